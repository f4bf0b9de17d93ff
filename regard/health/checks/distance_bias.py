"""Biases by distance (ALiBi, relative positions): of the wrong sign, in another order over heads, or all the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.checks.repairs import require_honest_loss
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.probe import CapturedCall, Key
from regard.health.probe.task import WORDS
from regard.health.probe.trial import Trial

LINEAR = 1e-3  # by which a bias may miss a line over the distance, relative to its largest value
HIDES = -1e3  # a number at or below it hides a key
GEOMETRIC = 0.02  # by which the logarithms of slopes may miss a line over the heads
NEEDS = "attention calls with a bias that falls evenly with the distance"
SIGN = Rule(
    "RG740", "ALiBi of the wrong sign", "ALiBi lowers the scores of far keys", "warning", NEEDS,
    "the bias grows with the distance from the query, so that every head prefers the farthest key",
    "The distance was taken as key − query where query − key is meant, or the slope was not negated.",
    "Add −slope·(i − j) for a query at i and a key at j.", ("arXiv 2108.12409",),
    explains=("RG306", "RG307", "RG308"),
)  # fmt: skip
ORDER = Rule(
    "RG741", "ALiBi slopes of other heads", "every head has its own ALiBi slope, the first the steepest", "warning",
    NEEDS,
    "slopes are a geometric series that grows over the heads, or begins anew at a later head, or the model predicts "
    "its text better with published slopes; a model trained so is not wrong",
    "The slopes were reversed, counted from 0 on every rank, or made by the rule for another number of heads.",
    "Use 2^(−8·h/H) for head h = 1 … H of the whole model; where H is no power of two, as the paper's code does.",
    ("arXiv 2108.12409", "keras#23038", "flashinfer#1606", "mlx#3071"), explains=("RG8",),
)  # fmt: skip
SAME = Rule(
    "RG742", "the same bias at every distance", "relative biases depend on the distance", "warning",
    "attention calls with a bias that is not only a mask",
    "the bias of every key before the query is one number per head: a table of relative positions is read at one entry",
    "The sign of the relative position is the other way round, so that every earlier key falls into one bucket.",
    "Compute the relative position as key − query, and print the buckets of the last row.",
    ("arXiv 1910.10683",),
)  # fmt: skip
RULES = (SIGN, ORDER, SAME)


def check(trial: Trial) -> list:
    biases = {key: bias for key, one in trial.captured[1].items() if (bias := last_bias(one)) is not None}
    same = [key for key, bias in biases.items() if is_same_everywhere(bias)]
    if same:
        number = float(biases[same[0]][0, 0])
        text = f"Every earlier key has one bias, {number:.2g} in head 0, in {len(same)} layers (first {same[0][0]})."
        return trial.find(SAME, "warning", same, text)
    slopes = {key: found for key, bias in biases.items() if (found := slopes_of(bias)) is not None}
    if not biases:
        raise NothingToCheck("no bias falls evenly with the distance")
    findings = []
    grows = [key for key, s in slopes.items() if bool((s > 0).all())]
    if grows:
        text = f"The bias grows by {float(slopes[grows[0]].max()):.2g} per position of distance in the steepest head"
        findings += trial.find(SIGN, "warning", grows, f"{text}, in {len(grows)} layers (first {grows[0][0]}).")
    known = {key: -s for key, s in slopes.items() if bool((s < 0).all())}
    for describe in (describe_reversed, describe_repeated):
        if texts := {key: text for key, s in known.items() if (text := describe(s))}:
            key, text = next(iter(texts.items()))
            return findings + trial.find(
                ORDER, "warning", list(texts), f"{text}, in {len(texts)} layers (first {key[0]})."
            )
    return findings or find_better_slopes(trial, known)


def describe_reversed(s: Tensor) -> str:
    if not is_reversed(s):
        return ""
    return f"Slopes grow from {float(s[0]):.2g} in head 0 to {float(s[-1]):.2g} in head {len(s) - 1}"


def describe_repeated(s: Tensor) -> str:
    """What is said of slopes that begin anew at a later head; nothing if every head has its own."""
    for size in [n for n in range(2, len(s) // 2 + 1) if len(s) % n == 0]:
        sets = s.view(-1, size)
        if bool((sets - sets[0]).abs().amax() <= LINEAR * s.amax()) and float(sets[0].max() / sets[0].min()) > 1.1:
            return f"Slopes begin anew at head {size}: heads 0 and {size} both have {float(s[0]):.2g}"
    return ""


def find_better_slopes(trial: Trial, slopes: dict[Key, Tensor]) -> list:
    """[Finding] if the model predicts its text surely better with published slopes than with its own."""
    task = trial.token_task or trial.task
    if task is None or not slopes:
        return []
    try:
        require_honest_loss(trial)
    except NotApplicable:
        return []
    own, heads = task.losses(), len(next(iter(slopes.values())))
    for words, wanted in (("the paper's code", published_slopes(heads)), ("2^(−8·h/H)", series_of_slopes(heads))):
        change = {key: wanted.to(s.device) for key, s in slopes.items() if len(s) == heads and not wanted.allclose(s)}
        if not change:
            continue

        def bend(call: Call, key: Key, run: Callable[[], Tensor], change: dict[Key, Tensor] = change) -> Tensor:
            if key not in change or call.mask is None or call.q.shape[2] != call.k.shape[2]:
                return run()
            at = torch.arange(call.k.shape[2], device=call.k.device)
            distance = (at[:, None] - at).clamp_min(0)
            more = (slopes[key] - change[key])[:, None, None] * distance
            return call.changed(mask=call.mask + more).run()

        changed = task.losses(bend)
        if task.compare(own, changed).word == WORDS["helps"]:
            text = f"With the slopes of {words} for {heads} heads the loss falls from {float(own.mean()):.3g} to"
            return trial.find(ORDER, "warning", list(change), f"{text} {float(changed.mean()):.3g}.")
    return []


def series_of_slopes(heads: int) -> Tensor:
    """2^(−8·h/H) for h = 1 … H."""
    return 2.0 ** (-8 / heads * torch.arange(1, heads + 1))


def published_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi's own code: a series for a power of two, then every other one of twice as many.

    >>> from regard.health.checks.distance_bias import published_slopes
    >>> published_slopes(6).log2().tolist()
    [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]
    """
    power = 2 ** (heads.bit_length() - 1)
    return torch.cat([series_of_slopes(power), series_of_slopes(2 * power)[::2][: heads - power]])


