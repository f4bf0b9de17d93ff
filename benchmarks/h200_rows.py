"""Rows on a GPU, the part `rows` of `h200.py`: correct first, then bandwidth against a copy and torch's softmax.

Workers compile and check every variant in parallel (a failed one is named and left out), then this process times them
alone, on tensors of 1 GiB, with the median of `triton.testing.do_bench`.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from regard import normalizers
from regard._backends.gpu.rows import launch as rows

WORKERS = 12
LENGTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]
GIB = 1 << 30
ABOUT = (
    "Random normal scores, tensors of 1 GiB. Bytes: forward reads one tensor and writes one, backward reads two and "
    "writes one. In brackets: per cent of a copy of the same bytes."
)


def cases() -> list[tuple[str, str, str, int]]:
    """(normaliser, forward or backward, dtype, n). entmax with a general α has no target and is not timed."""
    names = [name for name in FUSED if name != "entmax"]
    return [(name, d, t, n) for name in names for d in ("forward", "backward") for t in DTYPES for n in LENGTHS]


def make_call(name: str, direction: str, dtype: torch.dtype, n: int, count: int):
    """Returns the call to time, on `count` rows of n random normal scores."""
    choice = normalizers.get(name)
    s = torch.randn(count, n, device="cuda", dtype=dtype)
    if direction == "forward":
        return lambda: rows.forward(s, choice)
    p, state = rows.forward(s, choice)
    dp = torch.randn_like(s)
    saved = p if choice.slope_of_weight is not None else s
    return lambda: rows.backward(dp, saved, state, choice)


def check(name: str, dtype: torch.dtype, n: int, count: int) -> str:
    """Compares weights and gradient of fresh rows with float64; names what is wrong, or returns an empty string."""
    choice = normalizers.get(name)
    sizes = torch.tensor([1.0, 0.1, 10.0, 1.0], device="cuda").repeat(count)[:count, None]
    s = (torch.randn(count, n, device="cuda") * sizes).to(dtype)
    mask = torch.rand(count, n, device="cuda") < 0.8
    mask[3::4] = True
    theta = torch.rand(count, device="cuda") * 0.9 + 1.1 if name == "entmax" else None
    dp = torch.randn(count, n, device="cuda").to(dtype)

    def reference(wide):
        scores = s.to(wide).requires_grad_()
        p = choice.reference(scores * 0.7, mask, choice.theta if theta is None else theta.to(wide)[:, None])
        return p.detach(), torch.autograd.grad(p, scores, dp.to(wide))[0]

    (exact, gradient), (same, same_gradient) = reference(torch.float64), reference(torch.float32)
    poisoned = torch.full_like(s, float("nan"))  # freed at once: what the kernels get for their results
    del poisoned
    p, state = rows.forward(s, choice, theta, mask, 0.7)
    ds = rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice, theta, mask, 0.7)

    def far(x, same, truth, size):
        bound = 2 * ((same.to(dtype).double() - truth).abs().amax(-1) + 8 * torch.finfo(dtype).eps * size)
        return not bool(((x.double() - truth).abs().amax(-1) <= bound).all())

    size = exact.amax(-1)
    faults = ["weights"] if far(p, same, exact, size) else []
    if choice.family == "threshold":  # near the edge of the support slopes are as steep as τ's last bit: same weights
        alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name) or theta.double()[:, None]
        a = torch.where(p > 0, p.double() ** (2.0 - alpha), 0.0)
        gradient = 0.7 * a * (dp.double() - (a * dp.double()).sum(-1, keepdim=True) / a.sum(-1, keepdim=True))
        gradient = same_gradient = torch.where(mask, gradient, 0.0)
    slopes = gradient.abs().amax(-1) + size * dp.double().abs().amax(-1)
    faults += ["gradient"] if far(ds, same_gradient, gradient, slopes) else []
    if choice.family == "threshold" and dtype == torch.float32:
        faults += ["sum"] if bool(((p.double().sum(-1) - 1).abs() > 2e-6).any()) else []
    return ", ".join(faults)


def work(share: int, report: Path) -> None:
    """Compiles a worker's share of the cases on few rows, and checks its share of the shapes."""
    faults, done = [], []
    for case in cases()[share::WORKERS]:
        name, direction, dtype, n = case
        try:
            make_call(name, direction, DTYPES[dtype], n, 256)()
            torch.cuda.synchronize()
            done.append(case)
        except Exception as error:  # one variant's failure must not lose the others
            faults.append(f"{case}: {type(error).__name__} {str(error)[-200:]}")
    shapes = [(300, 33), (37, 1000), (5, 4099), (200, 20000), (20, 65536), (2, 200_001)]
    checks = [(name, t, shape) for name in FUSED for t in (*DTYPES.values(),) for shape in shapes]
    for name, dtype, (count, n) in checks[share::WORKERS]:
        try:
            wrong = check(name, dtype, n, count)
        except Exception as error:
            wrong = f"{type(error).__name__} {str(error)[-200:]}"
        if wrong:
            faults.append(f"{name} {dtype} {count}×{n}: {wrong}")
    report.write_text(json.dumps({"faults": faults, "done": done, "checks": len(checks[share::WORKERS])}))


