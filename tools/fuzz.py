"""Random calls of the public functions against the float64 reference and mpmath: `make fuzz`, in parts, counted.

`python tools/fuzz.py --cases 100000 --parts 8` runs eight processes, each with its own seed and an eighth of the cases;
`--only 3` runs the fourth alone, on whatever machine. The table at the end says how many calls each test has made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [str(path) for path in sorted((ROOT / "tests" / "fuzz").glob("test_fuzz_*.py"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="calls in all")
    parser.add_argument("--parts", type=int, default=os.cpu_count() or 1, help="processes that share them")
    parser.add_argument("--only", type=int, nargs="*", help="which of the parts to run here; all of them if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the first part; the others count on")
    parser.add_argument("--json", type=Path, help="write the counts there too")
    options = parser.parse_args()
    chosen = range(options.parts) if options.only is None else options.only
    with tempfile.TemporaryDirectory() as folder:
        runs = {part: started(part, options, Path(folder)) for part in chosen}
        broken = [part for part, run in runs.items() if run.wait()]
        told = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
        for part in broken:
            print(f"part {part} of {options.parts}, --seed {options.seed}:")
            print((Path(folder) / f"{part}.log").read_text(encoding="utf-8")[-6000:])
    total = sum((Counter(counts) for counts in told), Counter())
    for name, count in sorted(total.items()):
        print(f"{count:9,}  {name}")
    print(f"{sum(total.values()):9,}  calls in {len(runs)} parts, {len(broken)} of which failed")
    if options.json:
        options.json.write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


def started(part: int, options: argparse.Namespace, folder: Path) -> subprocess.Popen:
    """One part, whose test_fuzz files leave their counts in the folder (`fuzz_data.counted`)."""
    environment = {
        **os.environ,
        "REGARD_FUZZ": str(-(-options.cases // options.parts)),
        "REGARD_FUZZ_COUNTS": str(folder / f"{part}.json"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    quiet = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--hypothesis-seed={options.seed + part}"]
    with (folder / f"{part}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "pytest", *quiet, *TESTS]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
