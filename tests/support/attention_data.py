"""Random attention problems, and what holds of every backend's answer to one: the float64 oracle is right."""

from __future__ import annotations

import dataclasses
import math
import random

import torch

from regard import normalizers, reference, statistics
from regard._call.problem import Problem, Upstream

ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
LEAVES = ("q", "k", "v", "bias", "temperature", "sink", "theta")
FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]
# relative error is measured against |value| + this
FLOOR = dict.fromkeys(statistics.NAMES, 1e-3) | dict(entropy=1e-4, gradient_gain=1e-5, mean_logit=0.1, distance=1e-2)


class Poisoned:
    """torch, with every fresh tensor full of NaN (numbers) or of nonsense (counts): what is left unwritten shows."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, **kind):
        fresh = torch.empty(*shape, **kind)
        return fresh.fill_(math.nan if fresh.is_floating_point() else 99)

    def empty_like(self, other):
        return torch.full_like(other, math.nan)


def make(
    seed, name="softmax", *, b=2, h=4, g=2, m=21, n=37, d=8, e=5, dtype=torch.float32, device="cpu", sharp=1.0,
    bias=None, mask=False, temperature=False, sink=False, lengths=False, dropout=0.0, stats=statistics.NAMES,
    scale=None, strided=False, theta=None, **options,
) -> Problem:  # fmt: skip
    """A problem drawn from a seed. `bias` names the dims it is broadcast over, a subset of "bhmn" ("" for none).

    `theta` gives the normaliser's parameter per "head" or per "row".
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def head(heads, length, width):
        x = draw(b, length, heads, 2 * width)[..., ::2].transpose(1, 2) if strided else draw(b, heads, length, width)
        return x

    q, k, v = head(h, m, d) * sharp, head(g, n, d), head(g, n, e)
    extra = {}
    if bias is not None:
        sizes = [1 if dim in bias else size for dim, size in zip("bhmn", (b, h, m, n), strict=True)]
        offset = draw(*sizes)
        offset[torch.rand(sizes, generator=generator) < 0.2] = -math.inf
        extra["bias"] = offset.to(dtype).to(device).expand(b, h, m, n)
    if mask:
        shown = torch.rand(b, 1, m, n, generator=generator) < 0.6
        shown[0, :, 0] = False  # a row that sees nothing
        extra["mask"] = shown.to(device).expand(b, h, m, n)
    if temperature:
        extra["temperature"] = (torch.rand(1, h, m, generator=generator) + 0.5).to(device).expand(b, h, m)
    if sink:
        extra["sink"] = draw(h).float().to(device)[None, :, None].expand(b, h, m)
    if theta:
        sizes = (1, h, 1) if theta == "head" else (b, h, m)
        around = normalizers.get(name).parameter.default - 0.4
        extra["theta"] = (around + 0.8 * torch.rand(sizes, generator=generator)).to(device).expand(b, h, m)
    if lengths:
        extra["key_lengths"] = torch.tensor([n // 2, 0, n, n + 3][:b], device=device)
    if dropout:
        extra |= dict(dropout_p=dropout, seed=torch.tensor([seed * 7919 + 2**40], device=device))
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    scale = 1 / math.sqrt(d) if scale is None else scale
    return Problem(q, k, v, normalizers.get(name), scale, stats=stats, **extra, **options)


def random_problem(seed: int, dtype=torch.float32, device="cpu", size=1) -> Problem:
    """Any normaliser with any options, of an odd shape; `size` multiplies the lengths."""
    pick = random.Random(seed)
    name = pick.choice([*FUSED, "entmax(alpha=1.25)", "sigmoid(bias=-3)"])
    family = normalizers.get(name)
    options = {}
    if pick.random() < 0.4:
        options["causal"] = True
    if pick.random() < 0.3:
        options |= dict(left=pick.choice([None, 0, 5, 30]), right=pick.choice([None, 0, 3]))
    for option, chance in dict(mask=0.25, temperature=0.3, lengths=0.25, strided=0.3).items():
        options[option] = pick.random() < chance
    if pick.random() < 0.25:
        options["bias"] = pick.choice(["", "b", "bh", "m", "n", "bhmn"])
    if pick.random() < 0.2:
        options["softcap"] = 2.0
    if family.family == "ratio" and family.exponential and pick.random() < 0.3:
        options["sink"] = True
    if pick.random() < 0.2:
        options["dropout"] = 0.3
    if pick.random() < 0.2:
        options["scale"] = pick.choice([-0.4, 1.0, 0.05])
    if family.parameter_slope is not None:
        options["theta"] = random.Random(f"theta {seed}").choice([None, "head", "row"])
    g = pick.choice([1, 2])
    narrow = 8 if name == "relu" else 1  # of one number q·k, relu's weights do not depend on q
    return make(
        seed, name, b=pick.choice([1, 2]), h=g * pick.choice([1, 3]), g=g, m=size * pick.choice([1, 15, 33]),
        n=size * pick.choice([1, 16, 41]), d=pick.choice([narrow, 8, 20]), e=pick.choice([3, 16, 17]),
        dtype=dtype, device=device, sharp=pick.choice([0.1, 1.0, 8.0]), **options,
    )  # fmt: skip


def relative(ours, truth) -> float:
    ours, truth = ours.double(), truth.double()
    assert torch.isfinite(ours).all(), "not finite"
    return float((ours - truth).norm() / truth.norm().clamp_min(1e-9))


def check_forward(backend, problem: Problem, slack: float = 1.0, floor=FLOOR):
    """Output and statistics against float64; the answer."""
    answer = backend.forward(problem)
    o, stats = reference.of_problem(problem)
    bound = slack * ROUNDING[problem.q.dtype]
    assert answer.o.dtype == problem.q.dtype and relative(answer.o, o) <= bound, relative(answer.o, o)
    fine = 1e-9 if problem.q.dtype == torch.float64 else 3e-4
    if problem.choice.family == "threshold" and bound > 1e-4:
        fine = 3e-3  # 16-bit calls stop solving for τ earlier
    for name, ours, truth in zip(problem.stats, answer.stats.double(), stats, strict=True):
        bare = ~torch.isfinite(truth)
        assert torch.equal(ours[bare], truth[bare]), name
        counts = (
            ("support", "gradient_gain") if problem.choice.name == "sparsemax" else ("support",)
        )  # its gain: |S| − 1
        if problem.choice.family == "threshold" and name in counts:
            continue  # a weight of 1e-8 may round to 0: checked where the margin is wide
        error = ((ours - truth).abs() / (truth.abs() + floor[name]))[~bare]
        assert error.numel() == 0 or error.max() <= slack * fine, (name, float(error.max()))
    return answer


def check_backward(backend, problem: Problem, answer=None, stats=(), slack: float = 1.0):
    """Every gradient against autograd of the oracle."""
    answer = backend.forward(problem) if answer is None else answer
    generator = torch.Generator().manual_seed(1)
    rows = problem.q.shape[:-1]
    do = torch.randn(*rows, problem.v.shape[-1], generator=generator).to(problem.q.dtype).to(problem.q.device)
    pulls = {name: torch.randn(rows, generator=generator).to(answer.shift) for name in stats}
    given = {name: getattr(problem, name) for name in LEAVES if getattr(problem, name) is not None}
    given = {name: unexpanded(x) if name == "bias" else x for name, x in given.items()}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    whole = dataclasses.replace(problem, **{n: x.expand(getattr(problem, n).shape) for n, x in leaves.items()})
    o, truths = reference.of_problem(whole)
    loss = (o * do.double()).sum()
    for name, pull in pulls.items():
        truth = truths[problem.stats.index(name)]
        loss = loss + torch.where(torch.isfinite(truth), truth * pull.double(), 0.0).sum()
    truths = torch.autograd.grad(loss, leaves.values(), allow_unused=True, materialize_grads=True)
    wanted = {name: name in leaves for name in ("bias", "temperature", "sink", "theta")}
    ours = backend.backward(problem, answer, Upstream(do, pulls, **wanted))
    for name, truth in zip(leaves, truths, strict=True):
        gradient = getattr(ours, name)
        assert gradient.shape == truth.shape, (name, gradient.shape, truth.shape)
        floor = do.double().norm() * (0.2 if name == "temperature" else 0.1)  # sums that cancel to less are noise
        error = float((gradient.double() - truth).norm() / (truth.norm() + floor))
        assert error <= 4 * slack * ROUNDING[problem.q.dtype], (name, error)
    return ours


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def qkv(*shape, dtype=torch.float32, keys=None, kv_heads=None, value_dim=None, seed=0):
    """Leaves q, k, v of one call, as people make them."""
    generator = torch.Generator().manual_seed(seed)
    *lead, n, d = shape
    kv_lead = [*lead[:-1], kv_heads] if kv_heads else lead
    keys = n if keys is None else keys
    shapes = ([*lead, n, d], [*kv_lead, keys, d], [*kv_lead, keys, value_dim or d])
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
