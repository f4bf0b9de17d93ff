"""Catch every attention call inside a model, on the path that the model takes anyway.

Three doors, all shut again afterwards: transformers' attention registry (`huggingface.py`), torch's
`scaled_dot_product_attention` and `multi_head_attention_forward` (a torch function mode), and regard's own op. A call
becomes a `Call`; swaps may change it, then an observer gives the output, or the model's own way does.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import UserList
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from regard.health.call import MAPPED, Call, as_four, causal_rows, cleaned, forget_masks, is_vmapped, rows_of
from regard.health.forwards import OPENED, bury_dead, close_forward, open_forward
from regard.health.threads import PerThread, SlowPath, lock_of
from regard.health.uses import given_tokens

SDPA = torch.nn.functional.scaled_dot_product_attention
SDPAS = SDPA, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default
PLAIN = (
    nn.Linear,
    nn.LayerNorm,
    nn.Embedding,
    nn.Dropout,
    nn.Conv1d,
    nn.Conv2d,
    nn.GELU,
    nn.ReLU,
)  # no attention inside
SMALL = ("Norm", "Embedding", "Activation")  # nor in what is called so; if there were, it would go by the name above


class Interception:
    """While started, calls inside `model` go to `swap` (Call → Call), then to `observe` (Call → output).

    With `opens`, torch's own functions are caught in every forward of the model or of a part of it; otherwise only
    within `torch_calls()`.
    """

    def __init__(
        self, model: nn.Module, *, swap: Callable | None = None, observe: Callable | None = None, opens: bool = False
    ) -> None:
        self.model, self.swap, self.observe, self.opens = model, swap, observe, opens
        self.modules = list(getattr(model, "_orig_mod", model).named_modules())
        self.names = {id(module): name for name, module in self.modules}
        self.names.setdefault(id(model), "")  # what torch.compile made of it
        self.thread: int | None = None  # whose calls an observer sees
        self._hooks: list = []
        self._compiled: list[tuple[nn.Module, Any]] = []  # in place, by module.compile()

    def sees(self, module: nn.Module) -> bool:
        return id(module) in self.names and self.thread in (None, threading.get_ident())

    def _every(self) -> list[nn.Module]:
        modules = [module for _, module in self.modules]
        return modules if self.model is modules[0] else [self.model, *modules]

    def start(self) -> None:
        bury_dead()
        if self.observe is not None:
            lock_of(self.model).acquire()
            self.thread = threading.get_ident()
        with _DOORS:
            self._start()

    def _start(self) -> None:
        ACTIVE.append(self)
        for module in self._every():
            if module._compiled_call_impl is not None:
                self._compiled.append((module, module._compiled_call_impl))
                module._compiled_call_impl = None
            if module._modules or not (isinstance(module, PLAIN) or type(module).__name__.endswith(SMALL)):
                self._hooks.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(_leave, always_call=True))
        if "transformers" in sys.modules:
            from regard.health import huggingface

            huggingface.open_door()

    def stop(self) -> None:
        bury_dead()
        with _DOORS:
            self._stop()
        if self.observe is not None:
            lock_of(self.model).release()

    def _stop(self) -> None:
        ACTIVE.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, call in self._compiled:
            module._compiled_call_impl = call
        self._compiled.clear()
        if not ACTIVE and "transformers" in sys.modules:
            from regard.health import huggingface

            huggingface.close_door()

    @contextlib.contextmanager
    def torch_calls(self):
        """Catch torch's own attention functions too, in this thread; what was compiled runs as it was written."""
        depth = len(_STACK)
        compiled = any("_orig_mod" in module._modules for module in self._every())
        eagerly = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
        try:
            with eagerly, _SLOW_PATH, _pushed(_Mode()):
                yield
        finally:
            del _STACK[depth:]

    @contextlib.contextmanager
    def in_forward(self):
        """All of it for a forward of the model that begins just now, in its pre-hook: see `open_forward`."""
        with self:
            own = self.model._forward_pre_hooks.keys() | self.model._forward_hooks.keys()
            # torch walks through the model's own hooks when its forward raises: none may go then, so they go now
            for hook in [hook for hook in self._hooks if hook.id in own]:
                hook.remove()
            with self.torch_calls():
                _STACK.append((getattr(self.model, "_orig_mod", self.model), object()))  # in the place of its own hooks
                yield
        forget_masks()

    def __enter__(self) -> Interception:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()


