"""Runs tests/gpu in several processes, because compiling takes longer than running, and prints one summary.

    python3 tools/run_gpu_tests.py [--processes 14] [--seconds 480] [--cases 3 | --whole] [PATH …] [-k EXPRESSION]

Of a test function with many cases a few are run, drawn by a seed that is printed: `--seed` runs the same ones again,
`--whole` all. A process takes the next test that no other has claimed (tests/gpu/conftest.py). Everything, the summary
included, ends within `--seconds`: shortly before, all processes are interrupted at once, and what has run counts.
Ends with 1 if a test failed or a process broke, and with 2 if time ran out before all had run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--override-ini", "addopts=", "-W", "default")
GRACE = 10.0  # seconds from the interrupt to the summary: pytest ends the test that runs, and reports
LONGEST_REPORT = 3000  # characters of a failure
SLOWEST = 10  # tests that the summary names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests/gpu"])
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=480.0, help="within which everything ends")
    parser.add_argument("--cases", type=int, default=3, help="that run of each test function")
    parser.add_argument("--whole", action="store_true", help="run every case")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="that draws the cases")
    parser.add_argument("--json", type=Path, help="where to write each test's outcome and seconds")
    given = parser.parse_args()
    start = time.monotonic()
    cases = 0 if given.whole else given.cases
    print(f"seed {given.seed}, at most {cases or 'all'} cases of a test, {given.processes} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs, running = [Path(folder) / f"{shard}.log" for shard in range(given.processes)], []
        results, claims = [log.with_suffix(".json") for log in logs], Path(folder) / "claims"
        claims.mkdir()
        common = dict(
            PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'lab'}", REGARD_SEED=str(given.seed), REGARD_GPU_CASES=str(cases)
        )
        command = [sys.executable, *PYTEST, *given.paths, *(["-k", given.k] if given.k else [])]
        for shard, (log, result) in enumerate(zip(logs, results, strict=True)):
            own = dict(REGARD_GPU_CLAIMS=str(claims), REGARD_GPU_RESULTS=str(result))
            own["REGARD_SHARD"] = f"{shard}/{given.processes}"
            with log.open("w") as out:
                options = dict(cwd=ROOT, env={**os.environ, **common, **own}, stdout=out, stderr=subprocess.STDOUT)
                running.append(subprocess.Popen(command, **options))
        interrupted = not wait_for_all(running, start + given.seconds - GRACE)
        broken = [log.read_text() for log, done in zip(logs, running, strict=True) if done.returncode not in (0, 1, 5)]
        ended = [json.loads(line) for result in results if result.exists() for line in result.read_text().splitlines()]
    if given.json:
        given.json.write_text(json.dumps(ended))
    return summarise(ended, [] if interrupted else broken, interrupted, time.monotonic() - start)


def wait_for_all(running: list[subprocess.Popen], end: float) -> bool:
    """Wait for all processes; at the end of the time interrupt them together, soon kill them, and return False."""
    while any(process.poll() is None for process in running):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    else:
        return True
    for sign, until in ((signal.SIGINT, end + 0.6 * GRACE), (signal.SIGKILL, end + 0.9 * GRACE)):
        for process in running:
            if process.poll() is None:
                process.send_signal(sign)
        while any(process.poll() is None for process in running) and time.monotonic() < until:
            time.sleep(0.1)
    return False


def summarise(ended: list[dict], broken: list[str], interrupted: bool, seconds: float) -> int:
    """Print the failures with their reports, the slowest tests, and how many ended how; return the exit status."""
    count = collections.Counter(line["outcome"] for line in ended)
    for line in ended:
        if line["outcome"] == "failed":
            print(f"FAILED {line['test']}\n{line['text'][-LONGEST_REPORT:]}\n")
    for log in broken:
        print(f"a process broke:\n{log[-LONGEST_REPORT:]}\n")
    slowest = sorted(ended, key=lambda line: -line["seconds"])[:SLOWEST]
    print("slowest:", *(f"{line['seconds']:.1f} s {line['test'].rpartition('/')[2]}" for line in slowest), sep="\n  ")
    for line in ended:
        if line["outcome"] == "failed":
            print(f"FAILED {line['test']}")
    told = ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "no test ran"
    print(f"{told} in {seconds:.0f} s" + ("; time ran out: not every test has run" if interrupted else ""))
    return 1 if count["failed"] or broken else 2 if interrupted or not count else 0


if __name__ == "__main__":
    sys.exit(main())
