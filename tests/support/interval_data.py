"""Problems with intervals, row biases and relative biases, held against the dense mask and bias that say the same."""

from __future__ import annotations

import dataclasses
import math

import torch
from attention_data import FLOOR, LEAVES, ROUNDING, relative, unexpanded

from regard import reference
from regard._call.problem import Problem, Upstream

KINDS = ("documents", "full documents", "left padding", "prefix", "chunks", "cache", "scattered")
BIASES = ("bias", "row_bias", "relative")


def make_interval(kind: str, b: int, h: int, m: int, n: int, seed: int = 0, device="cpu") -> torch.Tensor:
    """lo, hi and position of every query, [3, b, h, m] int32, expanded where heads or batch entries do not differ."""
    i = torch.arange(m)
    zero, every = torch.zeros_like(i), torch.full_like(i, n)
    generator = torch.Generator().manual_seed(seed)
    if kind == "left padding":
        pads = torch.tensor([0, n // 3, n - 2, 5])[torch.arange(b) % 4][:, None]
        lo, hi, position = pads.expand(b, m), (i + 1).expand(b, m), i.expand(b, m)
        return torch.stack([lo, hi, position]).to(torch.int32).to(device)[:, :, None].expand(3, b, h, m)
    if kind == "scattered":  # any interval, also empty ones, per head and batch entry
        ends = torch.randint(0, n + 1, (2, b, h, m), generator=generator)
        position = torch.randint(0, n + 1, (b, h, m), generator=generator)
        return torch.stack([ends.amin(0), ends.amax(0), position]).to(torch.int32).to(device)
    if "documents" in kind:
        cuts = torch.tensor([0, n // 5, n // 5, n // 2, n - 1, n])  # one of no token
        place = i * n // m
        document = torch.searchsorted(cuts, place, right=True) - 1
        lo, last = cuts[document], cuts[document + 1]
        hi = last if kind == "full documents" else place + 1
        rows = lo, hi, place
    elif kind == "prefix":
        rows = zero, torch.maximum(i + 1, torch.full_like(i, n // 3)).clamp_max(n), i
    elif kind == "chunks":
        rows = i // 7 * 7, (i // 7 * 7 + 7).clamp_max(n), i
    else:  # the queries are the last of the keys
        rows = zero, (i + 1 + n - m).clamp(0, n), i + n - m
    assert bool((rows[1] <= every).all())
    return torch.stack(rows).to(torch.int32).to(device)[:, None, None].expand(3, b, h, m)


def with_biases(p: Problem, seed: int, names=("key", "row", "relative"), hides: bool = False) -> Problem:
    """The problem with a bias per key, per row and by relative position; −inf among the first two if it `hides`."""
    (b, h, m, _), n = p.q.shape, p.k.shape[2]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        x = torch.randn(*shape, generator=generator)
        return x.masked_fill(torch.rand(shape, generator=generator) < 0.2, -math.inf) if hides else x

    made: dict = {}
    if "key" in names:
        made["bias"] = draw(1, h, 1, n).to(p.q.device).expand(b, h, m, n)
    if "row" in names:
        made["row_bias"] = draw(b, 1, m).to(p.q.device).expand(b, h, m)
    if "relative" in names:
        made["relative"] = draw(h, m + n - 1).to(p.q.device)
    return dataclasses.replace(p, **made)


def dense_mask(p: Problem) -> torch.Tensor | None:
    """The mask that the interval is, with the problem's own."""
    if p.interval is None:
        return p.mask
    j = torch.arange(p.k.shape[2], device=p.q.device)
    lo, hi, _ = p.interval.unbind()
    shown = (j >= lo[..., None]) & (j < hi[..., None])
    return shown if p.mask is None else shown & p.mask


def dense_twin(p: Problem) -> Problem:
    """The same problem in terms of a dense mask and a dense bias alone; differentiable."""
    (b, h, m, _), n = p.q.shape, p.k.shape[2]
    bias = torch.zeros(b, h, m, n, dtype=torch.float64, device=p.q.device)
    if p.bias is not None:
        bias = bias + p.bias.double()
    if p.row_bias is not None:
        bias = bias + p.row_bias.double()[..., None]
    if p.relative is not None:
        i, j = torch.arange(m, device=p.q.device), torch.arange(n, device=p.q.device)
        bias = bias + p.relative.double()[:, j - i[:, None] + m - 1]
    has_bias = any(getattr(p, name) is not None for name in BIASES)
    plain = dict(interval=None, row_bias=None, relative=None)
    return dataclasses.replace(p, **plain, mask=dense_mask(p), bias=bias if has_bias else None)


def find_truth(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, statistics) in float64; `distance` from the rows' positions."""
    twin = dense_twin(p)
    o, stats = reference.of_problem(twin)
    if p.interval is not None and "distance" in p.stats:
        weights = _weights_of(twin)
        j = torch.arange(p.k.shape[2], device=p.q.device)
        far = (weights * (p.interval[2][..., None] - j).abs()).sum(-1)
        mass = weights.sum(-1)
        at = p.stats.index("distance")
        distance = torch.where(mass > 0, far / mass.clamp_min(1e-300), 0.0)
        stats = torch.cat([stats[:at], distance[None], stats[at + 1 :]])
    return o, stats


def _weights_of(p: Problem) -> torch.Tensor:
    """The weights, as the output of the unit vectors."""
    units = torch.eye(p.k.shape[2], dtype=torch.float64, device=p.q.device).expand(*p.k.shape[:2], -1, -1)
    return reference.of_problem(dataclasses.replace(p, v=units, stats=(), dropout_p=0.0))[0].detach()


def check_forward(backend, p: Problem, slack: float = 1.0):
    """Output and statistics against float64; the answer."""
    answer = backend.forward(p)
    o, stats = find_truth(p)
    assert relative(answer.o, o) <= slack * ROUNDING[p.q.dtype], relative(answer.o, o)
    fine = 3e-3 if p.choice.family == "threshold" and p.q.element_size() == 2 else 3e-4
    for name, ours, truth in zip(p.stats, answer.stats.double(), stats, strict=True):
        bare = ~torch.isfinite(truth)
        assert torch.equal(ours[bare], truth[bare]), name
        if p.choice.family == "threshold" and name in ("support", "gradient_gain"):
            continue  # a weight of 1e-8 may round to 0
        error = ((ours - truth).abs() / (truth.abs() + FLOOR[name]))[~bare]
        assert error.numel() == 0 or error.max() <= slack * fine, (name, float(error.max()))
    return answer


def check_backward(backend, p: Problem, answer, slack: float = 1.0):
    """Every gradient against autograd of the oracle."""
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(*p.q.shape[:-1], p.v.shape[-1], generator=generator).to(p.q.dtype).to(p.q.device)
    names = [name for name in (*LEAVES, "row_bias", "relative") if getattr(p, name) is not None]
    given = {name: getattr(p, name) for name in names}
    given = {name: unexpanded(x) if name == "bias" else x for name, x in given.items()}
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    whole = dataclasses.replace(p, **{n: x.expand(getattr(p, n).shape) for n, x in leaves.items()}, stats=())
    o, _ = reference.of_problem(dense_twin(whole))
    truths = torch.autograd.grad((o * do.double()).sum(), leaves.values(), allow_unused=True, materialize_grads=True)
    wanted = {name: name in leaves for name in ("temperature", "sink", *BIASES)}
    ours = backend.backward(p, answer, Upstream(do, {}, **wanted))
    for name, truth in zip(leaves, truths, strict=True):
        gradient = getattr(ours, name)
        assert gradient.shape == truth.shape, (name, gradient.shape, truth.shape)
        assert torch.isfinite(gradient).all(), name
        truth = torch.where(torch.isfinite(truth), truth, 0.0)  # of a bias of −inf
        floor = do.double().norm() * (0.2 if name == "temperature" else 0.1)
        error = float((gradient.double() - truth).norm() / (truth.norm() + floor))
        assert error <= 4 * slack * ROUNDING[p.q.dtype], (name, error)
    return ours
