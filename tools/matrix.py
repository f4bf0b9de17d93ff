"""Runs tests/test_smoke.py over fresh environments and prints the Markdown table of docs/versions.md.

python tools/matrix.py                              # every row; each environment is made, used and deleted
python tools/matrix.py --only 2.15                  # the rows whose description contains this
python tools/matrix.py --cuda-libraries DIR         # torch without its gigabytes of CUDA packages
python tools/matrix.py --patience 7200              # seconds for each step of a row; 1800 without

torch's wheels on PyPI for Linux need CUDA libraries to be imported at all. With `--cuda-libraries` torch is installed
without its dependencies, and the folders of DIR that hold libraries are put on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TORCH_NEEDS = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")


@dataclass(frozen=True)
class Row:
    """One environment of the table."""

    python: str
    torch: str
    transformers: str = "5.22.2"

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"


ROWS = (
    Row("3.10", "2.12.1", "4.57.6"),  # transformers 5.22 needs Python 3.11
    Row("3.12", "2.11.0"),
    Row("3.12", "2.12.1"),
    Row("3.11", "2.13.0"),
    Row("3.11", "2.13.0", "4.57.6"),
    Row("3.13", "2.14.1"),
    Row("3.12", "2.15.0"),
    Row("3.14", "2.15.0"),
)


class InstallError(Exception):
    """A row's environment could not be made; the message is the last line of what pip said."""


def find_interpreter(version: str) -> str | None:
    """Return the path of an interpreter of this version: on PATH, or one of pyenv's."""
    if found := shutil.which(f"python{version}"):
        if subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return found
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else None


def run_pip(python: Path, patience: float, *words: str) -> None:
    """Run pip in an environment; raise InstallError if it fails."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise InstallError(lines[-1].removeprefix("ERROR: ") if lines else done.stderr[-200:])


def install(row: Row, python: Path, wheels: list[str], bare: bool, patience: float) -> None:
    """Install torch, the wheels and what the smoke tests need."""
    pip = partial(run_pip, python, patience)
    if bare:
        pip("--no-deps", f"torch=={row.torch}")
        pip(*TORCH_NEEDS, "numpy", "numba", "rich", "pytest")
        pip("--no-deps", *wheels)
    else:
        pip(f"torch=={row.torch}", *wheels, "pytest")
    pip(f"transformers=={row.transformers}")


def find_library_folders(folder: Path) -> str:
    """Return the folders below one that hold shared libraries, as LD_LIBRARY_PATH has them."""
    return os.pathsep.join(sorted({str(path.parent) for path in folder.rglob("*.so*")}))


def run_smoke(python: Path, folder: Path, libraries: Path | None, patience: float) -> str:
    """Run the smoke tests outside the repository; return "n passed", or the tests that failed."""
    results = folder / "results.xml"
    shutil.copy(ROOT / "tests" / "test_smoke.py", folder)
    environment = {**os.environ, "PYTHONPATH": "", "REGARD_CACHE": str(folder / "cache")}
    if libraries:
        environment["LD_LIBRARY_PATH"] = find_library_folders(libraries)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", "test_smoke.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience)
    if not results.exists():
        return f"failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    sys.stderr.write(done.stdout[-3000:] if done.returncode else "")
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case.get("name") for case in cases if {child.tag for child in case} & {"failure", "error"}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    if failed or not cases:
        return f"failed: {', '.join(failed) or 'no test ran'}"
    return f"{len(cases) - skipped} passed" + (f", {skipped} skipped" if skipped else "")


def list_versions(python: Path, *names: str) -> list[str]:
    """Return the installed versions of packages, "–" for one that is missing."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True
    ).stdout
    found = dict(line.split("==") for line in listing.splitlines())
    return [found.get(name, "–") for name in names]


def measure(row: Row, wheels: list[str], libraries: Path | None, patience: float) -> str:
    """Return a row of the table."""
    interpreter = find_interpreter(row.python)
    if interpreter is None:
        return (
            f"| {row.python} | {row.torch} | | | {row.transformers} | not run: no Python {row.python} on this machine |"
        )
    with tempfile.TemporaryDirectory(prefix="regard-matrix-") as name:
        folder = Path(name)
        subprocess.run([interpreter, "-m", "venv", str(folder / "venv")], check=True)
        python = folder / "venv" / "bin" / "python"
        try:
            install(row, python, wheels, libraries is not None, patience)
            result = run_smoke(python, folder, libraries, patience)
        except InstallError as error:
            result = f"not installed: {error}"
        except subprocess.TimeoutExpired:
            result = f"not finished in {patience:g} s"
        versions = list_versions(python, "torch", "numpy", "numba", "transformers")
        full = subprocess.run([str(python), "-V"], capture_output=True, text=True).stdout.split()[-1]
    return f"| {full} | {' | '.join(versions)} | {result.replace('|', '/')} |"


def build_wheels(folder: Path) -> list[str]:
    """Build the wheels of this checkout: regard and regard-lab."""
    run = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*run, str(ROOT), str(ROOT / "lab")], check=True)
    return sorted(map(str, folder.glob("*.whl")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose description contains this text")
    parser.add_argument("--cuda-libraries", metavar="DIR", type=Path, help="install torch without its CUDA packages")
    parser.add_argument("--patience", metavar="SECONDS", type=float, default=1800, help="for each step of a row")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only in str(row)]
    if not rows:
        parser.error(f"--only {options.only!r} matches no row; rows: {'; '.join(map(str, ROWS))}")
    print("| Python | torch | numpy | numba | transformers | smoke tests |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="regard-wheel-") as folder:
        wheels = build_wheels(Path(folder))
        lines = []
        for row in rows:
            lines.append(measure(row, wheels, options.cuda_libraries, options.patience))
            print(lines[-1], flush=True)
    return int(any(re.search("failed|not finished", line) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
