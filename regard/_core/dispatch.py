"""Chooses the backend of a call: torch for plain softmax, the fused kernels for the rest, else the reference.

Which of torch's kernels runs is chosen later, in `cudnn_forward.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard._call.problem import Problem, find_option
from regard._facts import (
    NO_NUMBA,
    allowed_backends,
    has_bulk_copies,
    has_large_shared_memory,
    has_numba,
    is_transformed,
    is_within_vmap,
    readable,
    supports_gluon,
)
from regard.statistics import ON_REQUEST

BACKENDS = ("torch", "cpu", "triton", "reference")
TRANSFORM = "a torch.func transform"
PLAIN = (Tensor, torch.nn.Parameter)
REQUESTED = "asked for by backend="
ROWS = 64  # queries that the Hopper kernel takes at least
LONG = 2**29  # scores, from which on our forward of plain softmax is faster than cuDNN's
MASKED = 2**26  # the same beside a bool mask, which cuDNN takes as a bias in memory


class LengthClass(NamedTuple):
    """All that the choice between backends knows of lengths, so that a plan serves every length of a class."""

    is_step: bool  # one query: a decoding step
    is_short: bool  # too few queries for the Hopper kernel
    has_one_key: bool
    is_long: bool
    is_long_beside_mask: bool


def classify_lengths(queries_shape: Sequence[int], keys: int) -> LengthClass:
    """The class of the lengths of a call with q (…, M, D) and `keys` keys."""
    *rows, queries, width = queries_shape
    scores = math.prod(rows) * queries * keys * max(1, width // 128)
    return LengthClass(queries == 1, queries < ROWS, keys == 1, scores >= LONG, scores >= MASKED)


@dataclass(frozen=True, slots=True)
class Path:
    """The backend that a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def choose(problem: Problem, policy: object | None, backend: str | None) -> Path:
    """The path of a problem; a backend asked for by name that cannot take it raises."""
    device, obstacle = problem.q.device.type, why_not_torch(problem, policy)
    if backend is not None:
        _check_backend(backend, problem, obstacle)
        return Path(backend, REQUESTED)
    if obstacle is None and not has_transform(problem):
        return _choose_for_plain_softmax(problem)
    unfused = why_not_fused(problem, device == "cuda")
    if obstacle is None and unfused:
        return _choose_for_plain_softmax(problem)
    if unfused is not None:
        return Path("reference", unfused)
    if has_transform(problem):
        return Path("cpu" if device == "cpu" else "triton", f"{TRANSFORM}: fused tangents and gradients")
    if device == "cuda":
        return Path("triton", f"{obstacle}: fused GPU kernel")
    if device == "cpu":
        return Path("cpu", f"{obstacle}: blocked over queries, BLAS and fused rows")
    if device == "meta":
        return Path("cpu", f"{obstacle}, of shapes alone: nothing is computed")
    return Path("reference", f"{obstacle}, and there is no fused kernel for device {device!r}")


def _choose_for_plain_softmax(problem: Problem) -> Path:
    """The path of what torch's sdpa can compute."""
    if is_our_forward_faster(problem):
        if problem.mask is not None:
            return Path("triton", "plain softmax of many scores beside a bool mask: our kernels, which are faster here")
        return Path("triton", "plain softmax of many scores: our forward, which is faster here, and cuDNN's backward")
    hopper = problem.q.is_cuda and has_bulk_copies(problem.q.device)
    kernels = "torch's own fused kernels" + (", cuDNN's first" if hopper else "")
    return Path("torch", f"plain softmax without statistics: {kernels}")


def why_not_fused(problem: Problem, on_gpu: bool) -> str | None:
    """Why the fused kernels of the CPU, or the GPU, cannot compute a problem, in a few words; None if they can."""
    if not problem.choice.fused_in_attention:
        return f"{problem.choice.spec} has no fused form"
    if reason := find_theta_obstacle(problem):
        return reason
    if on_request := find_on_request(problem):
        return f"the statistic {on_request}, which no fused kernel computes"
    if problem.score_params is not None and problem.score_params.requires_grad:
        return "params of score_mod that have gradients, which no fused kernel computes"
    if has_transform(problem) and (reason := why_not_carried(problem)):
        return f"{TRANSFORM} that the fused kernels cannot carry: {reason}"
    if not on_gpu and problem.q.device.type == "cpu" and not has_numba():
        return NO_NUMBA
    return find_gpu_obstacle(problem) if on_gpu else None


def find_gpu_obstacle(problem: Problem) -> str | None:
    """Why the GPU kernels cannot take the tensors of a problem; None if they can, or are interpreted."""
    if problem.q.device.type != "cuda":
        return None
    if problem.q.dtype == torch.float64:
        return "float64, which the GPU kernels do not take"
    width = max(problem.q.shape[-1], problem.v.shape[-1])
    if width > widest(problem.q.device, problem.q.element_size()):
        return f"heads of {width}, for which the GPU has no shared memory"
    return None


def find_theta_obstacle(problem: Problem) -> str | None:
    """Why the fused kernels cannot take a tensor parameter; None if they can, or if its values cannot be read."""
    parameter, theta = problem.choice.normalizer.parameter, problem.theta
    if parameter is None or theta is None:
        return None
    if problem.choice.parameter_slope is None:
        return f"a {parameter.name} per row, which no kernel of {problem.choice.name!r} knows"
    if readable(theta) and bool(((theta < parameter.fused_low) | (theta > parameter.fused_high)).any()):
        return f"{parameter.name} outside [{parameter.fused_low:g}, {parameter.fused_high:g}], the kernels' range"
    return None


