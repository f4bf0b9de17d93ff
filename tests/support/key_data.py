"""Checks what keys get against the weights of the float64 oracle."""

import torch

from regard import reference
from regard._backends.gpu.attention import key_reading
from regard._backends.gpu.attention import launch as attention


def check_keys(problem, most, rtol=2e-5, atol=2e-5):
    """Compare both readings of a problem with the reference's weights; returns (index, weight) of its top keys."""
    forward = attention.forward(problem)
    p = reference.weights_of_rows(problem, 0, problem.q.shape[2])
    received = key_reading.sum_over_queries(problem, forward)
    index, weight = key_reading.list_top_keys(problem, forward, most)
    torch.testing.assert_close(received.double(), p.sum(2), rtol=max(rtol, 4e-3), atol=5 * atol)
    torch.testing.assert_close(weight.double(), p.topk(most).values, rtol=rtol, atol=atol)
    assert torch.equal(index < 0, ~(weight > 0))
    found = p.gather(3, index.clamp_min(0)).where(index >= 0, 0.0)
    torch.testing.assert_close(found, weight.double(), rtol=rtol, atol=atol)
    ordered = index.sort(-1).values
    assert ((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0)).all()  # no key twice
    return index, weight
