"""A statistic is stated once: what torch, the CPU kernels and reports know of it comes from its definition."""

import math

import torch

from regard._backends.cpu.attention import kernels
from regard.health.measure import histogram
from regard.health.report import glossary
from regard.statistics import NAMES, State
from regard.statistics.definitions import DEFINITIONS, Row
from regard.statistics.state import SPOKEN


def test_everybody_lists_the_definitions():
    assert tuple(DEFINITIONS) == NAMES == tuple(kernels.REQUIRED_SUMS) == tuple(SPOKEN)
    assert set(histogram.LAYOUT) - set(glossary.RATIOS) == set(NAMES) == set(glossary.STATISTICS) - set(glossary.RATIOS)
    scales = [scale for scale, _, _ in histogram.LAYOUT.values()]
    assert len(set(scales)) == sum(a != b for a, b in zip(scales, ["", *scales], strict=False))  # side by side


def test_a_row_that_sees_no_key_has_what_the_definition_says():
    none = torch.zeros(1, 1, dtype=torch.float64)
    fields = dict.fromkeys(State.__dataclass_fields__, none) | dict(top=none - math.inf)
    from regard import normalizers

    found = State(**fields).finish(normalizers.get("softmax"))
    assert {name: float(x) for name, x in found.items()} == {name: one.bare for name, one in DEFINITIONS.items()}


def test_a_nearly_one_hot_row_keeps_its_digits():
    """log1p of torch, whose derivative is exact, and the written one agree down to the smallest numbers."""
    one = torch.ones(3, dtype=torch.float64)
    others = torch.tensor([1e-300, 1e-18, 0.5], dtype=torch.float64).requires_grad_()
    row = Row(**dict.fromkeys(Row._fields, one) | dict(others=others, lower=0.0 * one, alive=one > 0))
    entropy = SPOKEN["entropy"](row)
    torch.testing.assert_close(entropy, torch.log1p(others), rtol=1e-15, atol=0.0)
    (slope,) = torch.autograd.grad(entropy.sum(), others)
    torch.testing.assert_close(slope, 1.0 / (1.0 + others.detach()), rtol=1e-12, atol=0.0)
