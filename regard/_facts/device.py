"""Facts about a device that choose a kernel, its blocks or a dtype."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch

DEFAULT_ORDER = [1, 2, 0, 3, 4]  # of torch's attention kernels: flash, efficient, math, cuDNN, a device's own


NO_NUMBA = (
    "numba is not installed, so that the float64 reference computes on the CPU: right, some queries at a time, and "
    'many times slower; pip install "regard[cpu]"'
)


@cache
def is_hopper(device: torch.device) -> bool:
    """True on compute capability 9.0, the only one with Hopper's warpgroup instructions."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)  # ROCm has a 9.0 too


@cache
def has_bulk_copies(device: torch.device) -> bool:
    """True from compute capability 9.0 on, where tensor descriptors load whole blocks (TMA)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def has_tensor_memory(device: torch.device) -> bool:
    """True on compute capability 10.x, where products accumulate in a memory of their own, read back in copies."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 10


@cache
def has_packed_maximum(device: torch.device) -> bool:
    """True where one instruction compares two pairs of 16-bit floats (NVIDIA's from Ampere on)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may opt in to; 0 where torch does not report it (ROCm)."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def has_large_shared_memory(device: torch.device) -> bool:
    """True where a block may use 160 KiB, as on A100 and H200; most GPUs outside servers have 99 KiB."""
    return shared_memory(device) >= 160 * 1024


@cache
def sm_count(device: torch.device) -> int:
    """Number of streaming multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def supports_gluon(device: torch.device) -> bool:
    """True on Hopper with a Triton whose Gluon the warpgroup kernels were tested with."""
    return is_hopper(device) and triton_version() >= (3, 6)


@cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton; (0, 0) without one."""
    try:
        import triton
    except ImportError:
        return 0, 0
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def allowed_backends() -> tuple[int, ...] | None:
    """The numbers of torch's attention kernels that `sdpa_kernel` or a setting leaves, in its order; None: all."""
    c = torch._C
    enabled = c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(), c._get_math_sdp_enabled()
    order = c._get_sdp_priority_order()
    if all(enabled) and c._get_cudnn_sdp_enabled() and order == DEFAULT_ORDER:
        return None
    return *enabled, c._get_cudnn_sdp_enabled(), *order


def _find_numba() -> bool:
    try:
        return importlib.util.find_spec("numba") is not None
    except ImportError:
        return False


_has_numba, _said = _find_numba(), False  # once: a compiler would trace the search


def has_numba() -> bool:
    """True if numba, which compiles the CPU kernels, can be imported; says once what follows if it cannot."""
    global _said
    if not _has_numba and not _said:
        _said = True
        warnings.warn(f"regard: {NO_NUMBA}", RuntimeWarning, stacklevel=2)
    return _has_numba


def supports_float64(device: torch.device) -> bool:
    """True where tensors can be float64: not on Apple's MPS, nor on Intel GPUs without it."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def clear() -> None:
    """Forget every fact, so that a test may pretend to be another device."""
    facts = is_hopper, has_bulk_copies, has_tensor_memory, has_packed_maximum, shared_memory, sm_count, triton_version
    for fact in facts:
        fact.cache_clear()
