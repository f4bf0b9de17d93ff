"""`regard.Mask`: every normaliser against the reference and against the dense mask; alignment; what is refused."""

import pytest
import torch
import torch._dynamo.testing

import regard
from regard import Mask, normalizers
from regard._call.mask import visible
from regard._call.mask.visible import Visible, resolve_mask
from regard._core.plans import plans

N = 13
PADDED = torch.arange(N) >= torch.tensor([[0], [4]])
MASKS = {
    "causal documents": Mask.documents(cu_seqlens=[0, 5, 5, 9, N]) & Mask.causal(),
    "ids per entry": Mask.documents(ids=torch.tensor([[0] * 6 + [1] * 7, [7] * N])),
    "left padding": Mask.padding(PADDED) & Mask.causal(),
    "right padding": Mask.padding(~PADDED),
    "prefix in a window": Mask.prefix([3, 9]) & Mask.window(5, None),
    "chunks": Mask.chunks(4) & Mask.causal(),
    "intervals per head": Mask.intervals(torch.randint(0, 7, (4, N)), torch.randint(5, N + 1, (4, N))),
}


def draw(queries=N, keys=N, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 8, generator=generator, dtype=dtype) * 2
    k, v = torch.randn(2, 2, 2, keys, 8, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("normalizer", normalizers.names())
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_dense_mask(name, normalizer):
    mask, inputs = MASKS[name], draw()
    options = dict(enable_gqa=True, normalizer=normalizer, return_stats=True)
    out, stats = regard.attention(*inputs, mask, **options)
    dense = mask.dense(N, N)
    assert torch.broadcast_shapes(dense.shape, (2, 4, N, N)) == (2, 4, N, N)
    truth, _, exact = regard.reference.attention(*inputs, dense, **options)
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-5)
    for statistic in stats:
        torch.testing.assert_close(stats[statistic].double(), exact[statistic], atol=2e-4, rtol=2e-4, msg=statistic)
    by_reference = regard.reference.attention(*inputs, mask, **options)[0]
    torch.testing.assert_close(by_reference, truth)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(out, inputs, upstream)
    for gradient, theirs in zip(ours, torch.autograd.grad(truth, inputs, upstream.double()), strict=True):
        torch.testing.assert_close(gradient, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("queries", [1, 4, N, N + 3])
def test_bottom_right(queries):
    q, k, v = draw(queries)
    mask = Mask.causal(bottom_right=True) & Mask.window(6, None, bottom_right=True)
    i = torch.arange(queries)[:, None] + N - queries
    j = torch.arange(N)
    shown = (j <= i) & (j >= i - 6)
    assert torch.equal(mask.dense(queries, N), shown)
    out, stats = regard.attention(q, k, v, mask, enable_gqa=True, normalizer="entmax15", return_stats=True)
    truth, p, _ = regard.reference.attention(
        q, k, v, shown, enable_gqa=True, normalizer="entmax15", return_stats=("mass",)
    )
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.distance.double(), (p * (i - j).abs()).sum(-1), atol=1e-4, rtol=1e-4)


