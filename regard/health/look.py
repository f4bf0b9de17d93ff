"""`regard.look`: which tokens the heads of a model look at, on one short text."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import forget_derived
from regard.health.capture.forwards import as_written
from regard.health.capture.guard import passing
from regard.health.capture.interception import Interception, check_model
from regard.health.measure.batches import evaluation_mode, is_function, max_positions, run_batch
from regard.health.measure.one_pass import name_model
from regard.health.measure.query_rows import is_two_sided, padding_of
from regard.health.tokens.reader import TokenReader
from regard.health.tokens.text import cut, list_special, name_tokens, read_plain, read_sides, repeat_tokens
from regard.health.tokens.view import HeadLook, Look

TOP = 4  # keys of a row
LEAST_WEIGHT = 0.01
MOST_ROWS = 24_000  # of all heads together: large models show fewer rows of each
LEAST_ROWS = 16


def look(
    model: nn.Module,
    batch: Any,
    *,
    layer: int | str | None = None,
    head: int | None = None,
    rows: int | slice | Sequence[int] | None = None,
    top: int = 8,
    tokenizer: Any = None,
    sequence: int = 0,
) -> Look:
    """Run `model` on one text and return each query's top keys, the mass each key receives, and each head's kind.

    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> seen = regard.look(layer, torch.randn(1, 10, 32), layer="self_attn", head=2, top=3)
    >>> seen.top[0].query, len(seen.top), len(seen.top[0].keys)
    (0, 10, 3)
    >>> seen.received.shape, seen.map.shape
    (torch.Size([10]), torch.Size([10, 10]))

    The weights are those that the model used, with its mask, soft cap, sink, and what `regard.using` changed. They are
    computed in float64, some rows at a time: a long text never needs an N × N matrix.

    Args:
        model: as in `regard.examine`; it runs in evaluation mode without gradients and is not changed.
        batch: one batch of the model's inputs (a mapping is passed as keywords, a tuple as arguments), a tensor of
            token ids, or a text if `tokenizer` is given; of a text, the first 256 tokens.
        layer: its index in order of execution, or its module's name; None reads all layers.
        head: its number in the layer; None reads all heads.
        rows: the queries whose top keys are kept: an int, a slice or several ints; None keeps all. `received`, the map
            and the kinds always cover the whole text.
        top: how many keys of each query, those with a weight above 0.
        tokenizer: names the tokens: a tokenizer of transformers, or a function from a token id to its text.
        sequence: which sequence of the batch.

    Returns:
        A `Look`. `.heads` has one `HeadLook` for each head; with one head, `.top`, `.received`, `.map`, `.kind`,
        `.score` and `.scores` are that head's. `print` shows it, `.save("look.html")` draws it.

    Raises:
        TypeError: `model` is not an nn.Module, or an argument has the wrong type.
        ValueError: There is no such layer, head, row or sequence, the layer could not be read, or text comes without a
            tokenizer.
    """
    check_model(model)
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, (int, str))):
        raise TypeError(f"layer must be an index or a module's name, got {type(layer).__name__}")
    head = None if head is None else _check_number("head", head, 0)
    top, sequence = _check_number("top", top, 1), _check_number("sequence", sequence, 0)
    model = as_written(model)
    room = max_positions(model)
    batch = _as_batch(model, batch, tokenizer)
    plain = read_plain(batch, model)
    if plain is not None:
        if sequence >= len(plain.ids):
            raise ValueError(f"sequence must be below the batch's {len(plain.ids)} sequences, got {sequence}")
        batch = cut(plain, sequence)
    elif sequence:
        raise ValueError("sequence: only a batch of token ids can be cut; pass the one sequence itself")
    options: dict[str, Any] = dict(layer=layer, head=head)

    def chosen(queries: int) -> list[int]:
        with passing():  # a wrong row is the caller's
            return choose_rows(rows, queries)

    reader = TokenReader(
        read_sides(batch, tokenizer, model), list_special(tokenizer), rows=chosen, top=top,
        padding=padding_of(batch, is_two_sided(model, (name for name, _ in model.named_modules()))), **options,
    )  # fmt: skip
    run_observed(model, batch, reader, room)
    found = Look.of_layers(name_model(model), list(reader.layers.values()), layer, head)
    repeated = run_repeated(model, batch, room, tokenizer, options)
    return found.with_induction(repeated) if repeated is not None else found


def run_repeated(model: nn.Module, batch: Any, room: int, tokenizer: Any, options: dict) -> TokenReader | None:
    """Runs the model on random tokens that are repeated, to score induction; None if the batch is not of tokens."""
    plain = read_plain(batch, model)
    if plain is None:
        return None
    special = set(list_special(tokenizer))

    def is_special(token: int) -> bool:
        return bool(special) and name_tokens(torch.tensor([token]), tokenizer)[0] in special

    made = repeat_tokens(plain, room, is_special)
    if made is None:
        return None
    repeated, period = made
    reader = TokenReader({}, period=period, top=1, rows=lambda queries: [], keeps_maps=False, **options)
    run_observed(model, repeated, reader, room)
    return reader


def run_observed(model: nn.Module, batch: Any, reader: TokenReader, room: int) -> None:
    """Runs one batch with `reader` as the observer of its attention calls."""
    interception = Interception(model, observe=reader)
    try:
        with evaluation_mode(interception.modules), interception, torch.no_grad(), interception.torch_calls():
            run_batch(model, batch, 0, room)
    finally:
        forget_derived()


def choose_rows(rows: int | slice | Sequence[int] | None, queries: int) -> list[int]:
    """Returns the chosen rows of 0 … queries − 1; negative ones count from the end."""
    if rows is None:
        return list(range(queries))
    if isinstance(rows, slice):
        return list(range(queries))[rows]
    try:
        chosen = [operator.index(row) for row in (rows if isinstance(rows, (Sequence, Tensor, range)) else [rows])]
    except TypeError:
        raise TypeError(f"rows must be an int, a slice or ints, got {type(rows).__name__}") from None
    for row in chosen:
        if not -queries <= row < queries:
            raise ValueError(f"rows: the text has {queries} queries, got row {row}")
    return [row % queries for row in chosen]


def _check_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return operator.index(value)


def _as_batch(model: nn.Module, batch: Any, tokenizer: Any) -> Any:
    if isinstance(batch, str):
        from regard.health.models.inputs import InputError, make_text_batches

        if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)) or not hasattr(model, "config"):
            raise ValueError("batch is text: pass tokenizer= of a transformers model, or the token ids")
        try:
            return make_text_batches(model, tokenizer, batch, None, 1, 1)[0]
        except InputError as error:
            raise ValueError(f"batch: {error}") from None
    if is_function(batch):
        raise TypeError("batch must be the model's inputs, got a function")
    if isinstance(batch, Tensor) and batch.ndim == 1 and not batch.is_floating_point():
        return batch[None]
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if value is not None}
    return batch


def sample_tokens(model: nn.Module, short: Any, tokenizer: Any, room: int, title: str) -> dict[str, Any]:
    """What every head looks at on a short text (see `first_text`); {"reason": why} if the model cannot run on it."""
    reader = TokenReader(read_sides(short, tokenizer, model), list_special(tokenizer), top=TOP, keeps_maps=False)
    try:
        run_observed(model, short, reader, room)
        seen = Look.of_layers(title, list(reader.layers.values()), None, None)
        repeated = run_repeated(model, short, room, tokenizer, {})
    except Exception as error:  # the model may refuse one sequence, or another length
        return dict(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return to_json(seen if repeated is None else seen.with_induction(repeated))


def to_json(look: Look) -> dict[str, Any]:
    """A look as a report's JSON holds it.

    {"text": [token, …], "heads": [{"index", "head", "kind", "score", "scores", "keys", "weights", "received"}, …]}

    `keys` and `weights` have up to four numbers for each of the first rows, those of at least 0.01; `received` is the
    part of the weight that goes to each key. A head whose keys are another text (cross-attention) has it as "text".
    """
    rows = max(LEAST_ROWS, MOST_ROWS // max(1, len(look.heads)))
    text = max((head.tokens for head in look.heads), key=len)
    return dict(text=text, heads=[_head_json(head, text, rows) for head in look.heads])


def _head_json(head: HeadLook, text: list[str], rows: int) -> dict[str, Any]:
    total = float(head.received.sum()) or 1.0
    tops = [[key for key in row.keys if key.weight >= LEAST_WEIGHT] for row in head.top[:rows]]
    other = {} if head.key_tokens == text == head.tokens else dict(text=head.key_tokens, queries=head.tokens)
    return dict(
        index=head.index, head=head.head, kind=head.kind, score=round(head.score, 3),
        scores={kind: round(score, 3) for kind, score in head.scores.items()},
        keys=[[key.index for key in top] for top in tops],
        weights=[[round(key.weight, 2) for key in top] for top in tops],
        received=[round(x / total, 3) for x in head.received.tolist()], **other,
    )  # fmt: skip
