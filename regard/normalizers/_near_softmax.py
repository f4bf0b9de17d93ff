"""entmax for α close to 1, softmax: p_i = exp(log(1 + k·u_i) / k) with k = α − 1, u_i = s_i − c and c such that Σp = 1.

The same weights as max(k·s − τ, 0)^{1/k}, where 1/k magnifies the rounding of τ without bound; here k = 0 is no limit
but a value like any other, p = exp(u), and every derivative in k exists there.
"""

import math

import torch

TERMS = 20  # of log(1 + w) / w, for |w| < 0.1


def solve(scores, visible, alpha):
    """entmax_α(scores) over the last dimension for 1 ≤ α ≤ 1.1; α a number, or a tensor of size 1 there."""
    if scores.shape[-1] == 0:
        return scores * 1.0
    s, seen, bad, k = _prepared(scores, visible, alpha)
    empty = ~seen.any(-1, keepdim=True)
    c = found = _constant(s.detach(), seen, k.detach())
    for _ in range(3):  # each step doubles the orders of derivatives that c has right; the value stays
        p, fall = _weights(s - c, seen, k, _log1p_ratio)
        step = (p.sum(-1, keepdim=True) - 1.0) / fall.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        c = found + (step - step.detach()) + (c - c.detach())
    return _weights(s - c, seen, k, _log1p_ratio)[0].masked_fill(bad, math.nan)


def _prepared(scores, visible, alpha):
    """Scores below their maximum, which of them count, which rows are lost to a NaN or +inf, and k."""
    bad = scores.isnan() | (scores == math.inf)
    bad = bad if visible is None else bad & visible
    seen = (scores > -math.inf) & ~bad if visible is None else visible & (scores > -math.inf) & ~bad
    k = torch.as_tensor(alpha - 1.0, dtype=scores.dtype, device=scores.device)
    top = scores.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    s = scores.masked_fill(~seen, 0.0) - top.masked_fill(top == -math.inf, 0.0)
    return s, seen, bad.any(-1, keepdim=True), k


def _constant(s, seen, k):
    """c by Newton's steps on log Σp, which is linear in c at k = 0, from above: c ≤ log Σ exp(s), (1 − n⁻ᵏ)/k."""
    with torch.no_grad():
        n = math.log(s.shape[-1])
        highest = torch.where(k > 0, -torch.expm1(-k * n) / k.where(k > 0, 1.0), n)
        c = torch.logsumexp(s.masked_fill(~seen, -math.inf), -1, keepdim=True).clamp_min(0.0)
        c = torch.minimum(c, highest)
        for _ in range(8):
            p, fall = _weights(s - c, seen, k, _log1p_quotient)
            total = p.sum(-1, keepdim=True).clamp_min(1e-300)
            c = c + torch.log(total) * total / fall.sum(-1, keepdim=True).clamp_min(1e-300)
            c = torch.minimum(c.clamp_min(0.0), highest)
        return c.detach()


def _weights(u, seen, k, ratio):
    """(p, −∂p/∂c) = (exp(log(1 + k·u)/k), p / (1 + k·u)), 0 where k·u ≤ −1."""
    w = k * u
    inside = seen & (w > -1.0)
    w, u = w.where(inside, 0.0), u.where(inside, 0.0)
    p = torch.exp(u * ratio(w)).where(inside, 0.0)
    return p, p / (1.0 + w)


def _log1p_ratio(w):
    """log(1 + w) / w, smooth at 0."""
    near = w.abs() < 0.1
    small, large = w.where(near, 0.0), w.where(~near, 1.0)
    series = torch.zeros_like(w)
    for n in range(TERMS, 0, -1):
        series = 1.0 / n - small * series
    return torch.where(near, series, torch.log1p(large) / large)


def _log1p_quotient(w):
    """log1p(x)/x without derivatives at 0."""
    zero = w == 0
    return torch.where(zero, 1.0, torch.log1p(w) / w.masked_fill(zero, 1.0))
