"""The policies: `Fixed`, `Learned`, `QueryDependent`, `SSMax`, `ASEntmax` and `Adaptive`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._call.scores import is_positive, is_real
from regard._facts import has_no_values
from regard.temperature.rows import Rows, check_queries, check_sizes

LARGEST = 87.0  # of Learned's |θ|: T stays finite and positive in float32
SMALLEST_S = 1e-3  # of SSMax's |s|: T stays finite and positive
SMALLEST = 1e-2  # QueryDependent's ε: a query can sharpen a hundredfold at most


class Fixed(nn.Module):
    """T = `value` for every row: a number as a policy, for code that compares or configures policies.

    >>> import regard, torch
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> a, b = (regard.attention(q, k, v, temperature=t) for t in (2.0, regard.temperature.Fixed(2.0)))
    >>> torch.equal(a, b)
    True
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        if not is_positive(value):
            raise ValueError(f"value must be a positive, finite number, got {value!r}")
        self.value = float(value)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T, a scalar."""
        return torch.full((), self.value, dtype=visible_keys.dtype, device=visible_keys.device)

    def extra_repr(self) -> str:
        return f"{self.value:g}"


class Learned(nn.Module):
    """T_h = exp(θ_h): one learned temperature per head, always positive, starting at `begin`.

    >>> import regard, torch
    >>> policy = regard.temperature.Learned(heads=2)
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> regard.attention(q, k, v, temperature=policy).square().sum().backward()
    >>> policy.log_temperature.grad.shape
    torch.Size([2])

    Under `regard.using`, pass its parameters to the optimizer yourself; in `regard.nn` they belong to the module.
    """

    def __init__(
        self,
        heads: int,
        begin: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(heads=heads)
        if not is_positive(begin):
            raise ValueError(f"begin must be a positive, finite number, got {begin!r}")
        self.log_temperature = nn.Parameter(torch.full((heads,), math.log(begin), device=device, dtype=dtype))

    @property
    def value(self) -> Tensor:
        """T per head [H, 1, 1], which broadcasts to (B, H, M, 1)."""
        wide = self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32))
        return wide.clamp(-LARGEST, LARGEST).exp()[:, None, None]

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [H, 1]."""
        return self.value[..., 0].to(visible_keys)

    def extra_repr(self) -> str:
        return f"heads={self.log_temperature.numel()}"


class QueryDependent(nn.Module):
    """T_i = ε + softplus(w_h·q_i + b_h): a learned map from a query to its temperature, per head.

    It starts at T = 1 for every query (w = 0), so a model trained without it is unchanged at first.

    >>> import regard, torch
    >>> policy = regard.temperature.QueryDependent(heads=2, head_dim=4)
    >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    >>> out = regard.attention(q, k, v, temperature=policy)
    >>> torch.allclose(out, regard.attention(q, k, v), atol=1e-6)
    True
    >>> out.square().sum().backward()
    >>> policy.weight.grad.shape, policy.bias.grad.shape
    (torch.Size([2, 4]), torch.Size([2]))
    """

    def __init__(
        self, heads: int, head_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        one = math.log(math.expm1(1.0 - SMALLEST))  # softplus of it is 1 − ε
        self.weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.full((heads,), one, device=device, dtype=dtype))

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        check_queries(self, rows.q, self.weight)
        weight, bias = self.weight.to(visible_keys), self.bias.to(visible_keys)
        projected = torch.einsum("...hmd,hd->...hm", rows.q.to(visible_keys), weight)
        return SMALLEST + F.softplus(projected + bias[:, None])

    def extra_repr(self) -> str:
        heads, head_dim = self.weight.shape
        return f"heads={heads}, head_dim={head_dim}"


