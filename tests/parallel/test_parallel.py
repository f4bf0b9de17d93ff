"""Context parallel on 2, 3 and 4 gloo processes: shards give what the whole gives; a lost rank ends the others."""

import pytest
import torch
import torch.distributed as dist
from parallel_cases import bytes_sent, dies, every_case, large_logits, masked, odd_pieces, same_bits, triton_parts
from parallel_models import (
    clipped_after_a_change_of_layers,
    clipped_shards,
    clipped_where_all_layers_are_dropped,
    clipped_where_layers_are_dropped,
    examined,
    examined_in_part,
    head_sharded,
    in_a_model,
)
from parallel_refused import all_full, raises_inside, refused
from rank_processes import RankProcesses

import regard
from regard.parallel.layout import spans, spans_of_lengths


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_give_the_whole(world):
    with RankProcesses(world) as ranks:
        ranks(every_case)
        ranks(masked)
        ranks(odd_pieces)
        ranks(large_logits)
        ranks(bytes_sent)
        bits = ranks(same_bits)
        assert all(other == bits[0] for other in bits)
        if world != 3:  # no ring: they gather from all ranks alike
            ranks(examined)
            ranks(examined_in_part)
            ranks(head_sharded)
            ranks(clipped_shards)
            ranks(clipped_where_layers_are_dropped)
            ranks(clipped_where_all_layers_are_dropped)
            ranks(clipped_after_a_change_of_layers)
            ranks(refused)
        if world == 2:
            ranks(in_a_model)
            ranks(triton_parts)


@pytest.mark.parametrize(("who", "how"), [(1, "killed"), (1, "stalled"), (0, "killed")])
def test_a_lost_rank_ends_the_others_within_the_timeout(who, how):
    """In a ring of three both others wait for the lost rank itself, and name it."""
    ranks = RankProcesses(3, timeout=5.0)
    try:
        found = ranks.answers(dies, who, how, 3, ranks={0, 1, 2} - {who}, wait=90)
        for fine, answer in found.values():
            assert fine, answer
            seconds, rank, step, message = answer
            assert rank == who and f"lost contact with rank {who} at step 'ring forward" in message, message
            assert step.startswith("ring forward") and seconds < 30
    finally:
        ranks.kill()


def test_a_rank_that_raises_in_a_call_ends_the_others():
    ranks = RankProcesses(2, timeout=3.0)
    try:
        (theirs, text), own = ranks(raises_inside)
        assert own == ("MemoryError", "no room for the scores")
        assert theirs == "RankError" and "rank 0 lost contact with" in text
    finally:
        ranks.kill()


def test_what_all_ranks_raise_alike_leaves_them_able_to_try_again():
    with RankProcesses(3, timeout=20.0) as ranks:
        ranks(all_full)


@pytest.mark.parametrize("adaptive", [True, False])
def test_in_16_bits_a_scale_per_head_learns_as_in_one_call(adaptive):
    """It is part of the temperature there, also of the one that a policy measures with."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=draw).bfloat16()
    temperature = regard.temperature.Adaptive() if adaptive else 0.1 + torch.rand(1, 2, 40, 1, generator=draw)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for attention in (regard.attention, regard.parallel.attention):
            scale = torch.tensor([0.7, -1.3], requires_grad=True)
            out = attention(q, k, v, scale=scale, temperature=temperature)
            found += torch.autograd.grad(out.float().square().sum(), scale)
        assert torch.allclose(*found, rtol=5e-4)
    finally:
        dist.destroy_process_group()


def test_balanced_ranks_have_equal_causal_work():
    for length, world in ((64, 4), (63, 3), (1000, 7)):
        work = [sum(sum(range(start, stop)) for start, stop in own) for own in spans(length, world)]
        assert max(work) - min(work) <= length, work
        covered = sorted(i for own in spans(length, world) for start, stop in own for i in range(start, stop))
        assert covered == list(range(length))


def test_shards_of_the_wrong_length_are_refused():
    with pytest.raises(
        ValueError, match="rank 0 holds 5 positions, but the balanced layout of 8 over 2 ranks gives it 4"
    ):
        spans_of_lengths([5, 3], "balanced", "q")
    assert spans_of_lengths([5, 0, 3], "contiguous", "q") == [[(0, 5)], [(5, 5)], [(5, 8)]]
