"""Statistics of rows that somebody holds in full: scores, or weights with or without them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard import normalizers
from regard._facts import widen
from regard.normalizers import Choice
from regard.normalizers._language import speak, torch_words
from regard.statistics.definitions import OF_LOGITS, Row
from regard.statistics.names import NAMES, ON_REQUEST, Statistics
from regard.statistics.state import State, Terms, finish_row, solve_shift


def of_scores(
    scores: Tensor,
    visible: Tensor | None = None,
    normalizer: str | Choice = "softmax",
    *,
    sink: float | Tensor | None = None,
    theta: Tensor | None = None,
    first: int = 0,
    positions: Tensor | None = None,
    names: Sequence[str] = NAMES,
) -> Statistics:
    """All statistics of dense rows of logits (…, Lq, n), or `names` alone: s after scale, soft cap, bias, temperature.

    `visible` is a bool mask that broadcasts (True = visible; −inf scores are hidden too), `sink` a logit that joins
    the denominator, broadcasting to (…, Lq, 1). The query's position, for `distance`, is `first` + its index in dim −2,
    or what `positions`, broadcasting to (…, Lq), says.
    The result is float32, or float64 for float64 scores.

    >>> regard.statistics.of_scores(torch.zeros(2, 4), normalizer="sparsemax").entropy
    tensor([1.3863, 1.3863])

    Returns:
        `Statistics`: each of shape (…, Lq).

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: The normaliser is unknown, or `visible` or `sink` does not broadcast.
    """
    choice = normalizers.get(normalizer).simplest
    if choice.plain is not choice:
        given: Any = choice.theta
        choice, theta = choice.plain, given
    check_float(scores, "scores")
    if isinstance(first, Tensor) or not hasattr(first, "__index__"):
        _refuse("first must be an int", first)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    scores = widen(scores)  # where τ and the mean tell large logits apart
    seen = scores != -math.inf
    seen = seen if visible is None else seen & _fitting(visible, "visible", scores.shape, torch.bool)
    if callable(theta) and not isinstance(theta, Tensor):
        theta = theta(seen.sum(-1).to(scores.dtype))[..., None]
    if isinstance(theta, Tensor) and choice.normalizer.parameter is not None:
        theta = choice.normalizer.parameter.keep_off_softmax(widen(theta))
    if sink is not None:
        logit: Any = torch.tensor(float(sink)) if isinstance(sink, numbers.Real) else sink
        sink = _fitting(logit, "sink", (*scores.shape[:-1], 1)).to(scores.dtype)
    rows = first + _positions(scores) if positions is None else positions.to(scores)[..., None]
    if not choice.merges:
        return _by_definition(scores, seen, choice, choice.theta if theta is None else theta, rows, names, dtype)
    top = _top(scores, seen) if choice.family == "threshold" else torch.zeros_like(rows)  # τ is told from it
    shift = solve_shift(scores - top, seen, choice, theta)
    stats = State.of(scores - top, seen, choice, shift, rows, theta=theta).finish(choice, sink, theta)
    for name in ("max_logit", "mean_logit", "logsumexp"):
        stats[name] = stats[name] + top.squeeze(-1)
    if "top_key" in names:  # a larger score never has less weight here
        stats["top_key"] = _top_key(scores, seen).masked_fill(stats["mass"].isnan(), math.nan)
    return Statistics({name: stats[name].to(dtype) for name in (*NAMES, *ON_REQUEST) if name in names})


def _top(scores: Tensor, seen: Tensor) -> Tensor:
    """(…, 1): the largest score that is seen, a constant; 0 where there is none, or it is not finite."""
    if not scores.shape[-1]:
        return scores.sum(-1, keepdim=True)
    top = scores.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    return top.masked_fill(~(top.abs() < math.inf), 0.0)


def of_weights(
    weights: Tensor, scores: Tensor | None = None, normalizer: str | Choice = "softmax", visible: Tensor | None = None
) -> Statistics:
    """The statistics of weights that somebody already has, (…, Lq, n): −Σ p̄ log p̄, Σ p̄·|i − j| and the rest.

    Without `scores` the logit statistics are left out and every positive weight counts as a visible key, unless
    `visible` says otherwise. `gradient_gain` follows from the weights for the given normaliser. A row with a NaN weight
    says NaN.

    >>> w = torch.eye(3)
    >>> regard.statistics.of_weights(w)["entropy"], regard.statistics.of_weights(w.flip(-1))["distance"]
    (tensor([0., 0., 0.]), tensor([2., 0., 2.]))

    Returns:
        `Statistics`: each of shape (…, Lq).

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: The normaliser is unknown, or `scores` or `visible` does not fit the weights.
    """
    check_float(weights, "weights")
    choice = normalizers.get(normalizer)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if scores is not None:
        check_float(scores, "scores")
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if scores.shape != weights.shape:
            raise ValueError(f"scores must have the shape of weights {tuple(weights.shape)}, got {tuple(scores.shape)}")
    shown = None if visible is None else _fitting(visible, "visible", weights.shape, torch.bool)
    if scores is not None:
        seen = scores != -math.inf if shown is None else shown & (scores != -math.inf)
    else:
        seen = ~(weights <= 0) if shown is None else shown  # a NaN is nothing hidden
    p = torch.where(seen, weights, 0.0)
    row, none = _row_of_weights(p, seen, choice, _positions(p))
    sick = row.largest.isnan()
    stats = finish_row(row, none, sick, [name for name in NAMES if name not in OF_LOGITS])
    gain = _gain_of_weights(p, choice, seen)
    if gain is not None:
        stats["gradient_gain"] = gain.to(p.dtype).masked_fill(sick.squeeze(-1), math.nan)
    if scores is not None:
        logits = of_scores(scores, seen, normalizer)
        stats |= {name: logits[name] for name in OF_LOGITS}
    return Statistics({name: stats[name] for name in NAMES if name in stats})


def _row_of_weights(p: Tensor, seen: Tensor, choice, rows: Tensor) -> tuple[Row, Tensor]:
    """What statistics are finished from, of weights p (…, n) themselves: Z = 1; and which rows see no key."""
    n = seen.sum(-1, keepdim=True)
    keys = torch.arange(p.shape[-1], device=p.device, dtype=p.dtype)
    top = p.amax(-1, keepdim=True) if p.shape[-1] else p.sum(-1, keepdim=True)
    alive = top > 0
    unit = torch.where(alive, top, 1.0)
    at_top = p >= top
    below = torch.where(at_top, 0.0, p / unit)  # u / u_max, without the maximum
    ties = (seen & at_top).sum(-1, keepdim=True).to(p.dtype)
    first = torch.where(seen, keys, math.inf).amin(-1, keepdim=True) if p.shape[-1] else top
    zero = torch.zeros_like(top)
    row = Row(
        n=n.to(p.dtype), top=zero, mean=zero, m2=zero, ties=ties, u=unit,
        others=below.sum(-1, keepdim=True), lower=torch.xlogy(below, below.where(below > 0, 1.0)).sum(-1, keepdim=True),
        squares=ties + (below * below).sum(-1, keepdim=True), far=(p * (rows - keys).abs()).sum(-1, keepdim=True),
        first=torch.where(keys == first, p, 0.0).sum(-1, keepdim=True),
        weighing=((p > 0) if choice.sparse else seen).sum(-1, keepdim=True).to(p.dtype),
        inverse=torch.ones_like(top), largest=top, gain=zero, lse=zero, alive=alive,
    )  # fmt: skip
    return row, n == 0


def _by_definition(scores: Tensor, seen: Tensor, choice, theta, rows: Tensor, names, dtype) -> Statistics:
    """Statistics from the weights by definition, for maps whose sums do not give them; imprecise near one-hot rows.

    Nothing here carries a gradient.
    """
    s = widen(scores.detach()).masked_fill(~seen, 0.0)
    lost = (seen & ~(s < math.inf)).any(-1)
    p = choice.reference(s, seen, theta).masked_fill(lost[..., None], math.nan)
    row, none = _row_of_weights(p, seen, choice, widen(rows))
    hidden, mean = s.masked_fill(~seen, -math.inf), s.sum(-1, keepdim=True) / row.n.clamp_min(1)
    row = row._replace(
        top=hidden.amax(-1, keepdim=True) if s.shape[-1] else row.top,
        mean=mean,
        m2=((s - mean) ** 2).masked_fill(~seen, 0.0).sum(-1, keepdim=True),
        lse=torch.logsumexp(hidden, -1, keepdim=True),
    )
    stats = finish_row(row, none, lost[..., None])
    if "gradient_gain" in names:  # of a falling map it is negative
        trace = _trace(s.masked_fill(lost[..., None], 0.0), seen, choice, theta)
        stats["gradient_gain"] = trace.masked_fill(lost, math.nan)
    if "top_key" in names:
        stats["top_key"] = _top_key(p, seen).masked_fill(lost, math.nan)
    return Statistics({name: stats[name].to(dtype) for name in (*NAMES, *ON_REQUEST) if name in names})


def _top_key(x: Tensor, seen: Tensor) -> Tensor:
    """(…): index of the largest x that is seen, the first of several; 0 in a row that sees none."""
    if not x.shape[-1]:
        return x.sum(-1)
    at = x.detach().masked_fill(~seen, -math.inf).argmax(-1)
    return at.to(x.dtype).masked_fill(~seen.any(-1), 0.0)


def _trace(s: Tensor, seen: Tensor, choice, theta) -> Tensor:
    """tr ∂p/∂s: from the tile functions, or by a derivative per key where there are none that serve."""
    if choice.fused:
        terms, shift = Terms(choice, theta), solve_shift(s, seen, choice, theta)
        _, v, slope, cross = (x.masked_fill(~seen, 0.0).sum(-1, keepdim=True) for x in terms(s, shift))
        z = v + terms.rest(shift) if choice.family == "ratio" else torch.ones_like(v)
        z = z.masked_fill(z == 0, math.inf)
        return (slope / z - cross / z**2).squeeze(-1)
    if choice.trace is not None:
        return choice.trace(s, seen, theta)
    with torch.inference_mode(False), torch.enable_grad():
        z = s.clone().requires_grad_()
        p, gain = choice.reference(z, seen.clone(), theta), torch.zeros(s.shape[:-1], dtype=s.dtype, device=s.device)
        for key in range(s.shape[-1] if p.requires_grad else 0):  # a map of steps has no slopes
            gain = gain + torch.autograd.grad(p[..., key].sum(), z, retain_graph=True)[0][..., key]
    return gain


def check_float(x: Tensor, name: str) -> None:
    """A dense tensor of float16 or wider with at least one dimension, or a refusal that names it."""
    if not isinstance(x, Tensor):
        _refuse(f"{name} must be a torch.Tensor", x)
    if x.layout != torch.strided or not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TypeError(f"{name} must be a dense tensor of float16 or wider, got {x.dtype}, {x.layout}")
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")


def _refuse(said: str, given):
    raise TypeError(f"{said}, got {type(given).__name__}")


def _fitting(x: Tensor, name: str, shape, dtype: torch.dtype | None = None) -> Tensor:
    """x broadcast to the shape; bool if `dtype` says so, else floating-point."""
    kind = "a bool tensor (True = visible)" if dtype is torch.bool else "a number or a floating-point tensor"
    if not isinstance(x, Tensor):
        _refuse(f"{name} must be {kind}", x)
    if x.layout != torch.strided or (x.dtype != torch.bool if dtype is torch.bool else not x.is_floating_point()):
        raise TypeError(f"{name} must be {kind}, got {x.dtype}, {x.layout}")
    try:
        return x.expand(*shape)
    except RuntimeError:
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(x.shape)}") from None


def _gain_of_weights(p: Tensor, choice, seen) -> Tensor | None:
    """tr ∂p/∂s from the weights alone, where the normaliser's slopes allow it; None where they need more."""
    if not choice.fused or (choice.family == "ratio" and not choice.softmax_family):
        return None
    theta = 0.0 if choice.theta is None else choice.theta
    if choice.family == "ratio":
        slope, share = p, p
    elif choice.slope_of_weight is None:
        return None
    else:
        slope = torch.where(seen, speak(choice.slope_of_weight, torch_words)(widen(p), theta), 0.0)
        total = slope.sum(-1, keepdim=True)
        share = slope / torch.where(total > 0, total, 1.0)
    if choice.family == "pointwise":
        return slope.sum(-1)
    missing = 1.0 - p.sum(-1, keepdim=True) if choice.family == "ratio" and speak(choice.rest)(1.0) else 0.0
    return _gain(slope, share, missing)


def _gain(slope: Tensor, share: Tensor, missing: Tensor | float = 0.0) -> Tensor:
    """Σ slope·(1 − share), where 1 − the largest share is the sum of the others and of what is missing."""
    if not share.shape[-1]:
        return share.sum(-1)
    at = share.argmax(-1, keepdim=True)
    others = share.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    return (slope * (1.0 - share).scatter(-1, at, others + missing)).sum(-1)


def _positions(x: Tensor) -> Tensor:
    """(…, Lq, 1) of query positions for x (…, Lq, n); 0 for a single row."""
    if x.ndim < 2:
        return torch.zeros_like(x[..., :1])
    return torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
