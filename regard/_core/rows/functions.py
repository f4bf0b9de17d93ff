"""The public row functions: `normalize` and its named forms, each a line or two over `run`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import normalizers
from regard._call.validation import (
    check_dense,
    check_device,
    check_dim,
    check_flag,
    check_scores,
    check_temperature,
    fits,
    is_float,
)
from regard._core.rows.execute import run, run_named
from regard._core.rows.log_softmax import log_softmax as log_softmax
from regard._core.rows.log_softmax import logsumexp as logsumexp
from regard._core.rows.temperature_limits import divide_visible
from regard._facts import accumulator
from regard.normalizers import Choice


def normalize(
    scores: Tensor,
    normalizer: str | Choice = "softmax",
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """p = normaliser(scores / temperature) along `dim`.

    >>> import regard, torch
    >>> regard.normalize(torch.tensor([1.0, 2.0, 3.0]), "sparsemax", temperature=0.5)
    tensor([0., 0., 1.])
    >>> regard.normalize(torch.zeros(1, 3), "softmax", mask=torch.tensor([True, True, False]))
    tensor([[0.5000, 0.5000, 0.0000]])

    Args:
        scores: floating-point tensor of any shape and strides. −inf weighs 0; NaN or +inf makes its row NaN.
        normalizer: a name from `regard.normalizers.names()`, with its parameter if any: "entmax(alpha=1.25)"; or what
            `regard.normalizers.get("entmax", alpha=…)` returns, for a tensor that broadcasts as `temperature` does.
        dim: the dimension that is normalised.
        temperature: a number, or a tensor that broadcasts against scores with size 1 in `dim` and receives
            gradients. 0 and inf are the limits: of softmax and the sparse maps one-hot, ties share, and uniform.
        mask: bool, broadcastable to scores, True = visible. A row with nothing visible is all zeros.
        backend: "cpu", "triton" or "reference"; None chooses by device.

    Returns:
        The weights, in the shape and dtype of `scores`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A name is unknown, a shape does not fit, or a number lies outside its range.
    """
    return run_named(scores, normalizer, dim, temperature, mask, backend, "scores")


def softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / Σ_j exp(z_j/T).

    >>> import regard, torch
    >>> regard.softmax(torch.tensor([0.0, 1.0]), temperature=0)
    tensor([0., 1.])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "softmax", dim, temperature, mask)


def sparsemax(z: Tensor, dim: int = -1, *, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """argmin_{p ∈ Δ} ‖p − z/T‖²: exact zeros.

    >>> import regard, torch
    >>> regard.sparsemax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "sparsemax", dim, temperature, mask)


