"""Normalisers from a user's file, of every family, in the CPU rows: discovered, compiled, edited."""

from __future__ import annotations

import contextlib
import textwrap

import pytest
import torch

pytest.importorskip("numba")
from row_oracle import INF, NAN, both_ways, oracle, scores

import regard
from regard import normalizers
from regard._call.problem import Problem
from regard.parallel import merge, plan

pytestmark = pytest.mark.usefixtures("two_threads")

NINTH = """
    import torch
    from regard.normalizers import Ratio, jit, tl

    POWER = {power}

    def reference(scores, visible, theta):
        u = scores.clamp_min(0.0) ** 2 * POWER
        u = u if visible is None else u.masked_fill(~visible, 0.0)
        z = u.sum(-1, keepdim=True)
        return u / (z + 1.0)

    @jit
    def square(s):
        positive = tl.maximum(s, 0.0)
        return positive * positive * POWER

    @jit
    def numerator(e, s, c):
        return square(s)

    @jit
    def numerator_slope(e, s, c):
        return 2 * tl.maximum(s, 0.0) * POWER

    @jit
    def rest(c):
        return c * 0.0 + 1

    normalizer = Ratio(
        name="ninth", formula="", sums_to="< 1", sparse=True, paper="", reference=reference,
        numerator=numerator, numerator_slope=numerator_slope, rest=rest, shift="none",
    )
"""


BELL = """
    import torch
    from regard.normalizers import Pointwise, jit, tl

    def reference(scores, visible, theta):
        p = torch.exp(-scores * scores)
        return p if visible is None else p.masked_fill(~visible, 0.0)

    @jit
    def value(s, theta):
        return tl.exp(-s * s)

    @jit
    def slope(s, theta):
        return -2.0 * s * tl.exp(-s * s)

    normalizer = Pointwise(
        name="bell", formula="", sums_to="≤ n", sparse=False, paper="", reference=reference, value=value, slope=slope
    )
"""


MIXED = """
    import torch
    from regard.normalizers import Parameter, Threshold, jit, tl

    def reference(scores, visible, b):
        x = 0.5 * (scores if visible is None else scores.masked_fill(~visible, float("-inf")))
        high = x.detach().amax(-1, keepdim=True)
        low = high - 1.0
        for _ in range(60):
            middle = (low + high) / 2
            above = value_of((x.detach() - middle).clamp_min(0.0), b).sum(-1, keepdim=True) >= 1.0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        t = (x - low).clamp_min(0.0)
        fall = torch.where(t > 0, b + 2 * (1 - b) * t, 0.0).sum(-1, keepdim=True)
        excess = value_of(t, b).sum(-1, keepdim=True) - 1.0
        return value_of((x - (low + excess / fall.detach())).clamp_min(0.0), b)

    def value_of(t, b):
        return b * t + (1 - b) * t * t

    @jit
    def gain(b):
        return 0.5

    @jit
    def value(t, b):
        return b * t + (1.0 - b) * t * t

    @jit
    def slope(t, b):
        return tl.where(t > 0.0, 0.5 * b + (1.0 - b) * t, 0.0)

    @jit
    def slope_of_weight(p, b):
        return tl.where(p > 0.0, 0.5 * tl.sqrt(b * b + 4.0 * (1.0 - b) * p), 0.0)

    normalizer = Threshold(
        name="mixed", formula="", sums_to="1", sparse=True, paper="", reference=reference,
        parameter=Parameter("b", default=0.0, low=0.0, high=1.0),
        gain=gain, value=value, slope=slope, slope_of_weight=slope_of_weight,
    )
"""


