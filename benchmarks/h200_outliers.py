"""Calls of real models in which `regard.attention` was far from the best rival, beside torch's default and cuDNN.

    PYTHONPATH=. python3 benchmarks/h200_outliers.py [PART OF A NAME …] [--profile] [--forward] [--json FILE]

Each variant is compared with float64 on rows of two heads first, which also compiles it, in other processes; then
medians of `do_bench` by turns. `--profile` adds the kernels of one call with their microseconds. The rows about a
growing cache add one key per call, as generation does. FlashAttention-4's times are those of issue 41, from one such
card; `h200_calls.py` has it in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from revision import find_revision

TURNS = 3
TWO = ("entropy", "max_logit")
OURS: dict[str, dict] = {
    "regard": {},
    "two statistics": dict(return_stats=TWO),
    "all statistics": dict(return_stats=True),
    "entmax15": dict(normalizer="entmax15"),
    "received": dict(return_stats=("received",)),
    "top_keys(8)": dict(return_stats=("top_keys(8)",)),
}


class Case(NamedTuple):
    """A call: its tensors, what each row sees, and the options of ours and of torch's sdpa."""

    tensors: list
    visible: Callable  # (b, h, i, j) -> bool, on index tensors
    options: dict
    sdpa: dict | None  # None: torch cannot say it
    sink: Any = None
    known: tuple[float, float] = (math.nan, math.nan)  # ms of FlashAttention-4, forward and backward


def draw(b: int, h: int, g: int, m: int, n: int, d: int, dtype: str = "bfloat16") -> list:
    """q, k and v, random normal, which require gradients."""
    import torch

    shapes, dtype = ((b, h, m, d), (b, g, n, d), (b, g, n, d)), getattr(torch, dtype)
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def everything(b, h, i, j):
    """Every key."""
    return j >= 0


def make_left_padding() -> Case:
    import torch

    pad = torch.arange(16, device="cuda") * 37 % 500
    i, j = torch.arange(1024, device="cuda")[:, None], torch.arange(1024, device="cuda")
    mask = ((j <= i) & (j >= pad[:, None, None]))[:, None].contiguous()
    visible = lambda b, h, i, j: mask[b, 0][i, j]  # noqa: E731
    return Case(draw(16, 12, 12, 1024, 1024, 64), visible, dict(attn_mask=mask), dict(attn_mask=mask))


def make_window(width: int, heads: tuple[int, int], window: int, sink: bool, known: tuple) -> Case:
    import torch

    options: dict = dict(is_causal=True, window=(window, 0), enable_gqa=True)
    at = torch.randn(heads[0], device="cuda") if sink else None
    if sink:
        options["sink"] = at
    visible = lambda b, h, i, j: (j <= i) & (i - j <= window)  # noqa: E731
    return Case(draw(1, *heads, 8192, 8192, width), visible, options, None, at, known)


def make_ragged_decode() -> Case:
    import torch

    lengths = (torch.arange(48, device="cuda") * 1237 % 5900 + 100).clamp(max=6000)
    lengths[0] = 6000
    mask = (torch.arange(6000, device="cuda") < lengths[:, None])[:, None, None]
    visible = lambda b, h, i, j: j < lengths[b]  # noqa: E731
    options = dict(key_lengths=lengths, enable_gqa=True)
    return Case(draw(48, 32, 8, 1, 6000, 128), visible, options, dict(attn_mask=mask, enable_gqa=True))


def make_plain(
    sizes: tuple, causal: bool = False, dtype: str = "bfloat16", known: tuple = (math.nan, math.nan)
) -> Case:
    visible = (lambda b, h, i, j: j <= i) if causal else everything
    options = dict(is_causal=causal, enable_gqa=sizes[1] != sizes[2])
    return Case(draw(*sizes, dtype=dtype), visible, options, options, None, known)


