"""squares(s)_i = s_i² / Σ_j s_j²: a ninth normaliser, in one file, whose weights fall before they rise."""

from regard.normalizers import Ratio, jit


def reference(scores, visible, theta):
    seen = scores > float("-inf") if visible is None else visible & (scores > float("-inf"))
    if visible is None:
        seen = seen | scores.isnan()
    u = scores.masked_fill(~seen, 0.0) ** 2
    z = u.sum(-1, keepdim=True)
    return u / z.masked_fill(z == 0, 1.0)


@jit
def numerator(e, s, c):
    return s * s


@jit
def numerator_slope(e, s, c):
    return 2.0 * s


normalizer = Ratio(
    name="squares",
    formula="s² / Σ s²",
    sums_to="1, or 0 where all scores are 0",
    sparse=True,
    paper="a test",
    reference=reference,
    numerator=numerator,
    numerator_slope=numerator_slope,
    shift="none",
)