def last_bias(one: CapturedCall) -> Tensor | None:
    """What is added to the last query's scores [H, N] of a self-attention call; None where it is a mask alone."""
    mask, queries, keys = one.call.mask, one.q.shape[2], one.k.shape[2]
    if mask is None or mask.dtype == torch.bool or queries != keys or queries < 8 or one.call.is_cross(one.key[0]):
        return None
    row = torch.broadcast_to(mask.float(), (*one.q.shape[:3], keys))[0, :, -1]
    return row if bool((row > HIDES).all()) and bool((row != 0).any()) else None


def is_same_everywhere(row: Tensor) -> bool:
    """True if each head adds a number of its own, not 0 in all of them, at every key before the query."""
    before = row[:, :-1]
    size = before.abs().amax(-1, keepdim=True)
    has_own = float(before[:, 0].max() - before[:, 0].min()) > LINEAR * float(size.max())
    return has_own and bool(((before - before[:, :1]).abs() <= LINEAR * size).all()) and bool((size > LINEAR).any())


def slopes_of(row: Tensor) -> Tensor | None:
    """The bias per position of distance [H], where it is a line over the distance in every head."""
    keys = row.shape[1]
    row = row - row[:, -1:]
    distance = torch.arange(keys - 1, -1, -1, device=row.device)
    slopes = row[:, 0] / (keys - 1)
    size = row.abs().amax(-1, keepdim=True)
    if bool((size == 0).any()) or bool(((row - slopes[:, None] * distance).abs() > LINEAR * size).any()):
        return None
    return slopes


def is_reversed(slopes: Tensor) -> bool:
    """True if slopes are a geometric series that grows over the heads."""
    if len(slopes) < 3:
        return False
    steps = slopes.log().diff()
    return bool((steps > 0).all()) and bool((steps - steps.mean()).abs().amax() < GEOMETRIC * steps.mean())
