"""The merge laws: parts of a row, however it is cut, give what the whole row gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import normalizers
from regard.statistics import State, of_scores, solve_shift

MERGING = [name for name in normalizers.names() if normalizers.get(name).merges]


@given(seed=st.integers(0, 10_000), name=st.sampled_from(MERGING), size=st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=60, deadline=None)
def test_states_merge_over_any_split(seed, name, size):
    generator = torch.Generator().manual_seed(seed)
    choice = normalizers.get(name)
    s = size * torch.randn(4, 24, generator=generator, dtype=torch.float64)
    s[1] = s[1].round()
    visible = torch.rand(4, 24, generator=generator) > 0.4
    visible[3] = False
    sink = torch.randn(4, 1, generator=generator, dtype=torch.float64) if name in ("softmax", "softmax1") else None
    position = torch.arange(4.0, dtype=torch.float64)[:, None]
    whole = of_scores(s, visible, name, sink=sink)
    shift = solve_shift(s, visible, choice)
    owner = torch.randint(0, 4, (24,), generator=generator)
    parts = []
    for part in range(4):
        at = (owner == part).nonzero().squeeze(-1)
        own = shift if choice.family == "threshold" else solve_shift(s[:, at], visible[:, at], choice)
        parts.append(State.of(s[:, at], visible[:, at], choice, own, position, at.double()))
    merged = parts[0].merge(parts[1], choice).merge(parts[3].merge(parts[2], choice), choice).finish(choice, sink)
    for key in whole:
        assert torch.allclose(merged[key], whole[key], rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("name", [name for name in normalizers.names() if normalizers.get(name).family == "ratio"])
def test_parts_whose_maxima_lie_far_apart_merge(name):
    choice = normalizers.get(name)
    s = torch.tensor([[2000.0, 1999.0, -1500.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    seen, at = torch.ones_like(s, dtype=torch.bool), torch.arange(6.0, dtype=torch.float64)
    parts = []
    for own in (slice(0, 2), slice(2, 6)):
        shift = solve_shift(s[:, own], seen[:, own], choice)
        parts.append(State.of(s[:, own], seen[:, own], choice, shift, at[:1, None], at[own]))
    whole = of_scores(s, normalizer=name)
    for one, two in (parts, parts[::-1]):
        for key, x in one.merge(two, choice).finish(choice).items():
            torch.testing.assert_close(x, whole[key], rtol=1e-9, atol=1e-12, msg=key)