CASES: dict[str, Callable[[], Case]] = {
    "left padding and causal as one bool mask, B16 H12 N1024 d64": make_left_padding,
    "window 1024, B1 H8/4 N8192 d256 (Gemma 3)": lambda: make_window(256, (8, 4), 1024, False, (0.120, 0.648)),
    "ragged decode, B48 H32/8 to 6000 keys": make_ragged_decode,
    "window 128 and sink, B1 H64/8 N8192 d64 (gpt-oss)": lambda: make_window(64, (64, 8), 128, True, (0.281, 0.454)),
    "B32 H16 N729 d72 (SigLIP)": lambda: make_plain((32, 16, 16, 729, 729, 72), known=(0.260, 0.692)),
    "B2 H20 N1500 d160 causal": lambda: make_plain((2, 20, 20, 1500, 1500, 160), True),
    "B8 H8 4096 × 77 d40 fp16 (SD cross)": lambda: make_plain((8, 8, 8, 4096, 77, 40), dtype="float16"),
    "B8 H32/8 Lq 32 Lk 8192 (chunked prefill)": lambda: make_plain((8, 32, 8, 32, 8192, 128)),
    "B8 H20 N700 d24 (ESM)": lambda: make_plain((8, 20, 20, 700, 700, 24)),
    "B4 H16 N4096 d128 causal": lambda: make_plain((4, 16, 16, 4096, 4096, 128), True),
    "B8 H16 N2048 d128 causal": lambda: make_plain((8, 16, 16, 2048, 2048, 128), True),
}


def run_ours(case: Case, extra: dict) -> Callable:
    """Our call of a case, which returns the output alone."""
    import regard

    def run():
        found = regard.attention(*case.tensors, **case.options, **extra)
        return found[0] if isinstance(found, tuple) else found

    return run


