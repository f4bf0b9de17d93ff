"""What one row of weights is like: definitions, the state that merges over key splits, and its laws.

A row has logits s_j over its visible keys and weights p_j = u_j / Z; p̄ = p / Σp. Everything below is finished from
a `State` of sums. The maximum is kept out of the sums (`ties` counts how often it occurs), so that a nearly one-hot
row loses nothing: with w = Σ_{j not max} u_j/u_max,

    entropy       = log(ties + w) − Σ' ũ·log ũ / (ties + w)        instead of lse − E[s], which cancels
    gradient_gain = tr ∂p/∂s from products of non-maximal terms     instead of 1 − Σp², which cancels

A row that sees no key has 0 throughout (its maximum and logsumexp −inf). A row with a NaN or +inf among its logits has
no weights: all but `visible_keys` and `max_logit` is NaN.

>>> import regard, torch
>>> s = torch.tensor([[30.0, 0.0, 0.0]])
>>> regard.statistics.of_scores(s)["gradient_gain"]
tensor([3.7430e-13])
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard import normalizers
from regard.normalizers._language import speak, torch_words

NAMES = (
    "visible_keys",
    "max_logit",
    "mean_logit",
    "logit_variance",
    "logsumexp",
    "mass",
    "entropy",
    "effective_keys",
    "participation",
    "max_weight",
    "support",
    "distance",
    "first_key_mass",
    "gradient_gain",
)
DIFFERENTIABLE = ("logit_variance", "logsumexp", "entropy")  # of the softmax family


class Statistics(dict):
    """Statistics by name, as `stats["entropy"]` or `stats.entropy`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no statistic {name!r} was asked for; here: {', '.join(self)}") from None


def resolve(wanted: bool | str | Iterable[str]) -> tuple[str, ...]:
    """The statistics asked for, in the table's order: True is all, a tuple of names those."""
    if wanted is True:
        return NAMES
    if wanted is False or wanted is None:
        return ()
    if not isinstance(wanted, (str, tuple, list, set, frozenset)):
        raise TypeError(f"return_stats must be True, False, a name or a tuple of names, got {wanted!r}")
    wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in wanted:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(NAMES)}"
            raise ValueError(f"return_stats: unknown statistic {name!r}; {hint}")
    return tuple(name for name in NAMES if name in wanted)


def solve_frame(scores: Tensor, visible: Tensor, choice, theta=None, sink: Tensor | None = None) -> Tensor:
    """What the whole row must tell its parts before they are summed: the shift m (ratio) or τ (threshold), (…, 1).

    Threshold maps are solved in (α−1)·s. Pointwise maps need nothing (0).
    """
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    seen = scores.masked_fill(~visible, -math.inf)
    top = seen.amax(-1, keepdim=True)
    if choice.family == "ratio":
        if not choice.exponential and choice.shift != "max":
            top = top.clamp_min(0.0) if choice.shift == "max0" else torch.zeros_like(top)
        return top.masked_fill(top == -math.inf, 0.0)
    if choice.family == "pointwise":
        return torch.zeros_like(top)
    theta = choice.theta if theta is None else theta
    theta = 0.0 if theta is None else theta
    gain, value = speak(choice.gain, torch_words)(theta), speak(choice.value, torch_words)
    x = gain * seen
    high = x.amax(-1, keepdim=True)
    high = high.masked_fill(high == -math.inf, 0.0)
    low = high - 1.0
    for _ in range(60):
        middle = (low + high) / 2
        above = value((x - middle).clamp_min(0.0), theta).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


