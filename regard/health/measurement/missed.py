"""Modules that look like attention but in which no call was captured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from regard.health.measurement.recorder import Layer

Modules = list[tuple[str, nn.Module]]
# parts of the names of kernels that are not captured
NOT_CAPTURED = ("flex_attention", "flash_attn", "memory_efficient_attention", "varlen_attn", "sageattn")
NAMED_ATTENTION = re.compile(r"(Attention|Attn)(Block|Layer|Module|\d[dD])?$")  # names of classes


def find_missed(modules: Modules, layers: Sequence[Layer]) -> dict[str, str]:
    """Modules that look like attention but in which no call was captured, with the reason."""
    captured = {layer.name for layer in layers}
    reasons = {kind: _why_attention(kind) for kind in {type(module) for _, module in modules}}
    suspected = {name: reason for name, module in modules if (reason := reasons[type(module)])}

    def is_related(name: str) -> bool:
        return any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in captured)

    missed = [name for name in suspected if name and not is_related(name)]
    return {name: suspected[name] for name in missed if not any(other.startswith(f"{name}.") for other in missed)}


def _why_attention(kind: type[nn.Module]) -> str | None:
    """Why a class should have called attention: its name, or a kernel in its code that is not captured."""
    methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    names = {name for method in methods for name in method.__code__.co_names if "." not in name}  # not imports
    kernel = next((name for name in sorted(names) if any(part in name for part in NOT_CAPTURED)), None)
    if kernel is not None:
        return f"no attention call was seen in it; its code has {kernel}, which is not captured"
    return "no attention call was seen in it" if NAMED_ATTENTION.search(kind.__name__) else None


def hint_at_missed(modules: Modules) -> str:
    """The first missed module and the kernel in its code, for an error message."""
    for name, reason in find_missed(modules, []).items():
        kernel = reason.partition("its code has ")[2]
        return f"; {name!r} has {kernel}" if kernel else f"; {name!r} is named attention, but computes it by hand"
    return ""
