"""Rank collapse: at a layer, every token of a text has nearly the same value vectors, so attention can choose nothing.

The measure is r = ‖V − v̄‖/‖V‖ over the tokens of a sequence, all heads together (Dong et al. 2021, arXiv 2103.03404).
Attention without residual connections or MLPs converges to it with depth.
"""

from torch import Tensor

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import Key
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG311", "rank collapse", "tokens stay different from layer to layer",
    "warning", needs="token ids and attention calls",
    proves="Proves that all tokens of a text have nearly the same values in these layers.",
    cause="Residual connections or norms are missing, or one vector dominates the embedding.",
    fix="Check that residual connections and norms are there.",
    references=("arXiv 2103.03404",),
    explains=("RG304", "RG306"),
)  # fmt: skip
RULES = (RULE,)
LEAST = 0.05


def check(trial: Trial) -> list[Finding]:
    length = trial.tokens.ids.shape[1]
    if length < 8 or int(trial.tokens.ids.unique().numel()) < 4:
        raise NotApplicable("the text is too short or too uniform")
    calls = trial.captured[1].items()
    whole = [
        (key, one) for key, one in calls if one.q.shape[2] == one.v.shape[2] == length or one.call.is_cross(key[0])
    ]
    spreads = {key: spread(one.v) for key, one in whole if one.v.shape[2] >= 8 and is_only_call(trial, key)}
    collapsed = [key for key, r in spreads.items() if r < LEAST]
    if not collapsed:
        return []
    first = collapsed[0]
    return trial.find(
        RULE, "warning", collapsed,
        f"From {first[0] or 'the first layer'} on, all tokens have nearly the same values: they differ by "
        f"{min(spreads[key] for key in collapsed):.2g} of their size.",
        f"‖V − v̄‖/‖V‖ < {LEAST:g} (arXiv 2103.03404)",
        "Check that residual connections and norms are there and that one vector does not dominate the embedding; "
        "check the output projection of the layers before.",
    )  # fmt: skip


def is_only_call(trial: Trial, key: Key) -> bool:
    """True if the module computes one attention; others approximate one by several, as Nyströmformer's landmarks do."""
    return sum(other[0] == key[0] for other in trial.captured[1]) == 1


def spread(v: Tensor) -> float:
    """‖V − v̄‖/‖V‖ of values [B, G, N, E], the largest over the sequences."""
    v = v.double().transpose(1, 2).flatten(2)  # [B, N, G·E]
    size = v.square().sum((1, 2)).sqrt()
    rest = (v - v.mean(1, keepdim=True)).square().sum((1, 2)).sqrt()
    return float((rest / size.clamp_min(1e-30)).max())