@dataclass
class State:
    """Sums over the visible keys of one part of a row, in the frame of that part; each field has shape (…, 1).

    Sums marked ' leave out the keys at the part's maximal logit. `frame` is m or τ. Parts of one row may have
    different shifts m; their τ must be the same (it belongs to the whole row).
    """

    n: Tensor  # visible keys
    top: Tensor  # max s
    ties: Tensor  # how many keys have s = top
    mean: Tensor  # of s
    m2: Tensor  # Σ (s − mean)²
    frame: Tensor
    first: Tensor  # position of the first visible key, inf if none
    first_u: Tensor  # its u
    u: Tensor  # Σ' u
    v: Tensor  # Σ' v (ratio), else Σ' u
    log_u: Tensor  # Σ' u·log u
    square: Tensor  # Σ' u²
    slope: Tensor  # Σ' u′ (threshold: g′)
    cross: Tensor  # Σ' v′·u (threshold: g′²)
    lse: Tensor  # Σ' exp(s − top)
    distance: Tensor  # Σ u·|i − j|, the maximum included
    support: Tensor  # keys with u > 0, the maximum included

    @classmethod
    def of(cls, scores, visible, choice, frame, rows=None, keys=None, theta=None) -> State:
        """The state of a part: scores (…, n), the row's frame (…, 1), positions of its row i and keys j."""
        terms = Terms(choice, theta)
        keys = torch.arange(scores.shape[-1], device=scores.device) if keys is None else keys
        keys = keys.to(scores.dtype).expand(scores.shape)
        rows = torch.zeros_like(scores[..., :1]) if rows is None else rows
        s = scores.masked_fill(~visible, 0.0)
        hidden = scores.masked_fill(~visible, -math.inf)

        def total(x, where=visible):
            return torch.where(where, x, 0.0).sum(-1, keepdim=True)

        n = visible.sum(-1, keepdim=True).to(scores.dtype)
        none = n == 0
        top = hidden.amax(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, -math.inf)
        mean = total(s) / n.clamp_min(1)
        below = visible & (s < top)
        u, v, du, cross = terms(s, frame)
        seen_keys = keys.masked_fill(~visible, math.inf)
        first = seen_keys.amin(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, math.inf)
        return cls(
            n=n,
            top=top,
            ties=n - total(torch.ones_like(s), below),
            mean=mean,
            m2=total((s - mean) ** 2),
            frame=frame,
            first=first,
            first_u=total(u, visible & (keys == first)),
            u=total(u, below),
            v=total(v, below),
            log_u=total(torch.xlogy(u, u), below),
            square=total(u * u, below),
            slope=total(du, below),
            cross=total(cross, below),
            lse=total(torch.exp(s - top.masked_fill(none, 0.0)), below),
            distance=total(u * (rows - keys).abs()),
            support=total((u > 0).to(s.dtype) if choice.sparse else torch.ones_like(s)),
        )

    def merge(self, other: State, choice, theta=None) -> State:
        """The state of both parts together. Commutative; associative up to rounding."""
        terms = Terms(choice, theta)
        top = torch.maximum(self.top, other.top)
        frame = self.frame
        if choice.family == "ratio":  # a part without keys has no say
            frame = torch.maximum(self.frame, other.frame)
            frame = torch.where(self.n == 0, other.frame, torch.where(other.n == 0, self.frame, frame))
        parts = [part._moved(top, frame, terms) for part in (self, other)]
        a, b = parts
        n = a.n + b.n
        weight = b.n / n.clamp_min(1)
        gap = b.mean - a.mean
        sooner = (b.n > 0) & ((a.n == 0) | (b.first < a.first))
        merged = {field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(State)}
        merged.update(
            top=top,
            frame=frame,
            mean=a.mean + gap * weight,
            m2=a.m2 + b.m2 + gap * gap * a.n * weight,
            first=torch.where(sooner, b.first, a.first),
            first_u=torch.where(sooner, b.first_u, a.first_u),
        )
        return State(**merged)

    def _moved(self, top: Tensor, frame: Tensor, terms: Terms) -> State:
        """The same keys told in another frame, with another maximum to leave out."""
        changes = {}
        if terms.family == "ratio":
            shift = (self.frame - frame).masked_fill(self.n == 0, 0.0)
            r = torch.exp(shift)
            changes["log_u"] = r * (self.log_u + shift * self.u)
            for name, power in dict(u=1, v=1, first_u=1, distance=1, slope=1, square=2, cross=2).items():
                changes[name] = getattr(self, name) * r**power
        state = State(**{**self.__dict__, **changes, "frame": frame})
        safe_top = torch.where(self.top == -math.inf, torch.zeros_like(self.top), self.top)
        folded = state.ties * ((self.top < top) & (self.n > 0))  # the old maximum joins the sums
        u, v, du, cross = terms(safe_top, frame)
        fall = torch.where(self.n > 0, torch.exp(safe_top - torch.where(top == -math.inf, safe_top, top)), 0.0)
        additions = dict(u=u, v=v, log_u=torch.xlogy(u, u), square=u * u, slope=du, cross=cross)
        for name, term in additions.items():
            setattr(state, name, getattr(state, name) + torch.where(folded > 0, folded * term, 0.0))
        state.lse = state.lse * fall + torch.where(folded > 0, folded * fall, 0.0)
        state.ties = state.ties - folded
        state.top = top
        return state

    def finish(self, choice, sink: Tensor | None = None, theta=None) -> Statistics:
        """Every statistic of the table, each of shape (…), from the state of the whole row."""
        terms = Terms(choice, theta)
        none = self.n == 0
        top = torch.where(none, torch.zeros_like(self.top), self.top)
        u, v, du, cross = terms(top, self.frame)
        ties = self.ties
        positive = (u > 0) & ~none
        safe_u = torch.where(positive, u, torch.ones_like(u))
        w = torch.where(positive, self.u / safe_u, 0.0)
        count = torch.where(positive, ties + w, 1.0)  # Σu / u_max ≥ 1
        lower = (self.log_u - torch.log(safe_u) * self.u) / safe_u
        entropy = torch.where(positive, torch.log1p((ties - 1.0) + w) - lower / count, 0.0)
        lse = top + torch.log(ties + self.lse)
        if terms.exponential:  # rest and sink join in a frame of their own, so that nothing overflows
            m = self.frame.clamp_min(0.0) if choice.shift == "max0" else self.frame
            m = m if sink is None else torch.maximum(m, sink)
            f = torch.exp(self.frame - m)
            rest = terms.rest(m) + (0.0 if sink is None else torch.exp(sink - m))
            both = ties * u + self.u
            total_m = torch.where(none, 1.0, f * both + rest)
            pairs = ties * (ties - 1.0) * u * u + 2.0 * ties * u * self.u + self.u**2 - self.square
            gain = (f * f * pairs + f * both * rest) / total_m**2
            lse = m + torch.log(total_m)
            z = total_m / f.clamp_min(torch.finfo(f.dtype).tiny)
        elif terms.family == "ratio":
            rest = terms.rest(self.frame)
            others = rest + (ties - 1.0) * v + self.v
            z = others + v
            at_top = ties * (du * others + (du * v - cross))
            numerator, z2 = at_top + self.slope * z - self.cross, z * z
            gain = torch.where(z2 > 0, numerator / torch.where(z2 > 0, z2, 1.0), 0.0)
        elif terms.family == "threshold":
            z = torch.ones_like(u)
            g = ties * du + self.slope
            pairs = ties * (ties - 1.0) * cross + 2.0 * ties * du * self.slope + self.slope**2 - self.cross
            gain = torch.where(g > 0, pairs / torch.where(g > 0, g, 1.0), 0.0)
        else:
            z = torch.ones_like(u)
            gain = ties * du + self.slope
        inverse = torch.where(z > 0, 1.0 / torch.where(z > 0, z, 1.0), 0.0)
        total = safe_u * count
        values = dict(
            visible_keys=self.n,
            max_logit=top,
            mean_logit=self.mean,
            logit_variance=self.m2 / self.n.clamp_min(1),
            logsumexp=lse,
            mass=torch.where(positive, total * inverse, 0.0),
            entropy=entropy.clamp_min(0.0),
            effective_keys=torch.where(positive, torch.exp(entropy.clamp_min(0.0)), 0.0),
            participation=torch.where(positive, count**2 / (ties + self.square / safe_u**2), 0.0),
            max_weight=u * inverse,
            support=self.support,
            distance=torch.where(positive, self.distance / total, 0.0),
            first_key_mass=torch.where(positive, self.first_u / total, 0.0),
            gradient_gain=gain.clamp_min(0.0),
        )
        bare = {"max_logit": -math.inf, "logsumexp": -math.inf}
        lost = ~(self.top < math.inf)  # a NaN or +inf among the logits: there are no weights to describe
        kept = ("visible_keys", "max_logit")
        values = {name: x if name in kept else x.masked_fill(lost, math.nan) for name, x in values.items()}
        return Statistics({name: torch.where(none, bare.get(name, 0.0), values[name]).squeeze(-1) for name in NAMES})