class SSMax(nn.Module):
    """T = 1 / (s·log n) for a row of n visible keys: scalable softmax (arXiv 2501.19399).

    One key at +3 among keys at −2 keeps its weight from n = 10 to n = 10 000, where softmax leaves it 0.0146:

    >>> import regard, torch
    >>> for n in (10, 10_000):
    ...     z = torch.full((n,), -2.0).index_fill(0, torch.tensor(0), 3.0)
    ...     t = regard.temperature.SSMax(0.43)(torch.tensor(float(n)), None)
    ...     print(f"{regard.softmax(z)[0]:.4f} {regard.softmax(z, temperature=t)[0]:.4f}")
    0.9428 0.9401
    0.0146 1.0000

    Args:
        s: a number, or a tensor with one entry per head.
        learn: True makes s a parameter; its absolute value is used, so that T stays positive.

    n = 1 is treated as 2, where s·log n would be 0 and the row is one-hot anyway.
    """

    def __init__(self, s: float | Tensor = 0.43, learn: bool = False) -> None:
        super().__init__()
        if isinstance(s, bool) or not isinstance(s, Tensor | numbers.Real):
            raise TypeError(f"s must be a positive number or a tensor of them, one per head, got {s!r}")
        known = isinstance(s, Tensor) or is_positive(s)  # a meta tensor has no value to check
        value = torch.as_tensor(s if known else math.nan, dtype=torch.float32)
        positive = known and (has_no_values(value) or bool(((value > 0) & value.isfinite()).all()))
        if value.ndim > 1 or not positive:
            raise ValueError(f"s must be a positive number or a tensor of them, one per head, got {s!r}")
        if learn:
            self.s = nn.Parameter(value.clone())
        else:
            self.register_buffer("s", value, persistent=False)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        is_number = self.s.ndim == 0 and self.s.device.type == "cpu" and not isinstance(self.s, nn.Parameter)
        if is_number and visible_keys.is_cuda and not torch.compiler.is_compiling():
            number = max(abs(float(self.s)), SMALLEST_S)  # a copy to the GPU may wait for what the GPU does
            return 1.0 / (number * torch.log(visible_keys.clamp_min(2.0)))
        s = self.s.to(visible_keys, non_blocking=True).abs().clamp_min(SMALLEST_S)
        heads = visible_keys.shape[-2] if visible_keys.ndim > 1 else s.numel()
        if s.numel() not in (1, heads):
            raise ValueError(f"SSMax with s of {s.numel()} heads got queries of {heads} heads; pass one s per head")
        s = s if s.ndim == 0 else s[:, None]
        return 1.0 / (s * torch.log(visible_keys.clamp_min(2.0)))

    def extra_repr(self) -> str:
        s = "…" if self.s.is_meta else [round(x, 4) for x in self.s.flatten().tolist()]
        return f"s={s}, learn={isinstance(self.s, nn.Parameter)}"