def test_static_masks_keep_their_plan():
    q, k, v = (x.detach() for x in draw())
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    plans.clear()
    for mask in (Mask.chunks(4) & Mask.causal(), Mask.chunks(4) & Mask.causal(), Mask.chunks(5)):
        out = regard.attention(q, k, v, mask, normalizer="sparsemax")
        torch.testing.assert_close(out, regard.attention(q, k, v, mask.dense(N, N), normalizer="sparsemax"))
    assert len(plans) == 2
    ids = torch.arange(N) // 5
    documents = Mask.documents(ids=ids)
    ids[:] = 0
    for mask in (documents & Mask.causal(), documents & Mask.causal(), Mask.documents(ids=torch.arange(N) // 4)):
        out = regard.attention(q, k, v, mask, normalizer="sparsemax")
        torch.testing.assert_close(out, regard.attention(q, k, v, mask.dense(N, N), normalizer="sparsemax"))
    assert len(plans) == 4
    leaf = q.clone().requires_grad_()
    regard.attention(leaf, k, v, Mask.chunks(5), normalizer="sparsemax").sum().backward()
    other = q.clone().requires_grad_()
    regard.attention(other, k, v, Mask.chunks(5).dense(N, N), normalizer="sparsemax").sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_pairs_options_and_block_masks():
    from torch.nn.attention.flex_attention import create_block_mask

    x = draw()[0].detach()
    shown = torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(3)) < 0.7
    options = dict(normalizer="entmax15", is_causal=True, window=(4, None), key_lengths=[N, 6])
    ours = regard.attention(x, x, x, (Mask.prefix([5, 2]), shown), **options)
    dense = Mask.prefix([5, 2]).dense(N, N) & shown
    torch.testing.assert_close(ours, regard.attention(x, x, x, dense, **options))
    block = create_block_mask(lambda b, h, i, j: i - j < 5, None, None, N, N, device="cpu")
    i = torch.arange(N)
    ours = regard.attention(x, x, x, block, normalizer="entmax15")
    torch.testing.assert_close(ours, regard.attention(x, x, x, i[:, None] - i < 5, normalizer="entmax15"))


def test_block_masks_made_of_blocks():
    from torch.nn.attention.flex_attention import BlockMask

    x = draw(64, 64)[0].detach()
    counts, first = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None, None, :, None]
    partial, full = (
        (first + torch.arange(4, dtype=torch.int32)) % 4,
        (first + 1 + torch.arange(4, dtype=torch.int32)) % 4,
    )

    def is_even(b, h, i, j):
        return j % 2 == 0

    block = BlockMask.from_kv_blocks(counts, partial, counts, full, BLOCK_SIZE=16, mask_mod=is_even)
    i, j = torch.arange(64)[:, None], torch.arange(64)
    shown = ((i // 16 == j // 16) & (j % 2 == 0)) | ((i // 16 + 1) % 4 == j // 16)
    ours = regard.attention(x, x, x, block, normalizer="entmax15")
    torch.testing.assert_close(ours, regard.attention(x, x, x, shown, normalizer="entmax15"))


@pytest.mark.parametrize("side", [1 << 31, (1 << 63) - 1, 1 << 70])
def test_sides_beyond_int64_are_no_limit(side):
    i = torch.arange(5)
    assert torch.equal(Mask.window(0, side).dense(5, 5), i[:, None] <= i)
    assert torch.equal(Mask.window(side, 0).dense(5, 5), i[:, None] >= i)
    assert Mask.chunks(side).dense(5, 5).all()
    q = torch.randn(3, 5, 2, 4)
    torch.testing.assert_close(
        regard.attention_varlen(*q, [0, 2, 5], window_size=(side, side)), regard.attention_varlen(*q, [0, 2, 5])
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_narrow_integers_bound_more_keys_than_they_count(dtype):
    x, end = torch.randn(1, 1, 300, 4), torch.tensor([100], dtype=dtype)
    truth = regard.attention(x, x, x, key_lengths=[100], normalizer="sparsemax")
    torch.testing.assert_close(regard.attention(x, x, x, key_lengths=end, normalizer="sparsemax"), truth)
    for mask in (Mask.lengths(end), Mask.intervals(0 * end, end), Mask.lengths(end) & Mask.prefix(end + 20)):
        assert mask.dense(300, 300)[..., 99, 100:].sum() == 0
    torch.testing.assert_close(regard.attention(x, x, x, Mask.intervals(0 * end, end), normalizer="sparsemax"), truth)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of the tensors that vmap makes
def test_documents_compiled_and_mapped():
    x, ends = draw()[0].detach(), torch.tensor([0, 5, 5, N])

    def attend(x, ends):
        return regard.attention(x, x, x, Mask.documents(ends) & Mask.causal(), normalizer="entmax15")

    truth = attend(x, ends)
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True)(x, ends), truth)
    mapped = torch.vmap(lambda ends: attend(x, ends))(torch.stack([ends, torch.tensor([0, 1, 2, N])]))
    torch.testing.assert_close(mapped[0], truth)
    assert not torch.equal(mapped[1], truth)


def test_batches_of_two_dims():
    x = draw()[0].detach().repeat(3, 1, 1, 1)
    mask = (Mask.prefix([1, 2, 3, 4, 5, 6]), regard.bias.alibi(4))
    flat, whole = regard.reference.attention(x, x, x, mask)[0], x.unflatten(0, (3, 2))
    torch.testing.assert_close(regard.reference.attention(whole, whole, whole, mask)[0].flatten(0, 1), flat)
    torch.testing.assert_close(regard.attention(whole, whole, whole, mask).flatten(0, 1), flat.float())


def test_compiled_and_mapped():
    x = draw()[0].detach()
    mask = MASKS["left padding"]
    run = torch.compile(lambda x: regard.attention(x, x, x, mask, normalizer="entmax15"), backend="aot_eager")
    truth = regard.attention(x, x, x, mask, normalizer="entmax15")
    torch.testing.assert_close(run(x), truth)
    mapped = torch.vmap(lambda y: regard.attention(y, y, y, mask, normalizer="entmax15"))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped[0], truth)


