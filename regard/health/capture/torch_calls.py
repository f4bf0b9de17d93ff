"""Captures torch's `scaled_dot_product_attention` and `multi_head_attention_forward`, regard's op and its reference.

A torch function mode sees them inside a hooked module's forward, whatever name they were imported under. Every other
function goes to `handwritten.py`, which follows attention that is written out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard._call.problem import TENSORS, Problem, unflatten
from regard._core.execute import dense_attention, opened_rows
from regard._core.formulas import apply_gate
from regard.health.capture.call import (
    NESTED,
    Call,
    as_four_dims,
    causal_rows,
    clean_mask,
    hide,
    mask_as_four_dims,
    select_rows,
)
from regard.health.capture.forwards import STATE, running_module
from regard.health.capture.guard import guarded
from regard.health.capture.handwritten import ORDINARY, Follower
from regard.health.capture.interception import interceptions_of, report_gate, route
from regard.health.capture.sdpa_name import SDPA, in_place_of_sdpa, is_torchs_or_ours, run_sdpa
from regard.masks import resolve_causal_bias
from regard.normalizers import Choice
from regard.reference import joined_mask, score_of
from regard.temperature.rows import is_measuring

ARGUMENTS_BEFORE_TRAINING = 13  # of torch's multi-head function
SDPA_NAMES = SDPA, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default


class TorchCalls(TorchFunctionMode):
    """Turns attention functions of torch into `Call`s, in the thread that enters it."""

    captures_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.follower = Follower()
        self._followed = self.follower.known.data  # a look at it costs less than a call for every torch function
        self._saw_handled = False
        self.handlers: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(SDPA_NAMES, lambda func, args, kwargs: _capture_sdpa(*args, **kwargs)),
            F.multi_head_attention_forward: _capture_multi_head,
            torch.ops.regard.attention.default: lambda func, args, kwargs: _capture_regard_op(func, args),
            dense_attention: lambda func, args, kwargs: _capture_reference(func, args),
            apply_gate: _capture_gate,
            **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), self._capture_sigmoid),
        }

    @property
    def saw_attention(self) -> bool:
        """True if a function was called that may be a part of attention."""
        return self._saw_handled or self.follower.saw_softmax

    def __exit__(self, *error: Any) -> None:
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is self:  # autograd restores the stack it found
            super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (func in ORDINARY and not self._followed) or torch.compiler.is_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        handler = self.handlers.get(func)
        if handler is None:
            return self.follower.run(func, args, kwargs or {})
        self._saw_handled = True
        given = kwargs or {}

        def handle(run: Callable) -> Any:
            _note_attention()
            return handler(func, args, given)

        return guarded(handle, partial(func, *args, **given))

    def _capture_sigmoid(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Reports σ of what may be a model's own gate, such as Qwen3-Next's; the observer compares its shape."""
        result = self.follower.run(func, args, kwargs)
        ORDINARY.discard(func)  # the follower's view: here the next one is looked at too
        if isinstance(result, Tensor):
            report_gate(result)
        return result


def _note_attention() -> None:
    """Tells the other modes of ours, which will not see a call, that one was captured."""
    for place in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, TorchCalls):
            mode._saw_handled = True


def _capture_gate(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    report_gate(torch.sigmoid(args[1].detach().float()))
    return func(*args, **kwargs)


def _capture_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, *, cross: bool | None = None, weights: list[Tensor] | None = None, function: Callable = SDPA,
) -> Tensor:  # fmt: skip
    STATE.sdpa_calls += function is SDPA

    def run(q, mask, causal, dropout):
        run_it = run_sdpa if function is SDPA else function
        return run_it(q, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)

    def run_original():
        return run(query, attn_mask, is_causal, dropout_p)

    module = running_module()
    if module is None or not interceptions_of(module):
        return run_original()
    if query.is_nested:
        call = Call(module, query, key, value, own=lambda rows: run_original(), kind="sdpa", obstacle=NESTED)
        return route(call, run_original)

    mask_given, ordered = resolve_causal_bias(attn_mask, is_causal, query.device)
    empty = (
        opened_rows.get(attn_mask) if isinstance(attn_mask, Tensor) else None
    )  # empty rows, which regard.attention opens and zeroes afterwards

    def own(rows):
        if rows is None:
            return zero_rows(as_four_dims(run(query, attn_mask, is_causal, 0.0)), empty)
        mask = select_rows(mask_given, rows)
        if ordered:
            order = causal_rows(rows, key.shape[-2])[0, 0]
            mask = order if mask is None else hide(mask, ~order)
        return zero_rows(as_four_dims(run(query.index_select(-2, rows), mask, False, 0.0)), select_rows(empty, rows))

    shown = mask_given if mask_given is None or empty is None else hide(mask_given, empty)
    call = Call(
        module=module, q=as_four_dims(query), k=as_four_dims(key), v=as_four_dims(value), own=own,
        kind="sdpa" if function is SDPA else f"sdpa, replaced by {_place_of(function)}", sliceable=function is SDPA,
        mask=clean_mask(mask_as_four_dims(shown, query)), causal=ordered,
        options=dict(scale=scale), dropout=dropout_p, cross=cross, three_dims=query.ndim == 3, weights=weights,
    )  # fmt: skip
    return route(call, lambda: as_four_dims(run_original())).reshape(*query.shape[:-1], value.shape[-1])


def zero_rows(o: Tensor, empty: Tensor | None) -> Tensor:
    return o if empty is None else o.masked_fill(empty, 0.0)


