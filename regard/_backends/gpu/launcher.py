"""Kernel launches that skip Triton's look at every argument, for calls that were launched before.

At every launch Triton inspects each argument (its type, whether it is 1 or a multiple of 16) to find the compiled
kernel: 15 to 25 µs, in a chain of short kernels more than they run. `describe` says what it looks at; the second launch
of a description goes to the compiled kernel at once, whatever its lengths are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from inspect import getclosurevars, isfunction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._call.problem import Problem
from regard._facts import remember

MAX_KEYS = 4096  # of remembered launches
MAX_ADDRESSES = 256  # of tensors whose encoded descriptor is kept
_compiled: dict[tuple, Any] = {}
_absent: dict[int, tuple] = {}


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make x's GPU the current device, on which Triton launches whatever its arguments."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def launch_key(p: Problem, *_: Tensor) -> Hashable:
    """Return the device of a call's launches; None on a CPU, where nothing is compiled."""
    return tensor_key(p.q)


def tensor_key(x: Tensor, *_: Tensor) -> Hashable:
    """Return the device of launches with this tensor; None on a CPU."""
    return x.device if x.is_cuda else None


def launch(key: Hashable, kernel: Any, programs: int, arguments: tuple, constants: tuple = (), **options) -> None:
    """Launch kernel[(programs,)](*arguments, *constants, **options); `key`: the device, or None to let Triton look.

    `constants` are the kernel's last parameters, compile-time ones.
    """
    if key is None:
        compiled = kernel[(programs,)](*arguments, *constants, **options)
    else:
        entry = id(kernel), key, constants, *options.items(), describe(arguments)
        found = _compiled.get(entry)
        if found is None:  # kept with the kernel, so that its id stays its own
            compiled = kernel[(programs,)](*arguments, *constants, **options)
            remember(_compiled, entry, (kernel, compiled), MAX_KEYS)
        else:
            compiled = found[1]
            compiled[(programs, 1, 1)](*arguments, *constants)
    if _state.recorder is not None:
        _state.recorder.record_launch(compiled, programs, arguments, constants)


def describe(arguments: tuple) -> tuple:
    """What Triton specialises arguments on: of an integer whether it is 1, a multiple of 16 or long, no length.

    One flat tuple, since a call has a hundred of them: a tuple among them is its length and then its parts.
    """
    found: list[Hashable] = []
    _describe(arguments, found.append)
    return tuple(found)


def _describe(arguments: tuple, add: Callable[[Hashable], None]) -> None:
    for x in arguments:
        kind = type(x)
        if x is None or kind is bool:
            add(x)
        elif kind is int:
            add((x == 1) + 2 * (x % 16 == 0) + 4 * (-(2**31) <= x < 2**31))
        elif kind is Tensor:
            add((x.dtype, x.data_ptr() % 16 == 0))
        elif isinstance(x, tuple):
            if id(x) in _absent:
                add(id(x))
            else:
                add((kind, len(x)))
                _describe(x, add)
        elif kind is float:
            add(kind)
        elif isinstance(x, Tensor):
            add((x.dtype, x.data_ptr() % 16 == 0))
        elif _is_descriptor(x):
            add((kind, x.base.dtype, tuple(x.block_shape), getattr(x, "layout", None)))
        else:
            add(kind)


def mark_absent(x: Any) -> Any:
    """Return a tuple without tensors that many calls share: `describe` knows it by its id, which stays its own."""
    _absent[id(x)] = x
    return x


class Prepared(NamedTuple):
    """A compiled kernel with its grid: `start(*arguments)` launches it without Triton's bookkeeping."""

    start: Callable[..., None]
    encoders: dict[int, Callable[[Tensor], tuple]]  # of the arguments that are tensor descriptors, by position


