"""Attention does not compute what it is given: softmax(q kᵀ) v of the call's own q, k, v and mask is another output.

The readings of a call by which two models are compared are tried, and the one that gives the output is named.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.capture.call import Call, output_and_weights
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.comparing.causes.attention import explain_attention
from regard.health.comparing.causes.guesses import Pair
from regard.health.comparing.scores import Kept
from regard.health.probe.differences import KERNEL, Calls, Cause
from regard.health.probe.probe import CapturedCall, relative_change
from regard.health.probe.trial import TOLERANCE, Trial

LEAST = 1e-3  # relative difference of the outputs, at least
RULES = (
    Rule(
        "RG420", "attention computes something else",
        "attention computes what it is given", "critical", "attention calls",
        "the layer's output is not softmax(q kᵀ)·v of what its attention function was given; the sentence names the "
        "reading of the same q, k and v that gives the output, if one does",
        "The attention function ignores one of its arguments or applies it in another way.",
        "Use the library's own attention function, or mend what the evidence names.",
        ("transformers#46634", "transformers#40414"), explains=("RG1", "RG2", "RG3", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    judged, wrong, ours = 0, [], []
    for key, one in trial.captured[1].items():
        if one.output.shape[-2] != one.q.shape[2] or one.call.dropout:
            continue
        own = rebuild(one.call)
        if own is None or own.shape != one.output.shape:
            continue
        judged += 1
        limit = max(LEAST, 10 * TOLERANCE.get(one.q.dtype, 3e-2))
        off = difference(own, one)
        if off > limit:
            if difference(compute_by_hand(one.call), one) > limit:
                wrong.append((key, off, name_reading(one, limit)))
            else:
                ours.append((key, off))
    if not judged:
        raise NotApplicable("no attention call could be computed again")
    if ours and not wrong:
        (name, _), off = ours[0]
        raise NotApplicable(
            f"regard's own kernel differs by {off:.2g} from plain torch in {len(ours)} of {judged} layers (first "
            f"{name or 'the model itself'}), and the model does not; please report that"
        )
    if not wrong:
        return []
    key, off, reading = wrong[0]
    meaning = reading or "None of the readings that were tried gives its output"
    return trial.find(
        RULES[0], "critical", [key for key, *_ in wrong],
        f"{meaning}: the output of {key[0] or 'the model'} ({one_kind(trial, key)}) differs by {off:.2g} of its size "
        f"from softmax(q kᵀ)·v of what it was given, in {len(wrong)} of {judged} layers.",
        f"relative difference > {LEAST:g}",
    )  # fmt: skip


def describe_cause(cause: Cause | None, calls: Calls) -> str:
    """ ": why two ways of running differ.", with the reading of the call in the other way that explains it."""
    if cause is None:
        return "."
    one, reading = calls.get(cause.key), ""
    if one is not None and cause.what == KERNEL:
        limit, own = max(LEAST, 10 * TOLERANCE.get(one.q.dtype, 3e-2)), rebuild(one.call)
        is_as_given = own is None or own.shape != one.output.shape or difference(own, one) <= limit
        reading = "" if is_as_given else name_reading(one, limit)
    return f": {cause.text}.{f' {reading}.' if reading else ''}"


def one_kind(trial: Trial, key) -> str:
    return f"attention by {trial.captured[1][key].call.kind!r}"


def rebuild(call: Call) -> Tensor | None:
    """The output of regard.attention for a call; None where the call is refused."""
    try:
        return call.changed(compute=None, weights=None, dropout=0.0).run()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        return None


def compute_by_hand(call: Call) -> Tensor:
    """The output of plain torch for a call that `rebuild` took: where it is the model's, our kernel is at fault."""
    return output_and_weights(call.changed(compute=None, weights=None, dropout=0.0))[0]


def difference(output: Tensor, one: CapturedCall) -> float:
    """The relative difference over rows that see a key."""
    rows = one.visible.any(-1).expand(*one.output.shape[:3])
    return relative_change(one.output[rows], output[rows])


def name_reading(one: CapturedCall, limit: float) -> str:
    """What the attention function does instead, if a reading of the same q, k, v and mask gives its output."""
    call = one.call.changed(compute=None, weights=None, dropout=0.0)
    if call.options.get("score_mod") is not None:
        without = rebuild(call.with_options(score_mod=None))
        return "It ignores the change of scores" if without is not None and difference(without, one) < limit else ""
    kept = Kept.of(call, call.run())
    own = one.output if one.output.ndim == 4 else one.output[:, None]
    real = kept.seen().any(1).any(1) if kept.is_readable and kept.shape[2] == kept.shape[3] else None
    pair = Pair(kept, kept.change(output=own.detach().cpu(), obstacle="the model's own"), limit, real)
    found = explain_attention(pair).best
    return "" if found is None else found.with_names("the call", "the model").rstrip(".")