def find_on_request(problem: Problem) -> str | None:
    """The first statistic of a problem that only the reference computes; None if there is none."""
    return next((name for name in problem.stats if name in ON_REQUEST), None)


def has_transform(problem: Problem) -> bool:
    """True if a tangent or a torch.func gradient reaches what the weights are made of."""
    p = problem
    return is_transformed(p.q, p.k, p.v, p.bias, p.temperature, p.sink, p.row_bias, p.relative, p.theta, p.score_params)


def why_not_carried(problem: Problem) -> str | None:
    """Why the fused kernels cannot carry the transform that a call is part of, in a few words; None if they can."""
    if torch.compiler.is_compiling():
        return "torch.compile"
    q = problem.q
    obstacles = (
        (is_within_vmap(), "vmap"),
        (problem.stats, "statistics"),
        (problem.theta is not None, "a parameter per head"),
        (problem.score is not None, "a score function"),
        (not (q.is_cuda or q.device.type == "cpu"), f"device {q.device.type!r}"),
        (torch._C._len_torch_dispatch_stack() or type(q) not in PLAIN, "a tensor subclass or a mode"),
    )
    return next((what for given, what in obstacles if given), None) or find_gpu_obstacle(problem)


OURS_ALONE = (  # options that torch's sdpa does not have
    "stats", "softcap", "score", "sink", "left", "right", "interval", "row_bias", "relative", "temperature",
)  # fmt: skip


def why_not_torch(problem: Problem, policy: object | None = None) -> str | None:
    """Why torch's sdpa cannot compute this, in a few words; None if it can."""
    if problem.choice.name != "softmax":
        return f"normalizer {problem.choice.spec!r}"
    masked = problem.mask is not None or problem.bias is not None
    if option := find_option(problem, *OURS_ALONE):
        return option
    obstacles = (
        (problem.q.shape[1] == 0, "no heads"),  # torch 2.11 ends the process
        (policy is not None, "a temperature per query"),
        (masked and problem.causal, "a mask beside causal order"),
        (problem.key_lengths is not None and problem.causal, "key lengths beside causal order"),
        (problem.key_lengths is not None and problem.q.is_cuda and not problem.dropout_p, "key lengths"),
        (problem.scale <= 0 and problem.causal, "a scale that is not positive beside causal order"),  # NaN on a CPU
        (problem.key_lengths is not None and problem.bias is not None, "key lengths beside a bias"),
        (_is_wider(problem.bias, problem.q), "a bias of more digits than the queries"),
    )
    return next((what for given, what in obstacles if given), None)


def _is_wider(bias: Tensor | None, q: Tensor) -> bool:
    """True for a bias that torch's GPU kernels would have to round; on a CPU they take float32 beside 16 bits."""
    return bias is not None and q.device.type == "cuda" and torch.promote_types(bias.dtype, q.dtype) != q.dtype


def _check_backend(backend: str, problem: Problem, obstacle: str | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None, got {backend!r}")
    device, is_interpreted = problem.q.device.type, os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "torch" and obstacle is not None:
        raise ValueError(f"backend 'torch' cannot compute {obstacle}; use backend=None, 'cpu', 'triton' or 'reference'")
    if backend == "cpu" and device != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU, got {device}")
    if backend == "triton" and device != "cuda" and not is_interpreted:
        raise ValueError(f"backend 'triton' needs tensors on a CUDA device (or TRITON_INTERPRET=1), got {device}")
    if backend in ("cpu", "triton") and (reason := why_not_fused(problem, backend == "triton")):
        raise unfused_error(backend, reason)


def unfused_error(backend: str, reason: str) -> ValueError:
    """The error of a backend asked for by name that cannot compute a call."""
    return ValueError(f"backend {backend!r} cannot compute this call: {reason}; use backend=None or 'reference'")


def is_our_forward_faster(problem: Problem) -> bool:
    """True where our Hopper forward beats cuDNN's: 16 bits, widths that it takes, many scores (h200-calls.md)."""
    q, width, value_width = problem.q, problem.q.shape[-1], problem.v.shape[-1]
    masked, lengths = problem.mask is not None, classify_lengths(problem.q.shape, problem.k.shape[2])
    return (
        q.is_cuda
        and (q.dtype == torch.bfloat16 or (masked and q.dtype == torch.float16))
        and width % 8 == value_width % 8 == 0
        and value_width <= width <= 256
        and not (lengths.is_short if masked else lengths.is_step)
        and (lengths.is_long_beside_mask if masked else lengths.is_long)
        and allowed_backends() is None
        and problem.bias is problem.key_lengths is None
        and not problem.dropout_p
        and supports_gluon(q.device)
        and not has_transform(problem)
        and not torch.are_deterministic_algorithms_enabled()
    )


def widest(device: torch.device, size: int) -> int:
    """The widest heads, of numbers of `size` bytes, whose blocks the GPU's shared memory holds, in the backward too."""
    return (2048 if has_large_shared_memory(device) else 1024) // size


def describe_kernel(problem: Problem) -> str:
    """The GPU kernel that takes a problem, and why faster ones were passed over, in one line."""
    from regard._backends.gpu.attention import registry

    return registry.describe(problem)
