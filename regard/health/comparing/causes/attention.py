"""Why two attention calls with the same q, k and v give other outputs: each way is computed from A's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.health.comparing.causes.guesses import Pair, guess_outputs
from regard.health.comparing.causes.masks import explain_masks
from regard.health.comparing.causes.trial import Trial, fit_factor, name_factor
from regard.health.comparing.scores import Kept

Fact = tuple[str, Callable[[], Tensor], str] | tuple[str, Callable[[], Tensor], str, bool]  # the last: is it vague?
MANY = 2**20  # scores of a call: of more, one sequence is explained


def explain_attention(pair: Pair) -> Trial:
    """Try on A's q, k, v what B may do otherwise after them."""
    pair = _worst_sequence(replace(pair, a=pair.a.resolve(), b=pair.b.resolve()))
    a, b = pair.a, pair.b
    trial = Trial(a.output, b.output, pair.budget, "attention", pair.real)
    if trial.is_lost:
        return trial
    if not a.is_readable:
        trial.tried.append(f"nothing: {a.obstacle or 'too many scores to write out'}")
        return trial
    if b.is_readable and a.shape == b.shape:
        for fact in facts_that_differ(pair):
            trial.explains(*fact)
        if trial.found:
            return trial
        names = [fact[0] for fact in facts_that_differ(pair)]
        if len(names) > 1:
            given = replace(b, q=a.q, k=a.k, v=a.v)
            trial.explains(
                "all of these", given.compute(), f"several facts of the call differ: {', '.join(names)}", True
            )
    for guess in guess_outputs(pair):
        trial.explains(*guess)
    return trial


def _worst_sequence(pair: Pair) -> Pair:
    """The pair for the one sequence that differs most, where all of them are too many to compute again and again."""
    a, b = pair.a, pair.b
    if a.shape[0] == 1 or math.prod(a.shape) <= MANY or a.output.shape != b.output.shape:
        return pair
    gap = (a.output.double() - b.output.double()).nan_to_num(posinf=1e30, neginf=-1e30)
    at = int(gap.flatten(1).norm(dim=1).argmax())
    real = None if pair.real is None else pair.real[at : at + 1]
    return replace(pair, a=a.sequence(at), b=b.sequence(at), real=real)


def facts_that_differ(pair: Pair) -> Iterator[Fact]:
    """Every fact of the call that differs: its name, A's output with B's fact, the sentence."""
    a, b = pair.a, pair.b
    if not _equal(a.scale, b.scale):
        yield "scale", a.change(scale=b.scale).compute, _say_scales(pair)
    if not torch.equal(a.seen(), b.seen()):
        said, is_told = explain_masks(a.seen(), b.seen(), pair.real)
        yield "mask", a.change(visible=b.visible).compute, f"The masks differ: {said}.", not is_told
    if a.softcap != b.softcap:
        said = f"{_cap(a.softcap)} in A, {_cap(b.softcap)} in B"
        yield "soft cap", a.change(softcap=b.softcap).compute, f"The soft caps of the logits differ: {said}."
    if not _equal(a.sink, b.sink):
        said = (
            "B leaves out A's sinks" if b.sink is None else "Only B has sinks" if a.sink is None else "The sinks differ"
        )
        yield "sink", a.change(sink=b.sink).compute, f"{said}: a logit per head in the softmax's denominator."
    if not _equal(a.temperature, b.temperature):
        changed = a.change(temperature=b.temperature)
        yield "temperature", changed.compute, "The temperatures that divide the logits differ."
    if a.choice is not None and b.choice is not None and a.choice.spec != b.choice.spec:
        said = f"{a.choice.spec} in A, {b.choice.spec} in B"
        yield "normaliser", a.change(choice=b.choice).compute, f"The normalisers differ: {said}."
    if not _equal_bias(a, b) and a.has_fixed_bias and b.has_fixed_bias:
        yield "bias", a.change(bias=b.bias).compute, _say_bias(a, b)


def _say_scales(pair: Pair) -> str:
    a, b, d = pair.a.scale, pair.b.scale, pair.a.q.shape[-1]
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return "The scales per head differ."
    known = name_factor(b / a, d, pair.numbers) if a else ""
    return f"The scales differ: {a:.4g} in A, {b:.4g} in B: logits × {b / a:.4f}{known} (1/√d is {d**-0.5:.4g})."


def _say_bias(a: Kept, b: Kept) -> str:
    if b.bias is None:
        return "B leaves out the bias that A adds to the scores."
    if a.bias is None:
        return "B adds a bias to the scores that A does not."
    shown = a.seen() & b.seen()
    x, y = (one.bias.expand(one.shape)[shown] for one in (a, b) if one.bias is not None)
    f = fit_factor(x, y)
    if float((y - f * x).norm()) < 1e-3 * float(y.norm()):
        sign = ": the other sign of the distance (ALiBi)" if abs(f + 1) < 1e-3 else ""
        return f"B's bias on the scores is {f:.4g} times A's{sign}."
    each = _fit_heads(a, b, shown)
    if each is not None:
        return f"B's bias on the scores is {', '.join(f'{x:.4g}' for x in each)} times A's by head: other slopes."
    return "The biases on the scores differ (relative positions, ALiBi slopes or an additive mask)."


def _fit_heads(a: Kept, b: Kept, shown: Tensor) -> list[float] | None:
    """A number per head that takes A's bias to B's; None if there is none."""
    x, y = (one.bias.expand(one.shape).masked_fill(~shown, 0.0) for one in (a, b) if one.bias is not None)
    each = (x * y).sum((0, 2, 3)) / x.square().sum((0, 2, 3)).clamp_min(1e-30)
    left = (y - each[:, None, None] * x).norm()
    return each.tolist() if float(left) < 1e-3 * float(y.norm()) else None


def _cap(cap: float | None) -> str:
    return "none" if cap is None else f"{cap:g}"


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.numel() == y.numel() and torch.allclose(x.double().flatten(), y.double().flatten(), rtol=1e-6)
    if isinstance(x, Tensor) or isinstance(y, Tensor) or x is None or y is None:
        return x is None and y is None
    return abs(x - y) <= 1e-5 * max(abs(x), abs(y))


def _equal_bias(a: Kept, b: Kept) -> bool:
    if a.bias is None and b.bias is None:
        return True
    zero = torch.zeros(())
    x, y = ((zero if one.bias is None else one.bias).expand(one.shape) for one in (a, b))
    shown = a.seen() & b.seen()
    x, y = x[shown], y[shown]
    return float((x - y).norm()) <= 1e-4 * max(float(x.norm()), float(y.norm()), 1e-3)
