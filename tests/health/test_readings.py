"""Readings: exact moments, quantiles within a bin, and a merge that does not care how the rows were dealt out."""

import math
from itertools import pairwise

import pytest
import torch

import regard
from regard.health.measure import histogram
from regard.health.measure.heads import dissimilarity
from regard.health.measure.layer_reading import LayerReading, first_position, position_bin, spreads_of


def spread_of(reading, name, head):
    return spreads_of([reading])[0][head][name]


def statistics(batch=3, heads=2, queries=40, seed=0, sharp=1.0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, queries, 8) for _ in range(3))
    return regard.attention(sharp * q, k, v, is_causal=True, return_stats=True)[1]


@pytest.mark.parametrize("sharp", [0.05, 1.0, 30.0])
def test_every_statistic_as_computed_at_once(sharp):
    stats = statistics(sharp=sharp)
    reading = LayerReading(2)
    for row in range(3):
        reading.update({name: x[row : row + 1] for name, x in stats.items()})
    for name, x in stats.items():
        for head in range(2):
            values, spread = x[:, head].double().flatten(), spread_of(reading, name, head)
            assert spread.count == 120
            assert spread.mean == pytest.approx(values.mean().item(), rel=1e-6, abs=1e-9)
            assert spread.std == pytest.approx(values.std(correction=0).item(), rel=1e-4, abs=1e-6)
            assert spread.min == values.min()
            assert spread.max == values.max()
            ordered = values.sort().values
            for share in (0.05, 0.5, 0.95):
                low, high = (ordered[min(max(round(share * 120) + step, 0), 119)].item() for step in (-3, 2))
                slack = 0.07 * max(abs(low), abs(high)) + 0.06
                assert low - slack <= spread.quantile(share) <= high + slack, (name, share)


@pytest.mark.parametrize("sharp", [30.0, 200.0])
def test_quantiles_of_a_collapsed_head_are_right_in_their_size(sharp):
    """Within a tenth, over every decade that matters; below the first bin's edge they say no more than that."""
    stats = statistics(queries=200, sharp=sharp)
    reading, rows = LayerReading(2).update(stats), stats.visible_keys >= 2
    stats = {**stats, "entropy_ratio": stats.entropy / stats.visible_keys.log()}
    for name in ("entropy", "entropy_ratio"):
        for head in range(2):
            values = stats[name][:, head][rows[:, head]].double()
            spread = spread_of(reading, name, head)
            for share in (0.2, 0.5, 0.8) if name == "entropy_ratio" else (0.5, 0.8):
                low, high = values.quantile(share - 0.02).item(), values.quantile(share + 0.02).item()
                told, edge = spread.quantile(share), histogram.least(name)
                assert told <= edge if low < edge else 0.89 * low <= told <= 1.12 * high, (name, share)
    assert stats["entropy"].quantile(0.3) < 1e-3  # the linear bins of before gave 0.01


def test_rows_with_one_key_have_no_entropy_ratio():
    reading = LayerReading(2).update(statistics())
    assert spread_of(reading, "entropy", 0).count == 120
    assert spread_of(reading, "entropy_ratio", 0).count == 117


def test_ratios_are_those_to_a_uniform_row():
    stats = statistics()
    reading, some = LayerReading(2).update(stats), stats.visible_keys >= 2
    n = stats.visible_keys
    for name, ratio in (("entropy_ratio", stats.entropy / n.log()), ("gain_ratio", stats.gradient_gain / (1 - 1 / n))):
        for head in range(2):
            truth = ratio[:, head][some[:, head]].double().mean().item()
            assert spread_of(reading, name, head).mean == pytest.approx(truth, rel=1e-6), name


def test_rows_that_do_not_count():
    stats = statistics()
    rows = torch.rand(3, 40) > 0.5
    reading = LayerReading(2).update(stats, rows)
    assert spread_of(reading, "distance", 1).mean == pytest.approx(stats.distance[:, 1][rows].mean().item(), rel=1e-6)
    assert spread_of(LayerReading(2).update(stats, torch.zeros(3, 40, dtype=torch.bool)), "entropy", 0).count == 0


