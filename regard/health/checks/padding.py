"""Padding: a text alone and the same text with padding must give the same outputs, and so must its neighbour.

The padding is the batch's own where it has some, and made here where forward takes a mask of the text: on the right, on
the left with positions that count from the first token, and for an encoder's text.
"""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.probe import CapturedCall, Key, relative_change
from regard.health.probe.rounding import alone_in_batch, largest_change
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch, find_padding

SEEN = Rule(
    "RG202", "sees padding", "padding does not change the text's outputs", "warning",
    needs="a padded batch, or a forward that takes attention_mask",
    proves="Proves that a text's outputs depend on its padding.",
    cause="The attention_mask is missing from the batch, or is not passed on to the attention call.",
    fix="Pass attention_mask (1 is text, 0 is padding) with the batch, and on to every attention call.",
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


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    reasons, found = [], []
    for part in (check_given, check_made, check_encoder):
        try:
            found += part(trial)
        except NotApplicable as reason:
            reasons.append(str(reason))
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
    visible = [key for key, call in calls.items() if shows_padding(call, padding[row])]
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
    return trial.find(
        MOVED, "warning", [],
        f"The same text without its padding gives outputs that differ by {amount:.2g} of their size, although no text "
        "query sees padding: the padding moves the text to other positions.",
        f"relative change > {LEAST:g}, no padding key visible to a text query",
        "Pad on the right, or pass position_ids that count from the first token of the text "
        "(attention_mask.cumsum(-1) - 1).",
    )  # fmt: skip


def given_pooled(
    trial: Trial, output: Tensor, calls: dict[Key, CapturedCall], alone: TokenBatch, kept: Tensor
) -> list[Finding]:
    """The batch's own padding, of a model with one output per row, [B, C]."""
    other, after = trial.probe.capture(alone)
    amount = largest_change(output, other)
    if amount <= max(LEAST, trial.rounding):
        return []
    same = [
        key for key, call in calls.items()
        if key in after and call.output.shape[2] > int(kept[-1]) and len(kept) == after[key].output.shape[2]
        and relative_change(after[key].output, call.output[:, :, kept]) <= max(LEAST, trial.rounding)
    ]  # fmt: skip
    is_pooling = bool(calls) and len(same) == len(calls)
    where = "; attention computes the same of the text: the pooling takes padding, or another token" * is_pooling
    return trial.find(
        SEEN if is_pooling or int(kept[0]) == 0 else MOVED, "note" if is_library_code(trial.model) else "warning", [],
        f"The same text without its padding gives a row output that differs by {amount:.2g} of its size{where}.",
        f"relative change > {LEAST:g}",
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
    alone = trial.probe.run(with_mask(first, short, torch.ones_like(short)))
    beside = trial.probe.run(with_mask(second, whole, torch.ones_like(whole)))
    if alone.ndim < 3:
        return pooled(trial, text, short, whole, alone)
    if alone.shape[:2] != short.shape:
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
        output = trial.probe.run(batch)
        padded = output[:1, ADDED:] if on_left else output[:1, :length]
        amount, other = largest_change(alone, padded), largest_change(beside, output[1:])
        if other > trial.rounding:
            return trial.find(
                NEIGHBOUR, "critical", [],
                f"{ADDED} tokens of padding on the {'left' if on_left else 'right'} of one row change the output of "
                f"the other by {other:.2g} of its size.", f"relative change of a row > {trial.rounding:.2g}",
            )  # fmt: skip
        if amount > trial.rounding:
            return describe_made(trial, batch, shown == 0, amount, on_left)
    return []


def with_mask(batch: TokenBatch, ids: Tensor, shown: Tensor) -> TokenBatch:
    """The batch with other ids and their mask."""
    return batch.with_targets(ids).put("attention_mask", shown)


def describe_made(trial: Trial, batch: TokenBatch, padding: Tensor, amount: float, on_left: bool) -> list[Finding]:
    """The finding about padding made here that changes the text's outputs."""
    calls = trial.probe.capture(batch)[1]
    one = [(key, call) for key, call in calls.items() if call.q.shape[2] == call.k.shape[2] == padding.shape[1]]
    visible = [key for key, call in one if bool(call.visible[..., ~padding[0], :][:1][..., padding[0]].any())]
    side = "left" if on_left else "right"
    text = (
        f"{ADDED} tokens of padding on the {side}, hidden by attention_mask, change the text's outputs by {amount:.2g} "
        "of their size"
    )
    threshold = f"relative change of a row > {trial.rounding:.2g}, which rounding explains"
    if visible or not on_left:
        told = ", and text queries see padding keys." if visible else "."
        severity = "note" if not visible and is_library_code(trial.model) else "warning"
        return trial.find(SEEN, severity, visible[:1], text + told, threshold)
    if "position_ids" not in batch.named:
        return []  # nothing can tell the model where the text begins, and no batch is padded on the left
    return trial.find(
        MOVED, "note" if is_library_code(trial.model) else "warning", [],
        f"{text}, although no text query sees padding: it moves the text to other positions.", threshold,
    )  # fmt: skip


def pooled(trial: Trial, text: TokenBatch, short: Tensor, whole: Tensor, alone: Tensor) -> list[Finding]:
    """Padding of a model with one output per row, [B, C]."""
    pad = short.new_full((1, ADDED), trial.pad if trial.pad is not None else 0)
    shown = torch.ones_like(whole.expand(2, -1)).clone()
    shown[0, short.shape[1] :] = 0
    both = text.select(torch.tensor([0, 1], device=short.device))
    output = trial.probe.run(with_mask(both, torch.cat([torch.cat([short, pad], 1), whole]), shown))
    amount = largest_change(*alone_in_batch(output, alone, 0))
    if amount <= trial.rounding:
        return []
    return trial.find(
        SEEN, "note" if is_library_code(trial.model) else "warning", [],  # SigLIP pools the last token by design
        f"{ADDED} tokens of padding on the right, hidden by attention_mask, change the row's output by {amount:.2g} of "
        "its size: the attention or the pooling reads them.", f"relative change of a row > {trial.rounding:.2g}",
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
