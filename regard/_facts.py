"""What torch, a tensor, a dtype or a device can do now: facts that every other module may ask for."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

DEFAULT_ORDERS = [1, 2, 0, 3, 4], [3, 1, 2, 0, 4]  # of torch's attention kernels: flash, efficient, math, cuDNN, a
# device's own; torch itself puts cuDNN first at its first call on a Hopper GPU, for all calls after it


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
def multiplies_from_shared_memory(device: torch.device) -> bool:
    """True on compute capability 9.x to 11.x, whose matrix products read shared memory; others read registers."""
    return torch.version.hip is None and 9 <= torch.cuda.get_device_capability(device)[0] <= 11


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
    if all(enabled) and c._get_cudnn_sdp_enabled() and order in DEFAULT_ORDERS:
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
    for fact in (*facts, multiplies_from_shared_memory):
        fact.cache_clear()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and row states: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_dtype(device: torch.device) -> torch.dtype:
    """The dtype that the reference computes in: float64, or float32 on a device without it."""
    return torch.float64 if supports_float64(device) else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype of the reference."""
    return x.to(reference_dtype(x.device))


def readable(x: Tensor) -> bool:
    """True if the values can be read without a device sync (CPU tensor; not fake, meta, traced or vmapped)."""
    return x.device.type == "cpu" and not has_no_values(x)


def has_no_values(x: Tensor) -> bool:
    """True while tracing, and of vmapped, fake and meta tensors."""
    return torch.compiler.is_compiling() or is_mapped(x) or x.is_meta or isinstance(x, FakeTensor) or _is_recorded()


def _is_recorded() -> bool:
    """True inside make_fx, which records operations on tensors that do have values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_mapped(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_plain_eager() -> bool:
    """True if nothing records or rewrites calls: no compiler, mode, torch.func transform or forward-mode level."""
    return not (
        is_compiling()
        or _get_tracing_state() is not None
        or _len_torch_function_stack()
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed(*tensors: Tensor | None) -> bool:
    """True if a tensor has a tangent, or torch.func wants its gradient: what the fused ops cannot carry."""
    if torch.compiler.is_compiling():
        return _is_within_transform()
    given = [x for x in tensors if x is not None]
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and any(forward.unpack_dual(x).tangent is not None for x in given):
        return True
    return any(is_mapped(x) or x.requires_grad for x in given) and _is_within_transform()


def _is_within_transform() -> bool:
    return any("Jvp" in kind or "Grad" in kind for kind in _active_transforms())


# torch guards a graph by the transforms that it was made in. torch.compiler.assume_constant_result sets this mark too,
# but imports all of torch._dynamo.
_is_within_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_within_vmap() -> bool:
    """True if one of the active torch.func transforms is vmap."""
    return any("Vmap" in kind for kind in _active_transforms())


def _active_transforms() -> list[str]:
    return [str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()]


def remember(cache: dict, key: Hashable, value: Any, most: int) -> Any:
    """Keep `value`, and of all entries the latest `most`; returns the value.

    >>> cache = {}
    >>> [remember(cache, key, key, 2) for key in "abc"], list(cache)
    (['a', 'b', 'c'], ['b', 'c'])
    """
    while len(cache) >= most and key not in cache:
        cache.pop(next(iter(cache), None), None)  # another thread may have been faster
    cache[key] = value
    return value