class ASEntmax(nn.Module):
    """T_i = 1 / (δ + β_i·(log n)^γ_i) for a row of n visible keys, β and γ learned per head (arXiv 2506.16640).

        β_i = softplus(w_h·q_i + b_h)          γ_i = s·tanh(u_h·q_i + c_h)

    Where SSMax has the factor s·log n, this one learns how fast it grows with n, and from each query. Use it with
    entmax, whose support a larger factor narrows. At first w = u = 0, b = c = 0: T = 1/(δ + log 2) whatever n.

    >>> import regard, torch
    >>> policy = regard.temperature.ASEntmax(heads=2, head_dim=4)
    >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    >>> regard.attention(q, k, v, normalizer="entmax15", temperature=policy).square().sum().backward()
    >>> policy.beta_weight.grad.shape, policy.gamma_bias.grad.shape
    (torch.Size([2, 4]), torch.Size([2]))

    Args:
        heads: number of query heads.
        head_dim: width of their queries.
        delta: δ ≥ 0, the factor at β = 0.
        exponent: s, the largest |γ|.

    n = 1 is treated as 2, where log n would be 0 and the row is one-hot anyway.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        delta: float = 1.0,
        exponent: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        for name, number in (("delta", delta), ("exponent", exponent)):
            if not (is_real(number) and 0 <= number < math.inf):
                raise ValueError(f"{name} must be a finite number ≥ 0, got {number!r}")
        self.delta, self.exponent = float(delta), float(exponent)
        self.beta_weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.beta_bias = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))
        self.gamma_weight = nn.Parameter(torch.zeros(heads, head_dim, device=device, dtype=dtype))
        self.gamma_bias = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        check_queries(self, rows.q, self.beta_weight)
        beta = F.softplus(self._project(rows.q, self.beta_weight, self.beta_bias, visible_keys))
        gamma = self.exponent * torch.tanh(self._project(rows.q, self.gamma_weight, self.gamma_bias, visible_keys))
        return 1.0 / (self.delta + beta * torch.log(visible_keys.clamp_min(2.0)) ** gamma).clamp_min(1e-6)

    @staticmethod
    def _project(q: Tensor, weight: Tensor, bias: Tensor, like: Tensor) -> Tensor:
        return torch.einsum("...hmd,hd->...hm", q.to(like), weight.to(like)) + bias.to(like)[:, None]

    def extra_repr(self) -> str:
        heads, head_dim = self.beta_weight.shape
        return f"heads={heads}, head_dim={head_dim}, delta={self.delta:g}, exponent={self.exponent:g}"


class Adaptive(nn.Module):
    """T = 1 / max(β(H), 1): sharpens rows of high entropy H (arXiv 2410.01104).

    β is a polynomial with coefficients from the highest power down. Two have names: "published" is the paper's, of
    degree 4, which falls below 1 above H ≈ 5.94 and so has no effect on long rows; "refit" is ours,
    β = 1 + 0.871·(H − ½), which never falls (derived in `docs/remedies.md`).

    >>> import regard, torch
    >>> long = {"entropy": torch.tensor([0.4, 2.0, 8.0])}
    >>> for fit in ("published", "refit"):
    ...     print(regard.temperature.Adaptive(fit)(None, lambda names: long))
    tensor([1.0000, 0.4764, 1.0000])
    tensor([1.0000, 0.4336, 0.1328])

    Args:
        fit: "refit", "published" or the coefficients of β.
        floor: rows with H ≤ floor keep T = 1.

    The entropy costs one more fused pass. It is part of the gradient for softmax and softmax1; for other normalisers T
    is a constant in backward. The policy has no parameters and can be used in a model that was trained without it.
    """

    published = (-0.037, 0.481, -2.3, 4.917, -1.791)
    refit = (0.871, 0.5645)

    def __init__(self, fit: str | Sequence[float] = "refit", floor: float = 0.5) -> None:
        super().__init__()
        known = {"refit": self.refit, "published": self.published}
        if isinstance(fit, str) and fit not in known:
            raise ValueError(f"fit must be 'refit', 'published' or the coefficients of a polynomial, got {fit!r}")
        try:
            self.coefficients = tuple(float(c) for c in (known[fit] if isinstance(fit, str) else fit))
        except (TypeError, ValueError):
            raise TypeError(f"fit must be 'refit', 'published' or a sequence of numbers, got {fit!r}") from None
        if not self.coefficients or not all(map(math.isfinite, self.coefficients)):
            raise ValueError(f"fit must hold at least one finite coefficient, got {fit!r}")
        if not (is_real(floor) and 0 <= floor < math.inf):
            raise ValueError(f"floor must be an entropy ≥ 0, got {floor!r}")
        self.floor = float(floor)

    def forward(self, visible_keys: Tensor, rows: Rows) -> Tensor:
        """Return T [B, H, M]."""
        entropy = rows(("entropy",))["entropy"]
        beta = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            beta = beta * entropy + coefficient
        beta = torch.where(entropy > self.floor, beta.clamp_min(1.0), 1.0)
        return 1.0 / beta

    def extra_repr(self) -> str:
        return f"{self.coefficients}, floor={self.floor:g}"
