"""Blocks and limits of the GPU kernels other than those of the library, each compared with float64 and timed.

    PYTHONPATH=. python3 benchmarks/h200_blocks.py [PART OF A NAME …] [--processes 14]

Of every trial the table's own values come first in the lines that are printed as "table": milliseconds of the forward,
the backward, or of what is read of keys behind a forward. A value is (queries, keys, warps, stages, by bulk copies?) of
a kernel, or a number of the library. Other processes compile beforehand; what does not compile, or is off by more than
rounding, is named and not timed. The last line is the host's time of small calls.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

MOST = 8  # keys of a row
LIMIT = 2e-2  # of ‖ours − float64's‖ / ‖float64's‖
# name: normaliser, (batch, heads, key heads, queries, keys, width), causal, window
CALLS: dict[str, tuple] = {
    "keys d64 N2048": ("softmax", (4, 16, 16, 2048, 2048, 64), True, None),
    "keys d128 N2048": ("softmax", (4, 32, 8, 2048, 2048, 128), True, None),
    "keys d128 N8192": ("softmax", (1, 32, 8, 8192, 8192, 128), True, None),
    "window d256": ("softmax", (1, 8, 4, 8192, 8192, 256), True, 1024),
    "SigLIP d72 entmax15": ("entmax15", (32, 16, 16, 729, 729, 72), False, None),
    "d160 entmax15": ("entmax15", (2, 20, 20, 1500, 1500, 160), True, None),
    "prefill softmax": ("softmax", (8, 32, 8, 32, 8192, 128), False, None),
    "prefill entmax15": ("entmax15", (8, 32, 8, 32, 8192, 128), False, None),
    "decode entmax15": ("entmax15", (48, 32, 8, 1, 6000, 128), False, None),
    "decode d64 entmax15": ("entmax15", (48, 32, 8, 1, 6000, 64), False, None),
}
RECEIVED = {
    64: [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3), (32, 128, 4, 4), (64, 256, 8, 3)],
    128: [(64, 64, 4, 3), (64, 128, 8, 2), (128, 128, 8, 2), (128, 64, 4, 2), (32, 128, 4, 4), (32, 128, 8, 4)],
}
NUMBERS = {  # what a trial may change beside blocks: module, name, the value from a number
    "least keys of lists": ("sparse.launch", "LEAST_KEYS", lambda old, n: dict.fromkeys(old, n)),
    "queries of decode": ("forward.decode", "QUERIES", lambda old, n: n),
    "keys above the bound": ("sparse.top_keys", "LISTED", lambda old, n: n),
    "entries at a time": ("sparse.top_keys", "CHUNK", lambda old, n: n),
    "warps of the choice": ("sparse.top_keys", "WARPS", lambda old, n: n),
}
READINGS = ("keys d64 N2048", "keys d128 N2048", "keys d128 N8192")
NEVER = 2**30  # keys: no list is made
TRIALS: list[tuple[str, str, str, list]] = [  # call, direction, kernel or number, values
    *((call, "forward", "nothing", []) for call in READINGS),
    *((call, "received", "received", [(*x, True) for x in RECEIVED[CALLS[call][1][-1]]]) for call in READINGS),
    *((call, "top_keys", "keys above the bound", [20, 40, 160]) for call in READINGS),
    *((call, "top_keys", "least keys of lists", [NEVER]) for call in READINGS),
    *((call, "top_keys", "entries at a time", [16]) for call in READINGS[1:]),
    *((call, "top_keys", "warps of the choice", [2]) for call in READINGS[1:]),
    ("window d256", "backward", "backward_dq", [(64, 32, 8, 1, False), (128, 32, 8, 1, False)]),
    ("SigLIP d72 entmax15", "forward", "forward_threshold", [(128, 64, 8, 3, False), (128, 64, 8, 2, True)]),
    ("d160 entmax15", "forward", "least keys of lists", [2048]),
    ("prefill softmax", "forward", "queries of decode", [16]),
    ("prefill entmax15", "forward", "forward_threshold", [(128, 64, 8, 3, False), (32, 64, 4, 3, True)]),
    ("decode entmax15", "forward", "forward_threshold", [(128, 64, 8, 3, False), (32, 64, 4, 3, True)]),
    ("decode d64 entmax15", "forward", "forward_threshold", [(16, 128, 4, 3, True), (16, 64, 4, 4, True)]),
]


@contextmanager
def with_value(kernel: str, value: Any) -> Iterator[None]:
    """The library with other blocks of one kernel, or another number; None: as it is."""
    import importlib

    from regard._backends.gpu import tape
    from regard._backends.gpu.attention import config

    chosen = config._choose_blocks

    def choose(p, name, *rest):
        m, n, warps, stages, bulk = value
        return (m, n, bulk, dict(num_warps=warps, num_stages=stages)) if name == kernel else chosen(p, name, *rest)

    tape._tapes.clear()
    with contextlib.ExitStack() as stack:
        if value is not None and kernel in NUMBERS:
            path, name, change = NUMBERS[kernel]
            module = importlib.import_module(f"regard._backends.gpu.attention.{path}")
            stack.enter_context(patch.object(module, name, change(getattr(module, name), value)))
        elif value is not None:
            stack.enter_context(patch.object(config, "_choose_blocks", choose))
        yield
    tape._tapes.clear()


def make_problem(name: str) -> Any:
    """The problem of a call, the same numbers each time; peaked rows, as trained heads have them."""
    import torch

    from regard import normalizers
    from regard._call.problem import Problem

    normalizer, (b, h, g, m, n, d), causal, window = CALLS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, x, y, d, device="cuda", dtype=torch.bfloat16) for x, y in ((h, m), (g, n), (g, n)))
    return Problem(q, k, v, normalizers.get(normalizer), 1.0 / math.sqrt(d), causal=causal, left=window)


def make_call(p: Any, direction: str) -> Callable[[], tuple]:
    """The call of the GPU backend in a direction; it returns the tensors that are compared."""
    import torch

    from regard._backends.gpu.attention import launch
    from regard._call.problem import Upstream

    if direction == "forward":
        return lambda: (launch.forward(p).o,)
    found = launch.forward(p)
    if direction == "backward":
        upstream = Upstream(torch.ones_like(found.o))
        return lambda: (lambda g: (g.q, g.k, g.v))(launch.backward(p, found, upstream))
    if direction == "received":
        return lambda: launch.read_keys(p, found, True, 0)[:1]
    return lambda: launch.read_keys(p, found, False, MOST)[1:]


def compute_truth(p: Any, direction: str) -> tuple:
    """What `make_call` returns, in float64; of top keys the weights and the log-sum-exp of each row."""
    import torch

    from regard import reference

    if direction == "forward":
        return (reference.of_problem(p)[0],)
    if direction == "backward":
        leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
        o, _ = reference.of_problem(dataclasses.replace(p, **dict(zip("qkv", leaves, strict=True))))
        return torch.autograd.grad(o.sum(), leaves)
    total, best, log_sum = 0.0, [], []
    for first in range(0, p.q.shape[2], 1024):
        weights = reference.weights_of_rows(p, first, first + 1024)
        total = total + weights.sum(2)
        if direction == "top_keys":
            best.append(weights.topk(MOST).values)
            rows, keys = p.q[:, :, first : first + 1024].double(), p.k[:, :, :1].double()  # every row sees key 0
            keys = keys.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
            log_sum.append((rows @ keys.mT)[..., 0] * p.scale - weights[..., 0].log())
    return (total,) if direction == "received" else (torch.cat(best, 2), torch.cat(log_sum, 2))


def find_error(p: Any, direction: str, found: tuple, truth: tuple) -> float:
    """The largest of ‖ours − truth‖ / ‖truth‖; of top keys also that of float64's weights of the keys found."""
    if direction == "top_keys":
        (index, weight), (best, log_sum) = found, truth
        b, h, m, most = index.shape
        keys = p.k.repeat_interleave(h // p.k.shape[1], 1).double()
        at = index.clamp_min(0).reshape(b, h, m * most, 1).expand(-1, -1, -1, keys.shape[-1])
        scores = (keys.gather(2, at).view(b, h, m, most, -1) * p.q.double()[:, :, :, None]).sum(-1) * p.scale
        exact = (scores - log_sum[..., None]).exp().where(index >= 0, 0.0)
        if ((index[..., 1:, None] == index[..., None, :-1]).tril() & (index[..., 1:, None] >= 0)).any():
            return math.inf  # a key twice
        found, truth = (weight, exact), (best, best)
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]
    return max(math.inf if error != error else error for error in errors)


