"""Rows: validate, choose the path, call the op. Every public row function is a few lines over `normalize`."""

from __future__ import annotations

import math

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
    choice = normalizers.get(normalizer)
    _check_scores(scores)
    return _normalize(scores, choice, None, dim, temperature, mask, backend)


def softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / Σ_j exp(z_j/T).

    >>> import regard, torch
    >>> regard.softmax(torch.tensor([0.0, 1.0]), temperature=0)
    tensor([0., 1.])
    """
    return normalize(z, "softmax", dim, temperature, mask)


def sparsemax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """argmin_{p ∈ Δ} ‖p − z/T‖²: exact zeros.

    >>> import regard, torch
    >>> regard.sparsemax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """
    return normalize(z, "sparsemax", dim, temperature, mask)


def entmax15(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(z_i/2T − τ, 0)² with Σ = 1.

    >>> import regard, torch
    >>> regard.entmax15(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])
    """
    return normalize(z, "entmax15", dim, temperature, mask)


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
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
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
    return normalize(z, "relu", dim, temperature, mask)


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
        z = z + bias * temperature
        bias = 0.0
    return _normalize(z, Choice(member, member.parameter.check(bias)), None, dim, temperature, mask, None)


def softmax1(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z_i/T) / (1 + Σ_j exp(z_j/T)).

    >>> import regard, torch
    >>> regard.softmax1(torch.tensor([0.0, 0.0]))
    tensor([0.3333, 0.3333])
    """
    return normalize(z, "softmax1", dim, temperature, mask)


def softpick(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """max(exp(z_i/T) − 1, 0) / Σ_j |exp(z_j/T) − 1|.

    >>> import regard, torch
    >>> regard.softpick(torch.tensor([0.0, 0.0, -1.0]))
    tensor([0., 0., 0.])
    """
    return normalize(z, "softpick", dim, temperature, mask)


def logsumexp(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """log Σ_j exp(z_j/T), the dimension removed.

    >>> import regard, torch
    >>> regard.logsumexp(torch.tensor([1000.0, 1000.0]))
    tensor(1000.6932)
    """
    _check_scores(z, "z")
    _check_dim(z, dim)
    t = check_temperature(temperature)
    if not isinstance(t, Tensor) and (t == 0.0 or t == math.inf):
        raise ValueError(f"temperature must be positive and finite for logsumexp, which has no limit there, got {t!r}")
    return torch.logsumexp(z if isinstance(t, float) and t == 1.0 else z / t, dim)


def log_softmax(z: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """z_i/T − log Σ_j exp(z_j/T), without forming the weights.

    >>> import regard, torch
    >>> regard.log_softmax(torch.tensor([0.0, -1000.0]))
    tensor([    0., -1000.])
    """
    _check_scores(z, "z")
    _check_dim(z, dim)
    t = check_temperature(temperature)
    if not isinstance(t, Tensor) and (t == 0.0 or t == math.inf):
        return torch.log(softmax(z, dim, t))
    return torch.log_softmax(z if isinstance(t, float) and t == 1.0 else z / t, dim)


def softmax_backward(grad_output: Tensor, softmax_output: Tensor) -> Tensor:
    """p·(g − Σ p·g) over the last dimension: the gradient of softmax from its output alone.

    >>> import regard, torch
    >>> regard.softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor([ 0.2500, -0.2500])
    """
    if grad_output.shape != softmax_output.shape:
        raise ValueError(
            f"grad_output must have the shape of softmax_output {tuple(softmax_output.shape)}, "
            f"got {tuple(grad_output.shape)}"
        )
    weighed = softmax_output * grad_output
    return weighed - softmax_output * weighed.sum(-1, keepdim=True)


# validation and the way to the op ---------------------------------------------------------------------------------


def _check_scores(scores: Tensor, name: str = "scores") -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {scores.dtype}; convert with .float()")


def _check_dim(scores: Tensor, dim: int) -> int:
    rank = max(scores.ndim, 1)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise ValueError(f"dim must be an int in [{-rank}, {rank - 1}] for scores of {scores.ndim} dims, got {dim!r}")
    return dim % rank


def check_temperature(temperature: float | Tensor) -> float | Tensor:
    """A float ≥ 0 (inf allowed), or a tensor, whose values are checked where that costs no device sync."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(f"temperature must be a number or a floating-point tensor, got {temperature.dtype}")
        if temperature.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_mapped(temperature):
            if not bool((temperature.detach() >= 0).all()):
                raise ValueError("temperature must be ≥ 0 and not NaN; the tensor has negative or NaN entries")
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
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
    if t == 0.0 or t == math.inf:
        return _limit(z, choice, theta, visible, cold=t == 0.0).movedim(-1, dim)
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
    if not alpha.is_floating_point():
        raise TypeError(f"alpha must be a number or a floating-point tensor, got {alpha.dtype}")
    if alpha.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_mapped(alpha):
        if not bool((alpha.detach() >= 1.0).all()):
            raise ValueError("alpha must be ≥ 1 and not NaN; the tensor has smaller or NaN entries")
    return alpha


