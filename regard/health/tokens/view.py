"""`Look`, the result of `regard.look`: as objects, in a terminal, as one HTML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from regard.health.report import files
from regard.health.report.terminal import printable
from regard.health.tokens.kinds import KINDS, MIXED, name_kind
from regard.health.tokens.reader import LayerTokens, TokenReader

PRINTED = 32  # rows in a terminal
LISTED = 12  # heads of a kind in a terminal


class TopKey(NamedTuple):
    """A key that a query looks at."""

    index: int  # type: ignore[assignment]  # a tuple's method has this name
    token: str
    weight: float


class QueryTop(NamedTuple):
    """A query and its top keys, largest weight first."""

    query: int
    token: str
    keys: tuple[TopKey, ...]


@dataclass(frozen=True)
class HeadLook:
    """What one head looks at."""

    layer: str
    index: int  # of the layer, in order of execution
    head: int
    tokens: list[str]  # of the queries
    key_tokens: list[str]
    top: list[QueryTop] = field(repr=False)  # one for each chosen row
    received: Tensor = field(repr=False)  # [N] Σ_i p_ij: the weight that each key receives over the text
    map: Tensor | None = field(repr=False)  # [M, N] the weights, for texts of up to 128 tokens
    scores: dict[str, float] = field(default_factory=dict)  # by kind, 0 to 1

    @property
    def kind(self) -> str:
        """The kind of head that it seems to be; "mixed" if no score reaches 0.4."""
        return name_kind(self.scores)[0]

    @property
    def score(self) -> float:
        """The score of that kind; of a mixed head, its highest."""
        return name_kind(self.scores)[1]

    def most_received(self, count: int = 8) -> list[TopKey]:
        """The keys that receive most, with their part of all the weight."""
        total = float(self.received.sum()) or 1.0
        values, order = self.received.sort(descending=True, stable=True)
        pairs = zip(order[:count].tolist(), values[:count].tolist(), strict=True)
        return [TopKey(at, self.key_tokens[at], value / total) for at, value in pairs if value > 0]

    def __str__(self) -> str:
        lines = [f"{self.layer or 'the model itself'}, head {self.head}: {describe_kind(self)}"]
        width = max((len(row.token) for row in self.top), default=0)
        for row in self.top[:PRINTED]:
            lines.append(f"{row.query:>5} {row.token:<{width}} → {_list_keys(row.keys)}")
        if len(self.top) > PRINTED:
            lines.append(f"      … and {len(self.top) - PRINTED} more rows; choose with rows=")
        lines.append(f"most weight goes to: {_list_keys(self.most_received())}")
        return "\n".join(map(printable, lines))


@dataclass(frozen=True, repr=False)
class Look:
    """The result of `regard.look`: the heads that were read, and the layers that could not be."""

    title: str
    heads: list[HeadLook]
    unmeasured: list[tuple[str, str]] = field(default_factory=list)  # (layer, reason)

    @classmethod
    def of_layers(cls, title: str, layers: Sequence[LayerTokens], layer: int | str | None, head: int | None) -> Look:
        """The heads of what a `TokenReader` read; raise ValueError if the wanted layer or head is not among them."""
        if not layers:
            raise ValueError("model: no attention call was captured; regard.examine says why")
        chosen = [one for one in layers if layer is None or layer in (one.index, one.name)]
        if not chosen:
            near = difflib.get_close_matches(str(layer), [one.name for one in layers], n=2, cutoff=0.3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the first is {layers[0].name!r}"
            raise ValueError(f"layer: the model has {len(layers)} attention layers, got {layer!r}; {hint}")
        read = [one for one in chosen if one.reason is None]
        if not read:
            raise ValueError(f"layer: {chosen[0].name or 'the model itself'} cannot be read: {chosen[0].reason}")
        heads = [_head_look(one, at) for one in read for at in range(len(one.received))]  # type: ignore[arg-type]
        return cls(title, heads, [(one.name, one.reason) for one in chosen if one.reason is not None])

    def with_induction(self, repeated: TokenReader) -> Look:
        """Return a copy that has the induction scores of a run on repeated tokens."""
        scores = {
            (layer.index, layer.first_head + at): one["induction"]
            for layer in repeated.layers.values()
            if layer.reason is None
            for at, one in enumerate(layer.scores)
        }
        heads = [
            replace(head, scores={**head.scores, "induction": scores[head.index, head.head]})
            if (head.index, head.head) in scores
            else head
            for head in self.heads
        ]
        return replace(self, heads=heads)

    @property
    def one(self) -> HeadLook:
        """The head, where there is one."""
        if len(self.heads) != 1:
            raise ValueError(f"this look has {len(self.heads)} heads; use .heads, or choose with layer= and head=")
        return self.heads[0]

    @property
    def top(self) -> list[QueryTop]:
        """The one head's top keys of each chosen row."""
        return self.one.top

    @property
    def received(self) -> Tensor:
        """[N] the weight that each key receives from the one head, summed over the text's queries."""
        return self.one.received

    @property
    def map(self) -> Tensor | None:
        """[M, N] the one head's weights; None for more than 128 tokens."""
        return self.one.map

    @property
    def kind(self) -> str:
        """The kind of head that the one head seems to be."""
        return self.one.kind

    @property
    def score(self) -> float:
        """The score of the one head's kind."""
        return self.one.score

    @property
    def scores(self) -> dict[str, float]:
        """The one head's scores by kind."""
        return self.one.scores

    @property
    def tokens(self) -> list[str]:
        """The text's tokens, as the first head's queries have them."""
        return self.heads[0].tokens

    def by_kind(self) -> dict[str, list[HeadLook]]:
        """The heads of each kind, best score first; mixed heads last."""
        found = {kind: [head for head in self.heads if head.kind == kind] for kind in (*KINDS, MIXED)}
        return {kind: sorted(heads, key=lambda head: -head.score) for kind, heads in found.items() if heads}

    def to_html(self) -> str:
        """One HTML page that needs no network."""
        from regard.health.tokens.page import render

        return render(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the page as an .html file."""
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"path must end in .html, got {str(path)!r}")
        return files.write(path, self.to_html())

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, as notebooks show it."""
        from regard.health.report.page.document import embed

        return embed(self.to_html())

    def __str__(self) -> str:
        if len(self.heads) == 1:
            return str(self.heads[0])
        lines = [f"{self.title}: {len(self.heads)} heads on {len(self.tokens)} tokens; layer·head (score)"]
        for kind, heads in self.by_kind().items():
            listed = " ".join(f"{head.index}·{head.head} ({head.score:.2f})" for head in heads[:LISTED])
            more = f" and {len(heads) - LISTED} more" if len(heads) > LISTED else ""
            lines.append(f"{kind:>15}: {listed}{more}")
        lines += [f"not read: {layer}: {reason}" for layer, reason in self.unmeasured]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        size = f"{len(self.heads)} heads, {len(self.tokens)} tokens"
        return f"<Look at {self.title}: {size}; print it, or .save('look.html')>"


def describe_kind(head: HeadLook) -> str:
    """`previous token head, score 0.93`."""
    if not head.scores:
        return "the text is too short to tell its kind"
    best = max(head.scores, key=lambda kind: head.scores[kind])
    if head.kind == MIXED:
        return f"mixed, nearest to {best} ({head.score:.2f})"
    return f"{head.kind} head, score {head.score:.2f}"


def _head_look(layer: LayerTokens, at: int) -> HeadLook:
    assert layer.top_keys is not None and layer.top_weights is not None and layer.received is not None
    indices, weights = layer.top_keys[at].tolist(), layer.top_weights[at].tolist()
    top = [
        QueryTop(
            row,
            layer.query_names[row],
            tuple(
                TopKey(key, layer.key_names[key], weight)
                for key, weight in zip(keys, shares, strict=True)
                if not weight <= 0.0
            ),
        )
        for row, keys, shares in zip(layer.rows, indices, weights, strict=True)
    ]
    return HeadLook(
        layer.name, layer.index, layer.first_head + at, layer.query_names, layer.key_names, top,
        layer.received[at].float().cpu(), None if layer.maps is None else layer.maps[at].cpu(),
        layer.scores[at] if layer.scores else {},
    )  # fmt: skip


def _list_keys(keys: Sequence[TopKey]) -> str:
    return "  ".join(f"{key.index} {key.token} {key.weight:.2f}" for key in keys) or "sees no key"
