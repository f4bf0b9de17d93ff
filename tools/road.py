"""Prints the files of regard that one call crosses, in the order in which it enters them: `python tools/road.py`.

On a GPU if there is one. Each call runs three times before it is traced, so that compiled kernels, plans, tapes and
lazy imports are there.
docs/developers/road.md explains the files one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import regard

PACKAGE = Path(regard.__file__).parent


def trace_files(call: Callable[[], object], warm: int = 3) -> list[str]:
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (4, 16, 512, 64) if device == "cuda" else (2, 4, 64, 32)
    q, k, v = torch.randn(3, *shape, device=device, dtype=dtype)
    layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True, device=device)
    batch = torch.randn(2, 10, 32, device=device)
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
