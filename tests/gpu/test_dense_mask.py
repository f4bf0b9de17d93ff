"""Dense masks that may be intervals, on a Hopper GPU: the kernels of intervals and of masks against dense float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_data import Poisoned, make
from hopper_data import poison
from interval_data import check_backward, check_forward

import regard
from regard import statistics
from regard._backends.gpu import tape
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.masks import dense as dense_mask

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
SHAPE = dict(b=2, h=8, g=4, m=1100, n=1100, d=128, e=128, dtype=torch.bfloat16, device="cuda")
LONG = dict(b=2, h=2, g=1, m=300, n=3300, d=64, e=64, dtype=torch.bfloat16, device="cuda")


@pytest.fixture
def poisoned(monkeypatch):
    poison(monkeypatch)
    monkeypatch.setattr(dense_mask, "torch", Poisoned())
    monkeypatch.setattr(dense_mask, "LEAST_SCORES", 0)


def draw_mask(kind, b, h, m, n, hole):
    """Masks in the shapes that users pass; a hole in one row of the last entry if it has a `hole`."""
    i, j = torch.arange(m)[:, None], torch.arange(n)
    lengths = torch.tensor([n, n // 3])[torch.arange(b) % 2].reshape(b, 1, 1, 1)
    masks = {
        "right": j < lengths,
        "left": j >= n - lengths,
        "each row": (j < lengths).expand(b, 1, m, n).contiguous(),
        "causal": (j >= n - lengths) & (j <= i + n - m),  # rows that see nothing among them
        "each head": (j < lengths) & (j <= i + 40 * torch.arange(h).reshape(h, 1, 1)),
        "transposed": (j < lengths).expand(b, 1, m, n).mT.contiguous().mT,
    }
    mask = masks[kind].cuda()
    if hole:
        rows = mask.shape[2]
        mask = mask.clone()
        mask[-1, -1, rows // 2] = True
        mask[-1, -1, rows // 2, n // 5] = False
    return mask.expand(b, h, m, n)


def with_mask(problem, kind, hole):
    (b, h, m, _), n = problem.q.shape, problem.k.shape[2]
    return replace(problem, mask=draw_mask(kind, b, h, m, n, hole))


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("kind", ["right", "left", "each row", "causal", "each head", "transposed"])
def test_softmax(kind, hole, poisoned):
    problem = with_mask(make(1, **SHAPE, stats=statistics.NAMES), kind, hole)
    assert registry.choose(registry.choose_bare(problem)).name == "hopper"
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("softmax", dict(stats=())), ("softmax", dict(stats=(), causal=True)), ("softmax", dict(stats=(), sink=True)),
     ("softmax1", dict(stats=(), d=64, e=64)), ("sigmoid", dict(stats=())),
     ("softmax", dict(stats=(), dtype=torch.float16)), ("softmax", dict(stats=(), softcap=20.0, left=400))],
    ids=str,
)  # fmt: skip
def test_beside_other_options(name, options, hole, poisoned):
    problem = with_mask(make(2, name, **SHAPE | options), "left", hole)
    assert registry.choose(registry.choose_bare(problem)).name == "hopper"
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


@pytest.mark.parametrize("kind", ["right", "each row", "left"])  # the last is no length
@pytest.mark.parametrize("hole", [False, True])
def test_lists_of_threshold_maps(kind, hole, poisoned):
    problem = with_mask(make(3, "entmax15", **LONG, stats=("entropy", "visible_keys")), kind, hole)
    assert registry.choose(registry.choose_bare(problem)).name == "sparse threshold"
    check_backward(attention, problem, check_forward(attention, problem, slack=2.0), slack=2.0)


def draw_call(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, 2, 8, 2048, 128, generator=generator)
    return [x.to(torch.bfloat16).cuda().requires_grad_() for x in draw]


def test_a_tape_takes_masks_with_holes_and_without(monkeypatch):
    """The same launches serve both: nothing about the mask's entries is known to the host."""
    tape._tapes.clear()
    for seed in range(6):
        mask = draw_mask("each row", 2, 1, 2048, 2048, hole=seed % 2 == 1)
        q, k, v = draw_call(seed)
        out, stats = regard.attention(q, k, v, mask, return_stats=True)
        out.square().sum().backward()
        want, _, exact = regard.reference.attention(q.detach(), k.detach(), v.detach(), mask, return_stats=True)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(stats.entropy.double(), exact.entropy, rtol=1e-3, atol=1e-3)
        again = [x.detach().requires_grad_() for x in (q, k, v)]
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_has_tape", lambda problem: False)
            regard.attention(*again, mask, return_stats=True)[0].square().sum().backward()
        for one, other in zip((q, k, v), again, strict=True):
            assert torch.equal(one.grad, other.grad), seed
    assert any(isinstance(kept, tape.Tape) for kept in tape._tapes.values())


@pytest.mark.parametrize("hole", [False, True])
def test_plain_softmax_waits_for_nothing(hole):
    q, k, v = draw_call(0)
    mask = draw_mask("each row", 2, 1, 2048, 2048, hole)
    path = regard.attention_path(q, k, v, mask)
    assert path.backend == "triton" and "kernel hopper" in path.reason
    for turn in range(4):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")  # the first call may compile
        try:
            out = regard.attention(q, k, v, mask)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
        truths = torch.autograd.grad(want, leaves, torch.ones_like(want))
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
        for ours, truth in zip(grads, truths, strict=True):
            assert (ours.float() - truth).norm() <= 2.4e-2 * truth.norm()
