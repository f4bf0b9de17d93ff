"""`measure`: one pass over the batches that measures every attention call; what `examine` and `check` begin with."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from regard.health.capture.call import forget_derived
from regard.health.capture.forwards import as_written
from regard.health.capture.handwritten import LOST
from regard.health.capture.interception import Interception, check_model
from regard.health.measure.batches import (
    Modules,
    evaluation_mode,
    is_function,
    max_positions,
    name_batch,
    run_batch,
)
from regard.health.measure.heads import read_early
from regard.health.measure.histogram import LAYOUT
from regard.health.measure.norms import OutputColumns
from regard.health.measure.query_rows import is_inverted, is_two_sided, pad_of, padding_of
from regard.health.measure.recorder import Layer, Recorder, merge_uses
from regard.health.mixers import MixerReading, Mixers
from regard.health.tokens.text import first_text
from regard.health.what_if import WhatIf

# parts of the names of kernels that are not captured
NOT_CAPTURED = ("flex_attention", "flash_attn", "memory_efficient_attention", "varlen_attn", "sageattn")
NAMED_ATTENTION = re.compile(r"(Attention|Attn)(Block|Layer|Module|\d[dD])?$")  # names of classes


@dataclass
class Pass:
    """What one pass measured; `failure` ended it early."""

    model: nn.Module
    modules: Modules
    layers: list[Layer]
    recorder: Recorder
    columns: OutputColumns
    batches: int
    seconds: float
    kept: list[Any] = field(default_factory=list)  # the first batches, as they were given
    first: Any = None  # the begin of the first batch's text
    failure: BaseException | None = None
    room: int = 2**31  # positions that the model has
    mixers: list[MixerReading] = field(default_factory=list)  # layers that mix tokens without attention

    @property
    def parameters(self) -> int:
        """The number of weights, shared ones once."""
        return sum(p.numel() for p in list_parameters(self.modules))


def require_measurable(model: Any) -> nn.Module:
    """The module to run; raises TypeError or ValueError for what cannot be run and captured."""
    check_model(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is TorchScript, whose calls cannot be captured; pass the module it was made from")
    model = as_written(model)
    modules = list(model.named_modules())
    if any(p.is_meta for p in list_parameters(modules)) and not (
        any(hasattr(module, "_hf_hook") for _, module in modules)  # accelerate loads them in each forward
    ):
        raise ValueError("model has weights on the meta device, which have no values; load them first")
    return model


def list_parameters(modules: Modules) -> list[nn.Parameter]:
    """The weights of a model, shared ones once."""
    found = (p for _, module in modules for p in module._parameters.values() if p is not None)
    return list({id(p): p for p in found}.values())


def measure(
    model: nn.Module, batches: Iterable[Any], changes: Sequence[WhatIf] = (), *, backend: str | None = None,
    progress: Callable[[int], None] | None = None, group: Any = None, snapshot: str | os.PathLike | None = None,
    keep: int = 0,
) -> Pass:  # fmt: skip
    """Runs the model on every batch and measures its attention; raises what ended it before anything was measured."""
    model = require_measurable(model)
    recorder = Recorder(changes, backend)
    rounds = None
    if group is not None or snapshot is not None:
        from regard.health.distributed.rounds import Rounds, checksum_weights

        what = dict(model=name_model(model), what_if=[one.name for one in changes], weights=checksum_weights(model))
        what["bins"] = repr(LAYOUT)
        rounds = Rounds(recorder, group, snapshot, what)
    interception = Interception(model, observe=recorder)
    modules = interception.modules

    def begin(*_) -> None:
        if not torch.compiler.is_compiling():
            recorder.begin()

    hook = model.register_forward_pre_hook(begin, prepend=True)
    started, done, failure, first = time.perf_counter(), 0, None, None
    two_sided = is_two_sided(model, (name for name, _ in modules))
    pad, room = pad_of(model), max_positions(model, modules)
    mixers = Mixers(modules)
    columns, kept = OutputColumns(dict(modules)), []  # type: ignore[var-annotated]
    try:
        with evaluation_mode(modules), interception, mixers.reading(), torch.no_grad(), interception.torch_calls():
            for batch in batches:
                first = first_text(batch, model) if done == 0 else first
                if rounds is not None:
                    rounds.check_batch(done, batch)
                if rounds is None or rounds.is_mine(done):
                    recorder.rows.padding = padding_of(batch, two_sided)
                    recorder.rows.inverted = bool(recorder.rows.padding) and is_inverted(batch, pad)
                    recorder.begin()  # a function may run only a part of the model, without this hook
                    run_batch(model, batch, done, room)
                    with recorder.on_side_stream():
                        columns.compute(recorder.layers.values())
                    if rounds is None:
                        read_early(recorder)
                    while recorder.finish_batch():
                        recorder.begin()
                        run_batch(model, batch, done, room)
                if len(kept) < keep and not is_function(batch):
                    kept.append(batch)
                done += 1
                if rounds is not None:
                    rounds.end_batch(done - 1)
                if progress is not None:
                    progress(done)
            if rounds is not None:
                rounds.end(done)
    except (Exception, KeyboardInterrupt) as error:
        failure = name_batch(error, done) if rounds is None else error
        recorder.finish_batch()
        if rounds is not None:
            failure, done = rounds.fail(done, error)
    finally:
        hook.remove()
        forget_derived()
    layers = list(recorder.layers.values())
    if rounds is not None:
        layers = rounds.finish() if failure is None else rounds.layers()
    layers = merge_uses(layers)
    if failure is not None and not any(layer.reading for layer in layers):
        raise failure
    if not done and failure is None:
        raise ValueError("batches is empty; there is nothing to examine")
    seconds = time.perf_counter() - started
    others = [one for one in mixers.readings if one.layer not in {layer.name for layer in layers}]
    return Pass(model, modules, layers, recorder, columns, done, seconds, kept, first, failure, room, others)


UNFOLLOWED = "its softmax ({}) is of scores that are no product of q and k any more, as where heads are mixed"


def find_missed(modules: Modules, layers: Sequence[Layer]) -> dict[str, str]:
    """Modules that look like attention but in which no call was captured, with the reason."""
    captured = {layer.name for layer in layers}
    kinds = {name: type(module) for name, module in modules}
    suspected = {name: why for name, kind in kinds.items() if (why := _why_attention(kind))}  # type: ignore[arg-type]

    def is_related(name: str) -> bool:
        return any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in captured)

    missed = [name for name in suspected if name and not is_related(name)]
    missed = [name for name in missed if not any(other.startswith(f"{name}.") for other in missed)]
    lost = {name: LOST[module] for name, module in modules if module in LOST}
    return {name: UNFOLLOWED.format(lost[name]) if name in lost else str(suspected[name]) for name in missed}


@lru_cache(maxsize=256)
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


def name_model(model: nn.Module) -> str:
    """The model's name in a report: that of its configuration, or its class."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__
