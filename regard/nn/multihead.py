"""The module itself: projections, the choice of score, a cache, torch's weights."""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import normalizers, statistics
from regard._core.attention import attention
from regard._core.double_backward import is_saved_elsewhere
from regard._core.readable import is_mapped
from regard._core.rows.validation import check_flag
from regard._core.validation import check_key_lengths, check_mask
from regard.masks import resolve_causal_bias
from regard.nn import additive, torch_weights
from regard.nn.order import Order
from regard.scores import is_finite
from regard.temperature import Fixed, named

SCORES = ("scaled_dot", "dot", "additive", "cosine")


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
        temperature: None, a number, "learned" (one per head, begun at 1), "ssmax" (learned per head), "adaptive",
            "query_dependent", or a policy of `regard.temperature`, whose parameters then belong to the module.
        softcap: c in c·tanh(x/c). sink: True adds a learned logit per head to softmax's denominator.
        dropout: on the weights, in training only. kdim, vdim, bias: as in torch's `nn.MultiheadAttention`, of which
            only batch_first=True is known here.

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
        batch_first: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if not batch_first:
            raise ValueError("batch_first must be True: inputs are (B, L, embed_dim); transpose (L, B, …) first")
        kv_heads = num_heads if kv_heads is None else kv_heads
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads, kdim=kdim, vdim=vdim)
        _check_options(score, normalizer, dropout, softcap, sink)
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
        self.temperature = _temperature(temperature, num_heads, self.head_dim, place)
        self._last: dict[int, tuple] = {}  # by thread
        self._is_clipped = False  # does `regard.qk_clip` ask for it?

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options) -> MultiheadAttention:
        """A copy of a torch `nn.MultiheadAttention` that gives the same output.

        Its inputs must be (B, L, embed_dim): a module with batch_first=False, torch's default, is refused. What was
        frozen stays frozen. A bool mask says who is visible, where torch's says who is hidden: its `attn_mask` is
        `~attn_mask` here, and its `key_padding_mask` is `attn_mask=~key_padding_mask[:, None, None]`.
        """
        torch_weights.check(module)
        weight = module.out_proj.weight
        ours = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            **{"dropout": module.dropout, **options},
        )
        torch_weights.fill(ours, module)
        return ours.train(module.training)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        torch_weights.rename(state_dict, prefix, local_metadata.get("assign_to_params_buffers", False))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        window: tuple[int | None, int | None] | None = None,
        cache: Cache | bool | None = None,
        return_stats: bool | str | tuple[str, ...] = False,
    ):
        """(B, Lq, embed_dim) → out, then the statistics if asked for, then the grown cache if one was given.

        `cache=True` begins one, a `Cache` continues it: the new keys follow the old, and with `is_causal` or `window`
        query i stands behind all cached keys, which `attn_mask` and `key_lengths` count too. `key` defaults to query
        (self-attention), `value` to key. `is_causal` and `attn_mask` may go together. The statistic `distance` counts
        queries from 0, cache or not, and keys from the first that a `window` leaves to any query.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        q = self._heads(self.q_proj(query), self.num_heads)
        k = self._heads(self.k_proj(key), self.kv_heads)
        v = self._heads(self.v_proj(value), self.kv_heads)
        past = 0
        if cache is not None and not isinstance(cache, bool):
            cache = self._check_cache(cache, k)
            past = cache.k.shape[2]
            k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
        is_causal = check_flag(is_causal, "is_causal")
        attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, q.device, past)
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        if attn_mask is not None:
            attn_mask = check_mask(attn_mask, (batch, heads), batch, heads, queries, keys, q)
        key_lengths = check_key_lengths(key_lengths, batch, keys, q)
        order = Order.of(keys, past, is_causal, window, attn_mask, key_lengths)
        wanted = statistics.requested(return_stats)
        run = self._additive if self.score == "additive" else self._product
        out, stats = run(q, order.keys(k), order.keys(v), wanted or (), order.options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        result = [out]
        if wanted is not None:
            result.append(stats)
        if cache is not None and cache is not False:
            result.append(Cache(k, v))
        return result[0] if len(result) == 1 else tuple(result)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _product(self, q, k, v, wanted, options):
        scale = {"scaled_dot": None, "dot": "none"}.get(self.score)
        if self.score == "cosine":
            q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
            scale = self.gain
        else:
            self._remember(q, k, scale, options)
        result = attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            enable_gqa=self.kv_heads != self.num_heads,
            normalizer=self.normalizer,
            temperature=self.temperature,
            softcap=self.softcap,
            sink=self.sink,
            return_stats=wanted or False,
            **options,
        )
        return result if wanted else (result, statistics.Statistics())

    def _additive(self, q, k, v, wanted, options):
        temperature = self.temperature
        dropout = self.dropout if self.training else 0.0
        if dropout and wanted:
            raise ValueError("return_stats with dropout in training is undefined; measure in evaluation mode")
        return additive.attention(
            q,
            k,
            v,
            self.additive,
            dropout_p=dropout,
            normalizer=self.normalizer,
            temperature=getattr(temperature, "value", temperature),
            softcap=self.softcap,
            sink=self.sink,
            wanted=wanted,
            **options,
        )

    def _remember(self, q, k, scale, options) -> None:
        """The last training call's q and k, which backward keeps alive anyway: `regard.qk_clip` measures them.

        Where it does not (checkpointing, offloading), they are let go unless somebody clips.
        """
        # torch 2.11 says that it exports whenever it compiles
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if exporting or not (self.training and torch.is_grad_enabled()):
            return
        compiling = torch.compiler.is_compiling()
        if compiling or not is_mapped(q):  # what torch.func wraps is gone after the call
            if not compiling and not self._is_clipped and _is_let_go():  # a graph would be made anew for who clips
                return
            thread = 0 if compiling else threading.get_ident()
            self._last[thread] = (q.detach(), k.detach(), scale, options)

    def __getstate__(self):
        return {**self.__dict__, "_last": {}, "_is_clipped": False}

    def _check_inputs(self, query, key, value) -> None:
        widths = (self.q_proj.in_features, self.k_proj.in_features, self.v_proj.in_features)
        for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.ndim != 3 or x.shape[-1] != width:
                raise ValueError(f"{name} must have shape (B, L, {width}), got {tuple(x.shape)}")
            if x.shape[0] != query.shape[0]:
                raise ValueError(f"{name} must have the batch of query ({query.shape[0]}), got {x.shape[0]}")
        if key.shape[1] != value.shape[1]:
            raise ValueError(f"key and value must have the same length, got {key.shape[1]} and {value.shape[1]}")

    def _check_cache(self, cache, k: Tensor) -> Cache:
        if not (isinstance(cache, tuple) and len(cache) == 2 and all(isinstance(x, Tensor) for x in cache)):
            raise TypeError(f"cache must be True, None or the Cache that the last call returned, got {cache!r}")
        want = (k.shape[0], self.kv_heads, "N", self.head_dim)
        for name, x in zip("kv", cache, strict=True):
            if x.ndim != 4 or (x.shape[0], x.shape[1], "N", x.shape[3]) != want:
                shape = f"({', '.join(map(str, want))})"
                raise ValueError(f"cache.{name} must have shape {shape}, got {tuple(x.shape)}")
        return Cache(*cache)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kv_heads={self.kv_heads}, score={self.score}, normalizer={self.normalizer}"


def _is_let_go() -> bool:
    """Does backward keep nothing of this forward, or is it one that backward runs again?"""
    return is_saved_elsewhere() or torch._C._current_graph_task_id() != -1


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is None and name in ("kdim", "vdim"):
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int ≥ 1, got {size!r}")
    if sizes["embed_dim"] % sizes["num_heads"]:
        raise ValueError(f"embed_dim ({sizes['embed_dim']}) must be a multiple of num_heads ({sizes['num_heads']})")
    if sizes["num_heads"] % sizes["kv_heads"]:
        raise ValueError(f"num_heads ({sizes['num_heads']}) must be a multiple of kv_heads ({sizes['kv_heads']})")


def _check_options(score, normalizer, dropout, softcap, sink) -> None:
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    if not isinstance(dropout, numbers.Real) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
    number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
    if softcap is not None and not (number and is_finite(softcap) and float(softcap) > 0):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    choice = normalizers.get(normalizer)
    if sink and not choice.softmax_family:
        raise ValueError(f"sink joins the denominator of 'softmax' or 'softmax1', not of {choice.name!r}; drop one")


def _temperature(temperature, heads: int, head_dim: int, place: dict):
    """None, a number or a policy; a word names one."""
    if temperature is None or (callable(temperature) and not isinstance(temperature, Tensor)):
        return temperature
    if isinstance(temperature, str):
        return named(temperature, heads, head_dim, **place)
    if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise ValueError(f"temperature must be None, a number, a word or a policy, got {temperature!r}")
    return Fixed(temperature).value
