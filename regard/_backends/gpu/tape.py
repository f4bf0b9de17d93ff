"""Tapes: the allocations, views and kernel launches of one GPU call, recorded once and replayed for calls like it.

Choosing a kernel, its blocks and its descriptors costs the host more than a small kernel runs. All of that follows from
shapes, strides, dtypes, alignments and options, so that a second call of the same kind can repeat what the first one
did, on its own tensors: a replay is a Python function of torch ops and launches, written when the call is recorded.
Launches are given addresses, because Triton asks the driver about every tensor, and memory that kernels alone see is
allocated in one piece.

    first call    run(inputs) under a `Recorder`: a dispatch mode sees torch's ops, `launcher.launch` reports kernels
    later calls   tape.replay(inputs)

A call whose launches the recorder did not all see (a kernel started without `launcher.launch`) gets no tape.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from regard._backends.gpu import launcher
from regard._facts import remember

MAX_TAPES = 512
MAX_BYTES = 2**25  # of an allocation that shares its memory with others
ALIGNMENT = 256  # bytes, as torch allocates
UNSEEN, SEEN = object(), object()
_tapes: dict[Hashable, Any] = {}  # a Tape, SEEN, or None for a call that has none


class Slot(NamedTuple):
    """The place of a tensor among those of a call."""

    index: int


class Nested(NamedTuple):
    """A tuple, or a tensor descriptor, with slots inside; `kind` makes it of its parts."""

    kind: Any
    parts: tuple


class Encoded(NamedTuple):
    """A tensor whose descriptor `encode` turns into several arguments of a launch."""

    encode: Callable[[Tensor], tuple]
    slot: Slot


class Step(NamedTuple):
    """One torch op or kernel launch, and the slots that its results go to."""

    call: Callable
    arguments: Sequence  # constants, slots and nested ones
    options: dict
    results: tuple[int, ...]
    returns_one: bool  # a tensor, and not a tuple of them
    is_launch: bool = False


class Tape:
    """The steps of a call and what it returned, compiled to a Python function without loops."""

    def __init__(self, steps: list[Step], inputs: int, result: tuple) -> None:
        self.source, self._names = _write_source(steps, inputs, result)
        exec(compile(self.source, "<tape>", "exec"), self._names)  # the text is ours alone
        self.replay: Callable[[Sequence[Tensor | None]], tuple] = self._names["replay"]


def _write_source(steps: list[Step], inputs: int, result: tuple) -> tuple[str, dict[str, Any]]:
    """The text of `replay(inputs)`, and the constants that it names.

    s3 is the tensor of slot 3, p3 its address, `memory` what several slots share and `base` the address of that.
    """
    names: dict[str, Any] = {}
    shared, size, how = _share_memory(steps, result)
    addressed = {at for step in steps if step.is_launch for at in _slots_of(step.arguments)[0]} - set(shared)

    def name(x: Any) -> str:
        names[f"c{len(names)}"] = x
        return f"c{len(names) - 1}"

    def write(x: Any, to_kernel: bool = False) -> str:
        if type(x) is Slot and x.index in shared:
            return f"base + {shared[x.index]}"
        if type(x) is Slot:
            return f"p{x.index}" if to_kernel else f"s{x.index}"
        if type(x) is Encoded:
            return f"*{name(x.encode)}(s{x.slot.index})"
        if type(x) is Nested:
            to_kernel = to_kernel and type(x.kind) is not _Descriptor
            parts = "".join(write(part, to_kernel) + ", " for part in x.parts)
            if x.kind is tuple or to_kernel:  # to a kernel a named tuple is a tuple
                return f"({parts})"
            return f"[{parts}]" if x.kind is list else f"{name(x.kind)}(({parts}))"
        return repr(x) if x is None or type(x) in (bool, int) else name(x)

    def write_addresses(slots: Sequence[int]) -> list[str]:
        return [f"    p{at} = s{at}.data_ptr()" for at in slots if at in addressed]

    lines = ["def replay(inputs):", "    " + "".join(f"s{place}, " for place in range(inputs)) + "= inputs"]
    lines += write_addresses(range(inputs))
    if shared:
        lines += [f"    memory = {name(torch.empty)}({size}, **{name(how)})", "    base = memory.data_ptr()"]
    unneeded = _find_last_uses(steps, {*range(inputs), *shared, *_slots_of(result)[0]})
    for (call, arguments, options, results, returns_one, is_launch), done in zip(steps, unneeded, strict=True):
        if results and results[0] in shared:
            continue
        given = [*(write(x, is_launch) for x in arguments), *([f"**{name(options)}"] if options else [])]
        targets = "".join(f"s{place}, " for place in results)
        equals = "" if not results else f"s{results[0]} = " if returns_one else f"{targets}= "
        lines += [f"    {equals}{name(call)}({', '.join(given)})", *write_addresses(results)]
        lines += [f"    del s{at}" for at in done]  # later allocations take its memory
    lines.append("    return " + write(Nested(tuple, result)))
    return "\n".join(lines), names


def _share_memory(steps: list[Step], result: tuple) -> tuple[dict[int, int], int, dict[str, Any]]:
    """({slot: offset}, bytes, options of torch.empty) of the memory shared by allocations that only kernels see."""
    seen = {at for step in steps if not step.is_launch for at in _slots_of(step.arguments)[0]}
    seen |= {at for step in steps for at in _slots_of(step.arguments)[1]} | set(_slots_of(result)[0])
    shared: dict[int, int] = {}
    size, device = 0, None
    for step in steps:
        is_plain = step.call is torch.empty and len(step.arguments) == 1 and {"dtype", "device"} <= step.options.keys()
        if not is_plain or step.results[0] in seen:
            continue
        own = math.prod(step.arguments[0]) * step.options["dtype"].itemsize
        if 0 < own <= MAX_BYTES and device in (None, step.options["device"]):
            shared[step.results[0]], device = size, step.options["device"]
            size += -(-own // ALIGNMENT) * ALIGNMENT
    return (shared, size, dict(dtype=torch.uint8, device=device)) if len(shared) > 1 else ({}, 0, {})


def _find_last_uses(steps: list[Step], kept: set[int]) -> list[list[int]]:
    """Return, for each step, the slots that no later step uses, except `kept`."""
    seen, found = set(kept), []
    for step in reversed(steps):
        plain, described = _slots_of(step.arguments)
        last = {*plain, *described, *step.results} - seen
        seen |= last
        found.append(sorted(last))
    return found[::-1]


def _slots_of(arguments: Any) -> tuple[list[int], list[int]]:
    """The slots among arguments: those given as they are, and those inside tensor descriptors."""
    plain: list[int] = []
    described: list[int] = []
    for x in arguments:
        if type(x) is Slot:
            plain.append(x.index)
        elif type(x) is Encoded:
            described.append(x.slot.index)
        elif type(x) is Nested:
            inside = _slots_of(x.parts)
            described += inside[1] + (inside[0] if type(x.kind) is _Descriptor else [])
            plain += [] if type(x.kind) is _Descriptor else inside[0]
    return plain, described


class Recorder(TorchDispatchMode):
    """Writes down every torch op and kernel launch while it is active."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.kept: list[Tensor | None] = list(inputs)  # alive, so that no id is used twice
        self.places = {id(x): place for place, x in enumerate(inputs) if x is not None}
        self.slots = len(inputs)
        self.launches, self.failed = 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because True makes torch import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = [self.describe(x) for x in args]
        found = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default and id(args[0]) in self.places:  # the same tensor to a kernel
            self.add(found, self.places[id(args[0])])
            return found
        results = found if isinstance(found, (tuple, list)) else (found,)
        if any(isinstance(x, Tensor) for x in kwargs.values()) or not all(isinstance(x, Tensor) for x in results):
            self.failed = True
        else:
            call = torch.empty if func is torch.ops.aten.empty.memory_format else func
            one = not isinstance(found, (tuple, list))
            self.steps.append(Step(call, arguments, kwargs, tuple(map(self.place_of, results)), one))
        return found

    def record_launch(self, compiled: Any, programs: int, arguments: tuple, constants: tuple) -> None:
        """Write down the launch of a compiled kernel."""
        self.launches += 1
        start, encoders = launcher.prepare(compiled, programs, arguments)
        described = [self.describe(x) for x in arguments]
        for place, encode in encoders.items():
            if type(described[place]) is Nested:  # else its tensor is none of the call's, and the tape has failed
                described[place] = Encoded(encode, described[place].parts[0])
        self.steps.append(Step(start, (*described, *constants), {}, (), True, is_launch=True))

    def record_call(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Write down a call that looks at the address of its tensor, in the place of the ops within."""
        with _disable_current_modes():
            found = call(x)
        self.steps.append(Step(call, (self.describe(x),), {}, (self.place_of(found),), True))
        return found

    def place_of(self, x: Tensor) -> int:
        """The slot of a tensor, a new one if it is new."""
        if id(x) not in self.places:
            self.add(x, self.slots)
            self.slots += 1
        return self.places[id(x)]

    def add(self, x: Tensor, place: int) -> None:
        """Write down the slot of a tensor, and keep a small one alive; a large one's id is forgotten with it."""
        self.places[id(x)] = place
        if x.untyped_storage().nbytes() <= MAX_BYTES:
            self.kept.append(x)
        else:
            weakref.finalize(x, self.places.pop, id(x), None)

    def describe(self, x: Any) -> Any:
        """An argument with slots in place of the call's tensors; what holds none stays as it is."""
        if isinstance(x, Tensor):
            if id(x) not in self.places:  # made where no op was seen: another call's would be another tensor
                self.failed = True
                return x
            return Slot(self.places[id(x)])
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

    def __call__(self, parts: tuple) -> Any:
        made = object.__new__(self.kind)
        made.__dict__.update(self.fields)
        made.__dict__["base"] = parts[0]
        return made


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
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:  # the compiler would trace the recorder
        return compute()
    if tape is UNSEEN:  # the first call compiles, the second is recorded
        remember(_tapes, key, SEEN, MAX_TAPES)
        return compute()
    result, _tapes[key] = _record(inputs, compute)
    return result


def _record(inputs: Sequence[Tensor | None], compute: Callable[[], tuple]) -> tuple[tuple, Tape | None]:
    """compute() and a tape of it; None for one that does what cannot be repeated."""
    recorder = Recorder(inputs)
    with launcher.recording(recorder) as count, recorder:
        result = compute()
    described = tuple(recorder.describe(x) for x in result)
    if recorder.failed or count() != recorder.launches:
        return result, None
    return result, Tape(recorder.steps, len(inputs), described)
