"""Attention on the GPU against torch's cuDNN backend: every variant is checked against float64, then timed, in one run.

    PYTHONPATH=. python3 benchmarks/h200_attention.py [--try] [--compile] [--only WORD]

(--try: the block sizes of TRIALS too; --compile: check without timing; --only: rows that contain a word.)

Times are medians of `triton.testing.do_bench`; causal work counts half the square. Kernels are compiled by a pool of
processes first, as Triton's cache is on disk.
"""

from __future__ import annotations

import math
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from regard import normalizers, reference, statistics
from regard.kernels import attention
from regard.problem import Problem, Upstream

LONG = {"d128": (1, 16, 16384, 128), "d64": (1, 32, 16384, 64)}
SHORT = {"d128 N4096": (4, 16, 4096, 128), "d64 N4096": (4, 32, 4096, 64)}
# block sizes (queries, keys, warps, stages, bulk copies?) to try beside those of `attention.HALF`
TRIALS = {
    ("forward_online", 128): [(128, 128, 8, 3, True), (128, 64, 8, 3, True), (128, 64, 8, 3, False)],
    ("forward_online", 64): [(64, 128, 4, 3, True), (128, 128, 8, 3, True), (64, 64, 4, 3, True)],
    ("forward_threshold", 128): [(128, 64, 8, 3, True), (128, 128, 8, 3, True), (64, 64, 4, 3, True)],
    ("forward_threshold", 64): [(128, 64, 4, 3, True), (64, 128, 4, 3, True), (128, 128, 8, 3, True)],
    ("backward_dq", 128): [(128, 64, 8, 3, True), (128, 128, 8, 2, True)],
    ("backward_dq", 64): [(128, 64, 8, 3, True), (64, 64, 4, 3, True), (128, 128, 8, 3, True)],
    ("backward_dkv", 128): [(64, 128, 8, 2, True), (64, 128, 8, 3, True)],
    ("backward_dkv", 64): [(64, 128, 8, 3, True), (64, 128, 4, 3, True), (128, 128, 8, 2, True)],
}  # fmt: skip


def problem(shape, name="softmax", causal=False, stats=(), seed=0) -> Problem:
    b, h, n, d = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(b, h, n, d, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return Problem(q, k, v, normalizers.get(name), 1 / math.sqrt(d), causal=causal, stats=stats)


def with_blocks(kernel, width, blocks):
    """Put one entry of the table of block sizes in place."""
    column = 0 if width <= 64 else 1
    row = list(attention.HALF[kernel])
    row[column] = blocks
    attention.HALF[kernel] = tuple(row)


def check(kernel, width, blocks, name, causal, stats) -> str:
    """Compile one variant and compare it with float64 on fresh inputs; '' or what is wrong."""
    try:
        before = attention.HALF[kernel]
        with_blocks(kernel, width, blocks)
        small = problem((1, 2, 1000, width), name, causal, stats, seed=int(torch.seed() % 2**31))
        answer = attention.forward(small)
        o, truths = reference.of_problem(small)
        error = float((answer.o.double() - o).norm() / o.norm())
        if not error < 8e-3:
            return f"o off by {error:.1e}"
        for one, ours, truth in zip(stats, answer.stats.double(), truths, strict=True):
            off = float(((ours - truth).abs() / (truth.abs() + 1e-2)).max())
            if not off < 2e-3:
                return f"{one} off by {off:.1e}"
        if kernel.startswith("backward"):
            leaves = [x.double().requires_grad_() for x in (small.q, small.k, small.v)]
            whole = Problem(*leaves, small.choice, small.scale, causal=causal)
            do = torch.randn_like(answer.o)
            truths = torch.autograd.grad(reference.of_problem(whole)[0], leaves, do.double())
            grads = attention.backward(small, answer, Upstream(do))
            for ours, truth in zip((grads.q, grads.k, grads.v), truths, strict=True):
                error = float((ours.double() - truth).norm() / truth.norm())
                if not error < 1.5e-2:
                    return f"gradient off by {error:.1e}"
        attention.HALF[kernel] = before
        return ""
    except Exception as error:  # one variant that does not compile must not lose the others
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:80]}"


