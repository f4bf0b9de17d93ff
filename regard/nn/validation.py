"""Checks of the arguments of the attention modules, each an error that names the argument."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor, nn

from regard import normalizers
from regard._call.arguments import BY_LAYER
from regard._call.options import check_score_mod, check_softcap
from regard._call.validation import is_autocast, is_float
from regard.temperature.rows import check_sizes as check_positive

GATES = ("head", "element")
SCORES = ("scaled_dot", "dot", "additive", "cosine")


def check_sizes(maps: int = 1, /, **sizes: int | None) -> None:
    """Raise ValueError if a size is not an int ≥ 1, or heads do not divide, with `maps` maps each."""
    check_positive(**{name: x for name, x in sizes.items() if x is not None or name not in ("kdim", "vdim")})
    if sizes["embed_dim"] % (maps * sizes["num_heads"]):
        heads = f"num_heads ({sizes['num_heads']})" if maps == 1 else f"{maps}·num_heads ({maps * sizes['num_heads']})"
        raise ValueError(f"embed_dim ({sizes['embed_dim']}) must be a multiple of {heads}")
    if sizes["num_heads"] % sizes["kv_heads"]:
        raise ValueError(f"num_heads ({sizes['num_heads']}) must be a multiple of kv_heads ({sizes['kv_heads']})")


def check_layer_options(options: dict[str, Any], caller: str) -> dict[str, Any]:
    """The options of `regard.attention` that a module gives to each of its calls, None for those not given."""
    for name in options:
        if name not in BY_LAYER:
            raise TypeError(f"{caller}.__init__() got an unexpected keyword argument {name!r}")
    found = {name: options.get(name) for name in BY_LAYER}
    check_score_mod(found["score_mod"], check_softcap(found["softcap"]))
    return found


def check_options(score: str, normalizer: str, dropout: float, score_mod: Any, sink: bool, caller: str) -> None:
    """Raise ValueError if an option of the constructor of `caller` cannot be used."""
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    if not isinstance(dropout, numbers.Real) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
    if score_mod is not None and score == "additive":
        raise ValueError("score_mod changes scores of q·k; with score='additive' use softcap, or drop one")
    choice = normalizers.learned(normalizer) or normalizers.get(normalizer)
    choice.check_spec(f"regard.nn.{caller}")
    if not isinstance(sink, bool):
        raise ValueError(f"sink must be True, a learned logit per head, or False, got {sink!r}")
    if sink and not choice.softmax_family:
        raise ValueError(f"sink joins the denominator of 'softmax' or 'softmax1', not of {choice.name!r}; drop one")


def check_gates(gate: str | None, forget_gate: bool) -> None:
    """Raise ValueError unless the gate is None, "head" or "element" and forget_gate is a bool."""
    if gate not in (None, *GATES):
        raise ValueError(f"gate must be None, {' or '.join(map(repr, GATES))}, got {gate!r}")
    if not isinstance(forget_gate, bool):
        raise ValueError(f"forget_gate must be True or False, got {forget_gate!r}")


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, projections: tuple[nn.Linear, nn.Linear, nn.Linear]
) -> None:
    """Raise an error unless query, key and value are (B, L, width) with fitting B, L and dtype."""
    for name, x, projection in zip(("query", "key", "value"), (query, key, value), projections, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 3 or x.shape[-1] != projection.in_features:
            raise ValueError(f"{name} must have shape (B, L, {projection.in_features}), got {tuple(x.shape)}")
        weight = getattr(projection, "weight", None)  # a quantised one, and autocast, have rules of their own
        if isinstance(weight, Tensor) and is_float(weight) and x.dtype != weight.dtype and not is_autocast(x):
            raise TypeError(
                f"{name} must have the dtype of the module's parameters, {weight.dtype}, got {x.dtype}; convert one by "
                ".to"
            )
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch of query ({query.shape[0]}), got {x.shape[0]}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have the same length, got {key.shape[1]} and {value.shape[1]}")


def check_packed(batch: int, attn_mask: Any, key_lengths: Tensor | None, cache: Any) -> None:
    """Raise ValueError if an argument says what `cu_seqlens` says already, or the batch is not packed."""
    if batch != 1:
        raise ValueError(
            f"cu_seqlens needs inputs of shape (1, L, embed_dim), the packed tokens, got a batch of {batch}"
        )
    for name, x in (("attn_mask", attn_mask), ("key_lengths", key_lengths), ("cache", cache or None)):
        if x is not None:
            raise ValueError(f"cu_seqlens says which keys are visible; {name} beside it must be None")


def join_cache(cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return cached keys and values [B, G, N, D] with new ones behind them, and N; without a cache the new ones, 0."""
    if cache is None or isinstance(cache, bool):
        return k, v, 0
    shape = (*k.shape[:2], "N", k.shape[3])
    if not (isinstance(cache, tuple) and 2 <= len(cache) <= 3 and all(isinstance(x, Tensor) for x in cache[:2])):
        raise TypeError(f"cache must be True, None or the Cache that the last call returned, got {cache!r}")
    for name, x in zip("kv", cache[:2], strict=True):
        if x.ndim != 4 or (x.shape[0], x.shape[1], "N", x.shape[3]) != shape:
            raise ValueError(f"cache.{name} must have shape ({', '.join(map(str, shape))}), got {tuple(x.shape)}")
    return torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2), cache[0].shape[2]
