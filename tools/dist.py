"""Builds the sdist and the wheel into dist/ twice and checks them: equal bytes, a wheel under 1.1 MB, `twine check`.

python tools/dist.py

The time in both archives is that of the last commit (SOURCE_DATE_EPOCH), so that the same commit gives the same bytes.
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
LIMIT = 1_100_000  # bytes of the wheel


def build(folder: Path) -> dict[str, str]:
    """Build into a folder; return name → SHA-256."""
    when = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SOURCE_DATE_EPOCH": when})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    first = build(dist)
    with tempfile.TemporaryDirectory() as folder:
        second = build(Path(folder))
    if first != second:
        sys.exit(f"two builds differ: {first} and {second}")
    size = next(dist.glob("*.whl")).stat().st_size
    if size >= LIMIT:
        sys.exit(f"the wheel has {size:,} bytes; {LIMIT:,} is the limit; list large files with `git ls-files regard`")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())], check=True)
    for name, digest in first.items():
        print(f"{digest}  dist/{name}  {(dist / name).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
