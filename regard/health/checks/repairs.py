"""Repairs: a change of the wiring that lowers the model's loss names what is wired wrongly.

Each repair undoes one mistake in every layer: another scale, key or value heads in another order, q and k exchanged,
rotary positions on one side only or shifted. In a sound model all of them raise the loss.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.capture.call import Call
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.measure.designed_scale import is_designed
from regard.health.probe.probe import change_calls
from regard.health.probe.task import MASKED, NEXT, Task
from regard.health.probe.trial import Trial

SCALE = Rule(
    "RG402", "scale off", "no other wiring of q, k and v lowers the loss", "warning", needs="a loss",
    proves="Proves that the model predicts this text better with another scale.",
    cause="The scale differs from the one that the model was trained with.",
    fix="Use the scale that the model was trained with.",
    what_if=("scale=sqrt", "qk_norm"), explains=("RG8",),
)  # fmt: skip
ORDER = Rule(
    "RG403", "heads in another order", "no other order of heads lowers the loss", "warning", needs="a loss",
    proves="Proves that the model predicts this text better with its heads in another order.",
    cause="repeat and repeat_interleave were confused, or heads were exchanged in a conversion.",
    fix="Compare the order of heads with that of the model it was converted from.", explains=("RG8",),
)  # fmt: skip
EXCHANGED = Rule(
    "RG404", "q and k exchanged", "exchanging q and k does not lower the loss", "warning", needs="a loss",
    proves="Proves that the model predicts this text better with q and k exchanged.",
    cause="The conversion named the query weights as key weights.",
    fix="Exchange the query and key weights.", explains=("RG8",),
)  # fmt: skip
ROTARY = Rule(
    "RG405", "rotary positions off", "no other rotation of q or k lowers the loss", "warning", needs="a loss",
    proves="Proves that the model predicts this text better with other rotary positions.",
    cause="Positions of a cache are off, or one side is not rotated.",
    fix="Rotate queries and keys by the same positions.", explains=("RG8",),
)  # fmt: skip
RULES = (SCALE, ORDER, EXCHANGED, ROTARY)
GAIN = 0.05  # of the loss, at least
ALONE = 0.3  # of the loss, at least, where no frequencies say which loss is sound
SEQUENCES, LENGTH = 8, 128
BASE = 10000.0  # of rotary angles


class Repair(NamedTuple):
    """A change of every call, the kind of finding it stands for, and what it means if it lowers the loss."""

    rule: Rule
    meaning: str
    change: Callable[[Call], Call]


def check(trial: Trial) -> list[Finding]:
    task = trial.token_task or trial.task
    if task is None:
        raise NotApplicable("the model has no loss on this text; pass loss=, or labels in the batches")
    require_honest_loss(trial)
    task = shorten(task)
    own, silent = task.losses(), loss_without_attention(trial, task)
    best: tuple[float, Repair] | None = None
    for repair in list_repairs(trial):
        try:
            changed = task.losses(change_calls(repair.change))
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError):
            continue  # this model's calls do not have the shapes for it
        loss = float(changed.mean())
        if is_cured(trial, task, own, changed, silent) and (best is None or loss < best[0]):
            best = loss, repair
    if best is None:
        return []
    loss, repair = best
    return trial.find(
        repair.rule, "warning", [],
        f"{repair.meaning} With that undone in every layer, the loss falls from {float(own.mean()):.3g} to {loss:.3g}.",
        CURED,
        "Compare the attention code with the one that the model was trained with, or use regard.compare(model, "
        "reference, batches).",
    )  # fmt: skip


CURED = (
    f"loss lower by more than {GAIN:.0%}, 95 % interval below 0, and then below that of the text's frequencies "
    "and of the model without attention"
)


def shorten(task: Task) -> Task:
    """The task on a few sequences, which are run once for each repair."""
    if task.kind in (NEXT, MASKED):
        return task.on([task.batches[0].cut(SEQUENCES, LENGTH)])
    return task


def require_honest_loss(trial: Trial) -> None:
    """Raises NotApplicable if the model reads the tokens that it predicts: its loss judges no repair then."""
    try:
        leaks = trial.why_causal is not None and trial.leak > trial.rounding
    except NotApplicable:
        return
    if leaks:
        raise NotApplicable("later tokens change earlier outputs, so the loss judges no repair")


def loss_without_attention(trial: Trial, task: Task) -> float:
    """The mean loss where attention adds nothing; infinite if no call was captured."""
    if not trial.batches or not trial.captured[1]:
        return float("inf")
    return float(task.losses(change_calls(lambda call: call.changed(v=torch.zeros_like(call.v)))).mean())


def is_cured(trial: Trial, task: Task, own: Tensor, changed: Tensor, silent: float) -> bool:
    """True if a change makes the loss sound: surely lower, and then below the text's frequencies and no attention.

    Attention that is wrong for another reason is often worse than none, so that what spoils it further seems to help.
    """
    effect, before = task.compare(own, changed), abs(float(own.mean()))
    if not effect.change < -GAIN * before or effect.high >= 0.0 or effect.loss > (1 - GAIN) * silent:
        return False
    reading = trial.loss_reading
    if reading is None or reading.unigram is None:
        return effect.change < -ALONE * before
    return effect.loss < reading.unigram


def list_repairs(trial: Trial) -> list[Repair]:
    """The repairs that fit the shapes of the model's calls."""
    one = next(iter(trial.captured[1].values()), None) if trial.batches else None
    if one is None:
        return []
    d, heads, groups = one.q.shape[-1], one.q.shape[1], one.k.shape[1]
    used = resolve_scale(one.call.options.get("scale"), d)
    ratio = 1.0 if isinstance(used, Tensor) else float(used) * d**0.5
    is_meant = not 0.98 < ratio < 1.02 and is_designed(one.call.module, ratio * d**-0.5)  # T5 has no 1/√d
    repairs = [] if is_meant else [
        Repair(
            SCALE, f"The logits look {d**0.5:.3g} times too small, as if 1/√d were applied twice.", scale_by(d**0.5)
        ),
        Repair(SCALE, f"The logits look {d**0.5:.3g} times too large, as if 1/√d were left out.", scale_by(d**-0.5)),
    ]  # fmt: skip
    if not is_meant and not 0.98 < ratio < 1.02:
        text = f"The scale of the scores is {ratio:.3g}/√d, where 1/√d predicts better."
        repairs.append(Repair(SCALE, text, lambda call: call.with_options(scale=None)))
    if groups > 1:
        for name, part in (("Key", "k"), ("Value", "v")):
            text = f"{name} heads do not belong to the query heads that they are paired with."
            for step in {1, groups - 1}:
                repairs.append(Repair(ORDER, text, roll(part, step)))
    if groups == heads:
        for size in [n for n in (2, 4, 8) if heads % n == 0 and n < heads]:
            text = "Groups of query heads read the wrong key-value heads: repeat_interleave and repeat were confused."
            repairs.append(Repair(ORDER, text, regroup(size)))
        repairs.append(Repair(EXCHANGED, "The queries and keys are exchanged.", exchange))
    if d % 2 == 0:
        repairs += list_rotations()
    return repairs


