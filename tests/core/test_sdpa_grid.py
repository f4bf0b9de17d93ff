"""The space of torch's own tests of scaled_dot_product_attention, through `regard.attention`: torch is the peer.

Dense masks of two to four dims, broadcast batches and heads, 2 to 5 dims, empty lengths, odd widths, strides as they
come out of packed projections, gradients of every subset of inputs, fully masked rows, invalid inputs.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard

pytest.importorskip("numba")

ROUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def heads(generator, batch, count, length, width, dtype, layout="plain"):
    """(B, H, L, D), as a projection packed over heads, or over q, k and v, leaves it."""
    if layout == "plain":
        return torch.randn(batch, count, length, width, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "packed heads":
        x = torch.randn(batch, length, count * width, generator=generator, dtype=torch.float64).to(dtype)
        return x.view(batch, length, count, width).transpose(1, 2)
    x = torch.randn(batch, length, 3, count, width, generator=generator, dtype=torch.float64).to(dtype)
    return x[:, :, 1].transpose(1, 2)


def assert_peers(q, k, v, backend, pull=True, **options):
    """Outputs and gradients within 2 × (torch's own error + rounding) of float64."""

    def run(attend, inputs, **extra):
        inputs = [x.detach().requires_grad_(pull) for x in inputs]
        out = attend(*inputs, **extra)
        if not pull:
            return [out.detach()]
        g = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, inputs, g)]

    mask = options.pop("attn_mask", None)
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    exact = run(sdpa, (q.double(), k.double(), v.double()), attn_mask=wide, **options)
    peer = run(sdpa, (q, k, v), attn_mask=mask, **options)
    ours = run(lambda *args, **o: regard.attention(*args, **o, backend=backend), (q, k, v), attn_mask=mask, **options)
    for name, mine, theirs, truth in zip(("out", "dq", "dk", "dv"), ours, peer, exact, strict=False):
        assert mine.shape == truth.shape and mine.dtype == theirs.dtype, name
        allowed = 2 * ((theirs.double() - truth).norm() + ROUND[q.dtype] * (truth.norm() + 1.0))
        assert (mine.double() - truth).norm() <= allowed, name


GRID = list(
    itertools.product(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
        [(1, 1), (7, 7), (8, 103), (103, 8), (64, 64)],
        [8, 16, 33, 72, 128],
        [False, True],
        [None, 0.37],
        ["plain", "packed heads", "packed qkv"],
    )
)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("part", range(6))
def test_the_grid(backend, part):
    for index, (dtype, (m, n), d, causal, scale, layout) in enumerate(GRID):
        if index % 31 != part * 5 or (backend == "reference" and index % 4):  # a sixth of a fifth
            continue
        generator = torch.Generator().manual_seed(index)
        q, k = heads(generator, 2, 3, m, d, dtype, layout), heads(generator, 2, 3, n, d, dtype, layout)
        v = heads(generator, 2, 3, n, d if index % 3 else 40, dtype, layout)
        assert_peers(q, k, v, backend, is_causal=causal, scale=scale)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9, 11), (1, 11), (3, 9, 11), (1, 1, 9, 11), (2, 1, 1, 11), (2, 3, 9, 11)], ids=str)
def test_masks_of_two_to_four_dims(backend, kind, shape):
    generator = torch.Generator().manual_seed(len(shape))
    dtype = torch.float64 if kind == torch.float64 else torch.float32
    q, k, v = (heads(generator, 2, 3, length, 16, dtype) for length in (9, 11, 11))
    shown = torch.rand(shape, generator=generator) < 0.7
    shown[..., 0] = True
    mask = (
        shown if kind == torch.bool else torch.randn(shape, generator=generator).to(kind).masked_fill(~shown, -math.inf)
    )
    assert_peers(q, k, v, backend, attn_mask=mask)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 8), (7, 8), (7, 4)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
        ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((1, 3, 5, 8), (2, 1, 7, 8), (1, 1, 7, 8)),
        ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8), (4, 2, 3, 7, 8)),
        ((2, 3, 5, 8), (7, 8), (3, 7, 8)),
        ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ],
    ids=str,
)
def test_batches_and_heads_broadcast(backend, q, k, v):
    generator = torch.Generator().manual_seed(0)
    assert_peers(*(torch.randn(shape, generator=generator) for shape in (q, k, v)), backend)


