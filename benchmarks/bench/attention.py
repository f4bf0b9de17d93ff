"""Cases of `python -m bench attention`: outputs and statistics against torch's backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bench.measure import Case


@dataclass(frozen=True)
class Shape:
    """The shape of one attention call."""

    batch: int
    heads: int
    length: int
    dim: int
    causal: bool

    def __str__(self) -> str:
        order = "causal" if self.causal else "full"
        return f"B{self.batch} H{self.heads} N{self.length} d{self.dim} {order}"

    def inputs(self, dtype: torch.dtype, device: str, grad: bool = False) -> list[torch.Tensor]:
        """Draw q, k and v."""
        generator = torch.Generator(device).manual_seed(0)
        size = (self.batch, self.heads, self.length, self.dim)
        made = [torch.randn(size, generator=generator, device=device).to(dtype) for _ in "qkv"]
        return [x.requires_grad_() for x in made] if grad else made


def cases(device: str, quick: bool) -> list[Case]:
    """Return the cases of a device."""
    return _cpu_cases(quick) if device == "cpu" else _gpu_cases(quick)


def _case(what: str, prepare: Callable, shape: Shape, **options: Any) -> Case:
    return Case(f"{what} {shape}", partial(prepare, shape=shape, **options))


def _cpu_cases(quick: bool) -> list[Case]:
    shape, on_cpu = Shape(1, 8, 2048, 64, causal=True), dict(dtype=torch.float32, device="cpu")
    sparse = dict(**on_cpu, normalizer="entmax15")
    found = [
        _case("softmax, no statistics, forward", _forward, shape, **on_cpu, stats=False),
        _case("softmax + all statistics, forward", _forward, shape, **on_cpu, dense=True),
        _case("softmax + all statistics, forward + backward", _forward_backward, shape, **on_cpu),
        _case("entmax15 + all statistics, forward", _forward, shape, **sparse),
        _case("entmax15 + all statistics, forward + backward", _forward_backward, shape, **sparse),
    ]
    return found[:-1] if quick else found


def _gpu_cases(quick: bool) -> list[Case]:
    found, on_gpu = [], dict(dtype=torch.bfloat16, device="cuda")
    for heads, dim in ((16, 128),) if quick else ((16, 128), (32, 64)):
        for causal in (True, False):
            shape = Shape(1, heads, 16384, dim, causal)
            found.append(_case("softmax + all statistics, forward", _forward, shape, **on_gpu))
            found.append(_case("softmax + all statistics, forward + backward", _forward_backward, shape, **on_gpu))
    for batch, heads, dim, causal in ((4, 16, 128, True), (4, 32, 64, True), (4, 16, 128, False)):
        shape = Shape(batch, heads, 4096, dim, causal)
        found.append(_case("entmax15, forward", _forward, shape, **on_gpu, normalizer="entmax15", stats=False))
    return found


def _forward(shape, dtype, device, normalizer="softmax", stats=True, dense=False):
    import regard

    q, k, v = shape.inputs(dtype, device)
    options = dict(is_causal=shape.causal, normalizer=normalizer, return_stats=stats)
    candidates: dict[str, Callable[[], object]] = {"regard": lambda: regard.attention(q, k, v, **options)}
    candidates |= _torch_backends(q, k, v, shape.causal)
    if dense:
        candidates["weights built"] = lambda: _weights_built(q, k, v, shape.causal)
    return candidates


def _forward_backward(shape, dtype, device, normalizer="softmax"):
    """Return candidates of forward and backward in one call, as in a training step."""
    import regard

    q, k, v = shape.inputs(dtype, device, grad=True)
    grad = shape.inputs(dtype, device)[0]

    def ours():
        out, _ = regard.attention(q, k, v, is_causal=shape.causal, normalizer=normalizer, return_stats=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    def with_backward(forward):
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    theirs = _torch_backends(q, k, v, shape.causal)
    return {"regard": ours} | {name: with_backward(forward) for name, forward in theirs.items()}


def _torch_backends(q, k, v, causal) -> dict[str, Callable[[], torch.Tensor]]:
    found = {"torch sdpa": lambda: sdpa(q, k, v, is_causal=causal)}
    if q.device.type == "cuda":

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa(q, k, v, is_causal=causal)

        found["torch cuDNN"] = cudnn
    return found


def _weights_built(q, k, v, causal):
    """Compute the whole weight matrix, then entropy and the largest weight: the way without regard."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        n = q.shape[-2]
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), float("-inf"))
    weights = torch.softmax(scores, -1)
    return weights @ v, -torch.xlogy(weights, weights).sum(-1), weights.amax(-1)
