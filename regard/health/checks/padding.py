"""Padding: a text alone and the same text with padding must give the same outputs, and so must its neighbour.

The padding is the batch's own where it has some, and made here where forward takes a mask of the text: on the right, on
the left with positions that count from the first token, and for an encoder's text.
"""

from __future__ import annotations

from inspect import signature
from typing import TypeAlias

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.differences import alone_in_batch, largest_change
from regard.health.probe.library import is_library_code
from regard.health.probe.probe import CapturedCall, Key, relative_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch, find_padding

SEEN = Rule(
    "RG202", "sees padding", "padding does not change the text's outputs", "warning",
    needs="a padded batch, or a forward that takes attention_mask",
    proves="Proves that a text's outputs depend on its padding.",
    cause="The attention_mask is missing from the batch, or is not passed on to the attention call.",
    fix="Pass attention_mask (1 is text, 0 is padding) with the batch, and on to every attention call.",
    references=("sentence-transformers#2569", "sentence-transformers#3208", "transformers#35909"),
)  # fmt: skip
MOVED = Rule(
    "RG203", "padding moves the text", "padding does not move the text", "warning",
    needs="a padded batch, or a forward that takes attention_mask",
    proves="Proves that a text's outputs depend on padding before it although no query sees it.",
    cause="Positions are counted from the padding on the left.",
    fix="Pad on the right, or pass position_ids that count from the first token of the text.",
)  # fmt: skip
NEIGHBOUR = Rule(
    "RG213", "a neighbour's padding matters", "a row does not depend on its neighbour's padding", "critical",
    needs="a forward that takes attention_mask",
    proves="Proves that the outputs of a row without padding change when another row of its batch is padded.",
    cause="The mask, a length or a position of one row is used for all of them.",
    fix="Take mask, length and positions of each row from that row.",
)  # fmt: skip
ENCODER = Rule(
    "RG214", "sees the encoder's padding", "the encoder's padding does not change the outputs", "warning",
    needs="an encoder-decoder whose forward takes attention_mask",
    proves="Proves that the decoder's outputs depend on padding of the encoder's text.",
    cause="The encoder, or the cross-attention, is not given the mask of the encoder's text.",
    fix="Pass the encoder's attention_mask to its layers and, as the mask of the keys, to every cross-attention.",
)  # fmt: skip
RULES = (SEEN, MOVED, NEIGHBOUR, ENCODER)
LEAST = 1e-3  # relative change: another length may take another kernel
ADDED = 5  # tokens of padding
POOLING = "; attention computes the same of the text: the pooling takes padding, or another token"
POOLED = dict(
    cause="The pooling counts tokens, averages over padding, or takes a fixed place that padding moves.",
    fix="Average over the tokens that attention_mask shows, or take the first or last place that it shows.",
)
Calls: TypeAlias = dict[Key, CapturedCall]


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    reasons, found = [], []
    for part in (check_given, check_made, check_encoder):
        try:
            found += part(trial)
        except NotApplicable as reason:
            reasons.append(str(reason))
            if part is check_made:  # which alone says something of the neighbour
                trial.skipped.append((NEIGHBOUR, reason))
    if len(reasons) == 3:
        raise NotApplicable(reasons[1])
    return list({finding.code: finding for finding in reversed(found)}.values())[::-1]