def entmax15(z: Tensor, dim: int = -1, *, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(z_i/2T − τ, 0)² with Σ = 1.

    >>> import regard, torch
    >>> regard.entmax15(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "entmax15", dim, temperature, mask)


def entmax(
    z: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """max((α−1)·z_i/T − τ, 0)^{1/(α−1)} with Σ = 1; α = 1 is softmax, α = 2 sparsemax.

    `alpha` is a number in [1, 32], or a tensor that broadcasts against z with size 1 in `dim` and receives a gradient.
    1 < α < 1.1 is computed in float64; above 2 in plain torch, some 50 to 100 times as slow.

    >>> import regard, torch
    >>> regard.entmax(torch.tensor([[-2.0, 0.0, 0.5]]).expand(2, 3), torch.tensor([[1.5], [2.0]]))
    tensor([[0.0000, 0.3260, 0.6740],
            [0.0000, 0.2500, 0.7500]])

    Returns:
        The weights, in the shape and dtype of `z`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `alpha` lies outside [1, 32] or does not broadcast; or as `regard.normalize` raises it.
    """
    check_scores(z, "z")
    return run(z, normalizers.get("entmax", alpha=alpha), None, dim, temperature, mask, None)


def relu_norm(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(z_i, 0) / Σ_j max(z_j, 0); zeros where no score is positive.

    >>> import regard, torch
    >>> regard.relu_norm(torch.tensor([[3.0, 1.0, -2.0], [-1.0, -2.0, -3.0]]))
    tensor([[0.7500, 0.2500, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "relu", dim, temperature, mask)


def sigmoid_norm(
    z: Tensor,
    dim: int = -1,
    bias: float | Tensor = 0.0,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """1 / (1 + exp(−z_i/T − bias)); a tensor `bias` broadcasts and receives gradients.

    >>> import regard, torch
    >>> regard.sigmoid_norm(torch.tensor([0.0, 2.0]), bias=-2.0)
    tensor([0.1192, 0.5000])

    Returns:
        The weights, in the shape and dtype of `z`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `bias` does not broadcast; or as `regard.normalize` raises it.
    """
    check_scores(z, "z")
    if isinstance(bias, Tensor):
        return _sigmoid_with_bias(z, bias, dim, temperature, mask)
    return run(z, normalizers.get("sigmoid", bias=bias), None, dim, temperature, mask, None)


def _sigmoid_with_bias(z: Tensor, bias: Tensor, dim: int, temperature, mask) -> Tensor:
    """Sigmoid with a bias per row or entry, which is one more score, added after the temperature."""
    check_dense(bias, "bias")
    if not is_float(bias):
        raise TypeError(f"bias must be a number or a tensor of float16 or wider, got {bias.dtype}")
    if not fits(bias.shape, z.shape):
        raise ValueError(f"bias must broadcast to {tuple(z.shape)}, got {tuple(bias.shape)}")
    check_device(bias, "bias", z)
    t = check_temperature(temperature)
    if isinstance(t, Tensor) or t in (0.0, math.inf):
        raise ValueError("a tensor bias needs a positive, finite number as temperature; divide z by the tensor first")
    wide = divide_visible(z.to(accumulator(z.dtype)), t) + bias
    return run(wide, normalizers.get("sigmoid"), None, dim, 1.0, mask, None).to(z.dtype)


def softmax1(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / (1 + Σ_j exp(z_j/T)).

    >>> import regard, torch
    >>> regard.softmax1(torch.tensor([0.0, 0.0]))
    tensor([0.3333, 0.3333])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "softmax1", dim, temperature, mask)


def softpick(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(exp(z_i/T) − 1, 0) / Σ_j |exp(z_j/T) − 1|.

    >>> import regard, torch
    >>> regard.softpick(torch.tensor([0.0, 0.0, -1.0]))
    tensor([0., 0., 0.])

    Arguments, result and errors are those of `regard.normalize`.
    """
    return run_named(z, "softpick", dim, temperature, mask)


def gumbel_softmax(
    z: Tensor,
    temperature: float | Tensor = 1.0,
    hard: bool = False,
    dim: int = -1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """softmax((z + g)/T), g ~ Gumbel(0, 1): its argmax is a sample of softmax(z).

    `hard` returns the one-hot sample, with the gradient of the soft one (straight-through). The same generator state
    gives the same sample.

    >>> import regard, torch
    >>> one = regard.gumbel_softmax(torch.zeros(5), 0.5, hard=True, generator=torch.Generator().manual_seed(0))
    >>> float(one.sum())
    1.0

    Returns:
        The sample, in the shape and dtype of `z`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: `dim` or `temperature` lies outside its range.
    """
    check_scores(z, "z")
    axis = check_dim(z, dim)
    hard = check_flag(hard, "hard")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    wide = accumulator(z.dtype)
    drawn = torch.empty_like(z, dtype=wide, memory_format=torch.contiguous_format).exponential_(generator=generator)
    noise = -torch.log(drawn.clamp_min(torch.finfo(wide).tiny))
    soft = softmax(z.to(wide) + noise, axis, temperature)
    if not hard or not z.numel():
        return soft.to(z.dtype)
    at = (z.detach().to(wide) + noise).argmax(axis, keepdim=True)
    one_hot = torch.zeros_like(soft).scatter(axis, at, 1.0)
    one_hot = one_hot.where(soft.detach().amax(axis, keepdim=True) != 0, 0.0)  # nothing to choose from: choose nothing
    return (one_hot + (soft - soft.detach())).to(z.dtype)


def softmax_backward(grad_output: Tensor, softmax_output: Tensor) -> Tensor:
    """p·(g − Σ p·g) over the last dimension: the gradient of softmax from its output alone.

    >>> import regard, torch
    >>> regard.softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor([ 0.2500, -0.2500])

    Returns:
        The gradient with respect to softmax's input, in the wider of the two dtypes.

    Raises:
        TypeError: An argument is not a dense float tensor.
        ValueError: The two differ in shape or device.
    """
    check_scores(grad_output, "grad_output")
    check_scores(softmax_output, "softmax_output")
    if grad_output.shape != softmax_output.shape:
        raise ValueError(
            f"grad_output must have the shape of softmax_output {tuple(softmax_output.shape)}, "
            f"got {tuple(grad_output.shape)}"
        )
    check_device(grad_output, "grad_output", softmax_output)
    dtype = torch.promote_types(grad_output.dtype, softmax_output.dtype)  # result_type cannot be compiled
    g, p = (x.to(torch.promote_types(dtype, torch.float32)) for x in (grad_output, softmax_output))
    return (p * (g - (p * g).sum(-1, keepdim=True))).to(dtype)