def prepare(compiled: Any, programs: int, arguments: tuple) -> Prepared:
    """Return a compiled kernel ready to launch on `programs` programs with arguments like these.

    An argument with an encoder is given to `start` as what the encoder returns for its tensor, spread out.
    """
    from triton import knobs

    watched, run, device = compiled[(programs, 1, 1)], compiled.run, torch.cuda.current_device()
    function, packed = compiled.function, compiled.packed_metadata
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    hooks, stream = (enter.calls, leave.calls), torch._C._cuda_getCurrentRawStream
    described = {place: x for place, x in enumerate(arguments) if _is_descriptor(x)}
    parts = _find_launch_parts(run) if described else None
    if parts is None or len(parts[1]) != len(described):

        def start(*arguments: Any) -> None:
            if hooks[0] or hooks[1]:
                watched(*arguments)
            else:
                run(programs, 1, 1, stream(device), function, packed, None, None, None, *arguments)

        return Prepared(start, {})
    launch_encoded, metadata = parts
    flags = run.launch_cooperative_grid, run.launch_pdl

    def start_encoded(*arguments: Any) -> None:
        queue, watch = stream(device), (None, None, None)
        if hooks[0] or hooks[1]:
            watch = compiled.launch_metadata((programs, 1, 1), queue, *arguments), enter, leave
        launch_encoded(programs, 1, 1, queue, function, *flags, None, None, packed, *watch, *arguments)

    encoders = {place: _Encoder(x, meta) for (place, x), meta in zip(described.items(), metadata, strict=True)}
    return Prepared(start_encoded, encoders)


def _is_descriptor(x: Any) -> bool:
    return hasattr(x, "base") and isinstance(x.base, Tensor)


def _find_launch_parts(run: Any) -> tuple[Callable, list] | None:
    """Return Triton's launch function behind its encoding of descriptors, and the metadata of each descriptor.

    None if this version of Triton is built otherwise (3.6 is known), or the kernel wants scratch memory.
    """
    parts = getclosurevars(run.launch).nonlocals if isfunction(run.launch) else {}
    if {"launcher", "tensordesc_indices", "tensordesc_meta"} - set(parts) or hasattr(run, "arg_annotations"):
        return None
    if run.global_scratch_size or run.profile_scratch_size or None in parts["tensordesc_meta"]:
        return None
    return parts["launcher"], parts["tensordesc_meta"]


class _Encoder:
    """Turns tensors into the launch arguments of one tensor descriptor, and keeps them by the tensor's address.

    Encoding a descriptor costs the host 7 µs. A training step meets the same few addresses again.
    """

    def __init__(self, descriptor: Any, metadata: dict) -> None:
        self.descriptor, self.metadata = copy(descriptor), metadata
        self.descriptor.base = None  # the first call's tensor is not kept alive
        self.kept: dict[int, tuple] = {}

    def __call__(self, tensor: Tensor) -> tuple:
        found = self.kept.get(tensor.data_ptr())
        return self.encode(tensor) if found is None else found

    def encode(self, tensor: Tensor) -> tuple:
        """Encode the descriptor of a tensor of the same shape and strides at a new address."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        described = copy(self.descriptor)
        described.base = tensor
        found = tuple(make_tensordesc_arg(described, self.metadata))
        return remember(self.kept, tensor.data_ptr(), found, MAX_ADDRESSES)


class _State(threading.local):
    recorder: Any = None


_state = _State()


def recorder() -> Any:
    """The recorder of this thread's launches, if one is active."""
    return _state.recorder


def call_by_address(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return call(x), a view that follows from the address of x: a replay calls it again, for its own x."""
    return call(x) if _state.recorder is None else _state.recorder.record_call(call, x)


@contextmanager
def recording(recorder: Any) -> Iterator[Callable[[], int]]:
    """Report this thread's launches to a recorder; yields a function that counts all launches, reported or not."""
    from triton import knobs

    seen: list[int] = []

    thread = threading.get_ident()

    def count(metadata: Any) -> None:
        if threading.get_ident() == thread:
            seen.append(1)

    hooks = knobs.runtime.launch_enter_hook
    hooks.add(count)
    _state.recorder = recorder
    try:
        yield lambda: len(seen)
    finally:
        _state.recorder = None
        hooks.remove(count)