def check_given(trial: Trial) -> list[Finding]:
    """The batch's own padding."""
    batch, padding, row = find_padded_row(trial)
    kept = (~padding[row]).nonzero().flatten()
    one = batch.select(torch.tensor([row], device=batch.ids.device))
    alone = one.map(lambda x: x[:, kept] if isinstance(x, Tensor) and x.shape[:2] == one.ids.shape else x)
    output, calls = trial.probe.capture(one)
    if output.ndim == 2 and output.shape[0] == 1:
        return given_pooled(trial, output, calls, alone, kept)
    trial.require_rows()
    amount = relative_change(output[:, kept], trial.probe.run(alone))
    if amount <= max(LEAST, trial.rounding):
        return []
    visible = [key for key, call in calls.items() if key in trial.text_keys and shows_padding(call, padding[row])]
    if visible:
        return trial.find(
            SEEN, "warning", visible[:1],
            f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, and text "
            "queries see padding keys.",
            f"relative change > {LEAST:g}, and a padding key visible to a text query",
        )  # fmt: skip
    if calls and bool(padding[row, -1]):
        return trial.find(  # ConvBERT and CANINE convolve over the padding
            SEEN, "note" if is_library_code(trial.model) else "warning", [],
            f"The same text without its padding gives outputs that differ by {amount:.2g} of their size: something "
            "beside the captured attention reads the padding.",
            f"relative change > {LEAST:g}, with padding on the right alone",
        )  # fmt: skip
    if "position_ids" in signature(trial.model.forward).parameters and "position_ids" not in one.named:
        own = (~padding[row : row + 1]).long().cumsum(-1) - 1
        placed = trial.probe.run(one.put("position_ids", own.clamp_min(0)))[:, kept]
        if relative_change(placed, trial.probe.run(alone)) > 0.5 * amount:
            return trial.find(
                SEEN, "note" if is_library_code(trial.model) else "warning", [],
                f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, also with "
                "position_ids that count from the text: something beside the captured attention reads the padding.",
                f"relative change > {LEAST:g}, no padding key visible to a text query",
            )  # fmt: skip
    return trial.find(
        MOVED, "warning", [],
        f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, although no text "
        "query sees padding: the padding moves the text to other positions.",
        f"relative change > {LEAST:g}, no padding key visible to a text query",
        "Pad on the right, or pass position_ids that count from the first token of the text "
        "(attention_mask.cumsum(-1) - 1).",
    )  # fmt: skip


def given_pooled(trial: Trial, output: Tensor, calls: Calls, alone: TokenBatch, kept: Tensor) -> list[Finding]:
    """The batch's own padding, of a model with one output per row, [B, C]."""
    other, after = trial.probe.capture(alone)
    amount = largest_change(output, other)
    if amount <= max(LEAST, trial.rounding):
        return []
    is_pooling = computes_same(trial, after, calls, kept)
    where = POOLING * is_pooling
    return trial.find(
        SEEN if is_pooling or int(kept[0]) == 0 else MOVED, "note" if is_library_code(trial.model) else "warning", [],
        f"The same text without its padding gives a row output that differs by {amount:.2g} of its size{where}.",
        f"relative change > {LEAST:g}", **(POOLED if is_pooling else {}),
    )  # fmt: skip


def find_padded_row(trial: Trial) -> tuple[TokenBatch, Tensor, int]:
    """(batch, padding [B, N], row) of a sequence with padding at one end."""
    for batch in trial.batches:
        given = batch.given_mask(batch.ids)
        if given is not None:
            padding = ~given
        elif trial.pad is not None:
            padding = find_padding(batch.ids, trial.pad)
        else:
            continue
        counts = padding.sum(1)
        rows = ((counts >= 3) & (counts < batch.ids.shape[1] - 3)).nonzero().flatten()
        if len(rows) and not batch.has_decoder:
            return batch, padding, int(rows[0])
    raise NotApplicable("no batch has padding")


def shows_padding(one: CapturedCall, padding: Tensor) -> bool:
    """True if some text query of the call sees a padding key."""
    queries, keys = one.q.shape[2], one.k.shape[2]
    if queries != keys or queries != len(padding):
        return False
    return bool(one.visible[..., ~padding, :][..., padding].any())


