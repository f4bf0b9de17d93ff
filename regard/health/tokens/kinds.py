"""What kind of head it seems to be: the part of its weight that goes to the keys that such a head looks at.

    score(kind) = mean over rows i of Σ_j p̄_ij · [j is a key of that kind for i]

| kind | keys that it looks at |
| --- | --- |
| previous token | i − 1 |
| next token | i + 1 |
| same token | every key with the query's own token, itself included |
| first key | the first token of the text |
| delimiter | punctuation, spaces and special tokens, except the first key |
| induction | on random tokens that are repeated: the token after the earlier copy of the query's own |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

KINDS = ("previous token", "next token", "same token", "first key", "delimiter", "induction")
MIXED = "mixed"
LEAST = 0.4  # score from which on a head is called by that kind
SKIPPED = 8  # first queries, which see too few keys under causal order; at most half of the text


@dataclass
class KeySets:
    """What the kinds ask of a text: token ids of queries [M] and keys [N], delimiters [N], the repeat of a sequence."""

    queries: Tensor | None = None
    keys: Tensor | None = None
    delimiters: Tensor | None = None
    first: int = 0  # the first key that is no padding
    period: int | None = None  # the text is a sequence of so many tokens, twice, after its first token

    def targets(self, positions: Tensor, rows: slice, keys: int) -> dict[str, Tensor]:
        """Returns for each kind that can be scored the keys [rows, N] that it looks at from `positions` [rows]."""
        key = torch.arange(keys, device=positions.device)
        if self.period is not None:
            return {"induction": key == positions[:, None] - self.period + 1}
        found = {
            "previous token": key == positions[:, None] - 1,
            "next token": key == positions[:, None] + 1,
            "first key": (key == self.first).expand(len(positions), keys),
        }
        if self.queries is not None and self.keys is not None:
            found["same token"] = self.queries[rows, None] == self.keys
        if self.delimiters is not None:
            found["delimiter"] = (self.delimiters & (key != self.first)).expand(len(positions), keys)
        return found


@dataclass
class KindScores:
    """Sums of the scores of H heads over the rows that counted so far."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # [H]
    rows: int = 0

    def update(self, weights: Tensor, positions: Tensor, counted: Tensor, rows: slice, sets: KeySets) -> None:
        """Adds a block: weights [H, rows, N], positions and which rows count [rows], the rows' place in the text."""
        skip = len(sets.queries) // 2 if sets.queries is not None else SKIPPED
        skip = min(SKIPPED, skip) if sets.period is None else sets.period + 1  # the second copy alone
        counted = counted & (torch.arange(rows.start, rows.stop, device=counted.device) >= skip)
        mass = weights.sum(-1, keepdim=True)
        share = (weights / torch.where(mass > 0, mass, 1.0))[:, counted]  # p̄
        for kind, keys in sets.targets(positions, rows, weights.shape[-1]).items():
            part = (share * keys[counted]).sum((-2, -1))
            self.sums[kind] = self.sums[kind] + part if kind in self.sums else part
        self.rows += int(counted.sum())

    def finish(self) -> list[dict[str, float]]:
        """Returns the scores of each head by kind; empty if no row counted."""
        if not self.rows or not self.sums:
            return []
        scores = {kind: (total / self.rows).tolist() for kind, total in self.sums.items()}
        heads = len(next(iter(scores.values())))
        return [{kind: scores[kind][head] for kind in KINDS if kind in scores} for head in range(heads)]


def name_kind(scores: dict[str, float]) -> tuple[str, float]:
    """Returns the kind with the highest score, and that score; "mixed" below 0.4.

    Induction goes first, because it is measured on a text of its own: between repeats such a head rests elsewhere.

    >>> from regard.health.tokens.kinds import name_kind
    >>> name_kind({"previous token": 0.9, "first key": 0.05}), name_kind({"first key": 0.9, "induction": 0.6})
    (('previous token', 0.9), ('induction', 0.6))
    """
    if scores.get("induction", 0.0) >= LEAST:
        return "induction", scores["induction"]
    kind = max(scores, key=lambda name: scores[name], default=MIXED)
    score = scores.get(kind, 0.0)
    return (kind, score) if score >= LEAST else (MIXED, score)


def find_delimiters(tokens: Sequence[str], special: Sequence[str] = ()) -> list[bool]:
    """True for tokens without a letter or digit (punctuation, spaces), and for special ones such as [SEP].

    >>> from regard.health.tokens.kinds import find_delimiters
    >>> find_delimiters(["[CLS]", "the", "##s", ".", "␣,"], ["[CLS]"])
    [True, False, False, True, True]
    """
    return [token in special or not any(c.isalnum() for c in token) for token in tokens]
