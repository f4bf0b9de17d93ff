"""A monitor over ranks that do not do the same: no run ends, waits or hangs because of it."""

from rank_processes import RankProcesses
from watch_ranks import (
    run_alarms,
    run_clip_on_one_rank,
    run_death_in_collective,
    run_heads_without_group,
    run_one_that_dies,
    run_one_that_raises,
    run_other_micro_batches,
    run_pause,
    run_pipeline_without_group,
    run_uneven,
)


def test_on_alarm_is_called_on_every_rank_at_the_same_step(two):
    (told, incidents), (other, other_incidents) = two(run_alarms)
    assert told == other and told and incidents == other_incidents == [("scores too large", 6)]
    assert told[0][1] - told[0][0] <= 3  # joined a step or two later


def test_uneven_data_under_join(two):
    (messages, rows), (_, others) = two(run_uneven)
    assert rows >= 5 and others == 0
    assert all("Monitor" in text or "QKClip clips nothing: ranks under Dist" in text for text in messages)


def test_other_numbers_of_micro_batches(two):
    (rows, steps, messages), (_, others, _) = two(run_other_micro_batches)
    assert rows == [1, 2, 3, 4] and steps == others == 4 and messages == []


def test_a_pause_and_a_skipped_batch_leave_nobody_out(two):
    (rows, keys, messages), _ = two(run_pause)
    assert rows == 24 and messages == []
    assert keys < 24  # the store forgets samples that all have read


def test_a_clip_on_one_rank_alone_is_refused_rather_than_waited_for(two):
    assert two(run_clip_on_one_rank) == ["QKClip was not made on ranks 1 within 1 s; make it on every rank", ""]


def test_a_rank_that_raises(two):
    assert two(run_one_that_raises) == [20, 3]


def test_pipeline_stages_without_a_group_are_told_of_it(two):
    (steps, messages), (others, _) = two(run_pipeline_without_group)
    assert steps == others == 6
    assert any("hold different layers (pass pipeline_group=)" in text for text in messages)


def test_ranks_with_other_heads_are_refused_without_a_group(two):
    for text in two(run_heads_without_group):
        assert "pass tensor_group=" in text


def test_a_rank_that_dies():
    ranks = RankProcesses(2, timeout=60.0)
    try:
        (fine, (steps, messages)) = ranks.answers(run_one_that_dies, ranks=[0])[0]
    finally:
        ranks.kill()
    assert fine and steps == 20
    assert any("rank 1 sent no sample of step" in text for text in messages)


def test_a_death_inside_the_models_own_collective_is_not_waited_for():
    """Closing the monitor waited five seconds for the samples of a rank that was gone."""
    ranks = RankProcesses(2, timeout=10.0)
    try:
        (fine, (step, seconds)) = ranks.answers(run_death_in_collective, 1, ranks=[0])[0]
    finally:
        ranks.kill()
    assert fine and step == 3 and seconds < 1.0