def test_merging_does_not_depend_on_the_tree():
    stats = statistics(batch=8)
    parts = [LayerReading(2).update({name: x[i : i + 1] for name, x in stats.items()}) for i in range(8)]
    whole = LayerReading(2).update(stats)
    left = parts[0]
    for part in parts[1:]:
        left = left.merge(part)
    pairs = [a.merge(b) for a, b in zip(parts[4:], parts[:4], strict=True)]
    tree = pairs[0].merge(pairs[3]).merge(pairs[2].merge(pairs[1]))
    for merged in (left, tree):
        for name in ("count", "mean", "square", "low", "high", "curve", "curve_count", "products", "totals"):
            torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
        assert torch.equal(merged.histogram, whole.histogram)
    with pytest.raises(ValueError, match="2 and 3 heads"):
        whole.merge(LayerReading(3))


def test_memory_does_not_grow_with_rows():
    def size(reading):
        return sum(x.numel() * x.element_size() for x in vars(reading).values() if isinstance(x, torch.Tensor))

    assert size(LayerReading(2).update(statistics(queries=4))) == size(LayerReading(2).update(statistics(queries=400)))


def test_curves_follow_the_position():
    stats = statistics(queries=100)
    *_, last = LayerReading(2).update(stats).curves(1)["max_weight"]
    at = [position for position in range(100) if position_bin(torch.tensor(position)) == position_bin(torch.tensor(99))]
    assert last[0] == at[0]
    assert last[1] == pytest.approx(stats.max_weight[:, 1, at].mean().item(), rel=1e-5)
    for position in (0, 1, 15, 16, 17, 100, 5000, 10**6):
        assert first_position(int(position_bin(torch.tensor(position)))) <= position


def test_twins_are_alike_and_strangers_are_not():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 60, 8) for _ in range(3))
    q[:, 2], k[:, 2] = q[:, 0], k[:, 0]
    (alike,) = dissimilarity([LayerReading(3).update(regard.attention(q, k, v, return_stats=True)[1])])
    assert alike[0, 2] < 1e-6
    assert alike[0, 1] > 0.5


@pytest.mark.parametrize("name", histogram.NAMES)
def test_a_value_lies_between_the_edges_of_its_bin(name):
    edges = histogram.edges(name)
    assert len(edges) == histogram.BINS + 1
    assert all(a < b for a, b in pairwise(edges))
    values = torch.tensor([(edges[at] + edges[at + 1]) / 2 for at in range(histogram.BINS)], dtype=torch.float64)
    found = histogram.find_bins(values.expand(len(histogram.NAMES), 1, -1).contiguous())
    placed = found[histogram.NAMES.index(name), 0]
    assert torch.equal(placed, torch.arange(histogram.BINS))


def test_shares_below_an_edge_are_exact():
    counts = torch.zeros(histogram.BINS, dtype=torch.int64)
    for gain in (1e-6, 5e-5, 0.99e-4, 1.01e-4, 0.3):
        placed = histogram.find_bins(torch.full((len(histogram.NAMES), 1, 1), gain, dtype=torch.float64))
        counts[placed[histogram.NAMES.index("gain_ratio"), 0, 0]] += 1
    assert histogram.share_below("gain_ratio", counts, 1e-4) == pytest.approx(0.6)
    assert math.isnan(histogram.quantile("gain_ratio", torch.zeros(histogram.BINS, dtype=torch.int64), 0.5, 0.0, 1.0))


@pytest.mark.parametrize("name", histogram.NAMES)
def test_shares_below_a_value_are_those_of_its_scale(name):
    """With one row in each bin an edge has as many rows below it as bins; the middle of a bin has half a row more."""
    scale, low, high = histogram.LAYOUT[name]
    counts = torch.ones(histogram.BINS, dtype=torch.int64)
    for at in (1, 100, 256, 300, 511):
        middle = histogram._off_scale(scale, low + (high - low) * (at + 0.5) / histogram.BINS)
        assert histogram.share_below(name, counts, histogram.edges(name)[at]) == pytest.approx(
            at / histogram.BINS, rel=1e-6
        )
        assert histogram.share_below(name, counts, middle) == pytest.approx((at + 0.5) / histogram.BINS, rel=1e-6)


def test_a_prediction_counts_where_a_row_does():
    reading = LayerReading(2)
    for rows in (None, torch.zeros(1, 3, dtype=torch.bool), torch.tensor([[True, False, False]])):
        reading.add_prediction(torch.tensor([1.0, 3.0]), rows)
    assert reading.calls == 2 and reading.predicted.tolist() == [2.0, 6.0]


def test_a_share_out_of_range_is_reported():
    with pytest.raises(ValueError, match="share must lie in"):
        spread_of(LayerReading(2).update(statistics()), "entropy", 0).quantile(50)
