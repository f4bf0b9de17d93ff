"""`run`: time candidates alternately and compare their medians.

In each round a candidate waits until its predecessor's idle threads have stopped spinning (OpenMP's spin for some
milliseconds and occupy a core), runs once unmeasured, and then a few times measured. On the CPU freed memory is kept,
so that no candidate pays for fresh pages that another reuses. The result is the ratio of two medians of one run.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from regard.table import Table

PACKAGES = ("regard", "torch", "triton", "numba", "entmax")
SLOW = 0.25  # seconds; a call that takes longer is measured in few rounds
BURST = 5
SETTLE = 0.02  # seconds between candidates


@dataclass
class Case:
    """One line of the table: `prepare()` returns candidates, "regard" among them, as functions without arguments."""

    work: str
    prepare: Callable[[], dict[str, Callable[[], Any]]]
    calls: int = 1  # in each sample; more where one call takes microseconds


@dataclass
class Result:
    """The medians of one case in seconds, and the candidates that failed.

    >>> from bench.measure import Result
    >>> Result("softmax", {"regard": 2.0, "torch": 4.0}, {}).ratios
    {'torch': 0.5}
    """

    work: str
    values: dict[str, float]
    failures: dict[str, str]

    @property
    def ratios(self) -> dict[str, float]:
        """Regard's time over that of each other candidate."""
        ours = self.values.get("regard")
        return {} if ours is None else {name: ours / x for name, x in self.values.items() if name != "regard"}

    def as_dict(self) -> dict:
        """Return the JSON record, in milliseconds."""
        values = {name: 1e3 * value for name, value in self.values.items()}
        ratios = [dict(against=name, ratio=ratio) for name, ratio in self.ratios.items()]
        return dict(work=self.work, unit="ms", values=values, ratios=ratios, failures=self.failures)


def run(cases: Iterable[Case], device: str, rounds: int = 15, label: str = "") -> list[Result]:
    """Measure the cases, with a progress bar if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import track

    if device == "cpu":
        keep_freed_memory()
    console = Console(stderr=True)
    shown = track(list(cases), label, console=console, transient=True, disable=not console.is_terminal)
    return [_measure(case, device, rounds) for case in shown]


def _measure(case: Case, device: str, rounds: int) -> Result:
    clock = _cuda_clock() if device == "cuda" else _cpu_clock
    samples: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    try:
        candidates = case.prepare()
    except Exception as failure:  # the other cases still run
        return Result(case.work, {}, {"regard": _one_line(failure)})
    for name, call in list(candidates.items()):
        try:
            call()
            candidates[name] = call = call if case.calls == 1 else partial(_repeat, call, case.calls)
            samples[name] = [clock(call)]
        except Exception as failure:
            failures[name] = _one_line(failure)
            del candidates[name]
    for turn in range(rounds):
        for name, call in candidates.items():
            slow = samples[name][0] > SLOW
            if slow and turn >= 2:
                continue
            if not slow:
                if device == "cpu":
                    time.sleep(SETTLE)
                call()
            samples[name] += [clock(call) for _ in range(1 if slow else BURST)]
    values = {name: statistics.median(found) / case.calls for name, found in samples.items()}
    return Result(case.work, values, failures)


def _repeat(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, so that no candidate pays for fresh pages depending on the order of allocations."""
    if platform.system() == "Linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                mallopt(parameter, 1 << 30)


def _cpu_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_clock() -> Callable[[Callable[[], object]], float]:
    blank = torch.empty(1 << 28, dtype=torch.int8, device="cuda")  # larger than any L2

    def clock(call):
        blank.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3

    return clock


def table(results: list[Result], title: str) -> Table:
    """Return the table: work, one column per candidate, and regard's time over that of the others."""
    names = list(dict.fromkeys(name for result in results for name in (*result.values, *result.failures)))
    names.sort(key=lambda name: name != "regard")
    rows = []
    for result in results:
        cells = [_cell(result, name) for name in names]
        ratios = ", ".join(f"{ratio:.3g}× {name}" for name, ratio in result.ratios.items())
        rows.append([result.work, *cells, ratios])
    return Table(["work", *names, "regard's time"], rows, title=title, numbers=names)


def _cell(result: Result, name: str) -> str:
    if name in result.failures:
        return "failed"
    if name not in result.values:
        return ""
    value = 1e3 * result.values[name]
    return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def machine(device: str) -> dict[str, str]:
    """Return what the numbers were measured on: device, cores, versions, commit."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {torch.get_num_threads()} threads"
    found = {"device": name, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    found["commit"] = _commit()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _commit() -> str:
    """Return the commit of the checkout that regard was imported from, with + if it was edited since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "-uno", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+" if changed else "")
