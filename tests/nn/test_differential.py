"""`nn.DifferentialAttention` against its definition in float64, with a cache, and what is refused."""

import math

import pytest
import torch
from rows_data import ONE_OF_EACH, slow_but

import regard
from regard import normalizers
from regard.nn import DifferentialAttention

WIDTH, HEADS = 24, 3
NAMES = ("entropy", "mass")


def inputs(length=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)


def make(**options):
    torch.manual_seed(1)
    return DifferentialAttention(WIDTH, HEADS, dtype=torch.float64, **options)


def by_definition(layer, x, **options):
    """Equations 1 to 4 of the paper, head by head."""
    d, group = layer.head_dim, HEADS // layer.kv_heads
    a, b = ((layer.lambda_q[n] * layer.lambda_k[n]).sum().exp() for n in (0, 1))
    weight = a - b + layer.lambda_init
    q, k, v = (projection(x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for h in range(HEADS):
        at, shared = slice(2 * d * h, 2 * d * (h + 1)), slice(2 * d * (h // group), 2 * d * (h // group + 1))
        maps = []
        for part in (slice(0, d), slice(d, 2 * d)):
            given = (q[..., at][..., part], k[..., shared][..., part], v[..., shared])
            maps.append(regard.reference.attention(*(y[:, None] for y in given), **options)[1][:, 0])
        o = (maps[0] - weight * maps[1]) @ v[..., shared]
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        heads.append((1.0 - layer.lambda_init) * o)
    return layer.out_proj(torch.cat(heads, -1))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("normalizer", slow_but((*ONE_OF_EACH, "stickbreaking"), normalizers.names()))
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_is_the_papers_definition(normalizer, kv_heads):
    layer, x = make(normalizer=normalizer, kv_heads=kv_heads, layer=3), inputs()
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 2.0)
    out, (first, second) = layer(x, is_causal=True, return_stats=NAMES)
    want = by_definition(layer, x, normalizer=normalizer, is_causal=True)
    torch.testing.assert_close(out, want)
    assert first.entropy.shape == second.entropy.shape == (2, HEADS, 6)
    assert not torch.equal(first.mass, second.mass) or normalizer not in ("sigmoid", "softmax1")
    parameters = list(layer.parameters())
    found, exact = (torch.autograd.grad(y.cos().sum(), parameters) for y in (out, want))
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_lambda_begins_where_the_paper_puts_it():
    for layer in (0, 1, 11):
        assert make(layer=layer).lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer))
    module = make()
    with torch.no_grad():
        module.lambda_q.zero_()
    assert float(module.lambda_.detach()) == pytest.approx(0.2)


def test_token_by_token_is_the_whole():
    layer, x = make().eval(), inputs()
    want, cache, found = layer(x, is_causal=True, window=(3, None)), True, []
    for at in range(6):
        out, cache = layer(x[:, at : at + 1], is_causal=True, window=(3, None), cache=cache)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1), want)


def test_masks_and_key_lengths_hold_for_both_maps():
    layer, x = make(), inputs()
    lengths = torch.tensor([6, 4])
    mask = torch.arange(6) < lengths[:, None, None, None]
    torch.testing.assert_close(layer(x, key_lengths=lengths), layer(x, attn_mask=mask))
    torch.testing.assert_close(layer(x, attn_mask=regard.Mask.lengths(lengths)), layer(x, attn_mask=mask))


def test_second_derivatives():
    layer = make()
    x = inputs(3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x, is_causal=True).sum((0, 1))[:3], (x,), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 5}, "embed_dim .24. must be a multiple of 2·num_heads .10."),
        ({"num_heads": 24}, "embed_dim .24. must be a multiple of 2·num_heads .48."),
        ({"layer": -1}, "layer must be an int ≥ 0"),
        ({"kv_heads": 2}, "multiple of kv_heads"),
        ({"normalizer": "softmaxx"}, "unknown"),
        ({"normalizer": "entmax(alpha=learned)"}, "regard.nn.DifferentialAttention learns no parameter"),
        (
            {"normalizer": normalizers.get("entmax", alpha=torch.ones(3))},
            "regard.nn.DifferentialAttention takes a number for alpha",
        ),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DifferentialAttention(**{"embed_dim": WIDTH, "num_heads": HEADS, **options})
