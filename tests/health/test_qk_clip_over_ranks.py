"""QKClip over ranks that share heads, hold other heads, or other layers: each head takes its own factor."""

import pytest
from clip_ranks import (
    run_dtensor_shards,
    run_local_shards,
    run_local_shards_with_group,
    run_stages,
    run_two_dimensions,
    run_whole,
)
from rank_processes import RankProcesses


def test_heads_of_ranks_with_local_shards_take_their_own_factors(two):
    (whole, after, _, expected), (_, _, _, unwritten) = two(run_whole)
    tops = whole["blocks.0"]
    assert after["blocks.0"] == pytest.approx([min(top, 5.0) for top in tops], rel=0.01)
    (one, one_after, _, rows), (other, other_after, _, _) = two(run_local_shards_with_group)
    assert one["blocks.0"] + other["blocks.0"] == pytest.approx(tops, rel=1e-4)
    assert one_after["blocks.0"] + other_after["blocks.0"] == pytest.approx(after["blocks.0"], rel=1e-3)
    assert unwritten == [] and len(rows) == 2  # the first rank's log has the heads of both
    assert rows == [pytest.approx(row, rel=1e-3) for row in expected] and rows[0]["attention/clipped_heads"] > 2


def test_layers_of_pipeline_stages_are_logged_together(two):
    (tops, rows), (others, _) = two(run_stages)
    assert rows[0]["attention/layer_00/max_logit"] == pytest.approx(tops)
    assert rows[0]["attention/layer_01/max_logit"] == pytest.approx(others) and tops != others


def test_groups_that_cannot_be_known_are_asked_for_at_construction(two):
    for text in two(run_local_shards):
        assert "holds other values than this rank (blocks.0.wq.weight differs)" in text and "tensor_group=" in text


@pytest.mark.parametrize("named", [True, False])
def test_projections_sharded_as_dtensors_are_clipped_by_their_own_heads(two, named):
    ((found, after, *_), is_equal), ((other, *_), other_is_equal) = two(run_dtensor_shards, named)
    assert len(found["blocks.0"]) == len(other["blocks.0"]) == 2 and found != other
    assert is_equal and other_is_equal
    assert max(after["blocks.0"]) == pytest.approx(5.0, rel=0.01)


def test_data_and_tensor_parallel_ranks_from_one_mesh():
    with RankProcesses(4, timeout=60.0) as four:
        found = four(run_two_dimensions)
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]
    assert max(found[0][1] + found[1][1]) == pytest.approx(5.0, rel=0.01)
