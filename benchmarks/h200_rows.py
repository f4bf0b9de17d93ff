"""Rows on a GPU: correct first, then bandwidth against a copy of the same bytes and torch's softmax, in one run.

    PYTHONPATH=. python3 benchmarks/h200_rows.py [OUTPUT.md]

Workers compile and check every variant in parallel (a failed one is named and left out), then this process times them
alone, on tensors of 1 GiB, with the median of `triton.testing.do_bench`. Bytes: forward reads one tensor and writes
one, backward reads two and writes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from regard import normalizers
from regard.kernels import rows

WORKERS = 12
LENGTHS = (256, 1024, 4096, 8192, 16384, 32768, 65536)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIB = 1 << 30


def cases() -> list[tuple[str, str, str, int]]:
    """(normaliser, forward or backward, dtype, n). entmax with a general α has no target and is not timed."""
    names = [name for name in normalizers.names() if name != "entmax"]
    return [(name, d, t, n) for name in names for d in ("forward", "backward") for t in DTYPES for n in LENGTHS]


def job(name: str, direction: str, dtype: torch.dtype, n: int, count: int):
    """The call to time, on `count` rows of n random normal scores."""
    choice = normalizers.get(name)
    s = torch.randn(count, n, device="cuda", dtype=dtype)
    if direction == "forward":
        return lambda: rows.forward(s, choice)
    p, state = rows.forward(s, choice)
    dp = torch.randn_like(s)
    saved = p if choice.slope_of_weight is not None else s
    return lambda: rows.backward(dp, saved, state, choice)


def check(name: str, dtype: torch.dtype, n: int, count: int) -> str:
    """What is wrong with the weights or the gradient of fresh rows, or nothing."""
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
    slopes = gradient.abs().amax(-1) + size * dp.double().abs().amax(-1)
    faults += ["gradient"] if far(ds, same_gradient, gradient, slopes) else []
    if choice.family == "threshold" and dtype == torch.float32:
        faults += ["sum"] if bool(((p.double().sum(-1) - 1).abs() > 2e-6).any()) else []
    return ", ".join(faults)


def work(share: int, report: Path) -> None:
    """One worker: compile its share of the cases on few rows, and check its share of the shapes."""
    faults, done = [], []
    for case in cases()[share::WORKERS]:
        name, direction, dtype, n = case
        try:
            job(name, direction, DTYPES[dtype], n, 256)()
            torch.cuda.synchronize()
            done.append(case)
        except Exception as error:  # one variant's failure must not lose the others
            faults.append(f"{case}: {type(error).__name__} {str(error)[-200:]}")
    shapes = [(300, 33), (37, 1000), (5, 4099), (200, 20000), (20, 65536), (2, 200_001)]
    checks = [(name, t, shape) for name in normalizers.names() for t in (*DTYPES.values(),) for shape in shapes]
    for name, dtype, (count, n) in checks[share::WORKERS]:
        try:
            wrong = check(name, dtype, n, count)
        except Exception as error:
            wrong = f"{type(error).__name__} {str(error)[-200:]}"
        if wrong:
            faults.append(f"{name} {dtype} {count}×{n}: {wrong}")
    report.write_text(json.dumps({"faults": faults, "done": done, "checks": len(checks[share::WORKERS])}))


def prepare(folder: Path) -> tuple[set[tuple], str]:
    """Run the workers: the cases that compiled and ran, and a sentence of what was wrong."""
    command = [sys.executable, __file__, "--work"]
    reports = [folder / f"{share}.json" for share in range(WORKERS)]
    workers = [subprocess.Popen([*command, str(share), str(path)]) for share, path in enumerate(reports)]
    for share, worker in enumerate(workers):
        try:
            worker.wait(timeout=120)
        except subprocess.TimeoutExpired:
            worker.kill()
            print(f"worker {share} did not finish")
    found = [json.loads(path.read_text()) for path in reports if path.exists()]
    faults = [fault for report in found for fault in report["faults"]]
    told = f"{sum(report['checks'] for report in found)} checks against float64; faults: {'; '.join(faults) or 'none'}"
    print(told, flush=True)
    return {tuple(case) for report in found for case in report["done"]}, told


def bandwidth(call, tensors: int) -> float:
    """TB/s of a call that moves so many GiB."""
    from triton.testing import do_bench

    return tensors * GIB / do_bench(call, warmup=5, rep=20, return_mode="median") / 1e9


def measure(ready: set[tuple]) -> dict[tuple, float]:
    """TB/s by (what, direction, dtype, n); a copy of the same bytes has n = 0."""
    found = {}
    for direction, tensors in (("forward", 2), ("backward", 3)):
        x = torch.randn(GIB // 8 * tensors, device="cuda")
        y = torch.empty_like(x)
        found["copy", direction, "", 0] = bandwidth(lambda: y.copy_(x), tensors)
    for case in cases():
        name, direction, dtype, n = case
        if case in ready:
            call = job(name, direction, DTYPES[dtype], n, GIB // (n * DTYPES[dtype].itemsize))
            found[case] = bandwidth(call, 2 if direction == "forward" else 3)
            del call
    for dtype, kind in DTYPES.items():
        for n in LENGTHS:
            x = torch.randn(GIB // (n * kind.itemsize), n, device="cuda", dtype=kind)
            p = torch.softmax(x, -1)
            found["torch softmax", "forward", dtype, n] = bandwidth(lambda: torch.softmax(x, -1), 2)
            back = bandwidth(lambda: torch._softmax_backward_data(x, p, 1, kind), 3)
            found["torch softmax", "backward", dtype, n] = back
    return found


def softmax_errors() -> str:
    """float32 softmax: our error against float64 over torch's on the same rows, the worst of several sizes."""
    worst = [0.0, 0.0]
    for n in (256, 4096, 32768, 65536):
        for size in (0.1, 1.0, 10.0):
            x = torch.randn(256, n, device="cuda") * size
            exact = torch.softmax(x.double(), -1)
            ours = (rows.forward(x, normalizers.get("softmax"))[0].double() - exact).abs()
            theirs = (torch.softmax(x, -1).double() - exact).abs()
            ratios = float(ours.max() / theirs.max()), float(ours.mean() / theirs.mean())
            worst = [max(pair) for pair in zip(worst, ratios, strict=True)]
    return f"float32 softmax error over torch's on the same rows, worst of 12: max {worst[0]:.2f}, mean {worst[1]:.2f}"