def _limit(z: Tensor, choice: Choice, theta, visible, cold: bool) -> Tensor:
    theta = choice.theta if theta is None else theta
    limit = choice.normalizer.cold if cold else choice.normalizer.hot
    bad = (z.isnan() | (z == math.inf)) if visible is None else (z.isnan() | (z == math.inf)) & visible
    p = limit(z.detach().double(), visible, theta).to(z.dtype)
    return p.masked_fill(bad.any(-1, keepdim=True), math.nan)


def _with_tensor_temperature(z, choice, theta, t, visible, backend) -> Tensor:
    """Rows divided by their own temperature; 0 and inf are limits, anything below 0 or NaN gives NaN."""
    cold, hot = t == 0.0, t == math.inf
    plain = ~(cold | hot)
    p = _rows(z / t.where(plain, 1.0), choice, theta, visible, 1.0, backend)
    if torch.compiler.is_compiling() or _is_mapped(t) or t.device.type != "cpu" or not bool(plain.all()):
        p = torch.where(cold, _limit(z, choice, theta, visible, cold=True), p)
        p = torch.where(hot, _limit(z, choice, theta, visible, cold=False), p)
        p = p.masked_fill(~(t >= 0.0), math.nan)
    return p


def _rows(z: Tensor, choice: Choice, theta, visible, scale: float, backend: str) -> Tensor:
    """z (…, n) → p (…, n): through the fused op, or the reference where a map has no fused form."""
    alpha = choice.theta if theta is None else theta
    is_entmax = choice.name == "entmax"
    if is_entmax and theta is None and alpha == 1.0:
        return _rows(z, normalizers.get("softmax"), None, visible, scale, backend)
    beyond = is_entmax and (alpha > 2.0 if theta is None else _any(alpha > 2.0))
    if backend == "reference" or not choice.fused or beyond:
        wide = z.to(torch.float64 if z.dtype == torch.float64 or backend == "reference" else torch.float32)
        return choice.reference(wide * scale, visible, alpha).to(z.dtype)
    if is_entmax and z.dtype != torch.float64 and (alpha < NEAR_ONE if theta is None else _any(alpha < NEAR_ONE)):
        return _rows(z.double(), choice, theta, visible, scale, backend).to(z.dtype)
    shape = z.shape
    flat = z.reshape(-1, shape[-1]) if z.numel() else z.reshape(math.prod(shape[:-1]), shape[-1])
    rows_mask = None if visible is None else visible.reshape(flat.shape)
    column = None
    soft = None
    if theta is not None:
        column = theta.reshape(-1).to(_ops.accumulator(z.dtype))
        soft = column <= 1.0
        if _any(soft):
            p = _ops.rows(flat, rows_mask, column.where(~soft, 1.5), choice.spec, scale, backend)[0]
            q = _SoftmaxOfAlpha.apply(flat, column, rows_mask, scale, backend)
            return torch.where(soft[:, None], q, p).reshape(shape)
    return _ops.rows(flat, rows_mask, column, choice.spec, scale, backend)[0].reshape(shape)


def _any(condition: Tensor) -> bool:
    """Whether a per-row case occurs; while tracing, where that cannot be known, it is taken to occur not."""
    if torch.compiler.is_compiling() or _is_mapped(condition):
        return False
    return bool(condition.detach().any())


class _SoftmaxOfAlpha(torch.autograd.Function):
    """Softmax as entmax at α = 1, whose derivative in α is known too."""

    @staticmethod
    def forward(ctx, s, alpha, mask, scale, backend):
        p, state = _ops.rows(s, mask, None, "softmax", scale, backend)
        ctx.save_for_backward(p, state, alpha, mask)
        ctx.options = (scale, backend)
        return p

    @staticmethod
    def backward(ctx, dp):
        p, state, alpha, mask = ctx.saved_tensors
        ds = _ops.rows_backward(dp, p, state, mask, None, "softmax", *ctx.options)
        member = normalizers.get("entmax").normalizer
        at_one = torch.ones_like(alpha)[:, None]
        dalpha = member.parameter_vjp(p.to(alpha.dtype), dp.to(alpha.dtype), at_one).where(alpha <= 1.0, 0.0)
        return ds, dalpha, None, None, None