@pytest.mark.parametrize("shape", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0), (2, 3, 0, 0)], ids=str)
@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_empty_inputs(shape, backend):
    b, h, m, n = shape
    q, k, v = torch.randn(b, h, m, 8), torch.randn(b, h, n, 8), torch.randn(b, h, n, 8)
    out = regard.attention(q.requires_grad_(), k, v, backend=backend)
    assert out.shape == q.shape and not out.isnan().any()
    out.sum().backward()
    assert q.grad.shape == q.shape and not q.grad.isnan().any()
    if n and h:  # without heads torch 2.11 ends the process
        torch.testing.assert_close(out, sdpa(q, k, v))


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_gradients_of_any_subset_of_inputs(backend, wanted):
    generator = torch.Generator().manual_seed(0)
    ours = [heads(generator, 2, 2, 9, 8, torch.float64).requires_grad_(wish) for wish in wanted]
    theirs = [x.detach().clone().requires_grad_(x.requires_grad) for x in ours]
    out, peer = regard.attention(*ours, backend=backend), sdpa(*theirs)
    assert out.requires_grad == peer.requires_grad
    if any(wanted):
        out.square().sum().backward()
        peer.square().sum().backward()
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize("keys", [7, 11])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_beside_causal_order(backend, keys, additive):
    """As torch's CPU kernels take both since 2.13: what either hides is hidden."""
    generator = torch.Generator().manual_seed(2)
    ours = [heads(generator, 2, 3, length, 8, torch.float64).requires_grad_() for length in (9, keys, keys)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    shown = torch.rand(2, 1, 9, keys, generator=generator) < 0.7
    shown[..., 0] = True
    order = torch.ones(9, keys, dtype=torch.bool).tril()
    mask = torch.randn(shown.shape, generator=generator, dtype=torch.float64).masked_fill(~shown, -math.inf)
    given, both = (mask, mask.masked_fill(~order, -math.inf)) if additive else (shown, shown & order)
    out, peer = regard.attention(*ours, given, is_causal=True, backend=backend), sdpa(*theirs, both)
    torch.testing.assert_close(out, peer)
    pull = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    mine, right = torch.autograd.grad(out, ours, pull), torch.autograd.grad(peer, theirs, pull)
    torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("shape", [(9, 11), (1, 3, 9, 11), (2, 1, 9, 11), (2, 3, 1, 11)], ids=str)
def test_the_gradient_of_an_additive_mask(backend, shape):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (heads(generator, 2, 3, length, 8, torch.float64) for length in (9, 11, 11))
    ours = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    regard.attention(q, k, v, ours, backend=backend).square().sum().backward()
    sdpa(q, k, v, theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_fully_masked_rows_give_zeros_and_no_nan(backend):
    q = torch.randn(2, 3, 6, 8, requires_grad=True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2], mask[1] = False, False
    out = regard.attention(q, q, q, mask, backend=backend)
    out.sum().backward()
    assert (out[0, :, 2] == 0).all() and (out[1] == 0).all() and not q.grad.isnan().any()
    rest = torch.ones(6, dtype=torch.bool).index_fill(0, torch.tensor(2), False)
    torch.testing.assert_close(out[0][:, rest], sdpa(q, q, q, mask)[0][:, rest])


@pytest.mark.parametrize(("query_heads", "key_heads"), [(8, 1), (8, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_grouped_queries(query_heads, key_heads, causal, backend):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (heads(generator, 2, count, 13, 8, torch.float32) for count in (query_heads, key_heads, key_heads))
    assert_peers(q, k, v, backend, enable_gqa=True, is_causal=causal)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(x, x.double(), x),
        lambda f, x: f(x, x[..., :3], x),
        lambda f, x: f(x[0, 0, 0], x, x),
        lambda f, x: f(x, x, x, torch.ones(3, 3, dtype=torch.bool)),
        lambda f, x: f(x, x, x, torch.ones(5, 5, dtype=torch.int64)),
        lambda f, x: f(x.long(), x.long(), x.long()),
        lambda f, x: f(x[:, :2], x, x),
        lambda f, x: f(x, x[:, :2], x[:, :2], enable_gqa=True),
    ],
)
def test_what_torch_refuses_is_refused_in_words(call):
    x = torch.randn(2, 3, 5, 4)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        call(sdpa, x)
    with pytest.raises((ValueError, TypeError)):
        call(regard.attention, x)


@pytest.mark.parametrize("p", [0.22, 0.7])
def test_dropout_keeps_the_mean_and_the_seed_decides(p):
    q = torch.zeros(1, 1, 4, 8)
    v = torch.ones(1, 1, 4000, 1)
    k = torch.zeros(1, 1, 4000, 8)
    for backend in (None, "cpu"):
        torch.manual_seed(0)
        first = regard.attention(q, k, v, dropout_p=p, backend=backend)
        torch.manual_seed(0)
        assert torch.equal(first, regard.attention(q, k, v, dropout_p=p, backend=backend))
        spread = math.sqrt(p / (1 - p) / 4000)
        assert (first - 1).abs().max() < 6 * spread
        assert not torch.equal(first, regard.attention(q, k, v, dropout_p=p, backend=backend))


def test_what_torch_leaves_unchecked_is_refused():
    x = torch.randn(2, 3, 5, 4)
    with pytest.raises(ValueError, match="k and v must have the same length"):
        regard.attention(x, x, x[:, :, :2])
