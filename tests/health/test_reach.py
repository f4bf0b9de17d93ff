"""Attention under torch.vmap runs and is reported as unmeasured; torch's op is captured under each of its names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.capture.call import UNDER_VMAP

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of vmap itself


class Two(nn.Module):
    """Attention by `call(heads)` in one module, plainly in the next."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = One(call), One(lambda x: F.scaled_dot_product_attention(x, x, x))

    def forward(self, x):
        return self.second(self.first(x))


class One(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.inner = call, nn.Linear(8, 8)

    def forward(self, x):
        return self.call(self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


X = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(2))
MAPPINGS = {
    "batch": lambda x: torch.vmap(lambda a: F.scaled_dot_product_attention(a, a, a))(x),
    "heads too": lambda x: torch.vmap(torch.vmap(lambda a: F.scaled_dot_product_attention(a, a, a)))(x),
    "bias": lambda x: torch.vmap(lambda a, b: F.scaled_dot_product_attention(a, a, a, b))(x, BIAS),
    "gradient": lambda x: torch.vmap(torch.func.grad(lambda a: F.scaled_dot_product_attention(a, a, a).sum()))(x),
    "regard": lambda x: torch.vmap(lambda a: regard.attention(a, a, a, normalizer="sparsemax"))(x),
}


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_attention_under_vmap_is_reported_and_runs_on(mapping):
    model = Two(MAPPINGS[mapping])
    outputs = []
    model.register_forward_hook(lambda module, given, output: outputs.append(output.detach()))
    model(X)
    report = regard.examine(model, [X])
    assert {head.layer for head in report.heads} == {"second"}
    assert report.unmeasured == [("first", UNDER_VMAP)]
    torch.testing.assert_close(outputs[1], outputs[0])


def test_a_monitor_and_qk_clip_report_it_too():
    model = Two(MAPPINGS["batch"])
    told = pytest.warns(regard.health.AttentionWarning, match=r"first: not watched: .* under torch\.vmap")
    with told, regard.Monitor(model, every=1) as monitor:
        model(X)
    assert monitor.unmeasured == {"first": UNDER_VMAP}
    regard.qk_clip(model, 10.0)
    for _ in range(2):
        model(X)
        clipped = regard.qk_clip(model, 10.0)
        assert clipped.skipped["first"] == UNDER_VMAP and "second" in clipped.max_logit
    regard.qk_clip.stop(model)


@pytest.mark.parametrize("op", ["packet", "overload", "builtin"])
def test_torchs_own_op_by_name_is_captured(op):
    packet = torch.ops.aten.scaled_dot_product_attention
    attention = dict(packet=packet, overload=packet.default, builtin=torch._C._nn.scaled_dot_product_attention)[op]
    model = Two(lambda x: attention(x, x, x, None, 0.0, True, scale=0.7))
    report = regard.examine(model, [X])
    assert report.unmeasured == [] and [head.layer for head in report.heads] == ["first"] * 2 + ["second"] * 2
    x = model.first.inner(X).detach().unflatten(-1, (2, 4)).transpose(1, 2)
    expected = regard.reference.attention(x, x, x, is_causal=True, scale=0.7, return_stats=True)[2]
    for head, entropy in zip(report.heads, expected.entropy.mean((0, 2)).tolist(), strict=False):
        assert head.statistics["entropy"].mean == pytest.approx(entropy, rel=1e-5)
