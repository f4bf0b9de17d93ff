"""The Hopper forward on the shapes that users have: checks every case against float64, then times it.

    python benchmarks/h200_widths.py [CASE …]

Each case is checked on small odd shapes with fresh random inputs and poisoned outputs (in parallel, which also
compiles the kernels), then timed on its own shape in CUDA graphs: without statistics, with two, with all, and heads of
64 without statistics in blocks of two warpgroups; beside them the plain Triton kernel (`online`, all statistics) and
torch's sdpa (cuDNN first) where it can do the call.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import sys
import time
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]

# name: (sizes of the timed call, options of both calls)
CASES = {
    "d64 N4096": (dict(b=4, h=32, m=4096, d=64, causal=True), {}),
    "d128 N4096": (dict(b=4, h=16, m=4096, d=128, causal=True), {}),
    "d40 N4096 full": (dict(b=2, h=16, m=4096, d=40), {}),
    "d72 N2048": (dict(b=4, h=32, m=2048, d=72, causal=True), {}),
    "d80 N2048": (dict(b=4, h=32, m=2048, d=80, causal=True), {}),
    "d96 N4096": (dict(b=2, h=32, m=4096, d=96, causal=True), {}),
    "d112 N2048": (dict(b=4, h=32, m=2048, d=112, causal=True), {}),
    "d256 N4096": (dict(b=2, h=8, m=4096, d=256, causal=True), {}),
    "192/128 N4096": (dict(b=1, h=64, m=4096, d=192, e=128, causal=True), {}),
    "cap 50 d128": (dict(b=4, h=16, m=4096, d=128, causal=True), dict(softcap=50.0)),
    "window 1024": (dict(b=1, h=16, m=16384, d=128, causal=True), dict(left=1024)),
    "lengths d128": (dict(b=4, h=16, m=4096, d=128), dict(lengths=True)),
    "ViT N197": (dict(b=64, h=12, m=197, d=64), {}),
    "BERT N512": (dict(b=32, h=12, m=512, d=64), {}),
    "GPT-2 N1024": (dict(b=16, h=12, m=1024, d=64, causal=True), {}),
    "d128 N2048": (dict(b=8, h=16, m=2048, d=128, causal=True), {}),
}
SETS = {"plain": (), "two": ("entropy", "max_logit"), "all": None}


def make_problem(sizes: dict, options: dict, names: tuple | None):
    """The timed call: random normal bfloat16."""
    import torch

    from regard import normalizers, statistics
    from regard._call.problem import Problem

    sizes = dict(causal=False, e=sizes["d"]) | sizes
    b, h, m, d = (sizes[name] for name in "bhmd")
    q, k, v = (torch.randn(b, h, m, width, device="cuda").bfloat16() for width in (d, d, sizes["e"]))
    extra = dict(options)
    if extra.pop("lengths", False):
        extra["key_lengths"] = torch.randint(m // 4, m, (b,), device="cuda")
    stats = statistics.NAMES if names is None else names
    return Problem(q, k, v, normalizers.get("softmax"), d**-0.5, causal=sizes["causal"], stats=stats, **extra)


def check(name: str) -> str:
    """Checks one case on two small shapes and runs the timed call once; returns "ok" or the failure."""
    import torch
    from attention_data import Poisoned, check_forward, make

    from regard import statistics
    from regard._backends.gpu.attention import launch as attention
    from regard._backends.gpu.attention.hopper import launch as hopper

    for module in (attention, hopper):
        module.torch = Poisoned()
    attention.SMALL = 0  # no tapes, which would not see the patch below
    sizes, options = CASES[name]
    shape = dict(d=sizes["d"], e=sizes.get("e", sizes["d"]), causal=sizes.get("causal", False))
    begin = time.time()
    try:
        for m, n, sharp in ((1000, 1000, 2.0), (300, 777, 12.0)):
            for stats in (statistics.NAMES, SETS["two"], ()):
                small = dict(options, left=150) if "left" in options else options
                problem = make(
                    int(begin) + m, b=4, h=4, g=2, m=m, n=n, dtype=torch.bfloat16, device="cuda", sharp=sharp,
                    stats=stats, **shape, **small,
                )  # fmt: skip
                assert hopper.supports(problem) is None, hopper.supports(problem)
                check_forward(attention, problem, slack=2.0)
        for names in SETS.values():
            attention.forward(make_problem(sizes, options, names))
        if sizes["d"] == 64:
            with patch.object(hopper, "MAX_WASTE", 0.0):
                attention.forward(make_problem(sizes, options, ()))
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAILED {type(error).__name__}: {str(error)[-400:]}"
    return f"ok ({time.time() - begin:.0f} s)"


def time_ms(function) -> float:
    """Median over CUDA graph replays."""
    from triton.testing import do_bench_cudagraph

    function()
    return do_bench_cudagraph(function, rep=60, return_mode="median")


def sdpa_ms(problem) -> float:
    """Time of torch's sdpa; NaN where it cannot do the call without a dense mask."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.softcap is not None or problem.reach[0] is not None or problem.key_lengths is not None:
        return math.nan
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    try:
        with sdpa_kernel(order, set_priority=True):
            return time_ms(lambda: sdpa(problem.q, problem.k, problem.v, is_causal=problem.causal, scale=problem.scale))
    except RuntimeError:
        return math.nan


def run_timings(name: str) -> list[float]:
    """[plain, two, all statistics, plain in blocks of two warpgroups, online with all statistics, sdpa], ms."""
    import torch

    from regard._backends.gpu.attention import launch as attention
    from regard._backends.gpu.attention.forward import launch as kernels
    from regard._backends.gpu.attention.hopper import launch as hopper

    attention.SMALL = 0
    sizes, options = CASES[name]
    times = []
    for names in SETS.values():
        problem = make_problem(sizes, options, names)
        times.append(time_ms(lambda problem=problem: attention.forward(problem)))
    two_groups = math.nan
    if sizes["d"] == 64:
        plain = make_problem(sizes, options, ())
        with patch.object(hopper, "MAX_WASTE", 0.0):
            two_groups = time_ms(lambda: attention.forward(plain))
    times.append(two_groups)
    result = attention.forward(problem)
    spare = dataclasses.replace(result, o=torch.empty_like(result.o))
    times.append(time_ms(lambda: kernels.run_online(problem, spare)))
    times.append(sdpa_ms(problem))
    return times


def main() -> None:
    names = [name for name in CASES if not sys.argv[1:] or name in sys.argv[1:]]
    with multiprocessing.get_context("spawn").Pool(min(12, len(names))) as pool:
        results = dict(zip(names, pool.map(check, names, chunksize=1), strict=True))
    print(f"{'case':16} {'plain':>7} {'two':>7} {'all':>7} {'2 wg':>7} {'online':>7} {'sdpa':>7}   check")
    for name in names:
        times = run_timings(name) if results[name].startswith("ok") else [math.nan] * 6
        print(f"{name:16}", *(f"{ms:7.3f}" for ms in times), " ", results[name], flush=True)


if __name__ == "__main__":
    main()
