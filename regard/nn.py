"""Multi-head attention as a module: four ways to score, any normaliser, all that `regard.attention` can measure."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import normalizers, statistics
from regard._attention import attention
from regard._normalize import normalize
from regard.masks import dense as dense_mask

SCORES = ("scaled_dot", "dot", "additive", "cosine")
BLOCK = 64  # queries scored at once by additive attention, which has no product to hide in


class Cache(NamedTuple):
    """The keys and values seen so far, [B, G, N, D] and [B, G, N, E]."""

    k: Tensor
    v: Tensor


class MultiheadAttention(nn.Module):
    """out = W_o · concat_h attention(W_q x, W_k y, W_v y), batch first: (B, L, embed_dim) → (B, L, embed_dim).

    >>> import regard, torch
    >>> layer = regard.nn.MultiheadAttention(16, num_heads=4, normalizer="entmax15")
    >>> x = torch.randn(2, 5, 16)
    >>> out, stats = layer(x, is_causal=True, return_stats=("support",))
    >>> out.shape, stats.support.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5]))

    Args:
        embed_dim, num_heads: as in torch; `kv_heads` < num_heads groups queries over shared keys and values.
        score: "scaled_dot" q·k/√d, "dot" q·k, "additive" w·tanh(q + k), or "cosine" g·q̂·k̂ with unit vectors
            (QK-norm) and a learned gain g per head, begun at √d.
        normalizer: any name of `regard.normalizers`. It holds no weights: a state dict survives a change of it.
        temperature: None, a number, "learned" (one per head, begun at 1) or a policy of `regard.temperature`.
        softcap: c in c·tanh(x/c). sink: True adds a learned logit per head to softmax's denominator.
        dropout: on the weights, in training only. kdim, vdim, bias: as in torch's `nn.MultiheadAttention`.

    `load_state_dict` also reads the weights of a torch `nn.MultiheadAttention` of the same sizes, and
    `MultiheadAttention.from_torch(module)` makes a copy that gives the same output.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        score: str = "scaled_dot",
        normalizer: str = "softmax",
        temperature=None,
        softcap: float | None = None,
        sink: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim ({embed_dim}) must be a multiple of num_heads ({num_heads})")
        kv_heads = num_heads if kv_heads is None else kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of kv_heads ({kv_heads})")
        if score == "additive" and (softcap is not None or sink):
            raise ValueError("score 'additive' takes neither softcap nor sink; its scores are bounded by Σ|w|")
        normalizers.get(normalizer)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.score, self.normalizer = embed_dim // num_heads, score, normalizer
        self.dropout, self.softcap = dropout, softcap
        place = dict(device=device, dtype=dtype)
        inner = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.k_proj = nn.Linear(kdim or embed_dim, inner, bias, **place)
        self.v_proj = nn.Linear(vdim or embed_dim, inner, bias, **place)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight)
        if bias:
            for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
                nn.init.zeros_(projection.bias)
        if score == "cosine":
            self.gain = nn.Parameter(torch.full((num_heads,), math.sqrt(self.head_dim), **place))
        if score == "additive":
            self.additive = nn.Parameter(torch.randn(num_heads, self.head_dim, **place) / math.sqrt(self.head_dim))
        self.sink = nn.Parameter(torch.zeros(num_heads, **place)) if sink else None
        self.log_temperature = None
        if isinstance(temperature, str):
            if temperature != "learned":
                raise ValueError(f"temperature must be None, a number, 'learned' or a policy, got {temperature!r}")
            self.log_temperature = nn.Parameter(torch.zeros(num_heads, **place))
            temperature = None
        self.temperature = temperature

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options) -> MultiheadAttention:
        """A copy of a torch `nn.MultiheadAttention` that gives the same output (batch first)."""
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn have no counterpart here; use a module without them")
        weight = module.out_proj.weight
        options = dict(dropout=module.dropout, bias=module.in_proj_bias is not None, **options)
        ours = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        ours.load_state_dict(module.state_dict(), strict=False)
        return ours.train(module.training)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Torch's names for the same weights: in_proj_weight stacks q, k, v."""
        for kind in ("weight", "bias"):
            stacked = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            if stacked is not None:
                for name, part in zip("qkv", stacked.chunk(3), strict=True):
                    state_dict[f"{prefix}{name}_proj.{kind}"] = part
        for name in "qkv":
            separate = state_dict.pop(f"{prefix}{name}_proj_weight", None)
            if separate is not None:
                state_dict[f"{prefix}{name}_proj.weight"] = separate
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        window: tuple[int | None, int | None] | None = None,
        cache: Cache | bool | None = None,
        return_stats: bool | str | tuple[str, ...] = False,
    ):
        """(B, Lq, embed_dim) → out, then the statistics if asked for, then the grown cache if one was given.

        `cache=True` begins one, a `Cache` continues it: the new keys follow the old, and with `is_causal` query i
        stands behind all cached keys. `key` defaults to query (self-attention), `value` to key.
        """
        if query.ndim != 3:
            raise ValueError(f"query must have shape (B, L, embed_dim), got {tuple(query.shape)}")
        if key_lengths is not None:
            key_lengths = torch.as_tensor(key_lengths)
        key = query if key is None else key
        value = key if value is None else value
        q = self._heads(self.q_proj(query), self.num_heads)
        k = self._heads(self.k_proj(key), self.kv_heads)
        v = self._heads(self.v_proj(value), self.kv_heads)
        if isinstance(cache, Cache):
            past = cache.k.shape[2]
            k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
            if past and window is not None:
                raise ValueError("window and a cache that holds keys do not go together; crop the cache instead")
            if past and is_causal:  # query i stands at position past + i
                window, is_causal = (None, past), False
        wanted = statistics.resolve(return_stats)
        options = dict(attn_mask=attn_mask, is_causal=is_causal, key_lengths=key_lengths, window=window)
        run = self._additive if self.score == "additive" else self._product
        out, stats = run(q, k, v, wanted, options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        result = [out]
        if wanted:
            result.append(stats)
        if cache is not None and cache is not False:
            result.append(Cache(k, v))
        return result[0] if len(result) == 1 else tuple(result)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _temperature(self):
        if self.log_temperature is None:
            return self.temperature
        return self.log_temperature.exp()[:, None, None]

    def _product(self, q, k, v, wanted, options):
        scale = {"scaled_dot": None, "dot": "none"}.get(self.score)
        if self.score == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            scale = self.gain
        result = attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            enable_gqa=self.kv_heads != self.num_heads,
            normalizer=self.normalizer,
            temperature=self._temperature(),
            softcap=self.softcap,
            sink=self.sink,
            return_stats=wanted,
            **options,
        )
        return result if wanted else (result, None)

    def _additive(self, q, k, v, wanted, options):
        """s_ij = w·tanh(q_i + k_j), a block of queries at a time, recomputed in backward."""
        groups = self.num_heads // self.kv_heads
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        temperature = self._temperature()
        if callable(temperature):
            raise ValueError("score 'additive' takes a number or 'learned' as temperature, not a policy")
        visible, bias = _visible(q, k, options)
        if visible is not None:  # what no query sees cannot leak, not even as NaN
            unseen = ~visible.any(-2)[..., None]
            k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        parts = []
        for first in range(0, q.shape[2], BLOCK):
            rows = slice(first, first + BLOCK)
            seen = None if visible is None else visible[..., rows, :] if visible.shape[-2] > 1 else visible
            added = None if bias is None else bias[..., rows, :] if bias.shape[-2] > 1 else bias
            block = (q[:, :, rows], k, v, seen, added, temperature, wanted, first)
            parts.append(checkpoint(self._additive_block, *block, use_reentrant=False))
        out = torch.cat([o for o, _ in parts], 2)
        stats = {name: torch.cat([stats[name] for _, stats in parts], 2) for name in wanted}
        return out, statistics.Statistics(stats)

    def _additive_block(self, q, k, v, visible, bias, temperature, wanted, first):
        s = torch.einsum("hd,bhmnd->bhmn", self.additive, torch.tanh(q[:, :, :, None] + k[:, :, None]))
        s = s if bias is None else s + bias
        s = s if temperature is None else s / temperature
        p = normalize(s, self.normalizer, mask=visible)
        stats = {}
        if wanted:
            shown = None if visible is None else visible.expand(s.shape)
            stats = statistics.of_scores(s.detach(), shown, self.normalizer, first=first)
        return F.dropout(p, self.dropout, self.training) @ v, stats


def _visible(q: Tensor, k: Tensor, options: dict) -> tuple[Tensor | None, Tensor | None]:
    """(bool mask, bias) of the dense form that additive scores need."""
    mask = options["attn_mask"]
    order = dict(is_causal=options["is_causal"], window_=options["window"], key_lengths=options["key_lengths"])
    visible = dense_mask(q.shape[2], k.shape[2], **order, device=q.device)
    if mask is None:
        return visible, None
    if mask.dtype == torch.bool:
        return (mask if visible is None else visible & mask), None
    shown = mask != -math.inf
    return (shown if visible is None else visible & shown), mask.masked_fill(~shown, 0.0)
