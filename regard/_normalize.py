"""Rows: validate, choose the path, call the op. Every public row function is a few lines over `normalize`."""

from __future__ import annotations

import math
import numbers
import operator

import torch
from torch import Tensor

from regard import _ops, normalizers
from regard.normalizers import Choice

NEAR_ONE = 1.1  # below this alpha, 1/(α−1) amplifies float32's rounding too much: rows are computed in float64


def normalize(
    scores: Tensor,
    normalizer: str = "softmax",
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
        normalizer: a name from `regard.normalizers.names()`, with its parameter if any: "entmax(alpha=1.25)".
        dim: the dimension that is normalised.
        temperature: a number, or a tensor that broadcasts against scores with size 1 in `dim` and receives
            gradients. 0 is the limit: one-hot, ties share. inf is the other limit: uniform.
        mask: bool, broadcastable to scores, True = visible. A row with nothing visible is all zeros.
        backend: "cpu", "triton" or "reference"; None chooses by device.
    """
    _check_scores(scores)
    choice = normalizers.get(normalizer)
    return _normalize(scores, choice, None, dim, temperature, mask, backend)


def softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / Σ_j exp(z_j/T).

    >>> import regard, torch
    >>> regard.softmax(torch.tensor([0.0, 1.0]), temperature=0)
    tensor([0., 1.])
    """
    return _named(z, "softmax", dim, temperature, mask)


def sparsemax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """argmin_{p ∈ Δ} ‖p − z/T‖²: exact zeros.

    >>> import regard, torch
    >>> regard.sparsemax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """
    return _named(z, "sparsemax", dim, temperature, mask)


def entmax15(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(z_i/2T − τ, 0)² with Σ = 1.

    >>> import regard, torch
    >>> regard.entmax15(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])
    """
    return _named(z, "entmax15", dim, temperature, mask)


def entmax(
    z: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """max((α−1)·z_i/T − τ, 0)^{1/(α−1)} with Σ = 1; α = 1 is softmax, α = 2 sparsemax.

    `alpha` is a number ≥ 1, or a tensor that broadcasts against z with size 1 in `dim` and receives a gradient.

    >>> import regard, torch
    >>> regard.entmax(torch.tensor([[-2.0, 0.0, 0.5]]).expand(2, 3), torch.tensor([[1.5], [2.0]]))
    tensor([[0.0000, 0.3260, 0.6740],
            [0.0000, 0.2500, 0.7500]])
    """
    _check_scores(z, "z")
    if isinstance(alpha, Tensor):
        return _normalize(z, normalizers.get("entmax"), alpha, dim, temperature, mask, None)
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"alpha must be a number or a tensor, got {type(alpha).__name__}")
    member = normalizers.get("entmax").normalizer
    return _normalize(z, Choice(member, member.parameter.check(alpha)), None, dim, temperature, mask, None)


def relu_norm(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(z_i, 0) / Σ_j max(z_j, 0); zeros where no score is positive.

    >>> import regard, torch
    >>> regard.relu_norm(torch.tensor([[3.0, 1.0, -2.0], [-1.0, -2.0, -3.0]]))
    tensor([[0.7500, 0.2500, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    return _named(z, "relu", dim, temperature, mask)


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
    """
    _check_scores(z, "z")
    member = normalizers.get("sigmoid").normalizer
    if isinstance(bias, Tensor):
        return _sigmoid_with_bias(z, bias, dim, temperature, mask)
    if isinstance(bias, bool) or not isinstance(bias, numbers.Real):
        raise TypeError(f"bias must be a number or a tensor, got {type(bias).__name__}")
    return _normalize(z, Choice(member, member.parameter.check(bias)), None, dim, temperature, mask, None)


def _sigmoid_with_bias(z: Tensor, bias: Tensor, dim: int, temperature, mask) -> Tensor:
    """A bias per row or entry is one more score, added after the temperature."""
    try:
        fits = torch.broadcast_shapes(bias.shape, z.shape) == z.shape
    except RuntimeError:
        fits = False
    if not fits or not bias.is_floating_point():
        raise ValueError(f"bias must be floating-point and broadcast to {tuple(z.shape)}, got {tuple(bias.shape)}")
    t = check_temperature(temperature)
    if isinstance(t, Tensor) or t in (0.0, math.inf):
        raise ValueError("a tensor bias needs a positive, finite number as temperature; divide z by the tensor first")
    wide = z.to(_ops.accumulator(z.dtype)) / t + bias
    return _normalize(wide, normalizers.get("sigmoid"), None, dim, 1.0, mask, None).to(z.dtype)


def softmax1(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / (1 + Σ_j exp(z_j/T)).

    >>> import regard, torch
    >>> regard.softmax1(torch.tensor([0.0, 0.0]))
    tensor([0.3333, 0.3333])
    """
    return _named(z, "softmax1", dim, temperature, mask)


def softpick(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(exp(z_i/T) − 1, 0) / Σ_j |exp(z_j/T) − 1|.

    >>> import regard, torch
    >>> regard.softpick(torch.tensor([0.0, 0.0, -1.0]))
    tensor([0., 0., 0.])
    """
    return _named(z, "softpick", dim, temperature, mask)


def logsumexp(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """log Σ_j exp(z_j/T), the dimension removed.

    >>> import regard, torch
    >>> regard.logsumexp(torch.tensor([1000.0, 1000.0]))
    tensor(1000.6932)
    """
    return torch.logsumexp(_divided(z, dim, temperature), dim)


def log_softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """z_i/T − log Σ_j exp(z_j/T), without forming the weights.

    >>> import regard, torch
    >>> regard.log_softmax(torch.tensor([0.0, -1000.0]))
    tensor([    0., -1000.])
    """
    if not isinstance(temperature, Tensor) and temperature in (0.0, math.inf):
        return torch.log(softmax(z, dim, temperature))
    return torch.log_softmax(_divided(z, dim, temperature), dim)


def _divided(z: Tensor, dim: int, temperature: float | Tensor) -> Tensor:
    """z / T, for functions that have no limit at T = 0 or inf."""
    _check_scores(z, "z")
    axis = _check_dim(z, dim)
    t = check_temperature(temperature)
    if isinstance(t, Tensor):
        column = _column(t, "temperature", z.shape, axis).movedim(-1, axis) if z.ndim else t
        return (z / column).to(z.dtype)
    if t == 0.0 or t == math.inf:
        raise ValueError(f"temperature must be positive and finite here, where there is no limit, got {t!r}")
    return z if t == 1.0 else z / t


def softmax_backward(grad_output: Tensor, softmax_output: Tensor) -> Tensor:
    """p·(g − Σ p·g) over the last dimension: the gradient of softmax from its output alone.

    >>> import regard, torch
    >>> regard.softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor([ 0.2500, -0.2500])
    """
    _check_scores(grad_output, "grad_output")
    _check_scores(softmax_output, "softmax_output")
    if grad_output.shape != softmax_output.shape:
        raise ValueError(
            f"grad_output must have the shape of softmax_output {tuple(softmax_output.shape)}, "
            f"got {tuple(grad_output.shape)}"
        )
    weighed = softmax_output * grad_output
    return weighed - softmax_output * weighed.sum(-1, keepdim=True)


# validation and the way to the op ---------------------------------------------------------------------------------


def _named(z, name: str, dim, temperature, mask) -> Tensor:
    _check_scores(z, "z")
    return _normalize(z, normalizers.get(name), None, dim, temperature, mask, None)


def _check_scores(scores: Tensor, name: str = "scores") -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}")
    if scores.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {scores.layout}; convert with .to_dense()")
    if not scores.is_floating_point() or scores.dtype.itemsize == 1:
        raise TypeError(
            f"{name} must be float64, float32, bfloat16 or float16, got {scores.dtype}; convert with .float()"
        )


def check_flag(value: bool, name: str) -> bool:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return bool(value)


def _check_dim(scores: Tensor, dim: int) -> int:
    rank = max(scores.ndim, 1)
    try:
        axis = operator.index(dim)
    except TypeError:
        raise TypeError(f"dim must be an int, got {type(dim).__name__}") from None
    if isinstance(dim, bool) or not -rank <= axis < rank:
        raise ValueError(f"dim must be an int in [{-rank}, {rank - 1}] for scores of {scores.ndim} dims, got {dim!r}")
    return axis % rank


def check_temperature(temperature: float | Tensor) -> float | Tensor:
    """A float ≥ 0 (inf allowed), or a tensor, whose values are checked where that costs no device sync."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point() or temperature.layout != torch.strided:
            kind = f"{temperature.dtype}, {temperature.layout}"
            raise TypeError(f"temperature must be a number or a dense floating-point tensor, got {kind}")
        if temperature.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_mapped(temperature):
            if not bool((temperature.detach() >= 0).all()):
                raise ValueError("temperature must be ≥ 0 and not NaN; the tensor has negative or NaN entries")
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise TypeError(f"temperature must be a number or a tensor, got {type(temperature).__name__}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be ≥ 0 and not NaN, got {temperature!r}")
    return float(temperature)


def _is_mapped(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _column(x: Tensor, name: str, shape: torch.Size, dim: int) -> Tensor:
    """A per-row tensor with `dim` (of size 1) moved last, broadcastable to the scores moved likewise."""
    want = [*shape]
    want[dim] = 1
    try:
        return x.expand(want).movedim(dim, -1)
    except RuntimeError:
        raise ValueError(
            f"{name} must broadcast to {tuple(want)} (the scores' shape with size 1 in dim {dim}), got {tuple(x.shape)}"
        ) from None


def choose_rows_backend(device: torch.device, backend: str | None) -> str:
    if backend is None:
        return "triton" if device.type == "cuda" else "cpu"
    if backend not in ("cpu", "triton", "reference"):
        raise ValueError(f"backend must be 'cpu', 'triton' or 'reference' for rows, got {backend!r}")
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs tensors on the CPU, got {device}; move them or use 'triton'")
    return backend


def _normalize(scores, choice: Choice, theta, dim, temperature, mask, backend) -> Tensor:
    dim = _check_dim(scores, dim)
    t = check_temperature(temperature)
    backend = choose_rows_backend(scores.device, backend)
    if torch.is_autocast_enabled(scores.device.type):  # whatever torch's softmax does under autocast
        scores = scores.to(torch.softmax(scores.new_empty((1,)), 0).dtype)
    if scores.ndim == 0:
        mask = None if mask is None else mask.reshape(1)
        return _normalize(scores.reshape(1), choice, theta, 0, t, mask, backend).reshape(())
    visible = None
    if mask is not None:
        visible = _check_mask(mask, scores.shape).movedim(dim, -1)
    if theta is not None:
        theta = _check_alpha(theta)
        theta = _column(theta, "alpha", scores.shape, dim)
    z = scores.movedim(dim, -1)
    if isinstance(t, Tensor):
        column = _column(t, "temperature", scores.shape, dim)
        return _with_tensor_temperature(z, choice, theta, column, visible, backend).movedim(-1, dim)
    finest = torch.finfo(torch.float64 if z.dtype == torch.float64 else torch.float32)
    if t * finest.max < 1.0 or t == math.inf:  # 0, or 1/t overflows: the limit
        return _limit(z, choice, theta, visible, cold=t != math.inf).movedim(-1, dim)
    return _rows(z, choice, theta, visible, 1.0 / t, backend).movedim(-1, dim)


def _check_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = visible), got {kind}; write e.g. mask != 0")
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"mask must broadcast to the scores' shape {tuple(shape)}, got {tuple(mask.shape)}") from None


def _check_alpha(alpha: Tensor) -> Tensor:
    if not alpha.is_floating_point() or alpha.layout != torch.strided:
        raise TypeError(f"alpha must be a number or a dense floating-point tensor, got {alpha.dtype}, {alpha.layout}")
    if alpha.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_mapped(alpha):
        parameter = normalizers.get("entmax").parameter
        if not bool(((alpha.detach() >= parameter.low) & (alpha.detach() <= parameter.high)).all()):
            raise ValueError(f"alpha must lie in [{parameter.low:g}, {parameter.high:g}]; the tensor has other entries")
    return alpha


def _limit(z: Tensor, choice: Choice, theta, visible, cold: bool) -> Tensor:
    if z.shape[-1] == 0:
        return torch.zeros_like(z)
    theta = choice.theta if theta is None else theta
    limit = choice.normalizer.cold if cold else choice.normalizer.hot
    bad = (z.isnan() | (z == math.inf)) if visible is None else (z.isnan() | (z == math.inf)) & visible
    p = limit(z.detach().double(), visible, theta).to(z.dtype)
    return p.masked_fill(bad.any(-1, keepdim=True), math.nan)


def _with_tensor_temperature(z, choice, theta, t, visible, backend) -> Tensor:
    """Rows divided by their own temperature; 0 and inf are limits, anything below 0 or NaN gives NaN."""
    cold, hot = t == 0.0, t == math.inf
    plain = ~(cold | hot)
    wide = z.to(_ops.accumulator(z.dtype))
    p = _rows((wide / t.where(plain, 1.0)).to(wide.dtype), choice, theta, visible, 1.0, backend).to(z.dtype)
    if torch.compiler.is_compiling() or _is_mapped(t) or t.device.type != "cpu" or not bool(plain.all()):
        p = torch.where(cold, _limit(z, choice, theta, visible, cold=True), p)
        p = torch.where(hot, _limit(z, choice, theta, visible, cold=False), p)
        p = p.masked_fill(~(t >= 0.0), math.nan)
    return p


def _rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    """z (…, n) → p (…, n): through the fused op, or the reference where a map has no fused form."""
    if choice.name == "entmax":
        return _entmax_rows(z, choice, theta, visible, scale, backend)
    if backend == "reference" or not choice.fused or transformed(z):
        return _reference_rows(z, choice, choice.theta, visible, scale)
    return _fused_rows(z, choice, None, visible, scale, backend)


def _entmax_rows(z: Tensor, choice: Choice, alpha, visible, scale: float, backend: str) -> Tensor:
    """α = 1 is softmax, 1 < α ≤ 2 fused (in float64 near 1), beyond 2 the reference; row by row if α is a tensor."""
    if backend == "reference" or transformed(z):
        return _reference_rows(z, choice, choice.theta if alpha is None else alpha, visible, scale)
    if alpha is None:
        if choice.theta == 1.0:
            return _rows(z, normalizers.get("softmax"), None, visible, scale, backend)
        if choice.theta > 2.0:
            return _reference_rows(z, choice, choice.theta, visible, scale)
        wide = z.double() if choice.theta < NEAR_ONE else z
        return _fused_rows(wide, choice, None, visible, scale, backend).to(z.dtype)
    soft, beyond = alpha <= 1.0, alpha > 2.0
    wide = z.double() if _may(alpha < NEAR_ONE) else z
    inner = alpha.where(~(soft | beyond), 1.5)
    p = _fused_rows(wide, choice, inner, visible, scale, backend).to(z.dtype)
    if _may(soft):
        q = _fused_rows(z, normalizers.get("softmax"), None, visible, scale, backend)
        p = torch.where(soft, _with_slope_in_alpha(q, alpha), p)
    if _may(beyond):
        p = torch.where(beyond, _reference_rows(z, choice, alpha.where(beyond, 3.0), visible, scale), p)
    return p


def _fused_rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    flat = z.reshape(math.prod(z.shape[:-1]), z.shape[-1])
    mask = None if visible is None else visible.reshape(flat.shape)
    column = None
    if theta is not None:
        column = theta.expand(*z.shape[:-1], 1).reshape(-1).to(_ops.accumulator(z.dtype))
    return _ops.rows_weights(flat, mask, column, choice.spec, scale, backend).reshape(z.shape)


def _reference_rows(z: Tensor, choice: Choice, theta, visible, scale: float) -> Tensor:
    z = z if visible is None else z.masked_fill(~visible, -math.inf)  # what is hidden cannot leak, not even as NaN
    bad = z.isnan() | (z == math.inf)
    p = choice.reference(z.double() * scale, visible, theta).to(z.dtype)
    return p.masked_fill(bad.any(-1, keepdim=True), math.nan)


def transformed(z: Tensor) -> bool:
    """Whether a tangent rides on z, or a transform asks for gradients of mapped rows: what the ops cannot carry."""
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(z).tangent is not None:
        return True
    if not _is_mapped(z):
        return False
    kinds = [str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()]
    return any("Jvp" in kind for kind in kinds) or (len(kinds) > 1 and any("Grad" in kind for kind in kinds))


def _may(condition: Tensor) -> bool:
    """Whether a per-row case occurs; while tracing, where that cannot be known, it may."""
    if torch.compiler.is_compiling() or _is_mapped(condition):
        return True
    return bool(condition.detach().any())


def _with_slope_in_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """Softmax as entmax at α = 1: the same weights, with ∂p/∂α = p·(Σ p·log² p − log² p)/2 for autograd to see."""
    still = p.detach().to(_ops.accumulator(p.dtype))
    square = torch.log(still.where(still > 0, 1.0)) ** 2
    slope = 0.5 * still * ((still * square).sum(-1, keepdim=True) - square)
    return p + ((alpha - alpha.detach()) * slope).to(p.dtype)
