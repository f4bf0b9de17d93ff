"""Calls of the kernel of the largest logits, and what float64 says of them, on any device."""

import math

import torch

from regard._backends.gpu import max_logits

SCALE = 0.25


def draw(queries, keys, *, groups=2, d=24, dtype=torch.float32, device="cpu"):
    """Return q of four heads, k and narrow values, whose logits are mostly negative."""
    torch.manual_seed(queries + keys)
    q = torch.randn(2, queries, 4, d).to(dtype).transpose(1, 2) - 2.0
    k, v = torch.randn(2, groups, keys, d).to(dtype) + 2.0, torch.randn(2, groups, keys, 5).to(dtype)
    return q.to(device), k.to(device), v.to(device)


def note(q, k, v, causal, rows):
    """Return the tensor that the kernel raised from −∞; two numbers more than it may touch."""
    held = torch.full((3 + q.shape[1] + 2,), -math.inf, device=q.device)
    assert max_logits.can_note(q, k, None, SCALE)
    max_logits.note_largest(q, k, v, causal, SCALE, rows, held)
    return held


def expect(q, k, causal):
    """Return all logits in float64, hidden ones −∞."""
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * SCALE
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill(hidden, -math.inf) if causal else s


def check(q, k, v, causal):
    """Assert that all rows, and about 16 of the first sequence beside values, give float64's largest logits."""
    (_, heads, queries, width), keys, step = q.shape, k.shape[2], max(1, q.shape[2] // 16)
    s, bound = expect(q, k, causal), 1e-5 * expect(q.abs(), k.abs(), False).max().item()  # of sums in float32
    whole, few = note(q, k, None, causal, 0), note(q, k, v, causal, 16)
    assert whole[:2].tolist() == few[:2].tolist() == [heads, width] and whole[2] == -math.inf
    assert (whole[3:-2] - s.amax((0, 2, 3))).abs().max() <= bound
    assert (few[3:-2] - s[0, :, (queries - 1) % step :: step].amax((1, 2))).abs().max() <= bound
    norm = v[0, :, :: max(1, keys // 16)].double().norm(dim=-1).mean()
    torch.testing.assert_close(few[2].double(), norm, rtol=1e-4, atol=1e-4)
    assert (whole[-2:] == -math.inf).all() and (few[-2:] == -math.inf).all()


def check_nan(q, k):
    """Assert that the largest of three calls is kept, and that one NaN stays in its head alone."""
    held = torch.full((3 + q.shape[1],), -math.inf, device=q.device)
    for factor in (1.0, 4.0, 0.125):
        max_logits.note_largest(q * factor, k, None, True, SCALE, 0, held)
    bound = 1e-5 * expect(4.0 * q.abs(), k.abs(), False).max().item()
    largest = torch.stack([expect(factor * q, k, True).amax((0, 2, 3)) for factor in (1.0, 4.0, 0.125)]).amax(0)
    assert (held[3:] - largest).abs().max() <= bound
    q = q.clone()
    q[0, 1, q.shape[2] // 2, 3] = math.nan
    max_logits.note_largest(q, k, None, True, SCALE, 0, held)
    max_logits.note_largest(q.nan_to_num(), k, None, True, SCALE, 0, held)
    assert held[4].isnan() and held[[3, *range(5, len(held))]].isfinite().all()
