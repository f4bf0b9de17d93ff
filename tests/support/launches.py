"""Kernels that record their launches."""

from __future__ import annotations

launched: set[str] = set()


class Watched:
    """A kernel that writes its launches down."""

    def __init__(self, kernel):
        self.kernel, self.__name__ = kernel, kernel.__name__

    def __getitem__(self, grid):
        launched.add(self.__name__)
        return self.kernel[grid]


def replace_support(monkeypatch, table: str, name: str, supports) -> None:
    """Let the kernel of this name in `registry.KERNELS` or `.BACKWARD_KERNELS` support what `supports` says."""
    from regard._backends.gpu.attention import registry

    kernels = getattr(registry, table)
    assert name in [kernel.name for kernel in kernels]
    changed = tuple(kernel._replace(supports=supports) if kernel.name == name else kernel for kernel in kernels)
    monkeypatch.setattr(registry, table, changed)
