"""`MultiheadAttention(gate=…, forget_gate=True)`: by hand from its own weights, with a cache, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.nn import MultiheadAttention
from regard.nn.validation import GATES, SCORES

WIDTH, HEADS, LENGTH = 16, 4, 6


def inputs(seed=0, length=LENGTH):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("score", SCORES)
def test_the_gate_multiplies_the_heads_before_the_output_projection(gate, score):
    layer = MultiheadAttention(WIDTH, HEADS, score=score, gate=gate, normalizer="entmax15")
    x = inputs()
    heads = []
    layer.out_proj.register_forward_pre_hook(lambda module, given: heads.append(given[0]))
    out, stats = layer(x, is_causal=True, return_stats=("entropy",))
    own, layer.gate = layer.gate, None
    _, plain = layer(x, is_causal=True, return_stats=("entropy",))
    gated, ungated = heads
    torch.testing.assert_close(split(gated), split(ungated) * torch.sigmoid(split(own(x))))
    torch.testing.assert_close(stats.entropy, plain.entropy)
    out.square().sum().backward()
    assert own.weight.grad.abs().sum() > 0
    assert own.weight.shape[0] == {"head": HEADS, "element": WIDTH}[gate]


def test_the_forget_gate_is_the_sum_of_log_gates_between():
    layer = MultiheadAttention(WIDTH, HEADS, forget_gate=True)
    x = inputs()
    out, stats = layer(x, is_causal=True, return_stats=("entropy", "logsumexp"))
    total = F.logsigmoid(layer.forget_gate(x)).transpose(1, 2).cumsum(-1)
    q, k, v = (split(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    bias = total[..., :, None] - total[..., None, :]
    o, _, want = regard.reference.attention(q, k, v, bias, is_causal=True, return_stats=("entropy", "logsumexp"))
    torch.testing.assert_close(out, layer.out_proj(o.float().transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)
    for name in want:
        torch.testing.assert_close(stats[name].double(), want[name], atol=1e-5, rtol=1e-5)
    out.square().sum().backward()
    assert layer.forget_gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"forget_gate": True, "gate": "head"}, {"gate": "element", "kv_heads": 2}])
def test_token_by_token_is_the_whole(options):
    layer = MultiheadAttention(WIDTH, HEADS, **options).eval()
    x = inputs()
    want, cache, found = layer(x, is_causal=True), True, []
    for first, last in ((0, 3), (3, 4), (4, 6)):
        out, cache = layer(x[:, first:last], is_causal=True, cache=cache)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1), want, atol=1e-5, rtol=1e-5)
    assert (cache.log_gates is not None) == ("forget_gate" in options)


def test_packed_documents_forget_within_themselves():
    layer = MultiheadAttention(WIDTH, HEADS, forget_gate=True)
    x = inputs()[:1]
    out = layer(x, is_causal=True, cu_seqlens=[0, 2, 6])
    want = torch.cat([layer(x[:, :2], is_causal=True), layer(x[:, 2:], is_causal=True)], 1)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_a_window_and_a_mask_beside_the_forget_gate():
    layer = MultiheadAttention(WIDTH, HEADS, forget_gate=True)
    x = inputs()
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-2)
    want = layer(x, is_causal=True, attn_mask=near)
    torch.testing.assert_close(layer(x, is_causal=True, window=(2, None)), want, atol=1e-5, rtol=1e-5)
    pair = (regard.Mask.window(2, None), None)
    torch.testing.assert_close(layer(x, is_causal=True, attn_mask=pair), want, atol=1e-5, rtol=1e-5)


def test_torchs_weights_beside_a_gate():
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = MultiheadAttention.from_torch(theirs, gate="head")
    with torch.no_grad():
        ours.gate.weight.zero_(), ours.gate.bias.fill_(40.0)  # open
    x = inputs()
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiheadAttention(8, 2, gate="row"), "gate must be None, 'head' or 'element', got 'row'"),
        (lambda: MultiheadAttention(8, 2, sink=1), "sink must be True, a learned logit per head, or False, got 1"),
        (lambda: MultiheadAttention(8, 2, temperature=-1), "temperature must be a positive, finite number, got -1"),
        (lambda: MultiheadAttention(8, 2, forget_gate=1), "forget_gate must be True or False, got 1"),
        (lambda: MultiheadAttention(16, 4, forget_gate=True)(inputs()), "forget_gate=True needs is_causal=True"),
        (
            lambda: MultiheadAttention(16, 4, forget_gate=True)(inputs(), inputs(1, 3), is_causal=True),
            "as many new keys as queries",
        ),
        (
            lambda: MultiheadAttention(16, 4, forget_gate=True)(
                inputs(), is_causal=True, cache=MultiheadAttention(16, 4)(inputs(), cache=True)[1]
            ),
            "cache must come from this module",
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_two_biases_are_refused():
    layer = MultiheadAttention(16, 4, forget_gate=True)
    with pytest.raises(TypeError, match="attn_mask takes one bias"):
        layer(inputs(), is_causal=True, attn_mask=regard.bias.alibi(4))
