"""A monitor and QK-clip over ranks: the scalars of one process, one writer, and no rank waits for another's layer."""

import pytest
import torch
from monitor_ranks import (
    run_alone,
    run_clip,
    run_data_parallel,
    run_in_turns,
    run_on_one_rank_only,
    run_pipeline,
    run_tensor_parallel,
    run_with_skipped_layers,
    share,
)
from rank_processes import RankProcesses


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            precise = not name.endswith("median_activation")  # of which the ranks' mean is taken
            assert one[name] == pytest.approx(other[name], rel=1e-5 if precise else 0.1, abs=1e-7), name


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_ranks_give_the_scalars_of_one_process(two, wrap):
    (rows, alarms, samples), (other, other_alarms, _) = two(run_data_parallel, wrap)
    expected, _ = run_alone()
    assert_same(rows, expected)
    assert other == [] and samples == 3  # the first rank alone writes
    assert alarms == other_alarms == []


def test_of_many_ranks_with_the_same_heads_a_few_send_their_tables_in_turns(two):
    """Of a thousand GPUs the first had 210 MB to read and merge in each sample."""
    rows, _ = two(run_in_turns)
    assert_same(rows, run_alone(given=lambda step: share((step + 1) % 2, 2, step))[0])


def test_alarms_are_those_of_all_ranks(two):
    (_, alarms, _), (_, other_alarms, _) = two(run_data_parallel, "ddp", 40.0)
    assert alarms == other_alarms and alarms[0]["alarm"] == "exploding logits" and alarms[0]["step"] == 2


@pytest.mark.slow
def test_eight_ranks_give_the_scalars_of_one_process():
    with RankProcesses(8, timeout=120.0) as eight:
        (rows, _, _), *others = eight(run_data_parallel, "ddp")
    assert_same(rows, run_alone()[0])
    assert all(other[0] == [] for other in others)


def test_a_rank_that_skips_layers_holds_nobody_up(two):
    (rows, samples, layers), _ = two(run_with_skipped_layers)
    assert samples == 3 and layers == {f"layer_0{at}": f"layers.{at}.self_attn" for at in range(3)}
    expected, _ = run_alone()
    shared = [{name: x for name, x in row.items() if "activation" not in name} for row in (rows[2], expected[2])]
    assert_same(shared[:1], shared[1:])  # a block's activations are known from the second run of its layer on
    assert rows[0]["attention/layer_00/max_logit"] == pytest.approx(expected[0]["attention/layer_00/max_logit"])


def test_heads_of_tensor_parallel_ranks_stand_beside_one_another(two):
    rows, other = two(run_tensor_parallel)
    expected = run_tensor_parallel(0, 1)
    assert other == [] and [row.get("head") for row in rows] == [None, 0, 1, 2, 3]
    for one, whole in zip(rows, expected, strict=True):
        numbers = {name: value for name, value in whole.items() if not isinstance(value, str)}
        assert {name: one[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


def test_layers_of_pipeline_stages_stand_after_one_another(two):
    (rows, layers), _ = two(run_pipeline)
    assert [row["step"] for row in rows] == [1, 2] and len(layers) == 4
    assert "attention/layer_03/max_logit" in rows[0]


def test_a_rank_without_a_monitor_is_named(two):
    (messages, samples), _ = two(run_on_one_rank_only)
    assert samples == 2 and len(messages) == 1 and "not made on ranks 1" in messages[0]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_qk_clip_keeps_the_ranks_alike(two, wrap):
    (found, skipped, weight), (other, _, other_weight) = two(run_clip, wrap)
    assert skipped == {} and found == other and torch.equal(weight, other_weight)
    before, after = found
    assert max(before) > 40.0
    assert after == pytest.approx([min(top, 20.0) for top in before], rel=0.01)
