"""Token mixers that are not softmax attention: delta nets, state spaces, linear recurrences, short convolutions.

`Mixers` reads every module of a known kind (`kinds.py`) in the forwards of an examination: the size of what it adds,
how long it remembers, how often its gates are shut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard.health.mixers.kinds import KINDS, Kind
from regard.health.mixers.reading import MixerReading

__all__ = ["MixerReading", "Mixers"]

OTHER = re.compile(
    r"(LightningAttention|LinearAttention|RetNet\w*|Retention|RwkvSelfAttention|RWKV\w*|mLSTM\w*|Hyena\w*)$"
)


def find_mixers(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, Kind | None]]:
    """(name, module, its kind) of each mixer; None for one that is known by its class alone."""
    found: list[tuple[str, nn.Module, Kind | None]] = []
    for name, module in modules:
        if any(name.startswith(f"{outer}.") for outer, _, _ in found):
            continue
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        if kind is not None or OTHER.search(type(module).__name__):
            found.append((name, module, kind))
    return found


class Mixers:
    """The mixers of a model, read inside `with mixers.reading():`."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._found = find_mixers(modules)
        self.readings = [
            MixerReading(name, type(module).__name__ if kind is None else kind.name)
            for name, module, kind in self._found
        ]

    @contextmanager
    def reading(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (_, module, kind), reading in zip(self._found, self.readings, strict=True):
                _observe(stack, module, kind, reading)
            yield


def _observe(stack: ExitStack, module: nn.Module, kind: Kind | None, reading: MixerReading) -> None:
    """Hooks a mixer and the submodules that its kind taps; a failure of ours ends its reading, never the forward."""
    taps: dict[str, Tensor] = {}

    def keep(name: str, is_input: bool) -> Any:
        def hook(_: nn.Module, args: tuple, output: Any) -> None:
            seen = args[0] if is_input and args else output
            if isinstance(seen, Tensor):
                taps[name] = seen.detach()

        return hook

    def add(_: nn.Module, args: tuple, named: dict, output: Any) -> None:
        if reading.failure is not None:
            return
        try:
            x = args[0] if args else next(value for value in named.values() if isinstance(value, Tensor))
            y = output if isinstance(output, Tensor) else output[0]
            reading.add_sizes(x.detach(), y.detach())
            if kind is not None and kind.read is not None:
                reading.add_gates(*kind.read(module, taps))
        except Exception as error:
            reading.failure = f"{type(error).__name__}: {error}".split("\n")[0]
        finally:
            taps.clear()

    for path in () if kind is None else kind.taps:
        name, _, side = path.partition(":")
        if (part := getattr(module, name, None)) is not None:
            stack.callback(part.register_forward_hook(keep(name, side == "input")).remove)
    stack.callback(module.register_forward_hook(add, with_kwargs=True).remove)