def list_trials(names: list[str]) -> list[tuple[str, str, str, Any]]:
    """(call, direction, kernel, value); None: as the library has it."""
    found: list[tuple[str, str, str, Any]] = []
    for call, direction, kernel, values in TRIALS:
        if not names or any(part in f"{call} {direction} {kernel}" for part in names):
            found += [(call, direction, kernel, value) for value in (None, *values)]
    return found


def compile_trial(trial: tuple) -> str:
    """Run a trial once; "" or what went wrong."""
    call, direction, kernel, value = trial
    try:
        import torch

        with with_value(kernel, value):
            make_call(make_problem(call), direction)()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"


def time_host() -> str:
    """Microseconds of small calls, one after another: what the host needs."""
    import torch

    import regard

    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    told = []
    for name, stats in (("forward", ()), ("received", ("received",)), ("top_keys", (f"top_keys({MOST})",))):
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                regard.attention(q, k, v, is_causal=True, backend="triton", return_stats=stats)
            torch.cuda.synchronize()
        told.append(f"{name} {(time.perf_counter() - start) / 200 * 1e6:.0f}")
    return ", ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of 'call direction kernel'; all without")
    parser.add_argument("--processes", type=int, default=14, help="that compile beforehand")
    given = parser.parse_args()
    trials = list_trials(given.names)
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        wrong = pool.map(compile_trial, trials, chunksize=1)
    import torch
    from triton.testing import do_bench

    lines: dict[tuple, list[str]] = {}
    known: tuple = ()
    for (call, direction, kernel, value), failure in zip(trials, wrong, strict=True):
        told = lines.setdefault((call, direction, kernel), [])
        name = "table" if value is None else str(value)
        if failure:
            told.append(f"{name} FAILED {failure}")
            continue
        if known[:2] != (call, direction):
            p = make_problem(call)
            known = call, direction, p, compute_truth(p, direction)
            torch.cuda.empty_cache()
        _, _, p, truth = known
        with with_value(kernel, value):
            run = make_call(p, direction)
            error = max(find_error(p, direction, run(), truth) for _ in range(3))  # computed, recorded, replayed
            ms = do_bench(run, warmup=5, rep=20, return_mode="median") if error < LIMIT else math.nan
        told.append(f"{name} {ms:.3f} (off by {error:.1e})" if error < LIMIT else f"{name} WRONG: off by {error:.1e}")
        torch.cuda.empty_cache()
    for key, told in lines.items():
        print(f"{' '.join(key)}: {'; '.join(told)}", flush=True)
    print(f"host, µs: {time_host()}", flush=True)


if __name__ == "__main__":
    main()
