"""Facts about a device that choose a kernel, its blocks or a dtype."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """True on compute capability 9.0, the only one with Hopper's warpgroup instructions."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)  # ROCm has a 9.0 too


@cache
def has_bulk_copies(device: torch.device) -> bool:
    """True from compute capability 9.0 on, where tensor descriptors load whole blocks (TMA)."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


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


def supports_float64(device: torch.device) -> bool:
    """True where tensors can be float64: not on Apple's MPS, nor on Intel GPUs without it."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def clear() -> None:
    """Forget every fact, so that a test may pretend to be another device."""
    for fact in (is_hopper, has_bulk_copies, has_packed_maximum, shared_memory, sm_count, triton_version):
        fact.cache_clear()
