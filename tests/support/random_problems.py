"""Random attention problems with a random subset of all options, and their float64 answers."""

import dataclasses
import math
import random

import score_functions
import torch
from rows_data import FUSED

from regard import normalizers, reference
from regard._call.problem import Problem, Upstream
from regard.statistics import DIFFERENTIABLE, NAMES

EXPONENTIAL = [name for name in FUSED if getattr(normalizers.get(name), "exponential", False)]

INPUTS = ("q", "k", "v", "bias", "temperature", "sink", "row_bias", "relative")


def draw(name, seed, dtype=torch.float64, **fixed):
    """A random problem: sharp or flat, with a random subset of all options, and gradients to pull on it."""
    chance = random.Random(f"{name} {seed}")
    generator = torch.Generator().manual_seed(chance.getrandbits(31))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def often(p):
        return chance.random() < p

    batch, groups, share = chance.choice([1, 2]), chance.choice([1, 2]), chance.choice([1, 1, 3])
    m, n = chance.choice([1, 7, 33]), chance.choice([1, 5, 40])
    d, e = chance.choice([1, 3, 16]), chance.choice([1, 8, 17])
    heads, rows = groups * share, (batch, groups * share, m)
    options = dict(
        scale=chance.choice([0.1, 1.0, 3.0]) / math.sqrt(d),
        softcap=chance.choice([None, None, 2.0]),
        causal=often(0.4),
        left=chance.choice([None, None, 0, 4]),
        right=chance.choice([None, None, 3]),
        key_lengths=torch.tensor([chance.randint(0, n + 1) for _ in range(batch)]) if often(0.3) else None,
        stats=NAMES,
    )
    if often(0.4):
        shape = chance.choice([(batch, heads, m, n), (1, 1, m, n), (batch, 1, 1, n)])
        options["mask"] = (torch.rand(shape, generator=generator) < 0.7).expand(*rows, n)
    if often(0.4):
        shape = chance.choice([(batch, heads, m, n), (1, heads, m, n), (1, 1, m, n), (batch, 1, 1, n), (1, 1, m, 1)])
        bias = normal(*shape)
        options["bias"] = bias.masked_fill(torch.rand(shape, generator=generator) < 0.1, -math.inf).expand(*rows, n)
    if often(0.4):
        options["temperature"] = (normal(*chance.choice([rows, (1, heads, 1)])).abs() + 0.3).expand(rows)
    if often(0.5) and name in EXPONENTIAL:
        options["sink"] = normal(*chance.choice([rows, (1, heads, 1)])).expand(rows)
    if often(0.4):
        shape = 2, *chance.choice([rows, (batch, 1, m), (1, 1, m)])
        lo, hi = torch.randint(-2, n + 3, shape, generator=generator)
        ends = torch.stack([lo, torch.maximum(hi, lo + 1), torch.randint_like(lo, 2 * n)])
        options["interval"] = ends.int().expand(3, *rows)
    if often(0.3):
        options["row_bias"] = normal(*chance.choice([rows, (1, heads, m)])).expand(rows)
    if often(0.3):
        options["relative"] = normal(heads, m + n - 1)
    if options["softcap"] is None and often(0.3):
        options["score"] = score = chance.choice(list(score_functions.ALL.values()))
        options["score_params"] = score.stack_params(heads, torch.empty(0), dtype)
    if often(0.3):
        options.update(dropout_p=0.3, seed=torch.tensor([chance.getrandbits(62)]))
    options.update(fixed)
    q, k, v = normal(*rows, d), normal(batch, groups, n, d), normal(batch, groups, n, e)
    problem = Problem(q, k, v, normalizers.get(name), **options)
    pulled = DIFFERENTIABLE if name in EXPONENTIAL and often(0.6) else ()
    upstream = Upstream(
        o=normal(*rows, e),
        stats={statistic: normal(*rows) for statistic in pulled},
        bias=problem.bias is not None,
        temperature=problem.temperature is not None,
        sink=problem.sink is not None,
        row_bias=problem.row_bias is not None,
        relative=problem.relative is not None,
    )
    return problem, upstream


def oracle(problem, upstream):
    """(o, stats, gradients by name) in float64 through autograd; the bias's summed over what was broadcast."""
    given = {name: getattr(problem, name) for name in INPUTS if getattr(problem, name) is not None}
    leaves = {name: x.detach().double().clone().requires_grad_() for name, x in given.items()}
    o, stats = reference.of_problem(dataclasses.replace(problem, **leaves))
    loss = (o * upstream.o.double()).sum()
    for name, gradient in upstream.stats.items():
        values = stats[problem.stats.index(name)]
        seen = stats[problem.stats.index("visible_keys")] > 0
        loss = loss + (torch.where(seen, values, 0.0) * gradient.double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    gradients = dict(zip(leaves, found, strict=True))
    if problem.bias is not None:
        sizes = zip(problem.bias.shape, problem.bias.stride(), strict=True)
        gradients["bias"] = gradients["bias"].sum_to_size([1 if stride == 0 else size for size, stride in sizes])
    return o.detach(), stats.detach(), gradients


def close(ours, exact, relative, what, size=1e-3):
    """Within `relative` of the largest entry, or of `size` where the terms are that large and cancel."""
    assert ours.shape == exact.shape, what
    size = max(size, exact.abs().where(exact.isfinite(), 0.0).max().item()) if exact.numel() else size
    torch.testing.assert_close(
        ours.double(), exact.double(), rtol=relative, atol=relative * size, msg=lambda m: f"{what}: {m}"
    )