ACTIVE: list[Interception] = []
_DOORS = threading.RLock()  # of those who open and shut
_SLOW_PATH = SlowPath()
_STACK: UserList[tuple[nn.Module, Any]] = (
    PerThread()
)  # the modules whose forward is running, and a token of the step it belongs to
_BUSY = PerThread([False])  # inside a caught call: what it calls is not caught again


def _enter(module, inputs, named) -> None:
    if OPENED and any(module is one.model for one in ACTIVE):
        bury_dead()
    if not OPENED:
        for one in ACTIVE:
            if one.opens and id(module) in one.names:
                open_forward(one.torch_calls())
                break
    _STACK.append((module, object() if given_tokens(inputs, named) else step()))


def _leave(module, inputs, output) -> None:
    if _STACK and _STACK[-1][0] is module:
        _STACK.pop()
    close_forward()


@contextlib.contextmanager
def _pushed(mode: TorchFunctionMode):
    mode.__enter__()
    try:
        yield
    finally:
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is mode:  # autograd restores the stack it found
            mode.__exit__(None, None, None)


def watched(module: nn.Module | None) -> list[Interception]:
    return [] if _BUSY[0] or module is None else [one for one in ACTIVE if one.sees(module)]


def attend(call: Call, otherwise: Callable[[], Tensor]) -> Tensor:
    """The output of a caught call: swaps first, then observers; `otherwise` is the model's own way, dropout and all."""
    before, _BUSY[0] = _BUSY[0], True
    try:
        with _mode_aside():
            return _attended(call, otherwise)
    finally:
        _BUSY[0] = before


def _attended(call: Call, otherwise: Callable[[], Tensor]) -> Tensor:
    swapped = call
    for one in ACTIVE:
        if one.swap is not None and one.sees(call.module):
            swapped = one.swap(swapped)
    if swapped is not call:
        otherwise = swapped.run
    if any(is_vmapped(x) for x in (call.q, call.k, call.v, call.mask)):
        swapped = replace(swapped, obstacle=MAPPED)
    for one in reversed(ACTIVE):  # the first one asked has the others behind it
        if one.observe is not None and one.sees(call.module):
            otherwise = partial(one.observe, swapped, one.names[id(call.module)], otherwise)
    return otherwise()


@contextlib.contextmanager
def _mode_aside():
    """Without our mode, where it is the innermost one: nothing is caught in here, and each torch call is cheaper."""
    depth = torch._C._len_torch_function_stack()
    if not depth or not isinstance(torch._C._get_function_stack_at(depth - 1), _Mode):
        yield
        return
    with _pop_mode_temporarily():
        yield


class _Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.handlers = {
            **dict.fromkeys(SDPAS, lambda func, args, kwargs: _sdpa(*args, **kwargs)),
            F.multi_head_attention_forward: _multi_head,
            torch.ops.regard.attention.default: lambda func, args, kwargs: _regard(func, args),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = self.handlers.get(func)
        if handler is None:  # as it mostly is: a forward calls hundreds of functions
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})


def _top() -> nn.Module | None:
    return _STACK[-1][0] if _STACK else None


