"""Statistics that no model gave, with every case a reading must bear: rows without keys, with one, sharp and flat."""

import math

import torch

from regard.health.measure.histogram import NAMES


def invented(batch, heads, queries, seed, device="cpu"):
    """Statistics [B, H, M] by name."""
    generator = torch.Generator(device).manual_seed(seed)

    def share():
        return torch.rand(batch, heads, queries, generator=generator, device=device)

    n = (share() * queries).floor()
    n[..., 0], n[..., 1:3] = 0.0, 1.0
    stats = dict(
        visible_keys=n,
        effective_keys=1.0 + n * share(),
        participation=1.0 + n * share(),
        support=n,
        distance=n * share(),
        logit_variance=10.0 ** (8.0 * share() - 6.0),
        max_logit=60.0 * share() - 30.0,
        mean_logit=2.0 * share() - 1.0,
        logsumexp=30.0 * share(),
        mass=(10.0 * share()).round() / 10.0,
        max_weight=share(),
        first_key_mass=share() ** 9,
        gradient_gain=share() ** 7,
        entropy=share() ** torch.where(share() < 0.5, 1.0, 12.0) * n.clamp_min(1.0).log(),
    )
    for name in stats:
        stats[name] = stats[name].masked_fill(n == 0, -math.inf if name in ("max_logit", "logsumexp") else 0.0)
    return stats


def same_reading(plain, other):
    """Equal counts and extremes, sums to rounding, and no value more than a bin away."""
    for name in ("count", "curve_count", "compared", "low", "high"):
        torch.testing.assert_close(getattr(other, name), getattr(plain, name), rtol=1e-6, atol=1e-9)
    for name in ("mean", "square", "curve", "products", "totals"):
        torch.testing.assert_close(getattr(other, name), getattr(plain, name), rtol=2e-5, atol=1e-6)
    assert torch.equal(other.histogram.sum(-1), plain.histogram.sum(-1))
    moved = (other.histogram.cumsum(-1) - plain.histogram.cumsum(-1)).abs().sum((1, 2))  # bins times values
    allowed = 1.0 + 1e-3 * plain.count.sum(1)
    assert bool((moved <= allowed).all()), dict(zip(NAMES, moved.tolist(), strict=True))
