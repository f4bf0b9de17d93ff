"""The tokens that a report shows: one short text, and what every head looks at on it.

    {"text": [token, …], "heads": [{"index", "head", "kind", "score", "scores", "keys", "weights", "received"}, …]}

`keys` and `weights` have up to four numbers for each of the first rows, those of at least 0.01; `received` is the part
of the weight that goes to each key. A head whose keys are another text (cross-attention) has its tokens as "text".
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.health.look import run_observed, run_repeated
from regard.health.tokens.reader import TokenReader
from regard.health.tokens.text import list_special, read_sides
from regard.health.tokens.view import HeadLook, Look

TOP = 4  # keys of a row
LEAST_WEIGHT = 0.01
MOST_ROWS = 24_000  # of all heads together: large models show fewer rows of each
LEAST_ROWS = 16


def sample_tokens(model: nn.Module, short: Any, tokenizer: Any, room: int, title: str) -> dict[str, Any] | None:
    """What every head looks at on a short text (see `first_text`); None if there is none.

    If the model cannot run on such a text, the result is {"reason": why}.
    """
    if short is None:
        return None
    reader = TokenReader(read_sides(short, tokenizer), list_special(tokenizer), top=TOP, keeps_maps=False)
    try:
        run_observed(model, short, reader, room)
        seen = Look.of_layers(title, list(reader.layers.values()), None, None)
        repeated = run_repeated(model, short, room, tokenizer, {})
    except Exception as error:  # the model may refuse one sequence, or another length
        return dict(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return to_json(seen if repeated is None else seen.with_induction(repeated))


def to_json(look: Look) -> dict[str, Any]:
    """A look as a report's JSON holds it."""
    rows = max(LEAST_ROWS, MOST_ROWS // max(1, len(look.heads)))
    text = max((head.tokens for head in look.heads), key=len)
    return dict(text=text, heads=[_head_json(head, text, rows) for head in look.heads])


def _head_json(head: HeadLook, text: list[str], rows: int) -> dict[str, Any]:
    total = float(head.received.sum()) or 1.0
    tops = [[key for key in row.keys if key.weight >= LEAST_WEIGHT] for row in head.top[:rows]]
    other = {} if head.key_tokens == text == head.tokens else dict(text=head.key_tokens, queries=head.tokens)
    return dict(
        index=head.index,
        head=head.head,
        kind=head.kind,
        score=round(head.score, 3),
        scores={kind: round(score, 3) for kind, score in head.scores.items()},
        keys=[[key.index for key in top] for top in tops],
        weights=[[round(key.weight, 2) for key in top] for top in tops],
        received=[round(x / total, 3) for x in head.received.tolist()],
        **other,
    )
