"""A function in the place of torch's scaled_dot_product_attention: seen through, captured, and left where it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_upper_left

import regard
from regard.health.capture import sdpa_name
from regard.health.capture.sdpa_name import SDPA


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A kernel that no torch function mode sees, as SageAttention's."""
    with torch._C.DisableTorchFunction():
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def wrapper(*args, **kwargs):
    return SDPA(*args, **kwargs)


@pytest.mark.parametrize("function", [kernel, wrapper])
def test_what_replaces_sdpa_is_measured_and_changed(function, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", function)
    model, x = Fused(), torch.randn(2, 5, 8)
    report = regard.examine(model, [x], checks=False)
    assert len(report.heads) == 2 and report.unmeasured == []
    assert F.scaled_dot_product_attention is function
    expected = model(x)
    with regard.using(model, temperature=1.0) as swap:
        assert torch.allclose(model(x), expected, atol=1e-6) and swap.calls == 1
    with regard.using(model, temperature=3.0):
        assert not torch.allclose(model(x), expected, atol=1e-3)
    assert F.scaled_dot_product_attention is function


def test_what_a_user_put_there_survives_torchs_multi_head_attention(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    assert len(regard.examine(layer, [x], checks=False).heads) == 2
    assert F.scaled_dot_product_attention is kernel
    with regard.using(layer, temperature=2.0):
        layer(x)
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)  # meanwhile
    assert F.scaled_dot_product_attention is wrapper


@pytest.mark.parametrize("context", ["monitor", "using"])
def test_torchs_causal_biases_know_an_sdpa_that_was_imported_before(context):
    """Code that holds torch's function, while a monitor or a swap of torch's multi-head attention has its name."""
    found, model, q = [], nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 2, 5, 4)
    own = causal_upper_left(5, 5)
    before = F.scaled_dot_product_attention  # torch's, unless a model of another test is observed for good
    model.register_forward_hook(lambda *_: found.append(SDPA(q, q, q, attn_mask=own)))
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    watch = regard.Monitor(model, every=1) if context == "monitor" else regard.using(model, temperature=1.0)
    with watch:
        model(*(torch.randn(2, 5, 8) for _ in range(3)))
        found.append(SDPA(q, q, q, attn_mask=own))
    found.append(SDPA(q, q, q, attn_mask=own))
    assert len(found) == 3 and all(type(o) is torch.Tensor and torch.allclose(o, expected) for o in found)
    by_name = CausalBias.__dict__["__torch_function__"] is sdpa_name._BY_NAME[CausalBias]
    assert F.scaled_dot_product_attention is before and by_name == (before is SDPA)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_monitor_that_ends_or_begins_within_a_captured_call_leaves_nothing(is_open):
    """A policy runs while a capture has the name, in torch's multi-head attention: taps go beneath it, and away."""
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    other, first = Fused(), F.scaled_dot_product_attention  # torch's, unless a model of another test is observed
    watches = [regard.Monitor(other, every=100)] if is_open else []

    def policy(keys, rows):
        if is_open:
            watches.pop().close()
        else:
            watches.append(regard.Monitor(other, every=100))
        return torch.ones(1)

    with regard.using(model, temperature=policy):
        model(x, x, x, need_weights=False)
    assert len(watches) == (not is_open)
    assert F.scaled_dot_product_attention is first if is_open else F.scaled_dot_product_attention is not SDPA
    for watch in watches:
        watch.close()
    assert F.scaled_dot_product_attention is first
