"""How many cores other processes kept busy while we measured: above a tenth, ratios of times mean little.

Two programs on one core slow each other unevenly: a kernel that waits for its slowest thread suffers more than one
whose threads take work as they come. A table made meanwhile must say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

STAT = Path("/proc/stat")  # Linux only; elsewhere nothing is known
ALLOWED = 0.1  # cores


class Others:
    """Started when made; `cores()` is the mean number of cores that other processes have used since, or None."""

    def __init__(self) -> None:
        self.start = self._now()

    def cores(self) -> float | None:
        now = self._now()
        if self.start is None or now is None:
            return None
        passed, busy, own = (after - before for before, after in zip(self.start, now, strict=True))
        return max(0.0, busy - own) / max(passed, 1e-9)

    def _now(self) -> tuple[float, float, float] | None:
        if not STAT.exists():
            return None
        own = sum(os.times()[:4])  # ours and our finished children's
        busy = busy_ticks(STAT.read_text(), os.sched_getaffinity(0)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, own


def busy_ticks(stat: str, cores: Iterable[int]) -> int:
    """Clock ticks that these cores have worked since the machine started, from the text of /proc/stat.

    >>> from regard.bench.busy import busy_ticks
    >>> busy_ticks("cpu  700 0 0 900\\ncpu0 300 50 50 900 0 0 0 100 0 0\\n", [0])
    500
    """
    lines = {line.split()[0]: list(map(int, line.split()[1:])) for line in stat.splitlines() if line.startswith("cpu")}
    counts = [lines[f"cpu{core}"] for core in cores]
    return sum(sum(count[:3]) + sum(count[5:8]) for count in counts)  # all but idle, waiting and guests (in user)
