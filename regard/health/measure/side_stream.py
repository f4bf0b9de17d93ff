"""Work that the model need not wait for, on a second CUDA stream of its GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import setitem
from typing import Any

import torch


@cache
def _stream(device: torch.device, use: str = "work") -> torch.cuda.Stream:
    """Returns one stream per device and use, because torch keeps freed memory per stream.

    Its kernels are small: of high priority, they need not wait for the end of a large one of the model.
    """
    return torch.cuda.Stream(device, priority=-1)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event after what the current stream of a GPU was given so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def after_event(event: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """Runs the body's kernels and copies after the event, and not after what other streams were given since."""
    stream = _stream(device, "fetch")
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


class HostCopies:
    """Copies of tensors on the host: `add` them, `start`, and `finish` when they are needed.

    `start` waits for nothing: what is on a GPU goes to pinned memory on a stream of its own, tensors of one dtype in
    one copy. `finish` waits for the copies and hands each tensor's to the function that was added with it.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = []
        self._copied: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}  # device, host
        self._events: list[torch.cuda.Event] = []

    def add(self, x: torch.Tensor, receive: Callable[[torch.Tensor], object]) -> None:
        """Adds a tensor and who receives its copy; on a CPU, the tensor itself."""
        self._wanted.append((x, receive))

    def add_attributes(self, owner: object, *names: str) -> None:
        """Adds tensors that are attributes of an object, in whose place the copies are put; None is left out."""
        for name in names:
            if (x := getattr(owner, name)) is not None:
                self.add(x, partial(setattr, owner, name))

    def start(self) -> None:
        """Starts the copies, after what the current stream was given so far."""
        for device in {x.device for x, _ in self._wanted if x.is_cuda}:
            own = [x for x, _ in self._wanted if x.device == device]
            for dtype in {x.dtype for x in own}:
                flat = torch.cat([x.detach().reshape(-1) for x in own if x.dtype == dtype])
                self._copied[device, dtype] = flat, torch.empty(flat.shape, dtype=dtype, pin_memory=True)
            with after_event(torch.cuda.current_stream(device).record_event(), device):
                for (place, _), (flat, host) in self._copied.items():
                    if place == device:
                        host.copy_(flat, non_blocking=True)
                self._events.append(torch.cuda.current_stream(device).record_event())

    def finish(self) -> None:
        """Waits for the copies and hands them on."""
        for event in self._events:
            event.synchronize()
        used = dict.fromkeys(self._copied, 0)
        for x, receive in self._wanted:
            key = x.device, x.dtype
            if key in used:
                at, used[key] = used[key], used[key] + x.numel()
                x = self._copied[key][1][at : used[key]].view(x.shape)
            receive(x)
        self._wanted, self._copied, self._events = [], {}, []


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors on the host, with one wait for each device that they are on."""
    copies, found = HostCopies(), list(tensors)
    for at, x in enumerate(tensors):
        copies.add(x, partial(setitem, found, at))
    copies.start()
    copies.finish()
    return found


class SideStream:
    """`with side(device, *what_is_read): …` runs the body's kernels beside the model; on a CPU it is a plain block.

    They follow what the model's stream was given so far, or only what it was given before the event `after`.

    What they read is kept until the model's own stream waits for them, at the next such block or at `join`: only then
    may its memory be reused. So no more than one block's tensors are held.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: dict[torch.device, tuple[torch.cuda.Event, Any]] = {}
        self._marks: dict[torch.device, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def __call__(self, device: torch.device, *read: Any, after: torch.cuda.Event | None = None) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        self._join(device)
        side = self._streams.setdefault(device, _stream(device))
        side.wait_event(after or torch.cuda.current_stream(device).record_event())
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            self._running[device] = side.record_event(), read

    def last_event(self, device: torch.device) -> torch.cuda.Event | None:
        """Returns the event at the end of the latest block on a GPU; None elsewhere."""
        return self._running[device][0] if device in self._running else None

    def mark(self, device: torch.device) -> None:
        """Marks what the model's stream has been given so far for `after_marks`."""
        if device.type == "cuda":
            self._marks[device] = torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def after_marks(self) -> Iterator[None]:
        """Runs the body after what was marked and after the blocks, but not after what the model was given since."""
        with contextlib.ExitStack() as stack:
            for device in {**self._streams, **self._marks}:
                side = self._streams.setdefault(device, _stream(device))
                if device in self._marks:
                    side.wait_event(self._marks[device])
                stack.enter_context(torch.cuda.stream(side))
            yield

    def join(self) -> None:
        """Makes the models' streams wait for the blocks."""
        for device in list(self._running):
            self._join(device)

    def _join(self, device: torch.device) -> None:
        if device in self._running:
            event, _ = self._running.pop(device)
            torch.cuda.current_stream(device).wait_event(event)
