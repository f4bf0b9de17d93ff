"""Which pixels each token of an image model reads before its first attention, by gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.checks.rule import NothingToCheck
from regard.health.probe.probe import CapturedCall, Key, StopForward
from regard.health.probe.trial import Trial

FAINT = 1e-4  # of a token's largest gradient, below which a pixel does not count
CHANNELS = 4  # of an image, at most
TOKENS = 5  # that are looked at


@dataclass(frozen=True)
class Pixels:
    """The pixels that a token, or a window of them, reads: [C, H, W] of one image, True where it does.

    >>> seen = torch.zeros(1, 4, 6, dtype=torch.bool)
    >>> seen[0, 1:3, 2:5] = True
    >>> pixels = Pixels(seen)
    >>> pixels.size, pixels.filled
    ((2, 3), 1.0)
    """

    seen: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the smallest rectangle around the pixels."""
        rows, columns = (self.seen.any(0).any(axis).nonzero().flatten() for axis in (1, 0))
        return int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1

    @property
    def filled(self) -> float:
        """The fraction of that rectangle which is read."""
        height, width = self.size
        return int(self.seen.any(0).sum()) / (height * width)

    @property
    def share(self) -> float:
        """The fraction of the whole image that is read."""
        return float(self.seen.double().mean())


def require_image(trial: Trial, given: Tensor | None = None) -> Tensor:
    """Returns the images of the sample, or those given, as [B, C, H, W]; raises NothingToCheck if there are none."""
    image = None if trial.batches else trial.sample.ids if given is None else given
    if image is None or image.ndim != 4 or not image.is_floating_point():
        raise NothingToCheck("the batches hold no images")
    return image if image.shape[1] <= CHANNELS or image.shape[3] > CHANNELS else image.permute(0, 3, 1, 2)


def trace_pixels(trial: Trial, draws: int = 0) -> tuple[CapturedCall, list[Pixels], Pixels | None]:
    """(the first attention call, the pixels of some of its tokens, those of all tokens of its first sequence).

    Tokens that read no pixel, as class tokens, are left out. One image has no gradient where a maximum or ReLU drops a
    pixel; so many `draws` of noise are read beside it.
    """
    image = require_image(trial)
    generator = torch.Generator().manual_seed(0)
    seen: dict[int | None, Tensor] = {}
    for draw in range(draws + 1):
        given = trial.sample.ids.detach().clone()
        if draw:
            given = torch.randn(given.shape, generator=generator).to(given) * image.std() + image.mean()
        with torch.enable_grad():
            key, k = run_to_keys(trial, given.requires_grad_(True))
            length = k.shape[2]
            for at in (*range(0, length, max(1, length // TOKENS)), length - 1, None):
                read = read_pixels(trial, given, k[0] if at is None else k[0, :, at])
                seen[at] = read | seen.get(at, read)
    known = {at: Pixels(x) for at, x in seen.items() if bool(x.any())}
    return trial.captured[1][key], [one for at, one in known.items() if at is not None], known.get(None)


def run_to_keys(trial: Trial, given: Tensor) -> tuple[Key, Tensor]:
    """(the first attention call with keys that depend on the image, its keys)."""
    found: list[tuple[Key, Tensor]] = []

    def keep(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        if not call.k.requires_grad or call.k.shape[2] < 4:
            return run()
        found.append((key, call.k))
        raise StopForward

    with contextlib.suppress(StopForward):
        trial.probe.run_model(trial.sample.with_ids(given * 1.0), keep)
    if not found:
        raise NothingToCheck("no attention to images was captured")
    return found[0]


def read_pixels(trial: Trial, given: Tensor, part: Tensor) -> Tensor:
    """The pixels [C, H, W] of one image on which part of a tensor depends, True there."""
    weights = torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part)
    grad = torch.autograd.grad((part * weights).sum(), given, retain_graph=True, allow_unused=True)[0]
    grad = require_image(trial, torch.zeros_like(given) if grad is None else grad.abs())
    rows = grad.flatten(1).amax(1)
    return grad[int(rows.argmax())] > FAINT * rows.max()
