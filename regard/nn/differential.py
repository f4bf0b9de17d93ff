"""`DifferentialAttention`: the difference of two attention maps, each by one fused call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard import normalizers, statistics
from regard._call.arguments import AttnMask
from regard._call.validation import check_flag
from regard._core.attention import attention
from regard._facts import accumulator
from regard.nn import validation
from regard.nn.multihead import Cache
from regard.nn.visibility import Visibility

SPREAD = 0.1  # standard deviation of the vectors that λ is made of, at the start
EPS = 1e-5  # of the norm of a head's output


class DifferentialAttention(nn.Module):
    """o = (p(q₁ k₁ᵀ) − λ·p(q₂ k₂ᵀ))·v per head, then RMS-normed (arXiv 2410.05258), on (B, L, embed_dim).

        λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ₀,   λ₀ = 0.8 − 0.6·exp(−0.3·layer)
        out = W_o · concat_h (1 − λ₀)·RMSNorm(o_h)

    >>> import regard, torch
    >>> layer = regard.nn.DifferentialAttention(32, num_heads=4, layer=2)
    >>> out, (first, second) = layer(torch.randn(2, 5, 32), is_causal=True, return_stats=("entropy",))
    >>> out.shape, first.entropy.shape
    (torch.Size([2, 5, 32]), torch.Size([2, 4, 5]))

    Args:
        embed_dim: width of inputs and outputs, a multiple of 2·num_heads: queries and keys have d = embed_dim /
            (2·num_heads), values 2·d.
        num_heads: number of heads H, half of those of a Transformer of the same size.
        kv_heads: number of key and value heads G, a divisor of num_heads (default num_heads).
        layer: the layer's place in the model, from 0; it sets λ₀.
        bias: whether the four projections have a bias.
        dropout: probability of dropping a weight of either map, in training only.
        normalizer: any name of `regard.normalizers`, for both maps.
        softcap: c in c·tanh(x/c), or None.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        layer: int = 0,
        bias: bool = False,
        dropout: float = 0.0,
        normalizer: str = "softmax",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = validation.check_layer_options(options, "DifferentialAttention")
        kv_heads = num_heads if kv_heads is None else kv_heads
        validation.check_sizes(2, embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads)
        if normalizers.learned(normalizer) is not None:
            raise ValueError(f"normalizer: regard.nn.DifferentialAttention learns no parameter, got {normalizer!r}")
        validation.check_options("scaled_dot", normalizer, dropout, None, False, "DifferentialAttention")
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ValueError(f"layer must be an int ≥ 0, the layer's place in the model, got {layer!r}")
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.normalizer = embed_dim // (2 * num_heads), normalizer
        self.dropout, self.softcap = dropout, self.options["softcap"]
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        place: dict[str, Any] = dict(device=device, dtype=dtype)
        inner = 2 * kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.k_proj = nn.Linear(embed_dim, inner, bias, **place)
        self.v_proj = nn.Linear(embed_dim, inner, bias, **place)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.lambda_q = nn.Parameter(SPREAD * torch.randn(2, self.head_dim, **place))
        self.lambda_k = nn.Parameter(SPREAD * torch.randn(2, self.head_dim, **place))
        self.norm = nn.RMSNorm(2 * self.head_dim, EPS, **place)

    @property
    def lambda_(self) -> Tensor:
        """λ, the weight of the second map: a scalar with gradients, in float32 or wider."""
        wide = accumulator(self.lambda_q.dtype)
        first, second = (self.lambda_q.to(wide) * self.lambda_k.to(wide)).sum(-1).exp()
        return first - second + self.lambda_init

    def forward(
        self,
        query: Tensor,
        *,
        is_causal: bool = False,
        attn_mask: AttnMask = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        window: tuple[int | None, int | None] | None = None,
        cache: Cache | bool | None = None,
        return_stats: bool | str | tuple[str, ...] = False,
    ) -> Any:
        """Return out, followed by (statistics, statistics) of both maps if `return_stats`, and by the new cache.

        Args:
            query: (B, L, embed_dim).
            is_causal, attn_mask, key_lengths, window: as in `MultiheadAttention`; both maps see the same keys.
            cache: True starts a cache; a `Cache` continues it: keys (B, G, N, 2·d), values (B, G, N, 2·d).
            return_stats: True for all statistics, or their names.
        """
        validation.check_inputs(query, query, query, (self.q_proj, self.k_proj, self.v_proj))
        wide = 2 * self.head_dim
        q, k, v = (
            x.unflatten(-1, (-1, wide)).transpose(1, 2)
            for x in (self.q_proj(query), self.k_proj(query), self.v_proj(query))
        )
        k, v, past = validation.join_cache(cache, k, v)
        is_causal = check_flag(is_causal, "is_causal")
        visibility = Visibility.of_call(q, k.shape[2], past, attn_mask, is_causal, window, key_lengths)
        wanted = statistics.requested(return_stats)
        maps = [
            self._attend(first, visibility.trim(second), visibility.trim(v), wanted, visibility.options)
            for first, second in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        ]
        (positive, first_stats), (negative, second_stats) = maps
        o = positive - self.lambda_.to(negative.dtype) * negative
        o = self.norm(o.to(self.norm.weight.dtype)) * (1.0 - self.lambda_init)
        result: list[Any] = [self.out_proj(o.transpose(1, 2).flatten(2))]
        if wanted is not None:
            result.append((first_stats, second_stats))
        if cache is not None and cache is not False:
            result.append(Cache(k, v))
        return result[0] if len(result) == 1 else tuple(result)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, wanted: tuple[str, ...] | None, options: dict
    ) -> tuple[Tensor, statistics.Statistics]:
        result: Any = attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.num_heads,
            normalizer=self.normalizer,
            return_stats=wanted or False,
            **self.options,
            **options,
        )
        return result if wanted else (result, statistics.Statistics())

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kv_heads={self.kv_heads}, normalizer={self.normalizer}"
