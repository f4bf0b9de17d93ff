"""Blocks of intervals: they multiply little beside the visible keys, and dense masks that are intervals become them."""

import itertools

import numpy as np
import pytest
import torch

import regard
from regard import Mask, normalizers
from regard._backends.cpu.attention.blocks import Blocks
from regard._backends.cpu.attention.intervals import cut_queries, find_intervals
from regard._call.mask.visible import make_interval
from regard._call.problem import Problem

N = 2048
DOCUMENTS = Mask.documents(cu_seqlens=[0, 700, 700, 1500, N])


def problem(**options):
    x = torch.zeros(1, 8, N, 4)
    return Problem(x, x, x, normalizers.get("softmax"), 1.0, **options)


def multiplied(given):
    """The scores that the blocks of a problem compute, per head."""
    blocks = Blocks(given)
    return sum(np.prod(block.shape) for tasks in blocks.tasks for task in tasks for block in blocks.blocks_of(task)) / 8


@pytest.mark.parametrize("mask", [DOCUMENTS, DOCUMENTS & Mask.causal(), Mask.causal() & Mask.window(511, None)])
def test_blocks_follow_the_interval(mask):
    visible = int(mask.dense(N, N).sum())
    interval = make_interval(mask, None, N, N, torch.device("cpu")).expand(3, 1, 8, N)
    assert visible <= multiplied(problem(interval=interval)) <= 1.3 * visible


def test_a_dense_mask_becomes_an_interval():
    dense = DOCUMENTS.dense(N, N).expand(1, 8, N, N)
    assert multiplied(problem(mask=dense)) <= 1.3 * int(DOCUMENTS.dense(N, N).sum())
    holed = dense.clone()
    holed[0, 0, 5, 3] = False
    assert multiplied(problem(mask=holed)) == N * N


def test_find_intervals():
    shown = torch.tensor([[False, True, True, False], [False] * 4, [True] * 4])
    lo, hi = find_intervals(shown)
    assert lo.tolist() == [1, 0, 0] and hi.tolist() == [3, 0, 4]
    assert find_intervals(torch.tensor([[True, False, True, False]])) is None


def test_small_documents_share_a_block():
    starts = np.arange(64) // 4 * 4
    assert cut_queries(starts, starts + 4, 64, 64, 1) == [(0, 64, 0, 64)]


@pytest.mark.parametrize("ends", [range(0, N + 1, 64), [0, 90, 90, *range(150, N, 50), N]])
def test_parts_of_many_documents_have_no_key_in_common(ends):
    mask = Mask.documents(cu_seqlens=list(ends)) & Mask.causal()
    blocks = Blocks(problem(interval=make_interval(mask, None, N, N, torch.device("cpu")).expand(3, 1, 8, N)))
    spans = sorted(
        (min(block.keys.start for block in found), max(block.keys.stop for block in found))
        for tasks in blocks.tasks
        for task in tasks
        for found in [list(blocks.blocks_of(task))]
    )
    assert blocks.parts == 1 < len(spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("length", [8, 100, 1200])  # one block, few, many
@pytest.mark.parametrize("normalizer", ["softmax1", "entmax15"])
def test_a_document_that_is_not_finite_leaves_the_others_alone(normalizer, length):
    ends = [0, length // 4, length // 4 + 1, length // 2, length]
    mask = Mask.documents(cu_seqlens=ends) & Mask.causal()
    clean = [torch.randn(1, 4, length, 8, generator=torch.Generator().manual_seed(at)) for at in range(3)]
    sick = [x.clone() for x in clean]
    for x in sick:
        x[:, :, ends[2] : ends[3]] = torch.nan
    upstream = torch.randn(1, 4, length, 8, generator=torch.Generator().manual_seed(9))
    found = []
    for inputs in (clean, sick):
        q, k, v = (x.requires_grad_() for x in inputs)
        out, stats = regard.attention(q, k, v, mask, normalizer=normalizer, return_stats=("entropy",), backend="cpu")
        found.append([out, stats.entropy[..., None], *torch.autograd.grad(out, (q, k, v), upstream)])
    others = torch.ones(length, dtype=torch.bool)
    others[ends[2] : ends[3]] = False
    assert found[1][0][:, :, ~others].isnan().all()
    for right, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours[:, :, others], right[:, :, others])
