"""Rank collapse: at a layer, every token of a text has nearly the same value vectors, so attention can choose nothing.

The measure is r = ‖V − v̄‖/‖V‖ over the tokens of a sequence, all heads together (Dong et al. 2021, arXiv 2103.03404).
Attention without residual connections or MLPs converges to it with depth.
"""

from torch import Tensor

from regard.health.findings._finding import Finding
from regard.health.probing.trial import NotApplicable, Trial

NAME = "tokens stay different from layer to layer"
KIND = "rank collapse"
LEAST = 0.05


def check(trial: Trial) -> list[Finding]:
    length = trial.tokens.ids.shape[1]
    if length < 8 or int(trial.tokens.ids.unique().numel()) < 4:
        raise NotApplicable("the text is too short or too uniform")
    spreads = {key: spread(one.v) for key, one in trial.captured[1].items() if one.v.shape[2] >= 8}
    collapsed = [key for key, r in spreads.items() if r < LEAST]
    if not collapsed:
        return []
    first = collapsed[0]
    return trial.find(
        KIND, "warning", collapsed,
        f"From {first[0] or 'the first layer'} on, all tokens have nearly the same values: they differ by "
        f"{min(spreads[key] for key in collapsed):.2g} of their size.",
        f"‖V − v̄‖/‖V‖ < {LEAST:g} (arXiv 2103.03404)",
        "Check that residual connections and norms are there and that one vector does not dominate the embedding; "
        "check the output projection of the layers before.",
    )  # fmt: skip


def spread(v: Tensor) -> float:
    """‖V − v̄‖/‖V‖ of values [B, G, N, E], the largest over the sequences."""
    v = v.double().transpose(1, 2).flatten(2)  # [B, N, G·E]
    size = v.square().sum((1, 2)).sqrt()
    rest = (v - v.mean(1, keepdim=True)).square().sum((1, 2)).sqrt()
    return float((rest / size.clamp_min(1e-30)).max())
