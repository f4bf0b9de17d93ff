"""Biases by distance (ALiBi, relative positions): of the wrong sign, with slopes in another order over the heads."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial

LINEAR = 1e-3  # by which a bias may miss a line over the distance, relative to its largest value
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
    "RG741", "ALiBi slopes in another order", "ALiBi's first head has the steepest slope", "warning", NEEDS,
    "slopes are a geometric series over the heads that grows, where published models begin with the steepest; a model "
    "trained so is not wrong",
    "The slopes were reversed, or computed with a positive exponent.",
    "Use 2^(−8·h/H) for head h = 1 … H.", ("arXiv 2108.12409", "keras#23038"),
)  # fmt: skip
RULES = (SIGN, ORDER)


def check(trial: Trial) -> list:
    slopes = {key: found for key, one in trial.captured[1].items() if (found := slopes_of(one)) is not None}
    if not slopes:
        raise NothingToCheck("no bias falls evenly with the distance")
    findings = []
    grows = [key for key, s in slopes.items() if bool((s > 0).all())]
    if grows:
        text = f"The bias grows by {float(slopes[grows[0]].max()):.2g} per position of distance in the steepest head"
        findings += trial.find(SIGN, "warning", grows, f"{text}, in {len(grows)} layers (first {grows[0][0]}).")
    turned = [key for key, s in slopes.items() if key not in grows and is_reversed(s.abs())]
    if turned:
        s = slopes[turned[0]].abs()
        text = f"Slopes grow from {float(s[0]):.2g} in head 0 to {float(s[-1]):.2g} in head {len(s) - 1}"
        findings += trial.find(ORDER, "warning", turned, f"{text}, in {len(turned)} layers (first {turned[0][0]}).")
    return findings


def slopes_of(one: CapturedCall) -> Tensor | None:
    """The bias per position of distance [H] of a causal call, where it is a line over the distance in every head."""
    mask, queries, keys = one.call.mask, one.q.shape[2], one.k.shape[2]
    if mask is None or mask.dtype == torch.bool or queries != keys or queries < 8 or mask.ndim != 4:
        return None
    heads = one.q.shape[1]
    bias = mask.float().expand(mask.shape[0], heads, queries, keys)[0]
    row = bias[:, -1]  # of the last query: keys at distances N − 1 … 0
    if not bool(torch.isfinite(row).all()):
        return None
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