def test_a_policy_counts_visible_keys():
    x, mask = draw()[0].detach(), MASKS["causal documents"]
    policy = regard.temperature.SSMax()
    torch.testing.assert_close(
        regard.attention(x, x, x, mask, temperature=policy),
        regard.attention(x, x, x, mask.dense(N, N), temperature=policy),
    )


REFUSED = {
    "a union": (lambda x: Mask.causal() | Mask.prefix(3), TypeError, r"Mask.causal\(\) \| Mask.prefix\(3\).*dense"),
    "a complement": (lambda x: ~Mask.causal(), TypeError, r"~Mask.causal\(\).*dense"),
    "a tensor": (lambda x: Mask.causal() & torch.ones(2, 2, dtype=torch.bool), TypeError, "dense"),
    "holes": (lambda x: Mask.padding(torch.tensor([[True, False, True]])), ValueError, "holes.*dense"),
    "an id that comes back": (lambda x: Mask.documents(ids=[0, 1, 0]), ValueError, "ids.*side by side"),
    "falling cu_seqlens": (lambda x: Mask.documents([0, 5, 3]), ValueError, "cu_seqlens.*never fall"),
    "cu_seqlens and ids": (lambda x: Mask.documents([0, 5], ids=[0]), ValueError, "one of them"),
    "other tokens": (lambda x: regard.attention(x, x, x, Mask.documents([0, 5])), ValueError, "5 tokens.*13"),
    "beyond the keys": (
        lambda x: regard.attention(x, x, x, Mask.intervals([0] * N, [N + 1] * N)), ValueError, "hi .*0, 13",
    ),
    "too long": (lambda x: regard.attention(x, x, x, Mask.lengths([N + 1, 0])), ValueError, "lengths of Mask"),
    "another batch": (lambda x: regard.attention(x, x, x, Mask.prefix([1, 2, 3])), ValueError, "must broadcast"),
    "two batches": (lambda x: (Mask.prefix([1, 2, 3]) & Mask.prefix([1, 2])).dense(N, N), ValueError, r"\(3, 1, 13\)"),
    "a size for a flag": (lambda x: Mask.causal(N), TypeError, "bottom_right must be a bool"),
    "floats": (lambda x: Mask.lengths([1.5]), TypeError, "lengths must be"),
    "a size of 0": (lambda x: Mask.chunks(0), ValueError, "size of Mask.chunks"),
    "a window of −1": (lambda x: Mask.window(-1, 0), ValueError, "left of Mask.window"),
    "a word for a size": (lambda x: Mask.causal().dense("4", 4), ValueError, "queries of Mask.dense must be an int"),
    "a negative size": (lambda x: Mask.causal().dense(4, -1), ValueError, "keys of Mask.dense must be an int"),
    "a word": (lambda x: regard.attention(x, x, x, (Mask.causal(), "alibi")), TypeError, "pair.*got str"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call(draw()[0].detach())


REACH = {
    "cu_seqlens": (lambda: Mask.documents([0, 300, 1000, 1100, 2000]), (1024, 1024)),
    "causal": (lambda: Mask.documents([0, 300, 1000, 1100, 2000]) & Mask.causal(), (1024, 0)),
    "ids": (lambda: Mask.documents(ids=torch.arange(2000)[None] // torch.tensor([[130], [700]])), (768, 768)),
    "one document": (lambda: Mask.documents([0, 2000]), (None, None)),
    "single tokens": (lambda: Mask.documents(ids=torch.arange(2000)), (0, 0)),
    "chunks": (lambda: Mask.chunks(129), (128, 128)),
    "a narrower window": (lambda: Mask.chunks(500) & Mask.window(100, None), (100, 512)),
    "not known": (lambda: Mask.intervals(torch.zeros(2000).long(), torch.ones(2000).long()), (None, None)),
}


@pytest.mark.parametrize(("mask", "expected"), REACH.values(), ids=REACH)
def test_masks_whose_reach_is_known_narrow_the_window(mask, expected):
    """Kernels size their scratch by it; few sizes, because calls are recorded for each."""
    x = torch.empty(2, 1, 2000, 8)
    found, _ = resolve_mask(mask(), Visible(), x, 2000, 2000, False)
    assert (found.left, 0 if found.causal else found.right) == expected and found.interval is not None
    lo, hi, _ = found.interval[:, :, 0].long()
    i, (left, right) = torch.arange(2000), expected
    hi = torch.minimum(hi, i + 1) if found.causal else hi
    seen = lo < hi
    assert left is None or "window" in repr(mask()) or bool((i - lo <= left)[seen].all())
    assert right is None or bool((hi - 1 - i <= right)[seen].all())


@pytest.mark.parametrize("name", MASKS)
def test_masks_within_the_window_that_their_reach_allows(name, monkeypatch):
    """The masks above have few keys, for which the window would be rounded up to none."""
    monkeypatch.setattr(visible, "_round_up", lambda side, keys: side)
    q, k, v = draw()
    for options in (dict(), dict(is_causal=True), dict(window=(3, 2))):
        options |= dict(enable_gqa=True, return_stats=True)
        out, stats = regard.attention(q, k, v, MASKS[name], **options)
        dense = regard.attention(q, k, v, MASKS[name].dense(N, N), **options)
        torch.testing.assert_close(out, dense[0])
        torch.testing.assert_close(stats.visible_keys, dense[1].visible_keys)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("make", [Mask.documents, Mask.lengths, Mask.prefix])
def test_a_mask_keeps_the_numbers_that_it_was_made_of(make, dtype):
    """Of any dtype: a buffer of int64 is refilled for the next batch as one of int32 is."""
    given = torch.tensor([0, 5, 8, N], dtype=dtype)
    mask = make(given)
    before = mask.dense(N, N)
    given[1:] = N
    assert torch.equal(mask.dense(N, N), before) and not torch.equal(make(given).dense(N, N), before)


def test_documents_of_any_length_are_compiled_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(x, mask):
        return regard.attention(x, x, x, mask)

    x = torch.randn(1, 1, 1024, 8)
    for longest in (300, 500, 700):
        mask = Mask.documents([0, longest, 1024])
        torch.testing.assert_close(attend(x, mask), regard.attention(x, x, x, mask))
    assert counter.frame_count == 1
