"""Work that the model need not wait for: on a second stream of its GPU, beside what it does next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch


@cache
def _stream(device: torch.device, use: str = "work") -> torch.cuda.Stream:
    """The same one always: torch keeps freed memory per stream, and a new one would ask the driver for its own."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def behind(event: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """The body's kernels and copies wait for the event, and for nothing that a stream was given after it."""
    stream = _stream(device, "fetch")
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


def landed(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of one dim on the CPU, with one wait for the device where they share it."""
    if len({(x.device, x.dtype) for x in tensors}) == 1:
        return torch.cat(list(tensors)).cpu().split([len(x) for x in tensors])
    return [x.cpu() for x in tensors]


class Aside:
    """`with aside(device, *what_is_read): …` runs the body's kernels beside the model; elsewhere it is a plain block.

    What they read is kept until the model's own stream has been told to wait for them, at the next such block or at
    `join`: only then may its memory be given to others. So no more than one block's tensors are held.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: dict[torch.device, tuple[torch.cuda.Event, Any]] = {}
        self._marks: dict[torch.device, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def __call__(self, device: torch.device, *read: Any) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        self._join(device)
        if device not in self._streams:
            self._streams[device] = _stream(device)
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            self._running[device] = side.record_event(), read

    def last(self, device: torch.device) -> torch.cuda.Event | None:
        """When the latest block of a GPU is done; None elsewhere."""
        return self._running[device][0] if device in self._running else None

    def mark(self, device: torch.device) -> None:
        """What the model's stream has been given so far is wanted in `after_marked`."""
        if device.type == "cuda":
            self._marks[device] = torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def after_marked(self) -> Iterator[None]:
        """Behind what was marked and done aside, but not behind what the model was given since."""
        with contextlib.ExitStack() as stack:
            for device, side in self._streams.items():
                if device in self._marks:
                    side.wait_event(self._marks[device])
                stack.enter_context(torch.cuda.stream(side))
            yield

    def join(self) -> None:
        """From here on the models' streams see what was done aside."""
        for device in list(self._running):
            self._join(device)

    def _join(self, device: torch.device) -> None:
        if device in self._running:
            event, _ = self._running.pop(device)
            torch.cuda.current_stream(device).wait_event(event)
