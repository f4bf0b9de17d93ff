"""Biases of the scores that are not N × N: `attn_mask=` takes one, alone or as (mask, bias) beside a `regard.Mask`.

>>> import regard, torch
>>> x = torch.randn(1, 4, 6, 8)
>>> out = regard.attention(x, x, x, (regard.Mask.causal(), regard.bias.alibi(4)))
>>> i, j = torch.arange(6)[:, None], torch.arange(6)
>>> dense = -torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None] * (i - j).abs()
>>> bool(torch.allclose(out, regard.attention(x, x, x, dense, is_causal=True), atol=1e-6))
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard._call.score_function import ScoreFunction
from regard._facts import accumulator, readable

__all__ = ["ScoreFunction", "alibi", "forgetting", "relative"]


class BiasTerms(NamedTuple):
    """What a bias adds to s_ij: key_j, row_i and relative_(j − i), in the shapes that a `Problem` keeps unexpanded."""

    key: Tensor | None = None  # [B or 1, H or 1, 1, N]
    row: Tensor | None = None  # [B or 1, H or 1, M]
    relative: Tensor | None = None  # [H or 1, M + N − 1]


class Bias:
    """A bias that takes the sizes of q and k where it meets them."""

    needs_causal_order: ClassVar[bool] = False  # defined for the keys behind a query alone

    def terms(self, q: Tensor, keys: int, ahead: int | None = None) -> BiasTerms:
        """The terms of this bias for q [B, H, M, D] and `keys` keys, in the accumulator's dtype on q's device.

        ahead: query i sees no key beyond i + ahead; None: it may see all.
        """
        raise NotImplementedError

    def dense(self, q: Tensor, keys: int) -> Tensor:
        """The bias as one tensor that broadcasts to [B, H, M, N]."""
        from regard.masks import spread_relative

        key, row, relative = self.terms(q, keys)
        row = None if row is None else row[..., None]
        relative = None if relative is None else spread_relative(relative, q.shape[2], keys)
        given = [x for x in (key, row, relative) if x is not None]
        return torch.stack(torch.broadcast_tensors(*given)).sum(0) if len(given) > 1 else given[0]


@dataclass(frozen=True, eq=False)
class Relative(Bias):
    """table[h, j − i + C], where C is the middle column; see `relative`."""

    table: Tensor
    bottom_right: bool = False

    def terms(self, q: Tensor, keys: int, ahead: int | None = None) -> BiasTerms:
        heads, queries = q.shape[1:3]
        _check_heads(self.table.shape[0], heads, "table of bias.relative")
        _check_device(self.table, q, "table of bias.relative")
        centre = self.table.shape[1] // 2
        if centre < max(queries, keys) - 1:
            raise ValueError(
                f"table of bias.relative must have at least 2·{max(queries, keys)} − 1 columns for {queries} queries "
                f"and {keys} keys, got {self.table.shape[1]}"
            )
        first = centre - (queries - 1) - (keys - queries if self.bottom_right else 0)
        cut = self.table[:, first : first + max(0, queries + keys - 1)]
        return BiasTerms(relative=cut.to(accumulator(q.dtype)))


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """−slope_h·|i − j|; see `alibi`.

    Behind the query this is slope·j − slope·i, a term per key and one per row, which the fastest kernels take. Its
    rounding grows with N, so that only 16-bit calls are computed so.
    """

    slopes: Tensor  # [H]
    bottom_right: bool = False

    def terms(self, q: Tensor, keys: int, ahead: int | None = None) -> BiasTerms:
        heads, queries = q.shape[1:3]
        _check_heads(len(self.slopes), heads, "bias.alibi")
        offset = keys - queries if self.bottom_right else 0
        slopes = self.slopes.to(q.device, accumulator(q.dtype))
        if ahead is not None and ahead <= offset and q.element_size() == 2:
            place = torch.arange(1 - keys, 1, device=q.device, dtype=slopes.dtype)  # 0 at the last key
            i = torch.arange(queries, device=q.device, dtype=slopes.dtype) + (offset + 1 - keys)
            slopes = slopes[None, :, None]
            return BiasTerms(key=(slopes * place)[:, :, None], row=-slopes * i)
        away = torch.arange(max(0, queries + keys - 1), device=q.device) - (queries - 1 + offset)
        return BiasTerms(relative=-slopes[:, None] * away.abs())


@dataclass(frozen=True, eq=False)
class Forgetting(Bias):
    """Σ of the log gates after key j up to query i; see `forgetting`."""

    log_gates: Tensor  # [B or 1, H or 1, N]
    needs_causal_order: ClassVar[bool] = True

    def terms(self, q: Tensor, keys: int, ahead: int | None = None) -> BiasTerms:
        batch, heads, queries = q.shape[:3]
        gates = self.log_gates
        _check_device(gates, q, "log_gates")
        if gates.shape[2] != keys or gates.shape[0] not in (1, batch) or gates.shape[1] not in (1, heads):
            raise ValueError(
                f"log_gates must have shape ({batch}, {heads}, {keys}), one per key, got {tuple(gates.shape)}"
            )
        if queries > keys:
            raise ValueError(f"bias.forgetting takes at most as many queries as keys ({keys}), got {queries}")
        total = gates.double().cumsum(-1)
        total = (total - total[..., -1:]).to(accumulator(q.dtype))  # counted from the last key: recent gates are exact
        return BiasTerms(key=-total[:, :, None], row=total[..., keys - queries :])


def alibi(heads: int | Tensor, bottom_right: bool = False) -> Alibi:
    """bias_ij = −slope_h·|i − j| (ALiBi, arXiv 2108.12409), the slopes 2^(−8/H), 2^(−16/H), … of H heads.

    >>> alibi(8).slopes[:3]
    tensor([0.5000, 0.2500, 0.1250])

    Args:
        heads: how many; for a number that is no power of two the paper's rule. Or the slopes themselves, (H,), which
            have gradients.
        bottom_right: count a query's position from i + Lk − Lq, as behind a cache.
    """
    _check_flag(bottom_right, "bias.alibi")
    if isinstance(heads, Tensor):
        if heads.ndim != 1 or not heads.is_floating_point():
            raise ValueError(
                f"slopes of bias.alibi must be a float tensor (H,), got {tuple(heads.shape)} {heads.dtype}"
            )
        return Alibi(heads, bottom_right)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be an int ≥ 1 or a tensor of slopes, got {heads!r}")
    whole = 1 << (heads.bit_length() - 1)  # the largest power of two
    slopes = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(heads - whole)]
    return Alibi(torch.tensor(slopes, device="cpu"), bottom_right)


def relative(table: Tensor, bottom_right: bool = False) -> Relative:
    """bias_ij = table[h, j − i + C] with C the middle column: T5's and Swin's relative position bias.

    >>> bias = relative(torch.arange(5.0)[None])  # −2, −1, 0, 1, 2 keys away
    >>> bias.dense(torch.zeros(1, 1, 2, 4), 3)
    tensor([[[2., 3., 4.],
             [1., 2., 3.]]])

    Args:
        table: (H, 2·L − 1) or (1, 2·L − 1) with L at least as large as queries and keys; it has gradients.
        bottom_right: count a query's position from i + Lk − Lq, as behind a cache.
    """
    _check_flag(bottom_right, "bias.relative")
    if not isinstance(table, Tensor) or not table.is_floating_point():
        kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"table of bias.relative must be a float tensor (H, 2·L − 1), got {kind}")
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ValueError(f"table of bias.relative must have shape (H, 2·L − 1), an odd width, got {tuple(table.shape)}")
    return Relative(table, bottom_right)


def forgetting(log_gates: Tensor) -> Forgetting:
    """bias_ij = Σ of log_gates over the keys j + 1 … i (forgetting attention, arXiv 2503.02130), in causal order.

    A call needs `is_causal=True` or a mask that hides later keys: the gates of a key ahead are not defined.

    >>> forgetting(torch.full((1, 1, 3), -1.0)).dense(torch.zeros(1, 1, 3, 4), 3)[0, 0, 2]
    tensor([-2., -1.,  0.])

    Args:
        log_gates: (B, H, Lk), the logarithm of each key's forget gate, finite; it has gradients. Fewer queries than
            keys are the last ones.
    """
    if not isinstance(log_gates, Tensor) or not log_gates.is_floating_point():
        kind = log_gates.dtype if isinstance(log_gates, Tensor) else type(log_gates).__name__
        raise TypeError(f"log_gates must be a float tensor (B, H, Lk), got {kind}")
    if log_gates.ndim != 3 or not log_gates.shape[2]:
        raise ValueError(f"log_gates must have shape (B, H, Lk), got {tuple(log_gates.shape)}")
    if readable(log_gates) and bool(log_gates.isinf().any()):
        raise ValueError(
            "log_gates must be finite, got ±inf; compute them by logsigmoid(x), not torch.sigmoid(x).log()"
        )
    if readable(log_gates) and bool((log_gates > 0).any()):
        raise ValueError("log_gates must be ≤ 0, logarithms of gates in (0, 1], got positive ones; use logsigmoid(x)")
    return Forgetting(log_gates)


def _check_flag(bottom_right: bool, name: str) -> None:
    if not isinstance(bottom_right, bool):  # bias.alibi(4, 512) has no length
        raise TypeError(f"bottom_right of {name} must be a bool, got {type(bottom_right).__name__}")


def _check_heads(own: int, heads: int, name: str) -> None:
    if own not in (1, heads):
        raise ValueError(f"{name} has {own} heads, but q has {heads}")


def _check_device(x: Tensor, q: Tensor, name: str) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
