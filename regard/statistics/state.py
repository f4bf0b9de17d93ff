"""Sums over the keys of a row, and the statistics that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.statistics.names import NAMES
from regard.statistics.terms import Terms


@dataclass
class State:
    """Sums over the visible keys of a row, in the row's shift; each field has shape (…, 1).

    Sums marked ' leave out the keys at the row's maximal logit. `shift` is m or τ.
    """

    n: Tensor  # visible keys
    top: Tensor  # max s
    ties: Tensor  # how many keys have s = top
    mean: Tensor  # of s
    m2: Tensor  # Σ (s − mean)²
    shift: Tensor
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
    def of(cls, scores, visible, choice, shift, rows, theta=None) -> State:
        """The state of rows: scores (…, n), the rows' shift (…, 1), their positions `rows` (…, 1)."""
        terms = Terms(choice, theta)
        keys = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype).expand(scores.shape)
        hidden = scores.masked_fill(~visible, -math.inf)

        def total(x, where=visible):
            return torch.where(where, x, 0.0).sum(-1, keepdim=True)

        n = visible.sum(-1, keepdim=True).to(scores.dtype)
        none = n == 0
        top = hidden.amax(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, -math.inf)
        s = torch.where(visible, scores, top.detach().masked_fill(none, 0.0))  # hidden keys: finite in every term
        mean = total(s) / n.clamp_min(1)
        below = visible & (s < top)
        u, v, du, cross = terms(s, shift)
        seen_keys = keys.masked_fill(~visible, math.inf)
        first = seen_keys.amin(-1, keepdim=True) if scores.shape[-1] else torch.full_like(n, math.inf)
        return cls(
            n=n,
            top=top,
            ties=n - total(torch.ones_like(s), below),
            mean=mean,
            m2=total((s - mean) ** 2),
            shift=shift,
            first=first,
            first_u=total(u, visible & (keys == first)),
            u=total(u, below),
            v=total(v, below),
            log_u=total(_xlogx(u), below),
            square=total(u * u, below),
            slope=total(du, below),
            cross=total(cross, below),
            lse=total(torch.exp(s - top.masked_fill(none, 0.0)), below),
            distance=total(u * (rows - keys).abs()),
            support=total(terms.weighs(s, u).to(s.dtype) if choice.sparse else torch.ones_like(s)),
        )

    def finish(self, choice, sink: Tensor | None = None, theta=None) -> dict[str, Tensor]:
        """Every statistic of the table, each of shape (…), from the state of the row."""
        terms = Terms(choice, theta)
        none = self.n == 0
        top = torch.where(none, torch.zeros_like(self.top), self.top)
        u, v, du, cross = terms(top, self.shift)
        ties = self.ties
        positive = (u > 0) & ~none
        safe_u = torch.where(positive, u, torch.ones_like(u))
        w = torch.where(positive, self.u / safe_u, 0.0)
        count = torch.where(positive, ties + w, 1.0)  # Σu / u_max ≥ 1
        lower = (self.log_u - torch.log(safe_u) * self.u) / safe_u
        entropy = torch.where(positive, torch.log1p((ties - 1.0) + w) - lower / count, 0.0)
        inverse, gain, lse = self._sharpness(
            terms, choice, sink, none, (u, v, du, cross), top + torch.log(ties + self.lse)
        )
        total, top_square = safe_u * count, safe_u * safe_u  # which may underflow, as every square then does
        squares = ties + self.square / top_square.masked_fill(top_square == 0, 1.0)
        values = dict(
            visible_keys=self.n,
            max_logit=top,
            mean_logit=self.mean,
            logit_variance=self.m2 / self.n.clamp_min(1),
            logsumexp=lse,
            mass=torch.where(positive, total * inverse, 0.0),
            entropy=entropy.clamp_min(0.0),
            effective_keys=torch.where(positive, torch.exp(entropy.clamp_min(0.0)), 0.0),
            participation=torch.where(positive, count**2 / squares, 0.0),
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
        return {name: torch.where(none, bare.get(name, 0.0), values[name]).squeeze(-1) for name in NAMES}

    def _sharpness(self, terms: Terms, choice, sink, none, at_max, lse) -> tuple[Tensor, Tensor, Tensor]:
        """(1/Z, tr ∂p/∂s, log Z); the gain from products of two terms that are not both the maximum's: none cancels."""
        u, v, du, cross = at_max
        ties = self.ties
        if terms.exponential:  # rest and sink join in a shift of their own, so that nothing overflows
            m = self.shift.clamp_min(0.0) if choice.shift == "max0" else self.shift
            m = m if sink is None else torch.maximum(m, sink)
            f = torch.exp(self.shift - m)
            rest = terms.rest(m) + (0.0 if sink is None else torch.exp(sink - m))
            both = ties * u + self.u
            total_m = torch.where(none, 1.0, f * both + rest)
            pairs = ties * (ties - 1.0) * u * u + 2.0 * ties * u * self.u + self.u**2 - self.square
            gain = (f * f * pairs + f * both * rest) / total_m**2
            lse = m + torch.log(total_m)
            inverse = f / total_m
        elif terms.family == "ratio":
            rest = terms.rest(self.shift)
            others = rest + (ties - 1.0) * v + self.v
            z = others + v
            at_top = ties * (du * others + (du * v - cross))
            numerator, z2 = at_top + self.slope * z - self.cross, z * z
            gain = torch.where(z2 > 0, numerator / torch.where(z2 > 0, z2, 1.0), 0.0)
            inverse = torch.where(z > 0, 1.0 / torch.where(z > 0, z, 1.0), 0.0)
        elif terms.family == "threshold":
            inverse = torch.ones_like(u)
            g = ties * du + self.slope
            pairs = ties * (ties - 1.0) * cross + 2.0 * ties * du * self.slope + self.slope**2 - self.cross
            gain = torch.where(g > 0, pairs / torch.where(g > 0, g, 1.0), 0.0)
        else:
            inverse = torch.ones_like(u)
            gain = ties * du + self.slope
        return inverse, gain, lse


def _xlogx(u: Tensor) -> Tensor:
    """u·log u, with 0 and the gradient 0 where u has underflowed."""
    return u * torch.log(u.masked_fill(u == 0, 1.0))
