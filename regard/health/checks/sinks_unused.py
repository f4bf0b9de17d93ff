"""Learned sinks that the layer holds are not in the call: a kernel without them dropped them."""

from __future__ import annotations

from torch import nn

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.trial import Trial

KINDS_WITHOUT = ("sdpa", "flash_attention", "flex_attention")
RULES = (
    Rule(
        "RG414", "sinks are not in the call",
        "learned sinks of a layer take part in its softmax", "warning",
        "token ids and layers with a parameter named sinks",
        "the layer holds a sink per head and its attention call was given none",
        "The attention function ignores `s_aux`, as kernels without sinks do.",
        "Use an implementation with sinks: eager, flash-attention 3 with s_aux, or regard.",
        ("transformers#40414", "arXiv 2508.10925"), explains=("RG23", "RG24", "RG308"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    with_sinks = [(key, one) for key, one in trial.captured[1].items() if sink_of(one.call.module, one.q.shape[1])]
    if not with_sinks:
        raise NothingToCheck("no layer has a parameter for sinks")
    without = [key for key, one in with_sinks if one.call.options.get("sink") is None and one.call.kind != "by hand"]
    if not without:
        return []
    return trial.find(
        RULES[0], "warning", without,
        f"{len(without)} of {len(with_sinks)} layers with learned sinks call attention without them (first "
        f"{without[0][0]}).",
        "a parameter named sink with one number per head, and no sink in the call",
    )  # fmt: skip


def sink_of(module: nn.Module, heads: int) -> str | None:
    """The name of the layer's own parameter with one sink per head."""
    own = module._parameters.items()
    return next((name for name, p in own if "sink" in name and p is not None and p.numel() == heads), None)