def list_rotations() -> list[Repair]:
    """Rotary positions (base 10000, halves) added to one side, or shifted on it."""
    repairs = []
    for part, name in (("k", "keys"), ("q", "queries")):
        text = f"Rotary positions are missing on the {name}."
        repairs.append(Repair(ROTARY, text, turn(part, lambda at: at)))
    for shift in (-3, -2, -1, 1, 2, 3):
        text = f"The rotary positions of the keys are {abs(shift)} too {'large' if shift < 0 else 'small'}."
        repairs.append(Repair(ROTARY, text, turn("k", partial(torch.full_like, fill_value=shift))))
    return repairs


def scale_by(factor: float) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        scale = resolve_scale(call.options.get("scale"), call.q.shape[-1])
        return call.with_options(scale=scale * factor)

    return change


def roll(part: str, step: int) -> Callable[[Call], Call]:
    return lambda call: call.changed(**{part: getattr(call, part).roll(step, 1)})


def regroup(size: int) -> Callable[[Call], Call]:
    """Key-value heads a, b, a, b as a, a, b, b."""

    def mend(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, size)).transpose(1, 2).flatten(1, 2)

    return lambda call: call.changed(k=mend(call.k), v=mend(call.v))


def exchange(call: Call) -> Call:
    return call.changed(q=call.k, k=call.q) if call.q.shape == call.k.shape else call


def turn(part: str, positions: Callable[[Tensor], Tensor]) -> Callable[[Call], Call]:
    """Rotates queries or keys of self-attention by their positions."""

    def change(call: Call) -> Call:
        x = getattr(call, part)
        if call.q.shape[2] != call.k.shape[2]:
            return call
        half = x.shape[-1] // 2
        at = positions(torch.arange(x.shape[2], device=x.device))
        angle = at[:, None] * BASE ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return call.changed(q=turned) if part == "q" else call.changed(k=turned)

    return change
