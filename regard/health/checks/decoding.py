"""Decoding: a prompt and single steps with the cache must give what one forward over the whole text gives.

Lengths cross the window if the configuration has one. Where they differ, q, k, v and the visible keys of the first
layer that does say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature

import torch

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe import differences
from regard.health.probe.decoding import Decoder, FirstOfEqual, GivenState, find_decoders, is_recurrent
from regard.health.probe.differences import row_changes
from regard.health.probe.library import is_library_code
from regard.health.probe.modes import configs_of, preserved
from regard.health.probe.probe import keep_calls
from regard.health.probe.trial import Trial
from regard.health.tokens.text import TokenBatch

NEEDS = "a model that takes a cache (past_key_values, cache, state, start_pos, …)"
PROVES = (
    "Proves that generation computes other outputs than training on the same tokens; where attention was captured, "
    "the first layer that differs and what of it."
)
DIFFERS = Rule(
    "RG206", "decoding differs", "steps with a cache give what one forward gives", "critical", needs=NEEDS,
    proves=PROVES, cause="The cache, its mask or the positions behind it are wrong.",
    fix="Compare q, k and the visible keys of the named layer, in a step and in one forward.",
)  # fmt: skip
POSITIONS = Rule(
    "RG207", "wrong positions in decoding", "tokens behind a cache stand at their own positions", "critical",
    needs=NEEDS, proves=PROVES,
    cause="Positions of new tokens start again, or are off by the number of cached, padded or window tokens.",
    fix="Give new tokens the positions n, n + 1, … behind n cached ones, for queries and keys alike.",
)  # fmt: skip
TWICE = Rule(
    "RG208", "cached keys rotated twice", "cached keys keep their rotation", "critical", needs=NEEDS, proves=PROVES,
    cause="Keys are stored after RoPE and rotated again, or moved to new positions, at every step.",
    fix="Store keys after RoPE and rotate new ones only, or store them before and rotate all by their own positions.",
)  # fmt: skip
LOST = Rule(
    "RG209", "keys not kept", "the cache keeps every key", "critical", needs=NEEDS, proves=PROVES,
    cause="The cache is not returned, not passed on, or overwritten at every step.",
    fix="Concatenate new keys behind the cached ones and return both.",
)  # fmt: skip
SEEN = Rule(
    "RG210", "another window in decoding", "a step sees the keys that one forward shows", "critical", needs=NEEDS,
    proves=PROVES, cause="The window or mask of a step is off by one, or is not applied to the cache.",
    fix="Count the new token in the window: a window of W shows W − 1 cached keys and itself.",
)  # fmt: skip
CHUNKS = Rule(
    "RG211", "chunks differ", "several tokens behind a cache give what one forward gives", "critical", needs=NEEDS,
    proves="Proves that prefilling in chunks, or checking drafted tokens, computes other outputs than one forward.",
    cause="The mask of several queries behind a cache is aligned with the first key, or missing.",
    fix="Behind n cached keys let query i see keys 0 … n + i: a mask aligned at the lower right.",
)  # fmt: skip
RULES = (DIFFERS, POSITIONS, TWICE, LOST, SEEN, CHUNKS)
BY_CAUSE = {
    differences.POSITIONS: POSITIONS, differences.TWICE: TWICE, differences.LOST: LOST, differences.SEEN: SEEN,
}  # fmt: skip
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention", "window_size")
LONGEST, BEYOND = 96, 12  # tokens that are decoded; those behind the window


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    text = trial.text
    window = window_of(trial)
    length = min(text.targets.shape[1], max(48, window + BEYOND) if window else 48, LONGEST)
    text = text.cut(text.targets.shape[0], length)
    with preserved(trial.model), FirstOfEqual():
        decoders = find_decoders(trial.probe, text)
        full = trial.probe.run(text)
        found: list[Finding] = []
        for decoder in decoders:
            found = found or compare_steps(trial, decoder, text, full, window)
        return found


def compare_steps(trial: Trial, decoder: Decoder, text: TokenBatch, full: torch.Tensor, window: int) -> list[Finding]:
    """Findings about one way of decoding."""
    length = text.targets.shape[1]
    for cuts in schedules(length, window):
        where = first_difference(trial, decoder, text, full, cuts)
        if where is None:
            continue
        if not state_is_kept(trial, decoder, text):
            raise NotApplicable(f"forward keeps nothing between two calls with {decoder.name}")
        continued = with_positions(trial, decoder, text)
        if continued is not None and first_difference(trial, continued, text, full, cuts) is None:
            return positions_start_again(trial, decoder, where)
        return [name_cause(trial, decoder, text, cuts, where)]
    return compare_chunks(trial, decoder, text, full, window)


def schedules(length: int, window: int) -> list[tuple[int, ...]]:
    """Ends of a prompt and single steps: from the middle, from the first token, and across the window."""
    middle = length // 2
    found: list[tuple[int, ...]] = [(middle, middle + 1, middle + 2, middle + 3), (1, 2, 3, 4)]
    if 2 < window < length:
        found.append((window - 1, *range(window, min(window + 4, length) + 1)))
    return found


def first_difference(
    trial: Trial, decoder: Decoder, text: TokenBatch, full: torch.Tensor, cuts: Sequence[int]
) -> tuple[int, int, float] | None:
    """(begin, end, amount) of the first chunk whose output differs from that of one forward."""
    for begin, end, output, _ in decoder.steps(trial.probe, text.targets, cuts):
        amount = float(row_changes(full[:, begin:end], output).max())
        if amount > trial.rounding:
            return begin, end, amount
    return None


def name_cause(
    trial: Trial, decoder: Decoder, text: TokenBatch, cuts: Sequence[int], where: tuple[int, int, float]
) -> Finding:
    """The finding about a step that differs, by the first attention call that does."""
    begin, end, amount = where
    cause = find_cause(trial, decoder, text, cuts, begin, end)
    rule = DIFFERS if cause is None else BY_CAUSE.get(cause.what, DIFFERS)
    what = f"the prompt of {end} tokens alone" if not begin else f"token {begin} behind {begin} cached ones"
    return trial.find(
        rule, "note" if is_library_code(trial.model) else "critical", [cause.key] if cause else [],
        f"With {decoder.name}, {what} gives an output that differs from one forward by {amount:.2g} of its size"
        + (f": {cause.text}." if cause else "."),
        f"relative change of a row > {trial.rounding:.2g}, which rounding explains",
    )[0]  # fmt: skip


def find_cause(
    trial: Trial, decoder: Decoder, text: TokenBatch, cuts: Sequence[int], begin: int, end: int
) -> differences.Cause | None:
    """The first attention call of the chunk begin … end that differs from one forward, and what of it."""
    calls: dict = {}
    ends = [cut for cut in cuts if cut <= end]
    for _, last, _, _ in decoder.steps(trial.probe, text.targets, ends, keep_calls(calls)):
        if last < end:
            calls.clear()
    return differences.explain_step(trial.probe.capture(text)[1], calls, begin, end, trial.rounding)


def state_is_kept(trial: Trial, decoder: Decoder, text: TokenBatch) -> bool:
    """True if the state that a call returns, or the model's own cache, holds anything."""
    if isinstance(decoder.call, GivenState):
        return True
    length = text.targets.shape[1]
    other = text.targets.roll(1, 1)
    cuts = (length - 1, length)
    a = [output for _, _, output, _ in decoder.steps(trial.probe, text.targets, cuts)][1]
    mixed = torch.cat([other[:, : length - 1], text.targets[:, length - 1 :]], 1)
    b = [output for _, _, output, _ in decoder.steps(trial.probe, mixed, cuts)][1]
    return bool(row_changes(a, b).max() > trial.rounding)