class Terms:
    """(u, v, u′, cross) of scores in a frame, from the normaliser's own tile functions spoken in torch."""

    def __init__(self, choice, theta=None):
        self.family, self.choice = choice.family, choice
        theta = choice.theta if theta is None else theta
        self.theta = 0.0 if theta is None else theta
        self.exponential = self.family == "ratio" and choice.exponential
        names = {
            "ratio": ("numerator", "denominator", "numerator_slope", "denominator_slope", "rest"),
            "threshold": ("gain", "value", "slope"),
            "pointwise": ("value", "slope"),
        }[self.family]
        self.tile = {name: speak(getattr(choice, name), torch_words) for name in names}

    def __call__(self, s: Tensor, frame: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tile = self.tile
        if self.family == "ratio":
            c = torch.exp(-frame).expand(s.shape)
            e = torch.exp(s - frame)
            names = ("numerator", "denominator", "numerator_slope", "denominator_slope")
            u, v, du, dv = (tile[name](e, s, c).to(s.dtype) for name in names)
            return u, v, du, dv * u
        if self.family == "threshold":
            t = (tile["gain"](self.theta) * s - frame).clamp_min(0.0)
            u, du = (tile[name](t, self.theta).to(s.dtype) for name in ("value", "slope"))
            return u, u, du, du * du
        u, du = (tile[name](s, self.theta).to(s.dtype) for name in ("value", "slope"))
        return u, u, du, du * 0.0

    def rest(self, frame: Tensor) -> Tensor:
        return self.tile["rest"](torch.exp(-frame)) if self.family == "ratio" else torch.zeros_like(frame)


def of_scores(scores, visible=None, normalizer="softmax", *, sink=None, theta=None, first=0) -> Statistics:
    """All statistics of dense rows of logits (…, Lq, n): s after scale, soft cap, bias and temperature.

    `visible` is a bool mask that broadcasts (True = visible; −inf scores are hidden too), `sink` a logit that joins
    the denominator, broadcasting to (…, Lq, 1). The query's position, for `distance`, is `first` + its index in dim −2.

    >>> regard.statistics.of_scores(torch.zeros(2, 4), normalizer="sparsemax").entropy
    tensor([1.3863, 1.3863])
    """
    choice = normalizers.get(normalizer)
    check_float(scores, "scores")
    if isinstance(first, Tensor) or not hasattr(first, "__index__"):
        _refuse("first must be an int", first)
    seen = scores != -math.inf
    seen = seen if visible is None else seen & _fitting(visible, "visible", scores.shape, torch.bool)
    if sink is not None:
        sink = sink if isinstance(sink, Tensor) or not isinstance(sink, numbers.Real) else torch.tensor(float(sink))
        sink = _fitting(sink, "sink", (*scores.shape[:-1], 1)).to(scores.dtype)
    rows = first + _positions(scores)
    frame = solve_frame(scores, seen, choice, theta, sink)
    return State.of(scores, seen, choice, frame, rows, theta=theta).finish(choice, sink, theta)


def of_weights(weights: Tensor, scores: Tensor | None = None, normalizer: str = "softmax", visible=None) -> Statistics:
    """The statistics of weights that somebody already has, (…, Lq, n): −Σ p̄ log p̄, Σ p̄·|i − j| and the rest.

    Without `scores` the logit statistics are left out and every positive weight counts as a visible key, unless
    `visible` says otherwise. `gradient_gain` follows from the weights for the given normaliser.

    >>> w = torch.eye(3)
    >>> regard.statistics.of_weights(w)["entropy"], regard.statistics.of_weights(w.flip(-1))["distance"]
    (tensor([0., 0., 0.]), tensor([2., 0., 2.]))
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
        seen = weights > 0 if shown is None else shown
    p = torch.where(seen, weights, 0.0)
    mass = p.sum(-1, keepdim=True)
    share = p / torch.where(mass > 0, mass, 1.0)
    entropy = 0.0 - torch.xlogy(share, share.where(share > 0, 1.0)).sum(-1).clamp_max(
        0.0
    )  # 0, not −0, for a one-hot row
    n = seen.sum(-1)
    alive = (n > 0) & (mass.squeeze(-1) > 0)
    keys = torch.arange(p.shape[-1], device=p.device, dtype=p.dtype)
    square = (share * share).sum(-1)
    top = p.amax(-1) if p.shape[-1] else torch.zeros_like(entropy)
    first = torch.where(seen, keys, math.inf).amin(-1, keepdim=True) if p.shape[-1] else mass
    stats = Statistics(
        visible_keys=n.to(p.dtype),
        mass=mass.squeeze(-1),
        entropy=entropy,
        effective_keys=torch.where(alive, entropy.exp(), 0.0),
        participation=torch.where(alive, 1.0 / torch.where(alive, square, 1.0), 0.0),
        max_weight=top,
        support=((p > 0) if choice.sparse else seen).sum(-1).to(p.dtype),
        distance=(share * (_positions(p) - keys).abs()).sum(-1),
        first_key_mass=torch.where(keys == first, share, 0.0).sum(-1),
        gradient_gain=_gain_of_weights(p, choice, scores, seen),
    )
    if stats["gradient_gain"] is None:
        del stats["gradient_gain"]
    if scores is not None:
        logits = of_scores(scores, seen, normalizer)
        for name in ("max_logit", "mean_logit", "logit_variance", "logsumexp", "gradient_gain"):
            stats[name] = logits[name]
    return Statistics({name: stats[name] for name in NAMES if name in stats})


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


def _gain_of_weights(p: Tensor, choice, scores, seen) -> Tensor | None:
    """tr ∂p/∂s from the weights alone, where the normaliser's slopes allow it; None where they need more."""
    if choice.family == "ratio" and not choice.exponential:
        return None
    theta = 0.0 if choice.theta is None else choice.theta
    if choice.family == "ratio":
        slope, share = p, p
    elif choice.slope_of_weight is None:
        return None
    else:
        slope = torch.where(seen, speak(choice.slope_of_weight, torch_words)(p, theta), 0.0).to(p.dtype)
        total = slope.sum(-1, keepdim=True)
        share = slope / torch.where(total > 0, total, 1.0) if choice.family == "threshold" else torch.zeros_like(slope)
    if not p.shape[-1]:
        return p.sum(-1)
    at = share.argmax(-1, keepdim=True)
    others = share.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    missing = 1.0 - p.sum(-1, keepdim=True) if choice.family == "ratio" and speak(choice.rest)(1.0) else 0.0
    complement = (1.0 - share).scatter(-1, at, others + missing) if choice.family != "pointwise" else 1.0
    return (slope * complement).sum(-1)


def _positions(x: Tensor) -> Tensor:
    """(…, Lq, 1) of query positions for x (…, Lq, n); 0 for a single row."""
    if x.ndim < 2:
        return torch.zeros_like(x[..., :1])
    return torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
