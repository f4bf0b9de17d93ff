"""Builds the sdist and the two wheels into dist/ twice and checks them: equal bytes, under 1 MB, `twine check`.

python tools/dist.py

The lab's wheel, regard-lab, is built from lab/. The time in the archives is that of the last commit
(SOURCE_DATE_EPOCH), so that the same commit gives the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAB = ROOT / "lab"
LIMIT = 1_000_000  # bytes of a wheel


def build(folder: Path) -> dict[str, str]:
    """Build into a folder; return name → SHA-256."""
    when = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": when}
    for words in ([str(ROOT)], ["--wheel", str(LAB)]):
        command = [sys.executable, "-m", "build", "--outdir", str(folder), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    first = build(dist)
    with tempfile.TemporaryDirectory() as folder:
        second = build(Path(folder))
    if first != second:
        sys.exit(f"two builds differ: {first} and {second}")
    for wheel in dist.glob("*.whl"):
        if (size := wheel.stat().st_size) >= LIMIT:
            sys.exit(f"{wheel.name} has {size:,} bytes; {LIMIT:,} is the limit; list its files with `unzip -v`")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())], check=True)
    for name, digest in first.items():
        print(f"{digest}  dist/{name}  {(dist / name).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