def with_positions(trial: Trial, decoder: Decoder, text: TokenBatch) -> Decoder | None:
    """The decoder that also passes position_ids, as generation in transformers does; None if forward takes none."""
    if not isinstance(decoder.call, GivenState) or "position_ids" not in signature(trial.model.forward).parameters:
        return None
    return replace(decoder, call=replace(decoder.call, positions=True))


def positions_start_again(trial: Trial, decoder: Decoder, where: tuple[int, int, float]) -> list[Finding]:
    """The finding about a model that is right only with position_ids: a note where the library wrote it so."""
    begin, _, amount = where
    return trial.find(
        POSITIONS, "note" if is_library_code(trial.model) else "critical", [],
        f"With {decoder.name} and without position_ids, token {begin} behind {begin} cached ones gives an output that "
        f"differs by {amount:.2g} of its size; with position_ids it does not. The model's own positions start again.",
        f"relative change of a row > {trial.rounding:.2g}, and not with position_ids",
        "Pass position_ids in every step, as generate() does, or count them from the length of the cache.",
    )  # fmt: skip


def compare_chunks(trial: Trial, decoder: Decoder, text: TokenBatch, full: torch.Tensor, window: int) -> list[Finding]:
    """Findings about several tokens behind a cache, where single ones are right."""
    length = text.targets.shape[1]
    cuts = (length // 3, length // 3 + 5, length)
    try:
        chunks = list(decoder.steps(trial.probe, text.targets, cuts))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model takes one token at a time
        first = str(error).strip().split("\n")[0][:120]
        trial.skipped.append((CHUNKS, f"several tokens behind a cache: {type(error).__name__}: {first}"))
        return []
    if is_recurrent(chunks[0][3]):
        return []  # its library steps one by one behind a recurrent state
    for begin, end, output, _ in chunks:
        amount = float(row_changes(full[:, begin:end], output).max())
        if amount > trial.rounding:
            cause = find_cause(trial, decoder, text, cuts, begin, end)
            told = f": {cause.text}." if cause else "."
            return trial.find(
                CHUNKS, "note" if is_library_code(trial.model) else "critical", [cause.key] if cause else [],
                f"With {decoder.name}, {end - begin} tokens behind {begin} cached ones give outputs that differ from "
                f"one forward by {amount:.2g} of their size, and single steps do not{told}",
                f"relative change of a row > {trial.rounding:.2g}",
            )  # fmt: skip
    return []


def window_of(trial: Trial) -> int:
    """The smallest window of the configuration; 0 if it has none."""
    found = [getattr(config, name, None) for config in configs_of(trial.model) for name in WINDOWS]
    return min((one for one in found if isinstance(one, int) and one > 2), default=0)