class Started(NamedTuple):
    folder: tempfile.TemporaryDirectory
    reports: list[Path]
    workers: list[subprocess.Popen]


def start() -> Started:
    """Starts the workers."""
    folder = tempfile.TemporaryDirectory()
    reports = [Path(folder.name) / f"{share}.json" for share in range(WORKERS)]
    command = [sys.executable, __file__]
    workers = [subprocess.Popen([*command, str(share), str(path)]) for share, path in enumerate(reports)]
    return Started(folder, reports, workers)


def collect(started: Started) -> tuple[set[tuple], str]:
    """Waits for the workers; returns the cases that ran and a summary of what was wrong."""
    faults = []
    for share, worker in enumerate(started.workers):
        try:
            worker.wait(timeout=120)
        except subprocess.TimeoutExpired:
            worker.kill()
            faults.append(f"worker {share} did not finish")
    found = [json.loads(path.read_text()) for path in started.reports if path.exists()]
    started.folder.cleanup()
    faults += [fault for report in found for fault in report["faults"]]
    summary = (
        f"{sum(report['checks'] for report in found)} checks against float64; faults: {'; '.join(faults) or 'none'}."
    )
    return {tuple(case) for report in found for case in report["done"]}, summary


def bandwidth(call, tensors: int) -> float:
    """Measures TB/s of a call that moves so many GiB."""
    from triton.testing import do_bench

    return tensors * GIB / do_bench(call, warmup=5, rep=20, return_mode="median") / 1e9


def measure(direction: str, ready: set[tuple]) -> dict[tuple, float]:
    """Measures TB/s by (what, dtype, n); a copy of the same bytes has n = 0."""
    found, tensors = {}, 2 if direction == "forward" else 3
    x = torch.randn(GIB // 8 * tensors, device="cuda")
    found["copy", "", 0] = bandwidth(functools.partial(torch.empty_like(x).copy_, x), tensors)
    for case in cases():
        name, way, dtype, n = case
        if way == direction and case in ready:
            call = make_call(name, way, DTYPES[dtype], n, GIB // (n * DTYPES[dtype].itemsize))
            found[name, dtype, n] = bandwidth(call, tensors)
            del call
    for dtype, kind in DTYPES.items():
        for n in LENGTHS:
            x = torch.randn(GIB // (n * kind.itemsize), n, device="cuda", dtype=kind)
            if direction == "forward":
                call = functools.partial(torch.softmax, x, -1)
            else:
                call = functools.partial(torch._softmax_backward_data, x, torch.softmax(x, -1), 1, kind)
            found["torch softmax", dtype, n] = bandwidth(call, tensors)
            del x, call
    return found


def softmax_errors() -> str:
    """Compares the error of float32 softmax and its backward with torch's on the same rows."""
    choice, worst, sets = normalizers.get("softmax"), [0.0] * 4, 0
    for n in (3, 17, 100, 257, 1000, 4096, 20000, 65536):
        for size in (0.1, 0.5, 1.0, 3.0, 10.0, 50.0):
            for count in (2, 8, 32, 64, 128):
                x, dp = torch.randn(2, count, n, device="cuda")
                x *= size
                exact = torch.softmax(x.double(), -1)
                p, state = rows.forward(x, choice)
                slope = p.double() * (dp.double() - (p.double() * dp.double()).sum(-1, keepdim=True))
                pairs = (
                    (p, torch.softmax(x, -1), exact),
                    (rows.backward(dp, p, state, choice), torch._softmax_backward_data(dp, p, 1, p.dtype), slope),
                )
                errors = [((one.double() - truth).abs(), (two.double() - truth).abs()) for one, two, truth in pairs]
                ratios = [of(a) / of(b).clamp_min(1e-300) for a, b in errors for of in (torch.max, torch.mean)]
                worst = [max(a, float(b)) for a, b in zip(worst, ratios, strict=True)]
                sets += 1
    return (
        "float32 softmax: error against float64 over torch's on the same rows, the worst of {} sets: largest {:.4f}, "
        "mean {:.4f}; of the gradient from the same weights: largest {:.4f}, mean {:.4f}.".format(sets, *worst)
    )


def table(direction: str, found: dict[tuple, float]) -> list[str]:
    copy = found["copy", "", 0]
    lines = [f"## {direction.capitalize()}, TB/s (% of a copy's {copy:.2f})", ""]
    lines += ["| | dtype | " + " | ".join(f"n = {n}" for n in LENGTHS) + " |", "| --- " * (len(LENGTHS) + 2) + "|"]
    for name in dict.fromkeys(key[0] for key in found if key[0] != "copy"):
        for dtype in DTYPES:
            cells = []
            for n in LENGTHS:
                speed = found.get((name, dtype, n))
                cells.append("–" if speed is None else f"{speed:.2f} ({100 * speed / copy:.0f})")
            lines.append(f"| {name} | {dtype} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def sections(ready: set[tuple], summary: str) -> Iterator[list[str]]:
    """The parts of the report, one after another."""
    yield ["## Correct", "", summary, "", softmax_errors(), ""]
    for direction in ("forward", "backward"):
        yield table(direction, measure(direction, ready))


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
