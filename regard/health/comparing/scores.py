"""An attention call written out: scores = (cap(scale·q kᵀ) + bias) / temperature over the visible keys, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._call.arguments import AttentionOptions
from regard._call.scores import resolve_scale, soft_cap
from regard._core.execute import apply_policy
from regard._core.prepare import prepare
from regard.health.capture.call import Call
from regard.normalizers import Choice, get
from regard.reference import joined_mask, with_sink

LARGEST = 2**26  # scores of a call that are written out


@dataclass(frozen=True)
class Kept:
    """What one attention call was given and returned, on the CPU; `output` is the model's own, [B, H, M, E].

    `visible` and `bias` broadcast to [B, H, M, N]; sink and temperature to [B, H, M, 1]. `obstacle` says why the call
    could not be read; then only its output counts.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    kind: str
    scale: float | Tensor = 1.0
    softcap: float | None = None
    sink: Tensor | None = None
    temperature: Tensor | None = None
    choice: Choice | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    obstacle: str | None = None
    positions: Tensor | None = None  # of the queries among the keys [M]; None: as many as there are

    @classmethod
    def of(cls, call: Call, output: Tensor) -> Kept:
        q, k, v, own = (x.detach().clone().cpu() for x in (call.q, call.k, call.v, output))
        q, k, v, own = (x[:, None] if x.ndim == 3 else x for x in (q, k, v, own))  # of one head
        k, v = share(k), share(v)
        if call.obstacle is not None:
            return cls(q, k, v, own, call.kind, obstacle=call.obstacle)
        try:
            return cls(q, k, v, own, call.kind, **_facts(call))
        except (ValueError, TypeError) as error:
            return cls(q, k, v, own, call.kind, obstacle=str(error))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, M, N."""
        return (*self.q.shape[:3], self.k.shape[2])  # type: ignore[return-value]

    @property
    def is_readable(self) -> bool:
        """True if scores can be written out, and are not too many."""
        b, h, m, n = self.shape
        return self.obstacle is None and b * h * m * n <= LARGEST

    def seen(self) -> Tensor:
        """True where a query sees a key, [B, H, M, N]."""
        assert self.visible is not None
        return self.visible.expand(self.shape)

    def products(self) -> Tensor:
        """q kᵀ in float64, [B, H, M, N]."""
        return self.q.double() @ spread(self.k, self.q.shape[1]).double().transpose(-1, -2)

    def scores(self) -> Tensor:
        """The logits, before any is hidden, [B, H, M, N]."""
        scale = self.scale.double().reshape(-1, 1, 1) if isinstance(self.scale, Tensor) else self.scale
        s = soft_cap(scale * self.products(), self.softcap)
        s = s if self.bias is None else s + self.bias
        return s if self.temperature is None else s / self.temperature

    def weigh(self, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """The weights of these scores over these keys, [B, H, M, N]."""
        scores = self.scores() if scores is None else scores
        visible = self.seen() if visible is None else visible
        choice = get("softmax") if self.choice is None else self.choice
        if self.sink is not None:
            return with_sink(choice, scores, visible, self.sink.expand(*scores.shape[:3], 1))
        return choice.reference(scores, visible, choice.theta)

    def values(self) -> Tensor:
        """v in float64 with shared heads repeated, [B, H, N, E]."""
        return spread(self.v, self.q.shape[1]).double().nan_to_num()

    def compute(self) -> Tensor:
        """The output of these facts, [B, H, M, E] in float64."""
        return self.weigh() @ self.values()

    def resolve(self) -> Kept:
        """The call with its bias told as a scale or a soft cap, where that is all it is.

        Attention by hand and FlexAttention give whatever was done to the logits as a bias.
        """
        if self.bias is None or self.softcap is not None or isinstance(self.scale, Tensor) or not self.is_readable:
            return self
        plain, seen = self.change(bias=None, temperature=None), self.seen()
        x, y = (z.masked_fill(~seen, 0.0) for z in (plain.scores(), plain.scores() + self.bias))
        near = max(1e-5, 2.0 * torch.finfo(self.q.dtype).eps) * float(y.norm())
        f = float((x * y).sum() / x.square().sum().clamp_min(1e-300))
        if float((y - f * x).norm()) <= near:
            return self.change(scale=self.scale * f, bias=None)
        at = x.abs().argmax()
        cap = invert_cap(float(x.flatten()[at].abs()), float(y.flatten()[at].abs()))
        if cap is not None and float((y - soft_cap(x, cap)).norm()) <= near:
            return self.change(softcap=cap, bias=None)
        return self

    @property
    def has_fixed_bias(self) -> bool:
        """True if what is added to the scores is the same for every sequence, as positions give it, or nothing is."""
        if self.bias is None or self.shape[0] == 1 or self.bias.ndim < 4 or self.bias.shape[0] == 1:
            return True
        seen = self.seen()
        both = seen & seen[:1]
        gap = (self.bias - self.bias[:1]).expand(self.shape)[both]
        return float(gap.norm()) <= 1e-2 * float(self.bias.expand(self.shape)[both].norm())

    def sequence(self, at: int) -> Kept:
        """Returns the call of one sequence of its batch."""
        batch = self.q.shape[0]
        names = ("q", "k", "v", "output", "sink", "temperature", "visible", "bias")
        found = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{
                name: x[at : at + 1] if x is not None and x.ndim == 4 and x.shape[0] == batch else x
                for name, x in found.items()
            },
        )

    def change(self, **changes: Any) -> Kept:
        """Returns a copy with some facts changed."""
        return replace(self, **changes)


def _facts(call: Call) -> dict[str, Any]:
    """Scale, soft cap, sink, temperature, normaliser, visible keys and bias of a call, resolved to tensors."""
    problem = apply_policy(prepare(call.q, call.k, call.v, AttentionOptions(**call.arguments))).problem
    if problem.score is not None:
        raise ValueError("its scores are changed by a function")
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    left, right = problem.reach
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if problem.key_lengths is not None:
        visible = visible & (torch.arange(keys) < problem.key_lengths.cpu()[:, None, None, None])
    bias, mask = None, joined_mask(problem)
    if mask is not None:
        mask = mask.detach().clone().cpu()
        visible = visible & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        bias = None if mask.dtype == torch.bool else mask.double().masked_fill(mask == -torch.inf, 0.0)
    rows = {name: getattr(problem, name) for name in ("sink", "temperature")}
    rows = {name: None if x is None else x.detach().cpu().double()[..., None] for name, x in rows.items()}
    scale = resolve_scale(call.options.get("scale"), call.q.shape[-1])
    if isinstance(scale, Tensor):
        scale = scale.detach().cpu()
        if rows["temperature"] is not None:  # which holds 1/|scale|
            t = rows["temperature"] * scale.double().abs().reshape(-1, 1, 1)
            rows["temperature"] = None if bool((t - 1).abs().max() < 1e-6) else t
    else:
        scale = float(scale)
    return dict(scale=scale, softcap=problem.softcap, choice=problem.choice, visible=visible, bias=bias, **rows)


def share(x: Tensor) -> Tensor:
    """x [B, H, N, D] with one head for each that repeats: attention by hand expands grouped heads."""
    heads = x.shape[1] if x.ndim == 4 else 1
    for times in range(heads, 1, -1):
        if heads % times == 0 and torch.equal(x[:, 0], x[:, times - 1]) and x.numel():
            few = x[:, ::times]
            if torch.equal(spread(few, heads), x):
                return few
    return x


def invert_cap(x: float, y: float) -> float | None:
    """c > 0 with c·tanh(x/c) = y, both positive; None where there is none.

    >>> from regard.health.comparing.scores import invert_cap
    >>> round(invert_cap(4.0, 3.0 * math.tanh(4.0 / 3.0)), 6)
    3.0
    """
    if not 0.0 < y < x or not math.isfinite(x):
        return None
    low, high = y, 1e6 * x
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return math.sqrt(low * high)


def spread(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, G, N, D] with a head for each of the `heads` queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def with_equal_heads(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both [B, H, N, D] with as many heads, where one shares them among queries and the other does not."""
    many = max(a.shape[1], b.shape[1])
    if a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:] or many % a.shape[1] or many % b.shape[1]:
        return a, b
    return spread(a, many), spread(b, many)


def perturb_scores(kept: Kept, size: float, generator: torch.Generator) -> Tensor:
    """How the output moves if scores and weights are moved by `size` of themselves at random, [B, H, M, E]."""
    if not kept.is_readable:
        return torch.zeros(())
    s = kept.scores()
    noise = [1 + size * torch.randn(s.shape, generator=generator, dtype=s.dtype) for _ in range(2)]
    return (noise[1] * kept.weigh(noise[0] * s) - kept.weigh(s)) @ kept.values()