def _capture_multi_head(func: Callable, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """Runs torch's multi-head function with our sdpa; the weights are its own, or those of a swap."""
    module = running_module()
    active = interceptions_of(module)
    if module is None or not active or STATE.multi_head is not None:  # or this is such a call, seen by a second mode
        return func(*args, **kwargs)
    wanted = kwargs.get("need_weights", True)
    weights: list[Tensor] | None = [] if wanted and any(one.swap is not None for one in active) else None
    query, key = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key")))
    changed = {**kwargs, "need_weights": False}
    if weights is not None and kwargs.get("attn_mask") is not None:
        changed["is_causal"] = False  # the mask holds it, and torch follows the mask where weights are wanted
    observes_only = wanted and weights is None  # a second run, for the observers: its output is not the model's
    if observes_only and module.training and len(args) <= ARGUMENTS_BEFORE_TRAINING:
        changed["training"] = False  # dropout would take random numbers from the model's later layers
    STATE.multi_head = dict(cross=query is not key, weights=weights)
    try:
        result = func(*args, **kwargs) if observes_only else None
        with _patched_sdpa(), torch.no_grad() if observes_only else contextlib.nullcontext():
            output, _ = func(*args, **changed)
        if weights is None:
            return (output, None) if result is None else result
        if not weights:  # the swap left the call as it was
            return func(*args, **kwargs)
    finally:
        STATE.multi_head = None
    p = weights[0].mean(1) if kwargs.get("average_attn_weights", True) else weights[0]  # of [B, H, M, N]
    return output, p if query.ndim == 3 else p.squeeze(0)


@contextlib.contextmanager
def _patched_sdpa() -> Iterator[None]:
    """Replaces torch's sdpa under its name in `torch.nn.functional`, where the multi-head function looks it up."""
    with _PATCH_LOCK:
        found = getattr(F.scaled_dot_product_attention, "replaced", F.scaled_dot_product_attention)
        function = SDPA if is_torchs_or_ours(found) else found

        def capture(*args, **kwargs) -> Tensor:
            """Captures the call if this thread is in a multi-head function; other threads get what was found."""
            if STATE.multi_head is None:
                return found(*args, **kwargs)
            return _capture_sdpa(*args, **{**kwargs, **STATE.multi_head}, function=function)

        capture.replaced = found  # type: ignore[attr-defined]
        with in_place_of_sdpa(capture):
            yield


_PATCH_LOCK = threading.RLock()
_OPAQUE: WeakSet[Any] = WeakSet()  # functions in the place of sdpa that were seen not to call torch's own


@contextlib.contextmanager
def capture_replaced_sdpa() -> Iterator[None]:
    """Captures what somebody put in the place of torch's sdpa; one that calls torch's own is captured there."""
    found = F.scaled_dot_product_attention
    if is_torchs_or_ours(found):
        yield
        return

    def route_it(run: Callable, *args, **kwargs) -> Tensor:
        if not interceptions_of(running_module()):
            return run()
        if found not in _OPAQUE:
            before = STATE.sdpa_calls
            result = run()
            if STATE.sdpa_calls != before:
                return result
            _OPAQUE.add(found)
        _note_attention()
        return _capture_sdpa(*args, **kwargs, function=found)

    def capture(*args, **kwargs) -> Tensor:
        return guarded(lambda run: route_it(run, *args, **kwargs), partial(found, *args, **kwargs))

    capture.replaced = found  # type: ignore[attr-defined]
    with in_place_of_sdpa(capture):
        yield


def _place_of(function: Callable) -> str:
    """Returns NAME in FILE."""
    code = getattr(function, "__code__", None)
    file = "?" if code is None else code.co_filename.rpartition("/")[2]
    return f"{getattr(function, '__name__', type(function).__name__)} in {file}"


def _capture_regard_op(func: Callable, args: tuple) -> list:
    """Runs regard's own op: [o, shift, z, stats]."""
    problem = unflatten(args[: len(TENSORS)], args[len(TENSORS) : -1])
    _, _, _, bias, mask, temperature, sink, *_ = args
    return [*_capture_own(problem, bias, mask, temperature, sink, partial(func, *args))]


def _capture_reference(func: Callable, args: tuple) -> tuple:
    """Runs regard's reference: (o, statistics)."""
    (call,) = args
    names = ("bias", "mask", "temperature", "sink")
    bias, mask, temperature, sink = (call.given.get(name, getattr(call.problem, name)) for name in names)
    return _capture_own(call.problem, bias, mask, temperature, sink, partial(func, call))


def _capture_own(problem: Problem, bias, mask, temperature, sink, run: Callable) -> tuple:
    """Routes a call of regard's own; returns what `run` returns, the output first. A swap changes the output alone.

    bias, mask, temperature and sink are those of the problem before they were expanded.
    """
    module = running_module()
    if module is None or not interceptions_of(module) or is_measuring():
        return run()
    result = cache(lambda: tuple(run()))

    def own(rows=None):
        return result()[0] if rows is None else result()[0].index_select(-2, rows)

    options: dict[str, Any] = dict(scale=problem.scale, softcap=problem.softcap, normalizer=problem.choice.spec)
    if problem.theta is not None:
        options["normalizer"] = Choice(problem.choice.normalizer, problem.theta[..., None])
    options["score_mod"] = score_of(problem)
    options["key_lengths"] = problem.key_lengths
    options["temperature"] = None if temperature is None else temperature[..., None]
    options["sink"] = None if sink is None else sink[..., None]
    options["window"] = None if problem.left is problem.right is None else (problem.left, problem.right)
    joined = mask if bias is None else bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if any(x is not None for x in (problem.interval, problem.row_bias, problem.relative)):
        joined = joined_mask(problem)
    call = Call(
        module, problem.q, problem.k, problem.v, own=own, kind="regard", mask=joined, causal=problem.causal,
        options=options, obstacle="it drops weights at random (dropout in training)" if problem.dropout_p else None,
    )  # fmt: skip
    return route(call, own), *result()[1:]  # with row state and statistics, which a swap does not compute
