"""Captures the attention calls of transformers: its registry returns an attention function, and that is wrapped here.

Only what the registry returns is wrapped. The configuration stays as it is, so masks are made as for the model's own
implementation, and eager, sdpa and custom functions keep their soft caps, sinks and position biases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from regard._call.mask.documents import documents_of_positions
from regard.health.capture.call import Call, causal_rows, clean_mask, derive, merge_mask_and_bias, select_rows
from regard.health.capture.flex_calls import mask_of_block
from regard.health.capture.forwards import STATE
from regard.health.capture.fused_call import FusedCall, capture_fused
from regard.health.capture.guard import guarded
from regard.health.capture.interception import interceptions_of, is_swapped, route
from regard.health.capture.sdpa_name import SDPA

_ORIGINALS: dict[str, object] = {}


def patch_registry() -> None:
    """Wraps the lookups of transformers' attention registry; a second call does nothing."""
    if _ORIGINALS:
        return
    for name in ("get_interface", "__getitem__"):
        if hasattr(AttentionInterface, name):
            _ORIGINALS[name] = AttentionInterface.__dict__.get(name)
            setattr(AttentionInterface, name, _wrap_lookup(getattr(AttentionInterface, name)))


def unpatch_registry() -> None:
    """Restores the registry's own lookups."""
    for name, original in _ORIGINALS.items():
        if original is None:
            delattr(AttentionInterface, name)
        else:
            setattr(AttentionInterface, name, original)
    _ORIGINALS.clear()


def _wrap_lookup(lookup: Callable) -> Callable:
    def find(self, *args, **kwargs):
        own = lookup(self, *args, **kwargs)
        return own if getattr(own, "func", None) is _capture else partial(_capture, own)

    return find


def _capture(own, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *args, **kwargs):
    given = module, query, key, value, attention_mask
    run = partial(own, *given, *args, **kwargs)
    if args or kwargs.get("cache") is not None:
        return run()
    return guarded(lambda run: _route_call(own, run, *given, kwargs), run)


def _route_call(own, run, module, query, key, value, attention_mask, kwargs):
    is_ours = getattr(getattr(own, "func", None), "__module__", None) == "regard.hf.attention"
    if is_ours or not interceptions_of(module):  # our own regard.attention is captured
        return run()
    if _name(own) == "flash_attention_forward":
        return _capture_flash(own, module, query, key, value, attention_mask, kwargs), None
    weights = None

    def run_original():
        nonlocal weights
        out, weights = own(module, query, key, value, attention_mask, **kwargs)
        return out.transpose(1, 2)

    call = _as_call(own, module, query, key, value, attention_mask, kwargs)
    if call.wants_weights and is_swapped(module):
        call.weights = []
    out = route(call, run_original)
    return out.transpose(1, 2), call.weights[0] if call.weights else weights


def _name(own: Callable) -> str:
    """Returns the name of an attention function; kernels of the hub are partial functions."""
    return getattr(getattr(own, "func", own), "__name__", type(own).__name__)


def _capture_flash(own, module, query, key, value, mask, kwargs) -> Tensor:
    """Captures flash_attention_2, 3, 4 and kernels of the hub: masks of two dims, or packed documents."""

    def run(dropout):
        given = kwargs if dropout is None else {**kwargs, "dropout": dropout}
        return own(module, query, key, value, mask, **given)[0]  # [B, M, H, E]

    causal, window = kwargs.get("is_causal"), kwargs.get("sliding_window")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    keys = key.shape[2] if mask is None else min(key.shape[2], mask.shape[-1])
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
    fused = FusedCall(
        _name(own).removesuffix("_forward"), run, q, k, v, scale=kwargs.get("scaling"), causal=causal,
        window=(None, None) if not window else (window - 1, None if causal else window - 1),
        softcap=kwargs.get("softcap"), sink=kwargs.get("s_aux"), dropout=kwargs.get("dropout") or 0.0,
    )  # fmt: skip
    if mask is not None:
        if mask.ndim != 2:
            fused.obstacle = f"its mask has {mask.ndim} dims, where flash-attention takes two"
        else:
            fused.mask = (mask[:, :keys] != 0)[:, None, None]
        return capture_fused(fused, module)
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        packed = query.shape[2] == key.shape[2]
        cu_q = cu_k = documents_of_positions(kwargs.get("position_ids")) if packed else None
    if cu_q is None:
        return capture_fused(fused, module)
    fused.q, fused.k, fused.v = (x.flatten(0, 1) for x in (q, k, v))
    fused.cu_q, fused.cu_k = cu_q.to(q.device), cu_k.to(q.device)
    fused.run = lambda dropout: run(dropout).flatten(0, 1)
    return capture_fused(fused, module).unflatten(0, (query.shape[0], query.shape[2]))


