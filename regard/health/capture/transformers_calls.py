"""The door to transformers: its registry hands every attention layer a function, and here that function is wrapped.

Only what the registry returns is wrapped. The configuration stays as it is, so masks are made as for the model's own
implementation, and eager, sdpa and custom functions, with soft caps, sinks and position biases, stay what they are.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from regard.health.capture.call import Call, causal_rows, cleaned, joined, rows_of
from regard.health.capture.interception import SDPA, attend, watched

try:  # what the forward under way collects from its modules, by name
    from transformers.utils.output_capturing import _active_collector as _COLLECTED
except ImportError:
    _COLLECTED = None

_KEPT: dict[str, object] = {}


def open_door() -> None:
    if _KEPT:
        return
    for name in ("get_interface", "__getitem__"):
        if hasattr(AttentionInterface, name):
            _KEPT[name] = AttentionInterface.__dict__.get(name)
            setattr(AttentionInterface, name, _wrapping(getattr(AttentionInterface, name)))


def close_door() -> None:
    _FOLDED.clear()
    for name, kept in _KEPT.items():
        if kept is None:
            delattr(AttentionInterface, name)
        else:
            setattr(AttentionInterface, name, kept)
    _KEPT.clear()


def _wrapping(lookup):
    def found(self, *args, **kwargs):
        own = lookup(self, *args, **kwargs)
        return own if isinstance(own, partial) and own.func is _called else partial(_called, own)

    return found


def _called(own, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *args, **kwargs):
    if args or not watched(module) or kwargs.get("cache") is not None:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    weights = None

    def otherwise():
        nonlocal weights
        out, weights = own(module, query, key, value, attention_mask, **kwargs)
        return out.transpose(1, 2)

    call = _as_call(own, module, query, key, value, attention_mask, kwargs)
    if call.shows and any(one.swap is not None for one in watched(module)):
        call.weights = []
    out = attend(call, otherwise)
    return out.transpose(1, 2), call.weights[0] if call.weights else weights


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's function as transformers' sdpa calls it, but the queries of a group as rows of one head: k and v are not
    copied for each of them."""
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    mask = None if mask is None else _folded(mask, group, rows)
    folded = query.reshape(batch, -1, group * rows, width)
    return SDPA(folded, key, value, mask, scale=scale).reshape(batch, heads, rows, -1)


def _folded(mask: Tensor, group: int, rows: int) -> Tensor:
    """The mask of the queries of a group as rows of one head; layers ask for the same."""
    for known, size, made in _FOLDED:
        if known is mask and size == (group, rows):
            return made
    each = mask.expand(-1, group, -1, -1) if mask.shape[1] == 1 else mask
    made = each.expand(-1, -1, rows, -1).reshape(mask.shape[0], -1, group * rows, mask.shape[-1])
    _FOLDED.append((mask, (group, rows), made))
    return made


_FOLDED: deque = deque(maxlen=2)


def _wants_weights(module: nn.Module, kwargs: dict) -> bool:
    """Does the model ask for them? It tells its function, or collects what its modules give (GPT-2), as its caller or
    its configuration wants."""
    collected = None if _COLLECTED is None else _COLLECTED.get()
    if collected is not None:
        return any(name.endswith("attentions") for name in collected)
    said = kwargs.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if said is None else said)


def _as_call(own, module, query, key, value, attention_mask, kwargs) -> Call:
    name = getattr(own, "__name__", type(own).__name__)
    eager = name == "eager_attention_forward"
    sdpa = name == "sdpa_attention_forward"
    shows = eager and _wants_weights(module, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and queries > 1 and attention_mask is None and not eager
    obstacle, mask = None, attention_mask
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
        shape = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        obstacle = f"its mask ({shape}) belongs to {name}; load the model with attn_implementation='sdpa' or 'eager'"
        mask = None
    elif mask is not None and mask.shape[-1] > keys:
        mask = mask[..., :keys]
    bias = kwargs.get("position_bias")

    def run(rows):
        quiet = {**kwargs, "dropout": 0.0}
        if rows is None:
            return own(module, query, key, value, attention_mask, **quiet)[0].transpose(1, 2)
        shown = causal_rows(rows, keys) if causal else rows_of(attention_mask, rows)
        if own is sdpa_attention_forward and bias is None and query.shape[1] > key.shape[1]:
            return _grouped(query.index_select(2, rows), key, value, shown, kwargs.get("scaling"))
        if bias is not None:
            quiet["position_bias"] = rows_of(bias, rows)
        return own(module, query.index_select(2, rows), key, value, shown, **quiet)[0].transpose(1, 2)

    mask, causal = joined(cleaned(mask), bias, causal, queries, keys)
    options = dict(scale=kwargs.get("scaling"), softcap=kwargs.get("softcap"), sink=kwargs.get("s_aux"))
    return Call(
        module, query, key, value, own=run, kind=name.removesuffix("_attention_forward"), mask=mask, causal=causal,
        options=options, dropout=kwargs.get("dropout") or 0.0, sliceable=(eager and not shows) or sdpa,
        obstacle=obstacle, shows=shows,
        told={name: kwargs[name] for name in ("sliding_window",) if name in kwargs},
    )  # fmt: skip
