"""What each thread has for itself, and what all of them share: models may run, and be examined, side by side."""

from __future__ import annotations

import threading
import weakref
from collections import UserList

import torch
from torch import nn


class PerThread(UserList, threading.local):
    """A list of which every thread has its own.

    >>> import threading
    >>> from regard.health.capture.threads import PerThread
    >>> seen = PerThread([0])
    >>> other = threading.Thread(target=lambda: seen.append(1))
    >>> other.start(); other.join()
    >>> seen
    [0]
    """


class SlowPath:
    """Without torch's fast path of nn.TransformerEncoder, whose attention nothing sees, while any thread is in here."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.inside += 1

    def __exit__(self, *_) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch.backends.mha.set_fastpath_enabled(self.before)


_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_ASKING = threading.Lock()


def turn_of(model: nn.Module) -> threading.RLock:
    """Who examines a model puts it into evaluation mode and back: two threads take turns."""
    with _ASKING:
        return _LOCKS.setdefault(model, threading.RLock())
