"""The attention calls that `h200.py` times, and the comparison with float64 that each passes first."""

from __future__ import annotations

import dataclasses
import math
import traceback
from typing import NamedTuple
from unittest.mock import patch

import torch

from regard import normalizers, reference, statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention.backward import stored_ds
from regard._call.problem import Problem, Upstream

SHAPES = {
    "d 128, N 4096": (4, 16, 16, 4096, 4096, 128),
    "d 128, N 16384": (1, 16, 16, 16384, 16384, 128),
    "d 64, N 4096": (4, 32, 32, 4096, 4096, 64),
    "d 64, N 16384": (1, 32, 32, 16384, 16384, 64),
}  # batch, query heads, key heads, queries, keys, width
DECODE = {
    "Lq 1": (8, 16, 16, 1, 131072, 128),
    "Lq 16": (8, 16, 16, 16, 131072, 128),
    "Lq 1, 4 query heads to a key head": (8, 32, 8, 1, 131072, 128),
    "Lq 16, 4 query heads to a key head": (8, 32, 8, 16, 131072, 128),
    "Lq 1, d 64": (8, 32, 32, 1, 131072, 64),
}
# lengths that are no multiple of a tile; the second none of 16 either, so compiled apart
RAGGED = {f"d {d}, N {n}": (4, h, h, n, n, d) for d, h in ((128, 16), (64, 32)) for n in (4000, 4097)}
SIZES = SHAPES | DECODE | RAGGED
PLAIN = ("softmax", "softmax1", "sigmoid", "relu", "softpick")
SPARSE = ("entmax15", "sparsemax")
ROWS = 256  # of a block that is compared
# what somebody may want who does not want all
SOME = (
    ("max_logit",),
    ("entropy",),
    ("entropy", "max_weight", "first_key_mass"),
    ("distance",),
    ("mean_logit", "logit_variance"),
)


class Case(NamedTuple):
    shape: str
    name: str
    causal: bool
    stats: tuple[str, ...]
    backward: bool = False

    @property
    def told(self) -> str:
        direction = "backward" if self.backward else f"{len(self.stats)} statistics"
        return f"{self.shape} {self.name} {'causal' if self.causal else 'full'}, {direction}"


def cases(parts) -> list[Case]:
    """Of "attention" and "decode", as asked."""
    return (_attention() if "attention" in parts else []) + (_decode() if "decode" in parts else [])


def _decode() -> list[Case]:
    found = [Case(shape, "softmax", False, stats) for shape in DECODE for stats in ((), statistics.NAMES)]
    return found + [Case("Lq 1", name, False, statistics.NAMES) for name in PLAIN[1:]]


def _attention() -> list[Case]:
    found = []
    for shape in SHAPES:
        for causal in (True, False):
            for name in PLAIN + SPARSE:
                found.append(Case(shape, name, causal, ()))
                if name in ("softmax", "entmax15"):
                    found.append(Case(shape, name, causal, statistics.NAMES))
                    found.append(Case(shape, name, causal, (), backward=True))
    found += [Case(shape, "softmax", True, some) for shape in SHAPES for some in SOME]
    for shape in RAGGED:
        found += [Case(shape, "softmax", True, statistics.NAMES), Case(shape, "entmax15", True, ())]
    return sorted(found, key=lambda case: "16384" in case.shape)  # last: by then their kernels are compiled


