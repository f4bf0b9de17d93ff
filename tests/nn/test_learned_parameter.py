"""Parameters of normalisers that `MultiheadAttention` learns: where they start, what they receive, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from regard import normalizers
from regard.nn import MultiheadAttention

STARTS = {"entmax(alpha=learned)": "entmax15", "sigmoid(bias=learned)": "sigmoid(bias=-log(n))"}


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@pytest.mark.parametrize("name", STARTS)
def test_it_starts_where_it_says_and_learns(name, score):
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, normalizer=name, score=score).double()
    plain = MultiheadAttention(8, 2, normalizer=STARTS[name], score=score).double()
    state = copy.deepcopy(layer.state_dict())
    raw = state.pop("parameter.raw")
    plain.load_state_dict(state)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    out, stats = layer(x, is_causal=True, return_stats=("entropy",))
    truth, same = plain(x, is_causal=True, return_stats=("entropy",))
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(stats.entropy, same.entropy)
    out.square().sum().backward()
    found = layer.parameter.raw.grad
    step, losses = 1e-6, []
    for head in range(2):
        for sign in (1.0, -1.0):
            with torch.no_grad():
                layer.parameter.raw.copy_(raw).index_add_(0, torch.tensor([head]), torch.tensor([sign * step]).double())
            losses.append(layer(x, is_causal=True).square().sum())
    slopes = torch.stack([losses[0] - losses[1], losses[2] - losses[3]]) / (2 * step)
    torch.testing.assert_close(found, slopes.detach(), rtol=1e-5, atol=1e-7)


def test_alpha_stays_in_the_kernels_range():
    layer = MultiheadAttention(8, 2, normalizer="entmax(alpha=learned)")
    parameter = normalizers.get("entmax").parameter
    for raw in (-1e4, 1e4):
        with torch.no_grad():
            layer.parameter.raw.fill_(raw)
        assert (layer.parameter.value >= parameter.fused_low).all()
        assert (layer.parameter.value <= parameter.fused_high).all()
        assert layer(torch.randn(1, 4, 8)).isfinite().all()


@pytest.mark.parametrize("name", STARTS)
def test_copies_and_half_precision(name):
    layer = MultiheadAttention(8, 2, normalizer=name, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16)
    assert torch.equal(layer(x), twin(x)) and name in repr(layer)
    missing, unexpected = layer.load_state_dict(MultiheadAttention(8, 2).state_dict(), strict=False)
    assert missing == ["parameter.raw"] and not unexpected


@pytest.mark.parametrize("name", ["softmax(learned)", "entmax(beta=learned)", "relu(learned)"])
def test_what_cannot_be_learned_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot be learned; known: 'entmax\(alpha=learned\)'"):
        MultiheadAttention(8, 2, normalizer=name)
    with pytest.raises(ValueError, match="takes a number for alpha"):
        MultiheadAttention(8, 2, normalizer=normalizers.get("entmax", alpha=torch.ones(2)))
