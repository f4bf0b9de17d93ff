"""What a difference between two attention calls that should be equal usually means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.health.probing.probe import CapturedCall, relative_change
from regard.scores import resolve_scale

SAME = 1e-3  # relative difference up to which a hypothesis explains what was seen
SCORED = 256  # queries and keys of the scores that are compared


def scores_of(one: CapturedCall) -> Tensor:
    """scale·q·kᵀ of the first sequence, [H, M, N] in float64, up to 256 queries and keys."""
    q, k = one.q[0, :, :SCORED].double().cpu(), one.k[0, :, :SCORED].double().cpu()
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scale = resolve_scale(one.call.options.get("scale"), q.shape[-1])
    scale = scale.double().cpu().reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
    scores = scale * q @ k.transpose(-1, -2)
    mask = one.call.mask
    if mask is not None and mask.dtype != torch.bool:
        shape = *one.q.shape[:3], one.k.shape[2]
        scores = scores + mask.double().cpu().expand(shape)[0, :, :SCORED, :SCORED].clamp_min(-1e9)
    return scores


def visible_of(one: CapturedCall) -> Tensor:
    """Which keys each query of the first sequence sees, [H, M, N]."""
    shape = *one.q.shape[:3], one.k.shape[2]
    return one.visible.expand(shape)[0, :, :SCORED, :SCORED].cpu()


def explain(a: Sequence[CapturedCall], b: Sequence[CapturedCall], at: int, parts: Sequence[str]) -> str:
    """What a difference in layer `at` usually means; `parts` are the tensors that differ there."""
    one, other = a[at], b[at]
    inputs = [part for part in parts if part in "qkv"]
    if len(inputs) == 3:
        hint = _explain_tensor(one.q, other.q) or _explain_tensor(one.v, other.v)
        if hint:
            return f"q, k and v: {hint}"
        if at == 0:
            return (
                "q, k and v differ in the first layer: look before its attention, at token ids, embeddings, the "
                "position table, the first norm, or weights of q, k and v that were not loaded or read otherwise."
            )
        return (
            f"q, k and v differ although the attention of layer {at - 1} agrees: look between the two, at the output "
            "projection, MLP and norms of that layer, or at weights of q, k and v that were read in another order."
        )
    if inputs:
        hints = {part: _explain_tensor(getattr(one, part), getattr(other, part)) for part in inputs}
        crossed = _find_exchange(one, other)
        hinted = "; ".join(f"{part}: {hint}" for part, hint in hints.items() if hint)
        rest = "only these weights, their bias, their norm or their rotary positions differ."
        return crossed or hinted or f"{' and '.join(inputs)} differ and the others agree: {rest}"
    if "scores" in parts:
        return _explain_scores(one, other)
    return (
        "q, k, v and the scores agree, but not the attention's output: another normaliser, soft cap or sink, dropout, "
        "or values that are paired with other heads."
    )


def _explain_scores(one: CapturedCall, other: CapturedCall) -> str:
    seen = visible_of(one), visible_of(other)
    if seen[0].shape == seen[1].shape and not torch.equal(*seen):
        more, fewer = int((seen[0] & ~seen[1]).sum()), int((seen[1] & ~seen[0]).sum())
        return (
            f"The masks differ: the model shows {more} keys that the reference hides, and hides {fewer} that it shows."
        )
    d = one.q.shape[-1]
    scales = [resolve_scale(call.call.options.get("scale"), d) for call in (one, other)]
    a, b = (None if isinstance(scale, Tensor) else float(scale) for scale in scales)
    if a is not None and b is not None and abs(a / b - 1) > SAME:
        return f"The scales differ: {a:.4g} here, {b:.4g} in the reference (1/√d is {d**-0.5:.4g})."
    return "The scores differ with equal q, k and scale: an additive mask or a position bias differs."


def _explain_tensor(a: Tensor, b: Tensor) -> str:
    """How [B, H, N, D] tensors are related: a factor, heads in another order, rotated, shifted; empty if unknown."""
    a, b = a.double().cpu(), b.double().cpu()
    if a.shape != b.shape:
        return f"the shapes differ, {list(a.shape)} and {list(b.shape)}."
    factor = float((a * b).sum() / b.square().sum().clamp_min(1e-30))
    if relative_change(b * factor, a) < SAME:
        return f"it is {factor:.4g} times the reference's: a scale applied once too often, or a norm's weight."
    order = _find_order(a, b)
    if order:
        return f"its heads are the reference's in the order {order}: weights sharded, stacked or repeated otherwise."
    if relative_change(a.norm(dim=-1), b.norm(dim=-1)) < SAME:
        if relative_change(b[:, :, :1], a[:, :, :1]) < SAME:
            return "equal norms and an equal first position: another angle (base, scaling, pairs) of rotary positions."
        return "equal norms, other directions: rotary positions that are missing, shifted, or paired in another way."
    flat_a, flat_b = a.flatten().sort().values, b.flatten().sort().values
    if relative_change(flat_b, flat_a) < SAME:
        return "it holds the reference's numbers in other places: a reshape that mixes heads with time."
    return ""


def _find_order(a: Tensor, b: Tensor) -> list[int] | None:
    """order such that head h of `a` is head order[h] of `b`; None if there is none, or if it is the identity."""
    heads = range(b.shape[1])
    order = []
    for h in heads:
        match = next((g for g in heads if relative_change(b[:, g], a[:, h]) < SAME), None)
        if match is None:
            return None
        order.append(match)
    return order if order != list(heads) else None


def _find_exchange(one: CapturedCall, other: CapturedCall) -> str:
    """Which of q, k and v are in each other's places."""
    for x, y in itertools.combinations("qkv", 2):
        pairs = (getattr(one, x), getattr(other, y)), (getattr(one, y), getattr(other, x))
        if all(p.shape == r.shape and relative_change(r.cpu(), p.cpu()) < SAME for p, r in pairs):
            return f"{x} and {y} are exchanged: a stacked matrix was read in another order."
    return ""
