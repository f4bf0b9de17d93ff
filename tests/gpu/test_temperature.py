"""Temperature policies and qk_clip on the GPU: the fused kernels against the float64 reference, with gradients."""

import pytest
import torch
from torch import nn

import regard
from regard.temperature import Adaptive, Learned, QueryDependent, SSMax

HEADS, WIDTH = 4, 64


def make(name):
    torch.manual_seed(3)
    policy = {
        "learned": lambda: Learned(HEADS, begin=1.3),
        "ssmax": lambda: SSMax(torch.rand(HEADS) + 0.2, learn=True),
        "published": lambda: Adaptive("published"),
        "refit": Adaptive,
        "query": lambda: QueryDependent(HEADS, WIDTH),
    }[name]()
    if isinstance(policy, QueryDependent):
        nn.init.normal_(policy.weight, std=0.1)
    return policy.cuda()


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("sharp", [0.5, 3.0])
@pytest.mark.parametrize("name", ["learned", "ssmax", "published", "refit", "query"])
def test_policies_agree_with_the_reference(name, sharp):
    generator = torch.Generator(device="cuda").manual_seed(1)
    shapes = ((2, HEADS, 300, WIDTH), (2, 2, 300, WIDTH), (2, 2, 300, WIDTH))
    q, k, v = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    q = sharp * q
    results = []
    for wide in (False, True):
        policy = make(name).double() if wide else make(name)
        leaves = [x.double().requires_grad_() if wide else x.clone().requires_grad_() for x in (q, k, v)]
        options = dict(is_causal=True, enable_gqa=True, temperature=policy)
        out = regard.reference.attention(*leaves, **options)[0] if wide else regard.attention(*leaves, **options)
        leaves += list(policy.parameters())
        results.append([out, *torch.autograd.grad(out.cos().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all() and error(got, want) < 2e-3, (tuple(got.shape), error(got, want))


def test_qk_clip_on_the_gpu():
    model = regard.nn.MultiheadAttention(256, 4, kv_heads=2, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model.q_proj.weight[:64] *= 100
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    regard.qk_clip(model, 20.0)  # watching begins
    for _ in range(2):
        model(x, is_causal=True).square().mean().backward()
        clipped = regard.qk_clip(model, 20.0)
        assert [clip.head for clip in clipped.heads] == [0]
        _, stats = model.eval()(x, is_causal=True, return_stats=("max_logit",))
        assert stats.max_logit[:, 0].max().item() == pytest.approx(20.0, rel=0.03)
        model.train()
        with torch.no_grad():
            model.q_proj.weight[:64] *= 10
