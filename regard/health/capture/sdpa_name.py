"""The name `torch.nn.functional.scaled_dot_product_attention`: what regard puts there, and takes away in any order."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA = torch._C._nn.scaled_dot_product_attention  # torch's own, whatever was put in its place under its name


def run_sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Runs torch's own sdpa; its causal biases do that by its name alone, where something else may stand."""
    if type(attn_mask).__name__ == "CausalBias":
        return type(attn_mask)._dispatch(query, key, value, attn_mask, *args, **kwargs)
    return SDPA(query, key, value, attn_mask, *args, **kwargs)


def _know_sdpa(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """What `CausalBias` does with a call; it knows torch's sdpa by itself, not by what stands under its name."""
    if func is SDPA:
        return cls._dispatch(*args, **(kwargs or {}))  # type: ignore[attr-defined]
    return _BY_NAME[cls].__func__(cls, func, types, args, kwargs)


_BY_NAME: dict[type, Any] = {}  # torch's class of causal biases -> what it does with a call by itself
_BY_ITSELF: Any = classmethod(_know_sdpa)
_BENEATH: dict[Callable, Callable] = {}  # a function of ours under the name -> what it was put upon


def is_torchs_or_ours(function: Any) -> bool:
    """True for torch's own sdpa, and for what a monitor taps it with."""
    return function is SDPA or str(getattr(function, "__module__", "")).startswith("regard.")


def put_sdpa(function: Callable) -> None:
    """Puts a function under the name of torch's sdpa, upon what is there, until `take_sdpa`."""
    _BENEATH[function] = F.scaled_dot_product_attention
    _name(function)


def take_sdpa(function: Callable) -> None:
    """Takes a function away that `put_sdpa` put there, whatever was put upon it since; what another put there stays."""
    beneath = _BENEATH.pop(function, None)
    if beneath is None:
        return
    if F.scaled_dot_product_attention is function:
        _name(beneath)
    for upper, lower in list(_BENEATH.items()):
        if lower is function:
            _BENEATH[upper] = beneath


def tap_sdpa(function: Callable) -> None:
    """Puts a function right upon torch's own sdpa, beneath what stands there for a while; nothing if it is replaced."""
    top, upper = F.scaled_dot_product_attention, None
    while top in _BENEATH and top is not function:
        top, upper = _BENEATH[top], top
    if top is SDPA and upper is None:
        put_sdpa(function)
    elif top is SDPA:
        _BENEATH[upper], _BENEATH[function] = function, SDPA  # type: ignore[index]


@contextlib.contextmanager
def in_place_of_sdpa(function: Callable) -> Iterator[None]:
    """Has a function under the name of torch's sdpa inside the block."""
    put_sdpa(function)
    try:
        yield
    finally:
        take_sdpa(function)


def _name(function: Callable) -> None:
    """Gives a function the name of torch's sdpa.

    Who has imported torch's own calls that one still. While another has the name, torch's causal biases would take it
    for any function, and themselves for a tensor of numbers that they do not have. Their module is not imported here,
    because it imports all of torch._dynamo, which takes longer than torch itself.
    """
    F.scaled_dot_product_attention = function
    cls: Any = getattr(sys.modules.get("torch.nn.attention.bias"), "CausalBias", None)
    if cls is None:
        return
    before, after = _BY_NAME.setdefault(cls, cls.__dict__["__torch_function__"]), _BY_ITSELF
    if not str(getattr(function, "__module__", "")).startswith("regard."):
        before, after = after, before
    if cls.__dict__["__torch_function__"] is before:
        cls.__torch_function__ = after
