"""What is derived from a mask lives no longer than the forward, and keeps its gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.capture import call


class Biased(nn.Module):
    """Two layers of attention with one additive mask, which `between` may change in place."""

    def __init__(self, mask, between=lambda mask: None):
        super().__init__()
        self.first, self.second, self.between = Layer(), Layer(), between
        self.mask = nn.Parameter(mask) if mask.requires_grad else mask

    def forward(self, x):
        mask = self.mask.clone()
        x = self.first(x, mask)
        self.between(mask)
        return self.second(x, mask)


class Layer(nn.Module):
    def forward(self, x, mask):
        return F.scaled_dot_product_attention(x, x, x, mask)


X = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))


def expected_gradient(model):
    model(X).square().sum().backward()
    gradient, model.mask.grad = model.mask.grad, None
    return gradient


def test_a_learned_bias_of_zeros_gets_its_gradient():
    model = Biased(torch.zeros(1, 2, 6, 6, requires_grad=True))
    expected = expected_gradient(model)
    with regard.using(model, scale="sqrt"):
        model(X).square().sum().backward()
    torch.testing.assert_close(model.mask.grad, expected)
    assert expected.abs().max() > 0


def test_a_learned_bias_with_hidden_keys_gets_its_gradient():
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    model = Biased(torch.zeros(1, 2, 6, 6, requires_grad=True))
    model.first.register_forward_pre_hook(lambda module, given: (given[0], given[1].masked_fill(hidden, -1e9)))
    expected = expected_gradient(model)
    with regard.using(model, scale="sqrt"):
        model(X).square().sum().backward()
    torch.testing.assert_close(model.mask.grad, expected)


def test_an_evaluation_before_a_step_leaves_the_gradient():
    model = Biased(torch.randn(1, 2, 6, 6, requires_grad=True))
    model.forward = lambda x: model.second(model.first(x, model.mask), model.mask)
    expected = expected_gradient(model)
    with regard.using(model, scale="sqrt"):
        with torch.no_grad():
            model(X)
        for _ in range(2):  # a graph that is kept would be used a second time
            model.mask.grad = None
            model(X).square().sum().backward()
            torch.testing.assert_close(model.mask.grad, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_mask_that_is_changed_in_place_is_read_again(mode):
    def hide_more(mask):
        mask[..., 3:] = -1e9

    model = Biased(torch.zeros(1, 1, 6, 6), hide_more)
    with mode():
        expected = model(X.clone())
        with regard.using(model, scale="sqrt"):
            torch.testing.assert_close(model(X.clone()), expected)
        report = regard.examine(model, [X.clone()])
    assert [head.statistics["visible_keys"].mean for head in report.heads] == [6, 6, 3, 3]


def test_nothing_is_kept_after_a_forward():
    model, kept = Biased(torch.zeros(1, 1, 6, 6)), []
    model.second.register_forward_hook(lambda *_: kept.append(len(call._DERIVED)))
    using = regard.using(model, scale="sqrt")
    model(X)
    assert kept[0] > 0 and not call._DERIVED
    using.restore()


def test_a_cached_call_whose_mask_broadcasts_over_keys():
    class Cached(nn.Module):
        is_causal = True

        def forward(self, x):
            return F.scaled_dot_product_attention(x[:, :, 4:], x, x, torch.ones(1, 1, 2, 1, dtype=torch.bool))

    report = regard.examine(Cached(), [X])
    assert not report.unmeasured and report.heads[0].statistics["visible_keys"].mean == 6