def table(found: dict[tuple, float]) -> str:
    lines = []
    for direction in ("forward", "backward"):
        copy = found["copy", direction, "", 0]
        lines += [f"## {direction.capitalize()}, TB/s (% of a copy's {copy:.2f})", ""]
        lines += ["| | dtype | " + " | ".join(f"n = {n}" for n in LENGTHS) + " |", "| --- " * (len(LENGTHS) + 2) + "|"]
        for name in dict.fromkeys(key[0] for key in found if key[0] != "copy"):
            for dtype in DTYPES:
                cells = []
                for n in LENGTHS:
                    speed = found.get((name, direction, dtype, n))
                    cells.append("–" if speed is None else f"{speed:.2f} ({100 * speed / copy:.0f})")
                lines.append(f"| {name} | {dtype} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--work"]:
        return work(int(arguments[1]), Path(arguments[2]))
    import triton

    with tempfile.TemporaryDirectory() as folder:
        ready, told = prepare(Path(folder))
    text = "\n".join([
        "# Rows on the H200", "",
        f"Command: `PYTHONPATH=. python3 benchmarks/h200_rows.py`, commit {os.environ.get('COMMIT', 'unknown')}, one "
        f"run on one {torch.cuda.get_device_name()}: torch {torch.__version__}, Triton {triton.__version__}. Random "
        "normal scores, tensors of 1 GiB, medians of `triton.testing.do_bench`. Bytes: forward reads one tensor and "
        "writes one, backward reads two and writes one. In brackets: per cent of a copy of the same bytes.", "",
        f"{told}. {softmax_errors()}.", "", table(measure(ready)),
    ])  # fmt: skip
    if arguments:
        Path(arguments[0]).write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
