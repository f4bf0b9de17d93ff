"""`AttentionOptions`: every option of one attention call, as its caller gave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from regard.bias import Bias
from regard.mask import Mask
from regard.normalizers import Choice
from regard.score_function import ScoreFunction

AttnMask = Tensor | Mask | Bias | tuple[Tensor | Mask | None, Tensor | Bias | None] | None
Temperature = float | Tensor | Callable[..., Tensor] | None
Window = tuple[int | None, int | None] | None
Wanted = bool | str | Sequence[str]


class AttentionOptions(NamedTuple):
    """The arguments of `regard.attention` after q, k and v, in the order of its signature.

    Made once in `attention` and handed on whole: to the plan, to validation, to each rank of a DTensor or of
    `regard.parallel`. `regard._core.prepare` turns it, with q, k and v, into a `Problem`.

    >>> AttentionOptions(is_causal=True)._replace(normalizer="entmax15").normalizer
    'entmax15'
    """

    attn_mask: AttnMask = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | str | Tensor | None = None
    enable_gqa: bool = False
    normalizer: str | Choice = "softmax"
    temperature: Temperature = None
    softcap: float | None = None
    score_mod: ScoreFunction | None = None
    sink: float | Tensor | None = None
    window: Window = None
    key_lengths: Tensor | Sequence[int] | None = None
    gate: Tensor | None = None
    return_stats: Wanted = False
    backend: str | None = None