def step() -> Any:
    """A token of the innermost running forward that was given tokens; another forward, another token."""
    return _STACK[-1][1] if _STACK else None


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, cross=None):
    def run(q, mask, causal, dropout):
        return SDPA(q, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)

    def otherwise():
        return run(query, attn_mask, is_causal, dropout_p)

    module = _top()
    if not watched(module) or query.is_nested:
        return otherwise()

    blind = getattr(attn_mask, "sees_nothing", None)  # rows that regard.attention opened, and blanks afterwards

    def own(rows):
        if rows is None:
            return blanked(as_four(run(query, attn_mask, is_causal, 0.0)), blind)
        mask = causal_rows(rows, key.shape[-2])[0, 0] if is_causal else rows_of(attn_mask, rows)
        return blanked(as_four(run(query.index_select(-2, rows), mask, False, 0.0)), rows_of(blind, rows))

    call = Call(
        module=module,
        q=as_four(query),
        k=as_four(key),
        v=as_four(value),
        own=own,
        kind="sdpa",
        mask=cleaned(_mask_like(hidden_again(attn_mask, blind), query)),
        causal=is_causal,
        options=dict(scale=scale),
        dropout=dropout_p,
        cross=cross,
        folded=query.ndim == 3,
    )
    return attend(call, lambda: as_four(otherwise())).reshape(*query.shape[:-1], value.shape[-1])


def blanked(o: Tensor, blind: Tensor | None) -> Tensor:
    return o if blind is None else o.masked_fill(blind, 0.0)


def hidden_again(mask: Tensor | None, blind: Tensor | None) -> Tensor | None:
    """The mask before its rows that see nothing were opened."""
    if mask is None or blind is None:
        return mask
    return mask & ~blind if mask.dtype == torch.bool else mask.masked_fill(blind, -math.inf)


def _mask_like(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of (…, L, S) beside a query of (…, L, D), as one that broadcasts to [B, H, L, S]."""
    if mask is None or mask.ndim == 4 or query.ndim == 4:
        return mask
    if mask.ndim == 3 and query.ndim == 3:
        return mask[:, None]
    return mask if mask.ndim <= 2 else mask.expand(*query.shape[:-2], *mask.shape[-2:]).flatten(0, query.ndim - 4)


def _multi_head(func, args, kwargs):
    """torch's multi-head function looks its sdpa up by name: hand it ours; keep its own result if it gives weights."""
    if not watched(_top()):
        return func(*args, **kwargs)
    wants_weights = kwargs.get("need_weights", True)
    swapped = any(one.swap is not None for one in watched(_top()))
    if wants_weights and swapped:
        raise ValueError(
            "need_weights=True cannot be served under regard.using; call the module with need_weights=False"
        )
    result = func(*args, **kwargs) if wants_weights else None
    query, key = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("query", "key")))
    F.scaled_dot_product_attention = partial(_sdpa, cross=query is not key)
    try:
        measured = func(*args, **{**kwargs, "need_weights": False})
    finally:
        F.scaled_dot_product_attention = SDPA
    return measured if result is None else result


def _regard(func, args):
    """regard's own op: [o, frame, z, stats] of exactly the distribution it names."""
    module = _top()
    if not watched(module):
        return func(*args)
    q, k, v, bias, mask, temperature, sink, lengths, _, scale, softcap, causal, left, right, dropout, name, *_ = args
    results: list = []

    def own(rows=None):
        if not results:
            results.extend(func(*args))
        return results[0] if rows is None else results[0].index_select(-2, rows)

    joint = mask if bias is None else bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    options = dict(scale=scale, softcap=softcap or None, normalizer=name, key_lengths=lengths)
    options["temperature"] = None if temperature is None else temperature[..., None]
    options["sink"] = None if sink is None else sink[..., None]
    options["window"] = None if left < 0 and right < 0 else tuple(None if side < 0 else side for side in (left, right))
    call = Call(
        module, q, k, v, own=own, kind="regard", mask=joint, causal=causal, options=options,
        obstacle="it drops weights at random (dropout in training)" if dropout else None,
    )  # fmt: skip
    output = attend(call, own)
    own()  # the rows' state and statistics, which a swapped output has not
    return [output, *results[1:]]
