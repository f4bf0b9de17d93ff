"""`MultiheadAttention`, the module, and `Cache`, its keys and values of earlier calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import normalizers, statistics
from regard._call.arguments import AttnMask
from regard._call.mask.documents import pack_documents
from regard._call.mask.mask import Mask
from regard._call.mask.visible import check_window
from regard._call.scores import is_positive, is_real
from regard._call.validation import check_flag
from regard._core.attention import attention
from regard._core.formulas import apply_gate, qk_norm
from regard._facts import is_mapped
from regard.bias import forgetting
from regard.nn import additive, torch_weights, validation
from regard.nn.learned_parameter import LearnedParameter
from regard.nn.visibility import Visibility
from regard.temperature.named import named


class Cache(NamedTuple):
    """The keys [B, G, N, D] and values [B, G, N, E] of all calls so far, and the log forget gates [B, H, N], if any."""

    k: Tensor
    v: Tensor
    log_gates: Tensor | None = None


class MultiheadAttention(nn.Module):
    """Multi-head attention, out = W_o · concat_h attention(W_q x, W_k y, W_v y), on (B, L, embed_dim).

    >>> import regard, torch
    >>> layer = regard.nn.MultiheadAttention(16, num_heads=4, normalizer="entmax15")
    >>> x = torch.randn(2, 5, 16)
    >>> out, stats = layer(x, is_causal=True, return_stats=("support",))
    >>> out.shape, stats.support.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5]))

    Args:
        embed_dim: width of queries and outputs, a multiple of num_heads; a head has d = embed_dim / num_heads.
        num_heads: number of query heads H.
        kv_heads: number of key and value heads G, a divisor of num_heads (default num_heads).
        kdim, vdim: width of keys and values (default embed_dim).
        bias: whether the four projections have a bias.
        dropout: probability of dropping a weight, in training only.
        score: "scaled_dot" q·k/√d, "dot" q·k, "additive" w·tanh(q + k), or "cosine" g·q̂·k̂ with unit vectors
            (QK-norm) and a learned gain g per head that starts at √d.
        normalizer: any name of `regard.normalizers`. It has no weights, so a state dict fits any of them; but
            "entmax(alpha=learned)" and "sigmoid(bias=learned)" learn a number per head, from 1.5 and −ln n on.
        temperature: None, a number, "learned" (per head, starts at 1), "ssmax" (learned per head), "adaptive",
            "query_dependent", "asentmax", or a policy of `regard.temperature`, whose parameters are then the module's.
        softcap: c in c·tanh(x/c), or None.
        score_mod: a `regard.bias.ScoreFunction` in the place of the soft cap, or None; not with score="additive". Its
            params that are nn.Parameters become the module's, as `score_params`.
        sink: True adds a learned logit per head to softmax's denominator.
        gate: "head" or "element": the heads' outputs are multiplied by σ of a linear layer of the query, one gate per
            head or per element (arXiv 2505.06708). Statistics are those before the gate.
        forget_gate: True adds the logarithms of learned forget gates, σ of a linear layer of the key, to the scores of
            earlier keys (forgetting attention, arXiv 2503.02130); for self-attention with is_causal=True.
        batch_first: must be True.
        device, dtype: of the parameters.

    Shapes:
        query (B, Lq, embed_dim), key (B, Lk, kdim), value (B, Lk, vdim) → out (B, Lq, embed_dim); statistics
        (B, H, Lq); cache (B, G, N, d).

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
        temperature: float | str | Callable | None = None,
        sink: bool = False,
        gate: str | None = None,
        forget_gate: bool = False,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = validation.check_layer_options(options, "MultiheadAttention")
        self.softcap, self.score_mod = self.options["softcap"], self.options["score_mod"]
        if not batch_first:
            raise ValueError("batch_first must be True: inputs are (B, L, embed_dim); transpose (L, B, …) first")
        kv_heads = num_heads if kv_heads is None else kv_heads
        validation.check_sizes(embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads, kdim=kdim, vdim=vdim)
        validation.check_options(score, normalizer, dropout, self.score_mod, sink, "MultiheadAttention")
        validation.check_gates(gate, forget_gate)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.score, self.normalizer = embed_dim // num_heads, score, normalizer
        self.dropout = dropout
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
        learned = normalizers.learned(normalizer)
        self.parameter = None if learned is None else LearnedParameter(learned, num_heads, **place)
        owned = [x for x in getattr(self.score_mod, "params", ()) if isinstance(x, nn.Parameter)]
        self.score_params = nn.ParameterList(owned) if owned else None
        self.sink = nn.Parameter(torch.zeros(num_heads, **place)) if sink else None
        widths = {"head": num_heads, "element": embed_dim}
        self.gate = nn.Linear(embed_dim, widths[gate], bias, **place) if gate else None
        self.forget_gate = nn.Linear(kdim or embed_dim, num_heads, **place) if forget_gate else None
        if self.forget_gate is not None:
            nn.init.zeros_(self.forget_gate.bias)
        self.temperature = _make_temperature(temperature, num_heads, self.head_dim, place)
        self._last: dict[int, tuple] = {}  # by thread: q, k, scale and options of the last training call
        self._is_clipped = False  # True while `regard.qk_clip` needs `_last`

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiheadAttention:
        """Return a copy of a torch `nn.MultiheadAttention` that gives the same output.

        The module must have batch_first=True (torch's default is False). Frozen parameters stay frozen. In a bool mask
        True means visible, where in torch's it means hidden: torch's `attn_mask` is `~attn_mask` here, and torch's
        `key_padding_mask` is `attn_mask=~key_padding_mask[:, None, None]`.
        """
        torch_weights.check_module(module)
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
        torch_weights.copy_weights(ours, module)
        return ours.train(module.training)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any) -> None:
        torch_weights.rename_keys(state_dict, prefix, local_metadata.get("assign_to_params_buffers", False))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        is_causal: bool = False,
        attn_mask: AttnMask = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        window: tuple[int | None, int | None] | None = None,
        cache: Cache | bool | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        return_stats: bool | str | tuple[str, ...] = False,
    ) -> Any:
        """Return out, followed by the statistics if `return_stats`, followed by the new cache if `cache`.

        Args:
            query: (B, Lq, embed_dim).
            key: (B, Lk, kdim), default query (self-attention).
            value: (B, Lk, vdim), default key.
            is_causal: hide later keys; may be combined with `attn_mask`.
            attn_mask: bool (True = visible) or additive, broadcasts to (B, H, Lq, N); N counts cached keys too. Or a
                `regard.Mask`, a bias of `regard.bias`, or a pair (mask, bias).
            key_lengths: (B,) visible keys, cached keys included.
            window: (left, right) keys around each query that are visible.
            cache: True starts a cache; a `Cache` continues it. New keys follow the cached ones, and `is_causal` and
                `window` place query 0 right after the cached keys.
            cu_seqlens: (documents + 1,) ints 0, …, L of a packed batch, whose inputs are (1, L, embed_dim): tokens
                attend within their document, `is_causal` and `window` count there.
            return_stats: True for all statistics, or their names.

        The statistic `distance` counts queries from 0, with or without a cache, and keys from the first that a
        `window` leaves to any query.
        """
        key = query if key is None else key
        value = key if value is None else value
        validation.check_inputs(query, key, value, (self.q_proj, self.k_proj, self.v_proj))
        q = self._split_heads(self.q_proj(query), self.num_heads)
        k = self._split_heads(self.k_proj(key), self.kv_heads)
        v = self._split_heads(self.v_proj(value), self.kv_heads)
        k, v, past = validation.join_cache(cache, k, v)
        is_causal = check_flag(is_causal, "is_causal")
        log_gates = self._log_gates(query, key, is_causal, Cache(*cache) if past and isinstance(cache, tuple) else None)
        queries, keys = q.shape[2], k.shape[2]
        if cu_seqlens is not None:
            validation.check_packed(q.shape[0], attn_mask, key_lengths, cache)
            if queries != keys:
                raise ValueError(
                    f"cu_seqlens needs as many keys as queries ({queries}), got {keys}; see regard.attention_varlen"
                )
            order = is_causal, check_window(window)
            attn_mask = pack_documents((cu_seqlens,), ("cu_seqlens",), queries, keys, q.device, *order)
            is_causal, window = False, None
        if past and self.score_mod is not None:  # it counts queries from `past` on, and every key
            own = Mask.window(None, None, bottom_right=True)
            attn_mask = (own, *attn_mask) if isinstance(attn_mask, (tuple, list)) else (own, attn_mask)
        if log_gates is not None:
            given = attn_mask if isinstance(attn_mask, (tuple, list)) else (attn_mask,)
            attn_mask = (*given, forgetting(log_gates))
        visibility = Visibility.of_call(q, keys, past, attn_mask, is_causal, window, key_lengths)
        wanted = statistics.requested(return_stats)
        attend = self._attend_product
        if self.score == "additive":
            visibility, attend = visibility.densify(q, keys), self._attend_additive
        out, stats = attend(q, visibility.trim(k), visibility.trim(v), wanted or (), visibility.options)
        if self.gate is not None:
            out = apply_gate(out, self._split_gates(self.gate(query)))
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        result = [out]
        if wanted is not None:
            result.append(stats)
        if cache is not None and cache is not False:
            result.append(Cache(k, v, log_gates))
        return result[0] if len(result) == 1 else tuple(result)

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _split_gates(self, x: Tensor) -> Tensor:
        """Return logits (B, L, H) or (B, L, H·d) as (B, H, L, 1) or (B, H, L, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _log_gates(self, query: Tensor, key: Tensor, is_causal: bool, cache: Cache | None) -> Tensor | None:
        """Return the logarithms of the forget gates, (B, H, N), those of cached keys first; None without them."""
        if self.forget_gate is None:
            return None
        if not is_causal or key.shape[1] != query.shape[1]:
            raise ValueError("forget_gate=True needs is_causal=True and as many new keys as queries")
        own = F.logsigmoid(self.forget_gate(key).float()).transpose(1, 2)
        if cache is None:
            return own
        if cache.log_gates is None:
            raise ValueError("cache must come from this module: with forget_gate=True it holds log_gates")
        return torch.cat([cache.log_gates, own], 2)

    def _attend_product(
        self, q: Tensor, k: Tensor, v: Tensor, wanted: tuple[str, ...], options: dict
    ) -> tuple[Tensor, statistics.Statistics]:
        scale: Any = {"scaled_dot": None, "dot": "none"}.get(self.score)
        if self.score == "cosine":
            q, k = qk_norm(q, k)  # of length √d
            scale = self.gain / q.shape[-1]
        else:
            self._remember(q, k, scale, options)
        result: Any = attention(  # type: ignore[misc]
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            enable_gqa=self.kv_heads != self.num_heads,
            normalizer=self._choose_normalizer(),
            temperature=self.temperature,
            sink=self.sink,
            return_stats=wanted or False,
            **self.options,
            **options,
        )
        return result if wanted else (result, statistics.Statistics())

    def _attend_additive(
        self, q: Tensor, k: Tensor, v: Tensor, wanted: tuple[str, ...], options: dict
    ) -> tuple[Tensor, statistics.Statistics]:
        dropout = self.dropout if self.training else 0.0
        if dropout and wanted:
            raise ValueError("return_stats with dropout in training is undefined; measure in evaluation mode")
        return additive.attention(
            q,
            k,
            v,
            self.additive,
            dropout_p=dropout,
            normalizer=self._choose_normalizer(),
            temperature=getattr(self.temperature, "value", self.temperature),
            cap=self.softcap,
            sink=self.sink,
            wanted=wanted,
            **options,
        )

    def _choose_normalizer(self) -> Any:
        return self.normalizer if self.parameter is None else self.parameter.choose()

    def _remember(self, q: Tensor, k: Tensor, scale: str | None, options: dict) -> None:
        """Keep q and k of the last training call while `regard.qk_clip` measures this model, and only then."""
        if not self._is_clipped or not (self.training and torch.is_grad_enabled()):
            return
        compiling = torch.compiler.is_compiling()
        # in torch 2.11 is_exporting() is True whenever it compiles
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            return
        if compiling or not is_mapped(q):  # tensors of torch.func are invalid after the call
            self._last[0 if compiling else threading.get_ident()] = (q.detach(), k.detach(), scale, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": {}, "_is_clipped": False}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kv_heads={self.kv_heads}, score={self.score}, normalizer={self.normalizer}"


def _make_temperature(temperature: Any, heads: int, head_dim: int, place: dict) -> Any:
    """Return None, a number or a policy; a word becomes the policy of that name."""
    if temperature is None or (callable(temperature) and not isinstance(temperature, Tensor)):
        return temperature
    if isinstance(temperature, str):
        return named(temperature, heads, head_dim, **place)
    if not is_real(temperature):
        raise ValueError(f"temperature must be None, a number, a word or a policy, got {temperature!r}")
    if not is_positive(temperature):
        raise ValueError(f"temperature must be a positive, finite number, got {temperature!r}")
    return float(temperature)
