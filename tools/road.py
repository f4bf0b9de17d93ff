"""Prints the files of regard that one call crosses, in the order in which it enters them: `python tools/road.py`.

Each call runs twice before it is traced, so that compiled kernels, plans and lazy imports are there.
docs/developers/road.md explains the files one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import regard

PACKAGE = Path(regard.__file__).parent


def trace_files(call: Callable[[], object], warm: int = 2) -> list[str]:
    """Return the files of the package whose functions `call` enters, first entered first."""
    for _ in range(warm):
        call()
    files: dict[str, None] = {}

    def enter(frame, event: str, _) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            files.setdefault(str(Path(path).relative_to(PACKAGE)))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files)


def main() -> None:
    q, k, v = torch.randn(3, 2, 4, 64, 32)
    layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    batch = torch.randn(2, 10, 32)
    short = q[:, :, :60]
    roads = {
        "attention(q, k, v)": trace_files(lambda: regard.attention(q, k, v)),
        "attention(q, k, v, return_stats=True)": trace_files(lambda: regard.attention(q, k, v, return_stats=True)),
        "the same, the first call of its kind": trace_files(
            lambda: regard.attention(short, k, v, return_stats=True), warm=0
        ),
        "examine(model, batches)": trace_files(lambda: regard.examine(layer, [batch])),
    }
    for name, files in roads.items():
        print(f"{name}: {len(files)} files", *files, sep="\n    ")


if __name__ == "__main__":
    main()