def check_made(trial: Trial) -> list[Finding]:
    """Padding made here: the first row is shorter than the second by `ADDED` tokens."""
    text = trial.text
    if text.has_decoder or text.mask_name != "attention_mask":
        raise NotApplicable("the model has a decoder beside its encoder")
    accepted = signature(trial.model.forward).parameters
    if "attention_mask" not in accepted or isinstance(text.key, int):
        raise NotApplicable("no batch has padding, and forward takes no attention_mask")
    ids = text.targets
    if ids.shape[0] < 2 or ids.shape[1] < 3 * ADDED:
        raise NotApplicable("padding needs two rows of 15 tokens")
    length = ids.shape[1] - ADDED
    short, whole = ids[:1, :length], ids[1:2]
    one = torch.zeros(1, dtype=torch.long, device=ids.device)
    first, second = (text.select(one + row) for row in (0, 1))
    alone, bare = trial.probe.capture(with_mask(first, short, torch.ones_like(short)))
    beside = trial.probe.run(with_mask(second, whole, torch.ones_like(whole)))
    if alone.ndim > 2 and alone.shape[:2] != short.shape:
        raise NotApplicable("the output has no row per token")
    counts = torch.arange(length, device=ids.device)[None]
    takes_positions = "position_ids" in accepted and not trial.differs_between(
        alone, with_mask(first, short, torch.ones_like(short)).put("position_ids", counts)
    )
    pad = ids.new_full((1, ADDED), trial.pad if trial.pad is not None else 0)
    for on_left in (False, True):
        row = torch.cat([pad, short] if on_left else [short, pad], 1)
        shown = torch.ones_like(ids[:2])
        shown[0, slice(0, ADDED) if on_left else slice(length, None)] = 0
        batch = with_mask(text.select(torch.cat([one, one + 1])), torch.cat([row, whole]), shown)
        if on_left and takes_positions:
            batch = batch.put("position_ids", (shown.cumsum(-1) - 1).clamp_min(0))
        output, calls = trial.probe.capture(batch)
        other = largest_change(*alone_in_batch(output, beside, 1))
        if other > trial.rounding:
            return trial.find(
                NEIGHBOUR, "critical", [],
                f"{ADDED} tokens of padding on the {'left' if on_left else 'right'} of one row change the output of "
                f"the other by {other:.2g} of its size.", f"relative change of a row > {trial.rounding:.2g}",
            )  # fmt: skip
        kept = shown[0].nonzero().flatten()
        padded = alone_in_batch(output, alone, 0)[::-1] if alone.ndim < 3 else (alone, output[:1, kept])
        amount = largest_change(*padded)
        if amount > trial.rounding:
            is_pooling = alone.ndim < 3 and computes_same(trial, bare, calls, kept)
            return describe_made(trial, batch, calls, shown == 0, amount, on_left, is_pooling)
    return []


def with_mask(batch: TokenBatch, ids: Tensor, shown: Tensor) -> TokenBatch:
    """The batch with other ids and their mask."""
    return batch.with_targets(ids).put("attention_mask", shown)


def describe_made(
    trial: Trial, batch: TokenBatch, calls: Calls, padding: Tensor, amount: float, on_left: bool, is_pooling: bool
) -> list[Finding]:
    """The finding about padding made here that changes the text's outputs."""
    read = [(key, call) for key, call in calls.items() if key in trial.text_keys]
    one = [(key, call) for key, call in read if call.q.shape[2] == call.k.shape[2] == padding.shape[1]]
    visible = [key for key, call in one if bool(call.visible[..., ~padding[0], :][:1][..., padding[0]].any())]
    side = "left" if on_left else "right"
    text = (
        f"{ADDED} tokens of padding on the {side}, hidden by attention_mask, change the text's outputs by {amount:.2g} "
        "of their size"
    )
    threshold = f"relative change of a row > {trial.rounding:.2g}, which rounding explains"
    is_own = is_library_code(trial.model)  # SigLIP pools the last token by design
    if is_pooling and on_left and not (any(map(trial.is_causal_call, trial.captured[1].values())) or pads_left(trial)):
        is_own = True  # an encoder's first token, where nobody pads on the left
    if visible or is_pooling or not on_left:
        told = POOLING + "." if is_pooling else ", and text queries see padding keys." if visible else "."
        severity, more = "note" if not visible and is_own else "warning", POOLED if is_pooling else {}
        return trial.find(SEEN, severity, visible[:1], text + told, threshold, **more)
    if "position_ids" not in batch.named:
        return []  # nothing can tell the model where the text begins, and no batch is padded on the left
    twice = batch.put("position_ids", 2 * batch.named["position_ids"])
    reads_positions = trial.differs_between(trial.probe.run(batch), twice)  # they were right, and are not the cause
    rule = SEEN if reads_positions else MOVED
    why = "something else reads it" if reads_positions else "it moves the text to other positions"
    return trial.find(
        rule, "note" if is_own else "warning", [], f"{text}, although no text query sees padding: {why}.", threshold
    )


