"""Packing: documents packed into one row by `position_ids` that start anew must give what they give alone.

The row is made here from the user's rows, so no packed batch is needed. Rows of the user that hold an end of text in
their middle, and nothing that says where documents begin, are named.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.differences import largest_change
from regard.health.probe.library import foreign_code, is_library_model
from regard.health.probe.texts import find_documents
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

PACKED = Rule(
    "RG215", "packing mixes documents", "packed documents give what they give alone", "warning",
    needs="token ids, and a causal model whose forward takes position_ids",
    proves="Proves that a document behind another in one row, told apart by position_ids, is computed otherwise. "
    "Whether the model is meant to be packed so, it cannot tell: it is a note unless the code was changed.",
    cause="Positions that start anew do not reach the mask: the kernel or the mask function ignores them.",
    fix="Pack with an implementation that keeps documents apart (attn_implementation='regard'), or pass a mask.",
)  # fmt: skip
UNTOLD = Rule(
    "RG216", "documents without positions", "packed rows say where documents begin", "note",
    needs="token ids with an end of text in the middle of a row",
    proves="Proves that tokens behind an end of text depend on those before it; it may be meant.",
    cause="Documents are joined with an end of text between them, and nothing else.",
    fix="Give position_ids that start anew at each document, if documents are not to see one another.",
)  # fmt: skip
RUN_ON = Rule(
    "RG217", "positions run on", "positions start anew with each packed document", "note",
    needs="a batch whose mask or segment ids tell documents apart",
    proves="Proves that position_ids do not start anew where a document begins; rotary positions allow it, a learned "
    "table of positions does not.",
    cause="The collator numbers the row, not its documents.",
    fix="Count position_ids from 0 in every document.",
)  # fmt: skip
RULES = (PACKED, UNTOLD, RUN_ON)
FLASH = ("flash", "regard")  # implementations that take cu_seq_lens


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    found = [*positions_run_on(trial), *untold_documents(trial)]
    try:
        return found + packed_here(trial)
    except NotApplicable:
        if found:
            return found
        raise


def packed_here(trial: Trial) -> list[Finding]:
    """Two of the text's rows packed into one, against the second alone."""
    text = trial.text
    accepted = signature(trial.model.forward).parameters
    if "position_ids" not in accepted or text.has_decoder or text.targets.shape[0] < 2:
        raise NotApplicable("packing needs two rows, and a forward that takes position_ids")
    half = text.targets.shape[1] // 2
    first, second = text.targets[:1, :half], text.targets[1:2, : half + 1]
    places = [torch.arange(part.shape[1], device=part.device) for part in (first, second)]
    one = text.select(torch.zeros(1, dtype=torch.long, device=first.device)).without("attention_mask")
    if "use_cache" in accepted:
        one = one.put("use_cache", False)
    alone = trial.probe.run(one.with_targets(second).put("position_ids", places[1][None]))
    row = one.with_targets(torch.cat([first, second], 1)).put("position_ids", torch.cat(places)[None])
    ways: dict[str, dict[str, Any]] = {"position_ids": {}}
    if str(getattr(getattr(trial.model, "config", None), "_attn_implementation", "")).startswith(FLASH):
        ways["position_ids and cu_seq_lens"] = lengths_of(first, second)
    for name, more in ways.items():
        packed = row
        for key, value in more.items():
            packed = packed.put(key, value)
        amount = largest_change(alone, trial.probe.run(packed)[:, half:])
        if amount > trial.rounding:
            return trial.find(
                PACKED, "warning" if library_keeps_apart(trial, one.with_targets(second), packed) else "note", [],
                f"A document of {second.shape[1]} tokens behind another of {half} in one row, told apart by {name}, "
                f"has outputs that differ by {amount:.2g} of their size from those alone.",
                f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
            )  # fmt: skip
    return []


def library_keeps_apart(trial: Trial, second: TokenBatch, packed: TokenBatch) -> bool:
    """True if a transformers model runs other code than the library's, whose own keeps the documents apart."""
    if not is_library_model(trial.model):
        return False
    others = list(foreign_code(trial.model))
    if not all(one.startswith("the ") and "function of" in one for one in others):
        return True  # more than a registered function is not the library's, so eager may not be either
    places = torch.arange(second.targets.shape[1], device=second.targets.device)[None]
    try:
        with trial.mode("eager"):
            alone, behind = (trial.probe.run(one) for one in (second.put("position_ids", places), packed))
    except NotApplicable:
        return False
    return largest_change(alone, behind[:, -places.shape[1] :]) <= trial.rounding


def lengths_of(first: Tensor, second: Tensor) -> dict[str, Any]:
    """The keywords that flash attention takes for two documents."""
    ends = torch.tensor([0, first.shape[1], first.shape[1] + second.shape[1]], dtype=torch.int32, device=first.device)
    longest = max(first.shape[1], second.shape[1])
    return dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)


def untold_documents(trial: Trial) -> list[Finding]:
    """Rows with an end of text inside, in batches where nothing tells documents apart."""
    ends = [getattr(one, "eos_token_id", None) for one in (getattr(trial.model, "config", None), trial.tokenizer)]
    end = next(
        (one for given in ends for one in (given if isinstance(given, list) else [given]) if one is not None), None
    )
    tokens = trial.tokens
    if end is None or tokens.has_decoder or "position_ids" in tokens.named or find_documents(tokens) is not None:
        return []
    ids = tokens.targets
    inside = (ids[:, :-1] == end) & (ids[:, 1:] != end) & tokens.text_mask(trial.pad)[:, 1:]
    inside[:, :2] = False  # a text may begin with the token
    rows = inside.any(1)
    if not bool(rows.any()):
        return []
    row = int(rows.nonzero()[0])
    start = int(inside[row].nonzero()[0]) + 1
    first = (torch.arange(ids.shape[1], device=ids.device) < start).expand_as(ids)
    changed = trial.probe.run(tokens.with_targets(tokens.exchange(ids, first & (ids != end))))
    amount = largest_change(trial.captured[0][row : row + 1, start:], changed[row : row + 1, start:])
    if amount <= trial.rounding:
        return []
    return trial.find(
        UNTOLD, "note", [],
        f"{int(rows.sum())} of {len(rows)} rows hold an end of text (token {end}) inside, and no position_ids: the "
        f"text before it changes the outputs behind by {amount:.2g} of their size.",
    )  # fmt: skip


def positions_run_on(trial: Trial) -> list[Finding]:
    """Positions that do not start anew where a document does."""
    for batch in trial.batches:
        positions, known = batch.named.get("position_ids"), find_documents(batch)
        if known is None or not isinstance(positions, Tensor) or positions.shape != known[0].shape:
            continue
        begins = known[0][:, 1:]
        if bool((positions.diff() == 1)[begins].any()):
            return trial.find(
                RUN_ON, "note", [], f"Documents begin by {known[1]} where position_ids count on from the one before."
            )
    return []
