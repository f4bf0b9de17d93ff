"""Masks that hide too little: ones and zeros that are added, scores set to 0, or a number that logits outgrow.

What is added to the scores, or what is left of them where a causal model may not look, is read from the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial
from regard.table import format_number

ROUNDING = 1e-4  # relative to the largest number that is compared
LEAKS = 1e-3  # of a query's weight that goes to keys which the mask means to hide
NEEDS = "attention calls with a mask that is added to the scores"
ZEROED = Rule(
    "RG730", "hidden scores are 0", "hidden keys get −inf and not 0", "critical", NEEDS,
    "all scores of later keys are exactly 0, which is a large score beside negative ones and hides nothing",
    "Scores were multiplied by a mask of ones and zeros, or filled with 0, before the softmax.",
    "Fill hidden scores with −inf: scores.masked_fill(~visible, float('-inf')).",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24", "RG110", "RG113", "RG306"),
)  # fmt: skip
ADDED = Rule(
    "RG731", "a bool mask is added", "masks are added as 0 and −inf", "critical", NEEDS,
    "what is added to the scores takes two values, the larger one where keys are visible, 1 apart or less",
    "A mask of ones and zeros, or of True and False, was added to the scores.",
    "Pass a bool mask to scaled_dot_product_attention, or add 0 where visible and −inf where not.",
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24", "RG110", "RG113"),
)  # fmt: skip
SMALL = Rule(
    "RG520", "mask too small for the logits", "the mask's number is far below every logit", "warning", NEEDS,
    "what is added at hidden keys leaves them a share of the weight, because logits are as large",
    "A finite number such as −100 is used for −inf, and logits have grown towards it.",
    "Use torch.finfo(dtype).min or −inf.",
    ("transformers#17683",),
    explains=("RG10", "RG206", "RG211", "RG212", "RG22", "RG23", "RG24", "RG110", "RG202", "RG213"),
)  # fmt: skip
RULES = (SMALL, ZEROED, ADDED)


def check(trial: Trial) -> list:
    added = {
        key: one
        for key, one in trial.captured[1].items()
        if one.call.mask is not None and one.call.mask.dtype != torch.bool and one.q.shape[2] == one.k.shape[2] > 4
    }
    if not added:
        raise NothingToCheck("no mask is added to scores")
    filled = {
        key: x for key, one in added.items() if one.call.kind == "by hand" and (x := filled_with(one)) is not None
    }
    zeroed = [key for key, x in filled.items() if x == 0]
    found = []
    if zeroed:
        text = f"The scores of all later keys are exactly 0 in {len(zeroed)} layers (first {zeroed[0][0]})."
        found += trial.find(ZEROED, "critical", zeroed, text)
    two = {key: values for key, one in added.items() if key not in filled and (values := two_values(one)) is not None}
    ones = [key for key, (low, high, _) in two.items() if 0 < high - low <= 1 + ROUNDING and high > 0]
    if ones:
        low, high, where = two[ones[0]]
        is_later = bool((~where & later_keys(added[ones[0]])).any())
        text = f"{format_number(high)} is added at {'the later' if is_later else 'some'} keys"
        text += f", {format_number(low)} at the others"
        found += trial.find(ADDED, "critical", ones, f"{text}, in {len(ones)} layers (first {ones[0][0]}).")
    hidden = {key: (x, later_keys(added[key])) for key, x in filled.items() if x < 0}
    hidden |= {key: (low, where) for key, (low, high, where) in two.items() if high == 0 and key not in ones}
    shares = [(hidden_weight(added[key], where), key, x) for key, (x, where) in hidden.items()]
    leaking = [one for one in shares if one[0] > LEAKS]
    if leaking:
        share, key, x = max(leaking)
        text = f"Hidden keys of {key[0]} are at {format_number(x)}, and a query gives them {share:.2g} of its weight."
        keys = [key for _, key, _ in leaking]
        found += trial.find(SMALL, "warning", keys, text, f"share of a query's weight > {LEAKS:g}")
    return found


def logits_of(one: CapturedCall) -> Tensor:
    """The logits with all that was added, [B, H, M, N]; −inf where the mask hides."""
    k = one.k.float().repeat_interleave(one.q.shape[1] // one.k.shape[1], 1)
    s = resolve_scale(one.call.options.get("scale"), one.q.shape[-1]) * one.q.float() @ k.transpose(-1, -2)
    return s + one.call.mask.float() if one.call.mask is not None else s


def later_keys(one: CapturedCall) -> Tensor:
    """True at the keys after each query's own place, [M, N]."""
    return torch.ones(one.q.shape[2], one.k.shape[2], dtype=torch.bool, device=one.q.device).triu(1)


def filled_with(one: CapturedCall) -> float | None:
    """The one logit that all later keys have while earlier ones differ; None if there is none."""
    logits, later = logits_of(one), later_keys(one)
    earlier, rest = logits[..., ~later], logits[..., later]
    if not bool(torch.isfinite(rest).all()):
        return None
    size = earlier.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    low, high = torch.aminmax(rest)
    near = ROUNDING * torch.maximum(size, low.abs())
    if not bool(size > 0) or bool(high - low > near) or bool(earlier.amax() - earlier.nan_to_num(0.0).amin() <= near):
        return None
    return 0.0 if bool(low.abs() <= near) else float(low)


def two_values(one: CapturedCall) -> tuple[float, float, Tensor] | None:
    """(lower, higher value, where the lower one is) of what is added to the scores; None if there are more values."""
    assert one.call.mask is not None
    x = one.call.mask.float()
    if not bool(torch.isfinite(x).all()):
        return None
    low, high = (float(v) for v in torch.aminmax(x))
    near = ROUNDING * max(abs(low), abs(high), 1.0)
    if high - low <= near:
        return None
    is_low = (x - low).abs() <= near
    if not bool((is_low | ((x - high).abs() <= near)).all()):
        return None
    high = 0.0 if abs(high) <= near else high
    return low, high, is_low


def hidden_weight(one: CapturedCall, hidden: Tensor) -> float:
    """The largest share of its weight that a query gives to keys where the mask has its lower value."""
    p = logits_of(one).softmax(-1)
    rows = ~hidden.expand(p.shape).all(-1)
    share = (p * hidden).sum(-1)[rows]
    return float(share.max()) if share.numel() else 0.0