def pads_left(trial: Trial) -> bool:
    return getattr(trial.tokenizer, "padding_side", "right") == "left"


def computes_same(trial: Trial, alone: Calls, padded: Calls, kept: Tensor) -> bool:
    """True if every attention call computes of a text alone what it computes of it at the places `kept` of row 0."""
    alone = {key: call for key, call in alone.items() if key in trial.text_keys}
    pairs = [(call.output, padded[key].output) for key, call in alone.items() if key in padded]
    fits = [a.shape[2] == len(kept) and b.shape[2] > int(kept[-1]) for a, b in pairs]
    limit = max(LEAST, trial.rounding)
    return bool(alone) and len(pairs) == len(alone) and all(fits) and all(
        relative_change(a, b[:1, :, kept]) <= limit for a, b in pairs
    )  # fmt: skip


def check_encoder(trial: Trial) -> list[Finding]:
    """Padding made here for an encoder's text."""
    tokens = trial.tokens
    if not tokens.has_decoder:
        raise NotApplicable("the model has no encoder beside a decoder")
    name = next((name for name in ("attention_mask", "src_key_padding_mask") if name in tokens.named), None)
    if name is None and "attention_mask" in signature(trial.model.forward).parameters and isinstance(tokens.key, str):
        name = "attention_mask"
    if name is None:
        raise NotApplicable("forward takes no mask of the encoder's text")
    given = tokens.given_mask(tokens.ids, name)
    length = tokens.ids.shape[1]
    if given is not None and bool(given[:, 0].all()):  # the longest text alone, as rows may be short
        length = int(given.sum(1).max())
        tokens = tokens.select(given.sum(1).argmax()[None])
    ids = tokens.ids
    if length < 8:
        raise NotApplicable("the encoder's text is shorter than 8 tokens")
    short = ids[:, :length]
    pad = ids.new_full((ids.shape[0], ADDED), trial.pad if trial.pad is not None else 0)
    shown = torch.cat([torch.ones_like(short), torch.zeros_like(pad)], 1)

    def masked(mask: Tensor) -> Tensor:
        return mask == 0 if name == "src_key_padding_mask" else mask

    bare = tokens.without("labels", "memory_key_padding_mask")
    alone = trial.probe.run(bare.with_ids(short).put(name, masked(torch.ones_like(short))))
    padded = bare.with_ids(torch.cat([short, pad], 1)).put(name, masked(shown))
    if "memory_key_padding_mask" in tokens.named:
        padded = padded.put("memory_key_padding_mask", shown == 0)
    output, calls = trial.probe.capture(padded)
    amount = largest_change(alone, output)
    if amount <= trial.rounding:
        return []
    wide = length + ADDED
    seen = [key for key, one in calls.items() if one.k.shape[2] == wide and bool(one.visible[..., length:].any())]
    where = " The cross-attention sees it." if any(calls[key].call.is_cross(key[0]) for key in seen) else ""
    return trial.find(
        ENCODER, "warning", seen[:1],
        f"{ADDED} tokens of padding behind the encoder's text, hidden by {name}, change the decoder's outputs by "
        f"{amount:.2g} of their size.{where}", f"relative change of a row > {trial.rounding:.2g}",
    )  # fmt: skip