@contextlib.contextmanager
def discovered(folder, name, text):
    """Discovers a normaliser from a file; removes it on exit."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    try:
        normalizers.discover(folder)
        yield normalizers.get(name)
    finally:
        normalizers._members.pop(name, None)


def test_a_threshold_map_that_is_a_power_for_its_default_alone(tmp_path):
    """Taken for one at every parameter, its rows came out as zeros."""
    with discovered(tmp_path, "mixed", MIXED):
        assert not normalizers.get("mixed").is_power and normalizers.get("entmax").is_power
        for b in (0.0, 0.4, 1.0):
            choice = normalizers.get(f"mixed(b={b})")
            s, dp = scores(9, 130, torch.float32, 12), scores(9, 130, torch.float32, 13)
            p, ds, _ = both_ways(s, choice, dp)
            exact = oracle(s, choice, dp)
            torch.testing.assert_close(p.double(), exact[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ds.double(), exact[1], rtol=1e-3, atol=1e-4)
            q, k = scores(1, 8, torch.float32, 14)[None, None], scores(130, 8, torch.float32, 15)[None, None]
            want = regard.reference.attention(q, k, k, normalizer=choice)[0].float()
            torch.testing.assert_close(regard.attention(q, k, k, normalizer=choice), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("return b * t + (1.0 - b) * t * t", "return t * t", "tiles ≠ reference at b = 1"),
        ("0.5 * b + (1.0 - b) * t", "0.25 * b + (1.0 - b) * t", "tile slopes ≠ derivative of the reference at b = 1"),
        ("gain=gain,", "gain=gain, order=2,", r"value must be t\*\*order"),
    ],
)
def test_a_record_is_checked_beside_its_default_too(tmp_path, right, wrong, complaint):
    assert right in MIXED
    with pytest.raises(ValueError, match=complaint), discovered(tmp_path, "mixed", MIXED.replace(right, wrong)):
        pass


def test_a_pointwise_map_whose_slope_needs_the_score(tmp_path):
    with discovered(tmp_path, "bell", BELL) as choice:
        s, dp = scores(9, 130, torch.float32, 12), scores(9, 130, torch.float32, 13)
        s[3, 5], s[4, 6], s[5, 7] = INF, NAN, -INF
        p, ds, _ = both_ways(s, choice, dp, scale=0.7)
        assert p[3:5].isnan().all() and ds[3:5].isnan().all() and p[5, 7] == 0 and ds[5, 7] == 0
        clean = s.masked_fill(~s.isfinite(), 0.0)
        exact = [x.masked_fill(s == -INF, 0.0) for x in oracle(clean, choice, dp, scale=0.7)]
        rest = [0, 1, 2, 5, 6, 7, 8]
        torch.testing.assert_close(p[rest].double(), exact[0][rest], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ds[rest].double(), exact[1][rest], rtol=1e-4, atol=1e-5)


def test_the_rest_of_a_users_ratio_joins_once_where_keys_are_in_parts(tmp_path):
    """The silent 1 beside two halves of the keys, which each rank's part leaves out."""
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(9))
    with discovered(tmp_path, "ninth", NINTH.format(power=1.0)) as choice:
        total, (engine, _) = merge.Total(choice), plan.choose_engine(Problem(q, k, v, choice, 0.5), "cpu")
        for first in (0, 3):
            here = slice(first, first + 3)
            total.add(engine.forward(Problem(q, k[:, :, here], v[:, :, here], choice, 0.5, first_key=first)))
        out = total.finish(Problem(q, k, v, choice, 0.5))[0]
        torch.testing.assert_close(out, regard.attention(q, k, v, normalizer="ninth"))


def test_a_ninth_normaliser_from_a_file_and_its_edit(tmp_path):
    for power in (1.0, 3.0):  # the second time the file has changed: no stale code
        with discovered(tmp_path, "ninth", NINTH.format(power=power)) as choice:
            s, dp = scores(9, 130, torch.float32, 12), scores(9, 130, torch.float32, 13)
            p, ds, _ = both_ways(s, choice, dp)
            exact = oracle(s, choice, dp)
            torch.testing.assert_close(p.double(), exact[0], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(ds.double(), exact[1], rtol=1e-4, atol=1e-5)
