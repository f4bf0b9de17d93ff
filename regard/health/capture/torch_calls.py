"""The door to torch: its `scaled_dot_product_attention` and `multi_head_attention_forward`, regard's op and reference.

A torch function mode catches them inside a watched module's forward, whatever name they were imported under.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import UserList

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._core.execute import dense_attention
from regard.health.capture.call import NESTED, Call, as_four, causal_rows, cleaned, rows_of
from regard.health.capture.interception import SDPA, Catching, attend, running, watched
from regard.health.capture.threads import PerThread
from regard.masks import resolve_causal_bias
from regard.temperature.rows import asking

BEFORE_TRAINING = 13  # arguments of torch's multi-head function
SDPAS = SDPA, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default


class Mode(Catching):
    """While it lasts, attention functions of torch become `Call`s, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers = {
            **dict.fromkeys(SDPAS, lambda func, args, kwargs: _sdpa(*args, **kwargs)),
            F.multi_head_attention_forward: _multi_head,
            torch.ops.regard.attention.default: lambda func, args, kwargs: _regard(func, args),
            dense_attention: lambda func, args, kwargs: _reference(func, args),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = self.handlers.get(func)
        if handler is None or torch.compiler.is_compiling():  # mostly none: a forward calls hundreds of functions
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})


def _sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
    cross=None, weights=None,
):  # fmt: skip
    def run(q, mask, causal, dropout):
        return SDPA(q, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)

    def otherwise():
        return run(query, attn_mask, is_causal, dropout_p)

    module = running()
    if not watched(module):
        return otherwise()
    if query.is_nested:
        call = Call(module, query, key, value, own=lambda rows: otherwise(), kind="sdpa", obstacle=NESTED)
        return attend(call, otherwise)

    told, ordered = resolve_causal_bias(attn_mask, is_causal, query.device)
    blind = getattr(attn_mask, "sees_nothing", None)  # rows that regard.attention opened, and blanks afterwards

    def own(rows):
        if rows is None:
            return blanked(as_four(run(query, attn_mask, is_causal, 0.0)), blind)
        mask = rows_of(told, rows)
        if ordered:
            order = causal_rows(rows, key.shape[-2])[0, 0]
            mask = order if mask is None else hidden_too(mask, ~order)
        return blanked(as_four(run(query.index_select(-2, rows), mask, False, 0.0)), rows_of(blind, rows))

    call = Call(
        module=module,
        q=as_four(query),
        k=as_four(key),
        v=as_four(value),
        own=own,
        kind="sdpa",
        mask=cleaned(_mask_like(hidden_again(told, blind), query)),
        causal=ordered,
        options=dict(scale=scale),
        dropout=dropout_p,
        cross=cross,
        folded=query.ndim == 3,
        weights=weights,
    )
    return attend(call, lambda: as_four(otherwise())).reshape(*query.shape[:-1], value.shape[-1])


def blanked(o: Tensor, blind: Tensor | None) -> Tensor:
    return o if blind is None else o.masked_fill(blind, 0.0)


def hidden_again(mask: Tensor | None, blind: Tensor | None) -> Tensor | None:
    """The mask before its rows that see nothing were opened."""
    return mask if mask is None or blind is None else hidden_too(mask, blind)