def _sdpa_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Runs torch's sdpa with the queries of a group as rows of one head, so that k and v are not repeated."""
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    mask = None if mask is None else derive(_fold_mask, mask, group, rows)
    folded = query.reshape(batch, -1, group * rows, width)
    return SDPA(folded, key, value, mask, scale=scale).reshape(batch, heads, rows, -1)


def _fold_mask(mask: Tensor, group: int, rows: int) -> Tensor:
    """Returns the mask of a group's queries as rows of one head."""
    each = mask.expand(-1, group, -1, -1) if mask.shape[1] == 1 else mask
    return each.expand(-1, -1, rows, -1).reshape(mask.shape[0], -1, group * rows, mask.shape[-1])


def _as_call(own, module, query, key, value, attention_mask, kwargs) -> Call:
    name = _name(own)
    eager = name.endswith("eager_attention_forward")  # timesfm has a `simple_eager_attention_forward`
    sdpa = name == "sdpa_attention_forward"
    # does the model collect its weights, by `output_attentions` of a running forward or of its configuration?
    running = (getattr(one, "config", None) for one in (module, *(one for one, *_ in STATE.stack)))
    collects = STATE.weights_depth is not None or any(getattr(one, "output_attentions", False) for one in running)
    wants_weights = eager and collects
    queries, keys = query.shape[2], key.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and queries > 1 and attention_mask is None and not eager
    obstacle, mask = None, attention_mask
    if type(mask).__name__ == "BlockMask":
        mask = mask_of_block(mask, query, key)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
        shape = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        obstacle = f"its mask ({shape}) belongs to {name}; load the model with attn_implementation='sdpa' or 'eager'"
        mask = None
    elif mask is not None and mask.shape[-1] > keys:
        mask = mask[..., :keys]
    bias = kwargs.get("position_bias")

    def run(rows):
        without_dropout = {**kwargs, "dropout": 0.0}
        if rows is None:
            return own(module, query, key, value, attention_mask, **without_dropout)[0].transpose(1, 2)
        mask_rows = causal_rows(rows, keys) if causal else select_rows(attention_mask, rows)
        if own is sdpa_attention_forward and bias is None and query.shape[1] > key.shape[1]:
            return _sdpa_by_group(query.index_select(2, rows), key, value, mask_rows, kwargs.get("scaling"))
        if bias is not None:
            without_dropout["position_bias"] = select_rows(bias, rows)
        return own(module, query.index_select(2, rows), key, value, mask_rows, **without_dropout)[0].transpose(1, 2)

    mask, causal = merge_mask_and_bias(clean_mask(mask), bias, causal, queries, keys)
    softcap = None if sdpa else kwargs.get("softcap")  # transformers before 5 passes it to sdpa, which ignores it
    options = dict(scale=kwargs.get("scaling"), softcap=softcap, sink=None if sdpa else kwargs.get("s_aux"))
    return Call(
        module, query, key, value, own=run, kind=name.removesuffix("_attention_forward"), mask=mask, causal=causal,
        options=options, dropout=kwargs.get("dropout") or 0.0, sliceable=(eager and not wants_weights) or sdpa,
        obstacle=obstacle, wants_weights=wants_weights,
        model_options={name: kwargs[name] for name in ("sliding_window",) if name in kwargs},
    )  # fmt: skip
