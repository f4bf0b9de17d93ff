"""Dense masks under Triton's interpreter: bits, intervals, lengths, and the two kernels of which one computes."""

from __future__ import annotations

import dataclasses

import attention_data
import pytest
import torch

pytest.importorskip("triton")
from attention_data import Poisoned, make
from interval_data import check_backward, check_forward

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.masks import dense as dense_mask
from regard._call.problem import Forward

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy overflows where a GPU does too
]
B, H, M, N = 2, 2, 21, 70
SIZES = dict(b=B, h=H, g=1, m=M, n=N)


@pytest.fixture(autouse=True)
def two_kernels(monkeypatch):
    """Fresh tensors hold NaN, and every masked call has a kernel of its own for intervals."""
    for module in (attention, dense_mask):
        monkeypatch.setattr(module, "torch", Poisoned())
    monkeypatch.setattr(dense_mask, "LEAST_SCORES", 0)
    choose, choose_backward = registry.choose, registry.choose_backward

    def another(kernel, problem):
        return kernel if problem.mask is not None else kernel._replace(name="of intervals")

    monkeypatch.setattr(registry, "choose", lambda p: another(choose(p), p))
    monkeypatch.setattr(registry, "choose_backward", lambda call: another(choose_backward(call), call.problem))


def draw_padding(*lead, left=False):
    """Right or left padding, [*lead, N]; one batch entry sees nothing."""
    ends = torch.randint(1, N + 1, lead, generator=torch.Generator().manual_seed(0))[..., None]
    j = torch.arange(N)
    shown = j >= N - ends if left else j < ends
    return shown & (torch.arange(lead[0]) != 1).reshape(-1, *[1] * len(lead))


MASKS = {
    "a row for each entry": draw_padding(B, 1, 1),
    "left": draw_padding(B, 1, 1, left=True),
    "a row for all": draw_padding(1, 1, 1),
    "each row": draw_padding(B, 1, M),
    "each head": draw_padding(B, H, M, left=True),
    "heads of all entries": draw_padding(1, H, M),
    "transposed in memory": draw_padding(B, 1, M).mT.contiguous().mT,
    "whole rows": (torch.arange(M) % 3 != 1)[:, None].expand(1, 1, M, 1),
    "causal padding": draw_padding(B, 1, 1) & torch.ones(M, N, dtype=torch.bool).tril(),
    "every second column of a wider one": draw_padding(B, 1, M).repeat_interleave(2, -1)[..., ::2],
}


def spoil(mask, *place):
    """Hide a visible key between two others, or show one far behind the last."""
    spoilt = mask.expand(B, H, M, N).clone()
    row = spoilt[place]
    ends = row.nonzero()
    if len(ends) > 2:
        row[int(ends[len(ends) // 2])] = False
    else:
        row[0], row[N - 1] = True, True
    return spoilt


def problem_of(mask, name="softmax", **options):
    return dataclasses.replace(make(3, name, **SIZES | options), mask=mask.expand(B, H, M, N))


def unpack(p, packed):
    """The mask that the bits say, [B, H, M, N]."""
    (words, each_b, each_h), size, step = packed.bits
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(M)[:, None], torch.arange(N)
    return (words.flatten()[(b * each_b + h * each_h) // 2 * size + i * step + j // 32] >> (j % 32)) & 1 == 1


@pytest.mark.parametrize("kind", MASKS)
def test_bits_and_intervals_of_a_mask(kind):
    p = problem_of(MASKS[kind])
    bare = dense_mask.replace_mask(p)
    packed = dense_mask.pack_mask(p, bare)
    assert torch.equal(unpack(p, packed), p.mask) and not packed.holes
    lo, hi, position = bare.interval
    j = torch.arange(N)
    assert torch.equal((j >= lo[..., None]) & (j < hi[..., None]), p.mask)
    assert torch.equal(position, torch.arange(M, dtype=torch.int32).expand(B, H, M))
    assert bare.mask is None and packed.bits.words.ptr.shape[0] == MASKS[kind].shape[:2].numel()  # each row once


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 1, 20), (1, 0, 7)])
def test_one_hole_empties_every_interval(place):
    p = problem_of(spoil(MASKS["each head"], *place))
    bare = dense_mask.replace_mask(p)
    packed = dense_mask.pack_mask(p, bare)
    assert packed.holes and torch.equal(unpack(p, packed), p.mask)
    assert not bare.interval.any()


def test_lengths_of_a_mask():
    p = problem_of(MASKS["a row for each entry"], "entmax15")
    bare = dense_mask.replace_mask(p)
    assert not dense_mask.pack_mask(p, bare).holes and bare.interval is None
    assert torch.equal(bare.key_lengths, p.mask[:, 0, 0].sum(-1).int())
    for kind in ("left", "each row", "causal padding"):  # intervals, but no lengths
        p = problem_of(MASKS[kind], "entmax15")
        bare = dense_mask.replace_mask(p)
        assert dense_mask.pack_mask(p, bare).holes and not bare.key_lengths.any()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "entmax15"])