def hidden_too(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask that hides this too."""
    return mask & ~hidden if mask.dtype == torch.bool else torch.where(hidden, -math.inf, mask)


def _mask_like(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of (…, L, S) beside a query of (…, L, D), as one that broadcasts to [B, H, L, S]."""
    if mask is None or mask.ndim == 4 or query.ndim == 4:
        return mask
    if mask.ndim == 3 and query.ndim == 3:
        return mask[:, None]
    return mask if mask.ndim <= 2 else mask.expand(*query.shape[:-2], *mask.shape[-2:]).flatten(0, query.ndim - 4)


def _multi_head(func, args, kwargs):
    """torch's multi-head function looks its sdpa up by name: hand it ours. Weights are its own, or those of a swap."""
    seen = watched(running())
    if not seen or _TOLD:  # or this is such a call, on its way through the mode of another
        return func(*args, **kwargs)
    wanted = kwargs.get("need_weights", True)
    weights: list[Tensor] | None = [] if wanted and any(one.swap is not None for one in seen) else None
    query, key = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key")))
    asked = {**kwargs, "need_weights": False}
    if weights is not None and kwargs.get("attn_mask") is not None:
        asked["is_causal"] = False  # the mask says it, and torch believes the mask where weights are wanted
    looks = wanted and weights is None  # once more, for the observers alone: what it gives is not the model's
    if looks and running().training and len(args) <= BEFORE_TRAINING:
        asked["training"] = False  # dropping would take random numbers that the model's later layers are to have
    _TOLD.append(dict(cross=query is not key, weights=weights))
    try:
        result = func(*args, **kwargs) if looks else None
        with _BY_NAME, torch.no_grad() if looks else contextlib.nullcontext():
            output, _ = func(*args, **asked)
        if weights is None:
            return (output, None) if result is None else result
        if not weights:  # the swap left the call as it was, or was taken off elsewhere meanwhile
            return func(*args, **kwargs)
    finally:
        _TOLD.pop()
    p = weights[0].mean(1) if kwargs.get("average_attn_weights", True) else weights[0]  # of [B, H, M, N]
    return output, p if query.ndim == 3 else p.squeeze(0)


class ByName:
    """While any thread is in here, torch's sdpa by its name is ours, for those threads."""

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            F.scaled_dot_product_attention = _by_name

    def __exit__(self, *_) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                F.scaled_dot_product_attention = SDPA


def _by_name(*args, **kwargs):
    return _sdpa(*args, **kwargs, **_TOLD[-1]) if _TOLD else SDPA(*args, **kwargs)


_BY_NAME = ByName()
_TOLD: UserList[dict] = PerThread()  # by the multi-head calls that this thread is in, to their Call


def _regard(func, args):
    """regard's own op: [o, frame, z, stats] of exactly the distribution it names."""
    q, k, v, bias, mask, temperature, sink, lengths, _, scale, softcap, causal, left, right, dropout, name, *_ = args
    options = dict(scale=scale, softcap=softcap or None, normalizer=name, key_lengths=lengths)
    sides = tuple(None if side < 0 else side for side in (left, right))
    return [*_own((q, k, v), bias, mask, causal, sides, temperature, sink, dropout, options, lambda: func(*args))]


def _reference(func, args):
    """regard's reference, which takes what no kernel does: (o, statistics)."""
    (call,), problem = args, args[0].problem
    options = dict(scale=problem.scale, softcap=problem.softcap, normalizer=problem.choice.spec)
    options["key_lengths"] = problem.key_lengths
    return _own(
        (problem.q, problem.k, problem.v), call.bias, call.mask, problem.causal, (problem.left, problem.right),
        call.temperature, call.sink, problem.dropout_p, options, lambda: func(call),
    )  # fmt: skip


def _own(qkv, bias, mask, causal, sides, temperature, sink, dropout, options, run):
    """A call of regard's: what `run` gives, output first; a swap changes the output alone."""
    module = running()
    if not watched(module) or asking():
        return run()
    results: list = []

    def own(rows=None):
        if not results:
            results.extend(run())
        return results[0] if rows is None else results[0].index_select(-2, rows)

    options["temperature"] = None if temperature is None else temperature[..., None]
    options["sink"] = None if sink is None else sink[..., None]
    options["window"] = None if sides == (None, None) else sides
    call = Call(
        module,
        *qkv,
        own=own,
        kind="regard",
        mask=mask if bias is None else bias if mask is None else bias.masked_fill(~mask, -torch.inf),
        causal=causal,
        options=options,
        obstacle="it drops weights at random (dropout in training)" if dropout else None,
    )
    output = attend(call, own)
    own()  # the rows' state and statistics, which a swapped output has not
    return output, *results[1:]
