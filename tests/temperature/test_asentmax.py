"""ASEntmax: its formula, its gradients, and its sizes."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.temperature import ASEntmax
from regard.temperature.named import named, unsized
from regard.temperature.rows import Rows


def draw_policy(**options):
    torch.manual_seed(0)
    policy = ASEntmax(2, 4, **options).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
    return policy


def test_formula():
    policy = draw_policy(delta=0.5, exponent=2.0)
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    n = torch.arange(1.0, 7.0, dtype=torch.float64).clamp_min(2.0)
    by_query = (torch.einsum("bhmd,hd->bhm", q, w) for w in (policy.beta_weight, policy.gamma_weight))
    beta, gamma = (x + b[:, None] for x, b in zip(by_query, (policy.beta_bias, policy.gamma_bias), strict=True))
    factor = 0.5 + torch.log1p(beta.exp()) * n.log() ** (2.0 * gamma.tanh())
    out = regard.attention(q, k, v, is_causal=True, normalizer="entmax15", temperature=policy)
    by_hand = regard.attention(q, k, v, is_causal=True, normalizer="entmax15", temperature=1.0 / factor[..., None])
    torch.testing.assert_close(out, by_hand)


def test_gradients():
    policy = draw_policy()
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    values = tuple(p.detach().clone().requires_grad_() for p in policy.parameters())

    def call(q, *values):
        given = dict(zip([name for name, _ in policy.named_parameters()], values, strict=True))
        bound = lambda n, rows: torch.func.functional_call(policy, given, (n, rows))  # noqa: E731
        return regard.attention(q, k, v, is_causal=True, normalizer="entmax15", temperature=bound)

    assert torch.autograd.gradcheck(call, (q.requires_grad_(), *values))


def test_larger_gamma_sharpens_longer_rows():
    policy = ASEntmax(1, 4)
    with torch.no_grad():
        policy.gamma_bias.fill_(10.0)
    counts = torch.tensor([[[4.0, 64.0, 4096.0]]])
    rows = Rows(torch.zeros(1, 1, 3, 4), lambda names: {})
    expected = 1.0 / (1.0 + torch.log(torch.tensor(2.0)) * counts.log())
    torch.testing.assert_close(policy(counts, rows), expected)


def test_names_and_refusals():
    assert isinstance(named("asentmax", 2, 4), ASEntmax) and "head_dim=4" in repr(named("asentmax", 2, 4))
    with pytest.raises(ValueError, match=r"ASEntmax\(heads, head_dim\)"):
        unsized("asentmax")
    with pytest.raises(ValueError, match="heads must be an int ≥ 1"):
        ASEntmax(0, 4)
    with pytest.raises(ValueError, match="delta must be a finite number ≥ 0"):
        ASEntmax(2, 4, delta=-1.0)
    with pytest.raises(ValueError, match="got queries of 3 heads of width 4"):
        regard.attention(*torch.randn(3, 1, 3, 5, 4), temperature=ASEntmax(2, 4))
