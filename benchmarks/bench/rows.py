"""Cases of `python -m bench rows`: every normaliser against torch's softmax, the `entmax` package and a copy."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from bench.measure import Case
from regard import normalizers

ELEMENTS = 4096 * 1024  # on the CPU, at every row length
GPU_BYTES = 1 << 30  # larger than a GPU's cache
LENGTHS = {"cpu": (1024, 64, 32768), "cuda": (256, 1024, 8192, 65536)}


def cases(device: str, quick: bool) -> list[Case]:
    """Return the cases of a device; on the CPU backward, and most normalisers, have one row length."""
    on_cpu, found = device == "cpu", []
    for direction, prepare in {"forward": _forward, "backward": _backward}.items():
        lengths = (1024,) if quick or (on_cpu and direction == "backward") else LENGTHS[device]
        for dtype in (torch.float32,) if on_cpu else (torch.bfloat16, torch.float32):
            kind = "" if on_cpu else f"{str(dtype).removeprefix('torch.')} "
            for n, name in itertools.product(lengths, _fused_names()):
                if on_cpu and n != 1024 and name not in ("softmax", "sparsemax", "entmax15"):
                    continue
                shape = ((ELEMENTS if on_cpu else GPU_BYTES // dtype.itemsize) // n, n)
                work = f"{name} {direction} {kind}{shape[0]} × {n}"
                found.append(Case(work, partial(prepare, name, shape, dtype, device)))
    return found


def _fused_names() -> list[str]:
    """Return the fused normalisers, softmax first, threshold maps last."""
    known = [name for name in normalizers.names() if normalizers.get(name).fused]
    return sorted(known, key=lambda name: (normalizers.get(name).family == "threshold", name != "softmax", name))


def _scores(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _forward(name, shape, dtype, device):
    import regard

    s = _scores(shape, dtype, device)
    candidates = {"regard": lambda: regard.normalize(s, name), "torch softmax": lambda: torch.softmax(s, -1)}
    peer = _entmax_package(name)
    if peer is not None and device == "cpu":
        candidates["entmax"] = lambda: peer(s)
    if device == "cuda":
        out = torch.empty_like(s)
        candidates["copy"] = lambda: out.copy_(s)
    return candidates


def _backward(name, shape, dtype, device):
    import regard

    s = _scores(shape, dtype, device).requires_grad_()
    g = _scores(shape, dtype, device).roll(1, 0)
    ours, theirs = regard.normalize(s, name), torch.softmax(s, -1)
    candidates = {
        "regard": lambda: torch.autograd.grad(ours, s, g, retain_graph=True),
        "torch softmax": lambda: torch.autograd.grad(theirs, s, g, retain_graph=True),
    }
    if device == "cuda":  # backward reads two tensors and writes one: one and a half copies
        source = torch.empty(3 * s.numel() // 2, dtype=dtype, device=device)
        out = torch.empty_like(source)
        candidates["copy"] = lambda: out.copy_(source)
    return candidates


def _entmax_package(name: str):
    try:
        import entmax
    except ImportError:
        return None
    peers = {
        "sparsemax": lambda s: entmax.sparsemax(s, dim=-1),
        "entmax15": lambda s: entmax.entmax15(s, dim=-1),
        "entmax": lambda s: entmax.entmax_bisect(s, alpha=normalizers.get("entmax").theta, dim=-1),
    }
    return peers.get(name)