def run_rivals(case: Case) -> dict[str, Callable]:
    """torch's sdpa as it chooses itself, and cuDNN's."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.sdpa is None:
        return {}
    call = lambda: torch.nn.functional.scaled_dot_product_attention(*case.tensors, **case.sdpa)  # noqa: E731

    def by_cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return {"torch": call, "cuDNN": by_cudnn}


def compare(case: Case, out, normalizer: str) -> str:
    """The largest error of rows of the first and the last head against float64, relative to the largest entry."""
    import torch

    from regard import normalizers

    choice, worst = normalizers.get(normalizer), 0.0
    q, k, v = (x.detach() for x in case.tensors)
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        g = h * k.shape[1] // q.shape[1]
        rows = torch.unique(torch.linspace(0, q.shape[2] - 1, 48, device="cuda").long())
        s = (q[b, h, rows].double() @ k[b, g].double().T) / math.sqrt(q.shape[-1])
        seen = case.visible(b, h, rows[:, None], torch.arange(k.shape[2], device="cuda")[None]).expand_as(s)
        s = s.masked_fill(~seen, -math.inf)
        if case.sink is None:
            p = choice.reference(s, seen, choice.theta)
        else:
            p = torch.softmax(torch.cat([s, case.sink[h].double().expand(len(rows), 1)], 1), 1)[:, :-1]
        want = p @ v[b, g].double()
        worst = max(worst, float((out.detach()[b, h, rows].double() - want).abs().max() / want.abs().max()))
    return f"ok {worst:.1e}" if worst < 0.03 else f"WRONG {worst:.1e}"


def supported() -> dict[str, dict]:
    """Our variants that this commit has."""
    import torch

    import regard

    q = torch.zeros(1, 1, 4, 8)
    found = dict(OURS)
    for name in ("received", "top_keys(8)"):
        try:
            regard.attention(q, q, q, **OURS[name])
        except (ValueError, TypeError):
            del found[name]
    return found


def check(name: str) -> dict[str, str]:
    """Each of our variants against float64, forward, and its backward once."""
    import torch

    found = {}
    for variant, extra in supported().items():
        case = CASES[name]()
        if case.sink is not None and variant == "entmax15":
            continue
        try:
            out = run_ours(case, extra)()
            if out.shape[2] > 1 and out.requires_grad:
                torch.autograd.grad(out, case.tensors, torch.randn_like(out))
            with torch.no_grad():
                again = run_ours(case, extra)()
            found[variant] = compare(case, again, extra.get("normalizer", "softmax"))
        except Exception as error:
            found[variant] = f"{type(error).__name__}: {str(error)[:160]}"
    return found


def time_case(name: str, checked: dict[str, str], backwards: bool) -> dict[str, list[float]]:
    """{candidate: [forward ms, backward ms]}."""
    import torch
    from triton.testing import do_bench

    case = CASES[name]()
    runs = run_rivals(case)
    runs |= {x: run_ours(case, extra) for x, extra in OURS.items() if checked.get(x, "").startswith("ok")}
    found: dict[str, list[list[float]]] = {x: [[], []] for x in runs}
    for turn in range(TURNS):
        for x in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            try:
                with torch.no_grad():
                    found[x][0].append(do_bench(runs[x], warmup=10, rep=20, return_mode="median"))
                out = runs[x]() if case.tensors[0].shape[2] > 1 and backwards else None
                if out is not None and out.requires_grad and x not in ("two statistics", "received", "top_keys(8)"):
                    do = torch.randn_like(out)
                    back = lambda out=out, do=do: torch.autograd.grad(out, case.tensors, do, retain_graph=True)  # noqa: E731
                    found[x][1].append(do_bench(back, warmup=10, rep=20, return_mode="median"))
            except Exception as error:
                found[x] = [[math.nan], [math.nan]]
                print(f"  {name}: {x}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    return {x: [statistics.median(times) if times else math.nan for times in pair] for x, pair in found.items()}


def profile_case(name: str, checked: dict[str, str], backwards: bool) -> None:
    """Print the kernels of one call of each variant, forward and backward."""
    import torch

    for x, extra in OURS.items():
        if not checked.get(x, "").startswith("ok"):
            continue
        case = CASES[name]()
        run = run_ours(case, extra)

        def step(run=run, case=case):
            out = run()
            if out.shape[2] > 1 and backwards and x in ("regard", "entmax15") and out.requires_grad:
                torch.autograd.grad(out, case.tensors, torch.ones_like(out))

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        kernels = [(e.key[:40], e.device_time_total) for e in seen.key_averages() if e.device_time_total > 3]
        told = ", ".join(f"{key} {us:.0f}" for key, us in sorted(kernels, key=lambda pair: -pair[1])[:8])
        print(f"    {x}: {told}", flush=True)


def host_us(run: Callable, count: int = 100) -> float:
    """Microseconds per call, with the device's."""
    import torch

    run(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for step in range(1, count + 1):
        run(step)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def time_growing() -> dict[str, tuple[float, float]]:
    """{variant: (µs at a fixed length, µs with one key more per call)} of B1 H32/8 d128 decoding."""
    import torch

    import regard

    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {}
    with torch.no_grad():
        for name, extra in list(OURS.items())[:4]:

            def run(step, grows, extra=extra):
                n = 2100 + step * grows
                regard.attention(q, k[:, :, :n], v[:, :, :n], enable_gqa=True, **extra)

            for _ in range(2):
                host_us(lambda step, run=run: run(step, 0), 20)
            fixed = min(host_us(lambda step, run=run: run(step, 0)) for _ in range(3))
            for start in (1200, 1000):  # lengths that no call had, but kernels compiled for any
                host_us(lambda step, run=run, start=start: run(step + start, 1), 40)
            grown = [host_us(lambda step, run=run, s=s: run(step + 101 * s, 1)) for s in range(3)]
            found[name] = fixed, statistics.median(grown)
    return found


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of cases; all without")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = [x for x in CASES if not given.names or any(part in x for part in given.names)]
    with multiprocessing.get_context("spawn").Pool(min(14, len(names) or 1)) as pool:
        checks = dict(zip(names, pool.map(check, names, chunksize=1), strict=True))
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(
        f"{versions}, commit {find_revision()}; ms forward / backward, × the best of torch, cuDNN and FA4", flush=True
    )
    wrong = [f"{a}: {b}: {c}" for a, found in checks.items() for b, c in found.items() if not c.startswith("ok")]
    print(*wrong, sep="\n")
    times = {}
    for name in names:
        times[name] = found = time_case(name, checks[name], not given.forward)
        known = CASES[name]().known
        rivals = [found[x] for x in ("torch", "cuDNN") if x in found] + [list(known)]
        best = [min((pair[way] for pair in rivals if not math.isnan(pair[way])), default=math.nan) for way in (0, 1)]
        print(name, flush=True)
        for x, pair in found.items():
            ratios = " / ".join("–" if math.isnan(a / b) else f"{a / b:.2f} ×" for a, b in zip(pair, best, strict=True))
            print(f"  {x}: " + " / ".join("–" if math.isnan(a) else f"{a:.3f}" for a in pair) + f"   {ratios}")
        if given.profile:
            profile_case(name, checks[name], not given.forward)
    growing = time_growing() if not given.names or "growing" in given.names else {}
    for name, (fixed, grown) in growing.items():
        print(f"growing cache, {name}: fixed {fixed:.0f} µs, growing {grown:.0f} µs, {grown / fixed:.2f} ×", flush=True)
    if given.json:
        given.json.write_text(json.dumps(dict(versions=versions, times=times, growing=growing, checks=checks)))


if __name__ == "__main__":
    main()
