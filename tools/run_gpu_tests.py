"""Runs tests/gpu in several processes, because compiling takes longer than running, and prints one summary.

    python3 tools/run_gpu_tests.py [--processes 14] [--seconds 550] [tests/gpu/test_hopper.py …] [-k EXPRESSION]

Each process takes every n-th test (`REGARD_SHARD`, tests/gpu/conftest.py). At the end of the time pytest is
interrupted, so that what has run still counts. Ends with 1 if a test failed, and with 2 if time ran out before all had
run.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--override-ini", "addopts=", "-W", "default")
OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.M)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests/gpu"])
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which the tests are interrupted")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{shard}.log" for shard in range(given.processes)]
        running = []
        for shard, log in enumerate(logs):
            env = {**os.environ, "PYTHONPATH": str(ROOT), "REGARD_SHARD": f"{shard}/{given.processes}"}
            command = [sys.executable, *PYTEST, *given.paths, *(["-k", given.k] if given.k else [])]
            with log.open("w") as out:
                running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT))
        interrupted = [not wait_until(process, end) for process in running]
        return summarise([log.read_text() for log in logs], interrupted)


def wait_until(process: subprocess.Popen, end: float) -> bool:
    """Wait for a process; at the end of the time interrupt it, and return False."""
    try:
        process.wait(None if end == float("inf") else max(0.0, end - time.monotonic()))
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def summarise(logs: list[str], interrupted: list[bool]) -> int:
    """Print the failures with their reports, then how many tests ended how; return the exit status."""
    count: collections.Counter[str] = collections.Counter()
    for log in logs:
        found = OUTCOME.findall(log)
        count.update(outcome for _, outcome in found)
        if any(outcome in ("FAILED", "ERROR") for _, outcome in found) or not found:
            print(log[max(log.find("= FAILURES ="), log.find("= ERRORS ="), len(log) - 6000) :])
    print(", ".join(f"{number} {outcome.lower()}" for outcome, number in count.items()) or "no test ran")
    if any(interrupted):
        print(f"time ran out in {sum(interrupted)} of {len(logs)} processes: not every test has run")
    return 1 if count["FAILED"] or count["ERROR"] else 2 if any(interrupted) or not count else 0


if __name__ == "__main__":
    sys.exit(main())
