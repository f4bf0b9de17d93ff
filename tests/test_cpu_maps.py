"""Maps that are written into a file of one's own, of every family, in the CPU rows: found, compiled, and edited."""

from __future__ import annotations

import contextlib
import textwrap

import pytest
import torch

pytest.importorskip("numba")
from test_cpu_rows import INF, NAN, both_ways, oracle, scores

from regard import normalizers

pytestmark = pytest.mark.usefixtures("two_threads")

NINTH = """
    import torch
    from regard.normalizers import Ratio
    from regard.normalizers._language import jit, tl

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
    from regard.normalizers import Pointwise
    from regard.normalizers._language import jit, tl

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
    from regard.normalizers import Threshold
    from regard.normalizers._language import jit, tl

    def reference(scores, visible, theta):
        x = 0.7 * (scores if visible is None else scores.masked_fill(~visible, float("-inf")))
        high = x.detach().amax(-1, keepdim=True)
        low = high - 1.0
        for _ in range(60):
            middle = (low + high) / 2
            t = (x.detach() - middle).clamp_min(0.0)
            above = ((t + t * t) / 2).sum(-1, keepdim=True) >= 1.0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        t = (x - low).clamp_min(0.0)
        fall = torch.where(t > 0, 0.5 + t, 0.0).sum(-1, keepdim=True)
        t = (x - (low + (((t + t * t) / 2).sum(-1, keepdim=True) - 1.0) / fall.detach())).clamp_min(0.0)
        return (t + t * t) / 2

    @jit
    def gain(theta):
        return 0.7

    @jit
    def value(t, theta):
        return 0.5 * (t + t * t)

    @jit
    def slope(t, theta):
        return tl.where(t > 0.0, 0.7 * (0.5 + t), 0.0)

    @jit
    def slope_of_weight(p, theta):
        return tl.where(p > 0.0, 0.35 * tl.sqrt(1.0 + 8.0 * p), 0.0)

    normalizer = Threshold(
        name="mixed", formula="", sums_to="1", sparse=True, paper="", reference=reference,
        gain=gain, value=value, slope=slope, slope_of_weight=slope_of_weight,
    )
"""


@contextlib.contextmanager
def discovered(folder, name, text):
    """A normaliser from a file, for a while."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    try:
        normalizers.discover(folder)
        yield normalizers.get(name)
    finally:
        normalizers._members.pop(name, None)


def test_a_threshold_map_that_is_no_power(tmp_path):
    with discovered(tmp_path, "mixed", MIXED) as choice:
        s, dp = scores(9, 130, torch.float32, 12), scores(9, 130, torch.float32, 13)
        p, ds, _ = both_ways(s, choice, dp)
        exact = oracle(s, choice, dp)
        torch.testing.assert_close(p.double(), exact[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ds.double(), exact[1], rtol=1e-3, atol=1e-4)


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


def test_a_ninth_normaliser_from_a_file_and_its_edit(tmp_path):
    for power in (1.0, 3.0):  # the second time the file has changed: no stale code
        with discovered(tmp_path, "ninth", NINTH.format(power=power)) as choice:
            s, dp = scores(9, 130, torch.float32, 12), scores(9, 130, torch.float32, 13)
            p, ds, _ = both_ways(s, choice, dp)
            exact = oracle(s, choice, dp)
            torch.testing.assert_close(p.double(), exact[0], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(ds.double(), exact[1], rtol=1e-4, atol=1e-5)