@pytest.mark.parametrize("has_hole", [False, True])
def test_one_of_the_two_kernels_computes(name, has_hole):
    """With a hole the kernel of intervals gives empty rows; without one the kernel of masks stores nothing."""
    mask = MASKS["a row for each entry"]
    p = problem_of(spoil(mask, 0, 1, 4) if has_hole else mask, name)
    bare = registry.choose_bare(p)
    packed = dense_mask.pack_mask(p, bare)
    rows = p.q.shape[:3]
    for problem, kernel, computes in (
        ((bare,), registry.choose(bare), not has_hole), ((p, packed), registry.choose(p), has_hole),
    ):  # fmt: skip
        result = Forward(*(torch.full(s, torch.nan) for s in (p.v.new_empty(*rows, p.v.shape[-1]).shape, rows, rows)),
                         torch.full((len(p.stats), *rows), torch.nan))  # fmt: skip
        kernel.run(problem[0], result, *problem[1:])
        if not computes:
            untouched = problem[0] is p
            assert result.o.isnan().all() if untouched else not result.o.any()
        else:
            assert result.o.isfinite().all() and result.o[0].any()


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("kind", "has_hole"),
    [("a row for each entry", False), ("heads of all entries", False), ("transposed in memory", False),
     ("whole rows", False), ("left", True), ("each row", True), ("each head", True)],
)  # fmt: skip
def test_softmax(kind, has_hole):
    mask = MASKS[kind]
    p = problem_of(spoil(mask, 0, 1, 4) if has_hole else mask, stats=statistics.NAMES)
    assert registry.choose_bare(p) is not None
    check_backward(attention, p, check_forward(attention, p))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["softmax1", "sigmoid", "entmax15"])
@pytest.mark.parametrize(("kind", "has_hole"), [("a row for each entry", False), ("left", True)])
def test_other_normalizers(name, kind, has_hole):
    mask = MASKS[kind]
    p = problem_of(spoil(mask, 0, 0, 20) if has_hole else mask, name)
    check_backward(attention, p, check_forward(attention, p))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("options", "has_hole"),
    [(dict(causal=True), True), (dict(causal=True), False), (dict(left=40, right=9), True),
     (dict(lengths=True), True), (dict(temperature=True, softcap=2.0), True), (dict(sink=True), True),
     (dict(sink=True, temperature=True), False)],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_masks_beside_other_options(options, has_hole):
    mask = MASKS["each row"]
    p = problem_of(spoil(mask, 0, 0, 11) if has_hole else mask, **options)
    check_backward(attention, p, check_forward(attention, p))


@pytest.mark.parametrize("has_hole", [False, True])
def test_gradients_of_statistics(has_hole):
    mask = MASKS["each head"]
    p = problem_of(spoil(mask, 0, 0, 11) if has_hole else mask, stats=statistics.with_gradient_inputs(
        ("entropy", "logsumexp", "logit_variance"), make(3, **SIZES).choice))  # fmt: skip
    attention_data.check_backward(attention, p, stats=("entropy", "logsumexp", "logit_variance"))


def test_masks_beside_a_bias_or_an_interval_stay_masks():
    p = problem_of(MASKS["each row"], bias="b")
    assert dense_mask.replace_mask(p) is None
    p = problem_of(MASKS["each row"])
    assert dense_mask.replace_mask(dataclasses.replace(p, interval=torch.zeros(3, B, H, M, dtype=torch.int32))) is None
    assert dense_mask.replace_mask(dataclasses.replace(p, queries=2 * M, first_query=M)) is None
    assert dense_mask.replace_mask(dataclasses.replace(p, mask=None)) is None


def test_small_calls_stay_masks(monkeypatch):
    p = problem_of(MASKS["each row"])
    monkeypatch.setattr(dense_mask, "LEAST_SCORES", B * H * M * N)
    assert dense_mask.replace_mask(p) is not None
    monkeypatch.setattr(dense_mask, "LEAST_SCORES", B * H * M * N + 1)
    assert dense_mask.replace_mask(p) is None
