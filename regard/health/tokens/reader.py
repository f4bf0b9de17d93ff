"""Observes the attention calls of one forward and reads which keys their heads look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard import reference
from regard.health.capture.call import Call, UseCounter
from regard.health.capture.forwards import forward_token
from regard.health.measure import norms
from regard.health.measure.query_rows import QueryRows, first_query_position
from regard.health.tokens.kinds import KeySets, KindScores, find_delimiters
from regard.health.tokens.text import Side

LARGEST_MAP = 128  # queries and keys up to which the weights themselves are kept
BLOCK = 2**21  # weights of one block, all heads together


@dataclass
class LayerTokens:
    """What the heads of one layer look at. H is the number of heads that were read."""

    name: str
    index: int
    first_head: int = 0  # the number of the first of the H heads
    heads: int = 0  # of the layer
    query_names: list[str] = field(default_factory=list)
    key_names: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # the queries whose top keys are kept
    top_keys: Tensor | None = None  # [H, rows, top] int64, largest weight first; ties: the first key
    top_weights: Tensor | None = None  # [H, rows, top]
    received: Tensor | None = None  # [H, N] Σ_i p_ij over the rows that count
    maps: Tensor | None = None  # [H, M, N], for short texts
    scores: list[dict[str, float]] = field(default_factory=list)  # per head, by kind
    reason: str | None = None  # why it could not be read


class TokenReader:
    """Reads every layer that is wanted, or one head of it; the first call of each layer in a forward counts."""

    def __init__(
        self, sides: dict[str, Side], special: Sequence[str] = (), *, layer: int | str | None = None,
        head: int | None = None, rows: Callable[[int], list[int]] | None = None, top: int = 8,
        padding: Sequence[Tensor] = (), period: int | None = None, keeps_maps: bool = True,
    ) -> None:  # fmt: skip
        self.sides, self.special, self.layer, self.head, self.top = sides, special, layer, head, top
        self.choose_rows, self.period, self.keeps_maps = rows, period, keeps_maps
        self.layers: dict[tuple[str, int], LayerTokens] = {}
        self._rows, self._uses = QueryRows(), UseCounter()
        self._rows.padding = list(padding)

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        output = run_original()
        key = name, self._uses.count(call, name, forward_token())
        if key in self.layers:
            return output
        layer = self.layers[key] = LayerTokens(f"{name}#{key[1] + 1}" if key[1] else name, len(self.layers))
        layer.heads = call.q.shape[1] if call.q.ndim == 4 else 0
        if self.layer is None or self.layer in (layer.index, layer.name):
            queries = call.q.shape[-2]
            layer.rows = list(range(queries)) if self.choose_rows is None else self.choose_rows(queries)
            with torch.no_grad():
                try:
                    layer.reason = call.obstacle or self._read(layer, call, name, output)
                except (ValueError, TypeError, NotImplementedError) as error:
                    layer.reason = f"regard.attention cannot compute it: {error}"
        return output

    def _read(self, layer: LayerTokens, call: Call, name: str, output: Tensor) -> str | None:
        """Reads a call into `layer`; returns why it could not."""
        if self.head is not None and not 0 <= self.head < layer.heads:
            return f"it has heads 0 to {layer.heads - 1}, not {self.head}"
        own = (call.own(None) if call.dropout else output)[:1]
        counted = self._rows.select(call, name)[0]
        call = call.first_sequences(1)
        queries, keys = call.q.shape[2], call.k.shape[2]
        counted = torch.ones(queries, dtype=torch.bool, device=own.device) if counted is None else counted[0]
        sets = self._describe_sides(layer, call, name, own.device)
        layer.first_head = self.head or 0
        wanted = torch.tensor(layer.rows, dtype=torch.int64, device=own.device)
        heads = 1 if self.head is not None else layer.heads
        top = min(self.top, keys)
        layer.top_keys = torch.zeros(heads, len(layer.rows), top, dtype=torch.int64, device=own.device)
        layer.top_weights = torch.zeros(heads, len(layer.rows), top, device=own.device)
        layer.received = torch.zeros(heads, keys, dtype=torch.float64, device=own.device)
        maps, rebuilt, kinds = [], [], KindScores()
        start = first_query_position(call, name)
        for first, weights, part in weight_blocks(call, self.head):
            rows = slice(first, first + weights.shape[1])
            positions = start + torch.arange(rows.start, rows.stop, device=own.device)
            kinds.update(weights, positions, counted[rows], rows, sets)
            layer.received += weights[:, counted[rows]].sum(1)
            here = ((wanted >= rows.start) & (wanted < rows.stop)).nonzero()[:, 0]
            values, order = weights[:, wanted[here] - first].sort(dim=-1, descending=True, stable=True)
            layer.top_keys[:, here], layer.top_weights[:, here] = order[..., :top], values[..., :top].float()
            rebuilt.append(part)
            if self.keeps_maps and max(queries, keys) <= LARGEST_MAP:
                maps.append(weights.float())
        layer.maps = torch.cat(maps, 1) if maps else None
        layer.scores = kinds.finish()
        return self._compare(own, torch.cat(rebuilt, 1)[None], counted[None], call) if rebuilt else "it has no queries"

    def _compare(self, own: Tensor, rebuilt: Tensor, counted: Tensor, call: Call) -> str | None:
        """Returns why the output rebuilt from the weights is not the model's own; None if it is."""
        own = own if self.head is None else own[:, self.head : self.head + 1]
        dtype = norms.coarsest_dtype(call.q, call.k, call.v)
        difference = norms.relative_difference(own, rebuilt, counted).tolist()
        worst = math.nan if any(x != x for x in difference) else max(difference, default=0.0)
        return norms.explain_difference(worst, norms.tolerance(dtype, own.device))

    def _describe_sides(self, layer: LayerTokens, call: Call, name: str, device: torch.device) -> KeySets:
        """Names the tokens of a call's queries and keys; a number stands for what is not a token of the text."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        cross = call.is_cross(name)
        own = "decoder" if "decoder" in self.sides and (cross or "decoder" in name) else "encoder"
        query_side = self._side(own, queries)
        key_side = self._side("encoder" if cross else own, keys)
        layer.query_names = query_side.names if query_side else [str(at) for at in range(queries)]
        layer.key_names = key_side.names if key_side else [str(at) for at in range(keys)]
        if self.period is not None:
            return KeySets(period=self.period)
        sets = KeySets()
        if query_side is not None and key_side is not None:
            sets.queries, sets.keys = query_side.ids.to(device), key_side.ids.to(device)
        if key_side is not None and not all(name.startswith("#") for name in key_side.names):
            sets.delimiters = torch.tensor(find_delimiters(key_side.names, self.special), device=device)
        text = self._rows.padding[0][0] if self._rows.padding and not cross else None
        if text is not None and len(text) == keys and bool(text.any()):
            sets.first = int(text.nonzero()[0])
        return sets

    def _side(self, name: str, length: int) -> Side | None:
        side = self.sides.get(name)
        return side if side is not None and len(side.names) == length else None


def weight_blocks(call: Call, head: int | None = None, size: int = BLOCK) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (first query, weights [H, rows, N], output [H, rows, E]) of a call of one sequence, in float64.

    With `head` it is the only one, H = 1. A block has about `size` weights, and at least one row.
    """
    call = call.densified() if head is None else select_head(call.densified(), head)
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
        call, q=pick(call.q, -3), k=pick_shared(call.k), v=pick_shared(call.v), mask=pick(call.mask, -3),
        options=options,
    )  # fmt: skip


def select_block(call: Call, first: int, last: int) -> Call:
    """Returns the call of the queries first … last − 1 alone."""
    queries = call.q.shape[2]

    def cut(x: Any) -> Any:
        return x[..., first:last, :] if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[-2] == queries > 1 else x

    options = {name: cut(x) if name in ("temperature", "sink") else x for name, x in call.options.items()}
    return call.changed(q=call.q[:, :, first:last], mask=cut(call.mask), options=options)