def bench(run) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")


def rate(shape, causal, ms, products=2) -> float:
    """TFLOP/s of `products` matrix products of N × N × d each."""
    b, h, n, d = shape
    return products * 2 * b * h * n * n * d / (2 if causal else 1) / ms / 1e9


def cudnn(shape, causal) -> tuple[float, float]:
    """(forward, backward) of torch's cuDNN softmax in ms."""
    p = problem(shape)
    leaves = [x.requires_grad_() for x in (p.q, p.k, p.v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward = bench(lambda: sdpa(*leaves, is_causal=causal))
        o = sdpa(*leaves, is_causal=causal)
        do = torch.randn_like(o)
        backward = bench(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
    return forward, backward


def cases(tried: bool) -> list[tuple]:
    """(kernel, width, blocks, name, causal, stats, shape's name), one per row of the table."""
    rows = []
    for causal in (True, False):
        for table, names in ((LONG, ("softmax",)), (SHORT, ("entmax15",))):
            for label, shape in table.items():
                for name in names:
                    kernel = "forward_threshold" if normalizers.get(name).family == "threshold" else "forward_online"
                    for stats in ((), statistics.NAMES):
                        for blocks in options(kernel, shape[3], tried):
                            rows.append((kernel, shape[3], blocks, name, causal, stats, label))
                    for kernel in ("backward_dq", "backward_dkv"):
                        for blocks in options(kernel, shape[3], tried and causal):
                            rows.append((kernel, shape[3], blocks, name, causal, (), label))
    return rows


def options(kernel, width, tried):
    standing = attention.HALF[kernel][0 if width <= 64 else 1]
    return list(dict.fromkeys([standing, *TRIALS.get((kernel, width), ())])) if tried else [standing]


def main() -> None:
    rows = cases("--try" in sys.argv)
    if "--only" in sys.argv:
        wanted = sys.argv[sys.argv.index("--only") + 1]
        rows = [row for row in rows if wanted in str(row)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = list(pool.map(check, *zip(*(row[:6] for row in rows), strict=True)))
    if "--compile" in sys.argv:
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    anchors, shapes = {}, LONG | SHORT
    for label, shape in shapes.items():
        for causal in (True, False):
            anchors[label, causal] = times = cudnn(shape, causal)
            for what, ms, products in (("forward", times[0], 2), ("backward", times[1], 5)):
                order, speed = "causal" if causal else "full", rate(shape, causal, ms, products)
                print(f"{label:11} {order:6} cuDNN softmax {what:8} {ms:7.3f} ms {speed:4.0f} TFLOP/s")
    for row, fault in zip(rows, faults, strict=True):
        kernel, width, blocks, name, causal, stats, label = row
        what = f"{label:11} {'causal' if causal else 'full':6} {name:8} {kernel:17} {len(stats):2} stats {blocks!s:24}"
        if fault:
            print(what, "WRONG:", fault)
            continue
        before = attention.HALF[kernel]
        with_blocks(kernel, width, blocks)
        p = problem(shapes[label], name, causal, stats)
        try:
            answer = attention.forward(p)
            back = kernel.startswith("backward")
            upstream = Upstream(torch.randn_like(answer.o))
            run = (lambda: attention.backward(p, answer, upstream)) if back else (lambda: attention.forward(p))
            ms, anchor = bench(run), anchors[label, causal][back]
            speed = rate(shapes[label], causal, ms, 5 if back else 2)
            print(f"{what} {ms:7.3f} ms {speed:4.0f} TFLOP/s  {anchor / ms:5.2f} x cuDNN", flush=True)
        except Exception as error:
            print(what, "FAILED:", type(error).__name__, str(error)[:100])
        attention.HALF[kernel] = before


if __name__ == "__main__":
    main()