def problem(sizes, name="softmax", causal=False, stats=(), seed=0, sharp=1.0) -> Problem:
    b, h, g, m, n, d = sizes
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(heads, length):
        return torch.randn(b, heads, length, d, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(h, m) * sharp, draw(g, n), draw(g, n)
    return Problem(q, k, v, normalizers.get(name), 1 / math.sqrt(d), causal=causal, stats=stats)


def run_of(case: Case, sizes=None):
    """The call to time."""
    p = problem(sizes or SIZES[case.shape], case.name, case.causal, case.stats)
    if not case.backward:
        return lambda: attention.forward(p)
    answer = attention.forward(p)
    upstream = Upstream(torch.randn_like(answer.o))
    return lambda: attention.backward(p, answer, upstream)


def check(case: Case) -> str:
    """Compare the very call that will be timed, and smaller ones, with float64 on fresh inputs; '' or what is wrong."""
    try:
        b, h, g, m, n, d = SIZES[case.shape]
        sizes = (b, h, g, m, min(n, 16384), d)  # of a long cache an eighth, as many processes are here
        fault = compare(case, problem(sizes, case.name, case.causal, case.stats, torch.seed() % 2**31))
        if fault:
            return fault
        for sharp in (1.0, 8.0):  # keys that are no multiple of a tile, but compiled as the timed length is
            keys = 8208 if case.shape in DECODE else 1001 if "4097" in case.shape else 1008
            sizes = (1, 2 * h // g, 2, keys if m == n else m, keys, d)
            with patch.multiple(stored_ds, SHORT=0, FILL=0):  # the road of many long rows
                fault = compare(case, problem(sizes, case.name, case.causal, case.stats, torch.seed() % 2**31, sharp))
            if fault:
                return f"{fault} at {keys} keys, sharpness {sharp}"
        return ""
    except Exception as error:  # one variant that fails must not lose the others
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:80]}"


def compare(case: Case, p: Problem) -> str:
    """The last key head's query heads: some blocks of rows, and where gradients are asked for those of the head."""
    poison = torch.full((len(p.stats) + 3, *p.q.shape), float("nan"), device=p.q.device)
    del poison  # what the next tensors of such sizes are made of
    answer = attention.forward(p)
    heads = slice(-1, None), slice(-(p.q.shape[1] // p.k.shape[1]), None)
    one = dataclasses.replace(p, q=p.q[heads], k=p.k[-1:, -1:], v=p.v[-1:, -1:])
    queries = p.q.shape[2]
    for first in {0, max(0, queries // 2 - ROWS), max(0, queries - ROWS)}:
        rows = slice(first, first + ROWS)
        stats = answer.stats[(slice(None), *heads, rows)] if p.stats else ()
        fault = off(case, answer.o[(*heads, rows)], stats, *reference.of_rows(one, first, first + ROWS))
        if fault:
            return f"{fault} from row {first} of {queries} on"
    if not case.backward:
        return ""
    leaves = [x.double().requires_grad_() for x in (one.q, one.k, one.v)]
    whole = dataclasses.replace(one, **dict(zip("qkv", leaves, strict=True)))
    do = torch.randn_like(answer.o)
    truths = torch.autograd.grad(reference.of_problem(whole)[0], leaves, do[heads].double())
    grads = attention.backward(p, answer, Upstream(do))
    ours = grads.q[heads], grads.k[-1:, -1:], grads.v[-1:, -1:]
    for label, mine, truth in zip("qkv", ours, truths, strict=True):
        error = float((mine.double() - truth).norm() / truth.norm())
        if not error < 2e-2:
            return f"gradient of {label} off by {error:.1e} ({queries} queries)"
    return ""


def off(case: Case, o, stats, truth, truths) -> str:
    """What of a call is too far from float64."""
    error = float((o.double() - truth).norm() / truth.norm())
    if not error < 8e-3:
        return f"o off by {error:.1e}"
    loose = case.name in SPARSE  # 16-bit calls stop solving for τ where their rounding does
    for name, ours, right in zip(case.stats, stats, truths, strict=True):
        if loose and name in ("support", "gradient_gain"):
            continue  # a weight of 1e-8 may round to 0
        error = float(((ours.double() - right).abs() / (right.abs() + 1e-2)).nan_to_num(nan=math.inf).max())
        if not error < (6e-3 if loose else 2e-3):
            return f"{name} off by {error:.1e}"
    return ""


def flops(shape: str, causal: bool, products: int) -> float:
    """Of `products` matrix products of queries × keys × width; a causal call does half of them."""
    b, h, _, m, n, d = SIZES[shape]
    return products * 2 * b * h * m * n * d / (2 if causal else 1)
