"""Row kernels of score functions: s ← value(s, i, j, h, …) of a block's scores, and ds ← ds·slope(s, i, j, h, …).

These are templates: `jit.compile.kernel` fills in the function as `tile.function` and the number of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard._backends.cpu.attention.forward_rows import visible_columns
from regard._backends.cpu.jit.compile import kernel, prim, real, tile
from regard._call.score_function import ScoreFunction

_kernels: dict[tuple, tuple[ScoreFunction, Callable]] = {}


def modify_scores(s, geometry, first_head, params):
    """s ← value(s, …) in the columns that each row sees; geometry as in `visible_columns`, params [P, H]."""
    for r in range(s.shape[0]):
        i, first, last = visible_columns(geometry, r, s.shape[1])
        h = first_head + r % geometry[5] // geometry[1]
        given = prim.column_tuple(params, h, tile.count)
        position, key, head = real(i), geometry[2], real(h)
        x = s[r]
        for c in range(first, last):
            x[c] = tile.function(x[c], position, real(key + c), head, *given)


def multiply_slopes(ds, s, geometry, first_head, params):
    """ds ← ds·slope(s, …) in the columns that each row sees; a ds of 0 stays 0, whatever the score of a hidden key."""
    for r in range(s.shape[0]):
        i, first, last = visible_columns(geometry, r, s.shape[1])
        h = first_head + r % geometry[5] // geometry[1]
        given = prim.column_tuple(params, h, tile.count)
        position, key, head = real(i), geometry[2], real(h)
        x, dx = s[r], ds[r]
        for c in range(first, last):
            slope = tile.function(x[c], position, real(key + c), head, *given)
            dx[c] = prim.where(dx[c] == real(0.0), real(0.0), dx[c] * slope)


def score_kernel(score: ScoreFunction, precision: str, is_slope: bool) -> Callable[..., Any]:
    """The kernel `modify_scores`, or `multiply_slopes`, of a score function."""
    found = _kernels.get((score.key, precision, is_slope))
    if found is None:
        template = multiply_slopes if is_slope else modify_scores
        function = score.slope if is_slope else score.value
        tiles = dict(function=function, count=len(score.params))
        found = _kernels[score.key, precision, is_slope] = score, kernel(template, tiles, precision)
    return found[1]
