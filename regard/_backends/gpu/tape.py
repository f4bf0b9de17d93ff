"""Tapes: the allocations, views and kernel launches of one GPU call, recorded once and replayed for calls like it.

Choosing a kernel, its blocks and its descriptors costs the host more than a small kernel runs. All of that follows from
shapes, strides, dtypes, alignments and options, so that a second call of the same kind can repeat what the first one
did, on its own tensors: a replay is a loop over torch ops and launches, with no Python logic in between.

    first call    run(inputs) under a `Recorder`: a dispatch mode sees torch's ops, `launcher.launch` reports kernels
    later calls   tape.replay(inputs)

A call whose launches the recorder did not all see (a kernel started without `launcher.launch`) gets no tape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard._backends.gpu import launcher

MAX_TAPES = 512
UNSEEN, SEEN = object(), object()
_tapes: dict[Hashable, Any] = {}  # a Tape, SEEN, or None for a call that has none


class Slot(NamedTuple):
    """The place of a tensor among those of a call."""

    index: int


class Nested(NamedTuple):
    """A tuple, or a tensor descriptor, with slots inside; `kind` makes it of its parts."""

    kind: Any
    parts: tuple


class Step(NamedTuple):
    """One torch op or kernel launch, and the slots that its results go to."""

    call: Callable
    arguments: list  # with None where `filled` says what goes there
    filled: list[tuple[int, Any]]
    options: dict
    results: tuple[int, ...]

    @classmethod
    def of(cls, call: Callable, arguments: Sequence, options: dict, results: tuple[int, ...]) -> Step:
        """A step whose arguments hold slots here and there."""
        places = [at for at, x in enumerate(arguments) if type(x) in (Slot, Nested)]
        constants = [None if at in places else x for at, x in enumerate(arguments)]
        return cls(call, constants, [(at, arguments[at]) for at in places], options, results)


class Tape:
    """The steps of a call, and what it returned in terms of slots."""

    def __init__(self, steps: list[Step], slots: int, result: tuple) -> None:
        self.steps, self.slots, self.result = steps, slots, result

    def replay(self, inputs: Sequence[Tensor | None]) -> tuple:
        """Run the steps on other tensors of the same kind."""
        slots: list[Any] = [*inputs, *[None] * (self.slots - len(inputs))]
        for call, arguments, filled, options, results in self.steps:
            if filled:
                arguments = arguments.copy()
                for at, x in filled:
                    arguments[at] = slots[x[0]] if type(x) is Slot else _fill(x, slots)
            found = call(*arguments, **options) if options else call(*arguments)
            if not results:
                continue
            if len(results) == 1:
                slots[results[0]] = found[0] if type(found) in (tuple, list) else found
            else:
                for place, x in zip(results, found, strict=True):
                    slots[place] = x
        return tuple([_fill(x, slots) for x in self.result])


def _fill(x: Any, slots: list) -> Any:
    """Put tensors where an argument has slots."""
    kind = type(x)
    if kind is Slot:
        return slots[x.index]
    if kind is Nested:
        return x.kind([_fill(part, slots) for part in x.parts])
    return x


class Recorder(TorchDispatchMode):
    """Writes down every torch op and kernel launch while it is active."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.kept = list(inputs)  # every tensor, so that no id is used twice
        self.aliases: list[Tensor] = []  # kept alive, so that no id is used twice
        self.places = {id(x): place for place, x in enumerate(inputs) if x is not None}
        self.launches, self.failed = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = [self.describe(x) for x in args]
        found = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default and id(args[0]) in self.places:  # the same tensor to a kernel
            self.places[id(found)] = self.places[id(args[0])]
            self.aliases.append(found)
            return found
        results = found if isinstance(found, (tuple, list)) else (found,)
        if any(isinstance(x, Tensor) for x in kwargs.values()) or not all(isinstance(x, Tensor) for x in results):
            self.failed = True
        else:
            call = torch.empty if func is torch.ops.aten.empty.memory_format else func
            self.steps.append(Step.of(call, arguments, kwargs, tuple(map(self.place_of, results))))
        return found

    def record_launch(self, compiled: Any, programs: int, arguments: tuple, constants: tuple) -> None:
        """Write down the launch of a compiled kernel."""
        self.launches += 1
        described = (*[self.describe(x) for x in arguments], *constants)
        self.steps.append(Step.of(launcher.prepare(compiled, programs), described, {}, ()))

    def place_of(self, x: Tensor) -> int:
        """The slot of a tensor, a new one if it is new."""
        if id(x) not in self.places:
            self.places[id(x)] = len(self.kept)
            self.kept.append(x)
        return self.places[id(x)]

    def describe(self, x: Any) -> Any:
        """An argument with slots in place of the call's tensors; what holds none stays as it is."""
        if isinstance(x, Tensor):
            return Slot(self.places[id(x)]) if id(x) in self.places else x
        if isinstance(x, (tuple, list)):
            parts = tuple(self.describe(part) for part in x)
            if not any(type(part) in (Slot, Nested) for part in parts):
                return x
            return Nested(type(x)._make if hasattr(x, "_make") else type(x), parts)
        if hasattr(x, "base") and isinstance(x.base, Tensor):  # a tensor descriptor
            return Nested(_Descriptor(x), (self.describe(x.base),))
        return x


class _Descriptor:
    """Makes copies of a tensor descriptor for other tensors, without checking the shapes again."""

    def __init__(self, prototype: Any) -> None:
        self.kind, self.fields = type(prototype), {**vars(prototype), "base": None}

    def __call__(self, parts: list) -> Any:
        made = object.__new__(self.kind)
        made.__dict__.update(self.fields)
        made.__dict__["base"] = parts[0]
        return made


def alignment_of(tensors: Sequence[Tensor | None]) -> Hashable:
    """Return, per tensor, whether it begins at a multiple of 16 bytes; None where there is none."""
    return tuple([None if x is None else x.data_ptr() % 16 == 0 for x in tensors])


def key_of(tensors: Sequence[Tensor | None]) -> Hashable:
    """Return what a kernel is chosen by of a call's tensors: shapes, strides, dtypes, alignment, device."""
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0, x.device) for x in tensors]
    )


def run(key: Hashable, inputs: Sequence[Tensor | None], compute: Callable[[], tuple]) -> tuple:
    """compute(), or a replay of what it did under the same key, which covers options and `key_of(inputs)`."""
    given = [id(x) for x in inputs if x is not None]
    if len(set(given)) < len(given):  # one tensor in two places: its slot would be ambiguous
        return compute()
    tape = _tapes.get(key, UNSEEN)
    if type(tape) is Tape:
        return tape.replay(inputs)
    if tape is None or launcher.recorder() is not None or torch._C._len_torch_dispatch_stack():
        return compute()
    if tape is UNSEEN:  # the first call compiles, the second is recorded
        if len(_tapes) >= MAX_TAPES:
            _tapes.clear()
        _tapes[key] = SEEN
        return compute()
    result, _tapes[key] = _record(inputs, compute)
    return result


def _record(inputs: Sequence[Tensor | None], compute: Callable[[], tuple]) -> tuple[tuple, Tape | None]:
    """compute() and a tape of it; None for one that does what cannot be repeated."""
    recorder = Recorder(inputs)
    with launcher.recording(recorder) as count, recorder:
        result = compute()
    described = tuple(recorder.describe(x) for x in result)
    unseen = any(isinstance(x, Tensor) for x in described)  # a tensor that was made where no op was seen
    if recorder.failed or unseen or count() != recorder.launches:
        return result, None
    return result, Tape(recorder.steps, len(recorder.kept), described)
