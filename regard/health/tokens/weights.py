"""The weights of one captured call, some query rows at a time: never all rows at once.

Each block runs through the float64 reference with every option of the call (mask, bias, soft cap, sink, temperature,
normaliser), at its rows' own positions. It is plain torch and runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard import reference
from regard.health.capture.call import Call

BLOCK = 2**21  # weights of one block, all heads together


def weight_blocks(call: Call, head: int | None = None, size: int = BLOCK) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (first query, weights [H, rows, N], output [H, rows, E]) of a call of one sequence, in float64.

    With `head` it is the only one, H = 1. A block has about `size` weights, and at least one row.
    """
    call = call if head is None else select_head(call, head)
    heads, queries, keys = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    rows = max(1, size // max(1, heads * keys))
    for first in range(0, queries, rows):
        block = select_block(call, first, first + rows)
        output, weights = reference.attention(
            block.q, block.k, block.v, **block.arguments, first_query=first, queries=queries
        )
        pick = slice(None) if head is None or heads == 1 else slice(head, head + 1)
        yield first, weights[0, pick], output[0, pick]


def select_head(call: Call, head: int) -> Call:
    """Returns the call of one head alone; a temperature policy may know all heads, so it keeps them all."""
    if callable(call.options.get("temperature")):
        return call
    heads = call.q.shape[1]

    def pick(x: Any, dim: int) -> Any:
        return x.narrow(dim, head, 1) if isinstance(x, Tensor) and x.ndim >= -dim and x.shape[dim] == heads > 1 else x

    def pick_shared(x: Tensor) -> Tensor:
        return x.narrow(1, head * x.shape[1] // heads, 1)

    options = dict(call.options)
    for name in ("scale", "temperature", "sink"):
        value = options.get(name)
        if isinstance(value, Tensor) and value.ndim:
            options[name] = pick(value, -1 if value.ndim == 1 else -3)
    return replace(
        call,
        q=pick(call.q, -3),
        k=pick_shared(call.k),
        v=pick_shared(call.v),
        mask=pick(call.mask, -3),
        options=options,
    )


def select_block(call: Call, first: int, last: int) -> Call:
    """Returns the call of the queries first … last − 1 alone."""
    queries = call.q.shape[2]

    def cut(x: Any) -> Any:
        return x[..., first:last, :] if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[-2] == queries > 1 else x

    options = {name: cut(x) if name in ("temperature", "sink") else x for name, x in call.options.items()}
    return replace(call, q=call.q[:, :, first:last], mask=cut(call.mask), options=options)
