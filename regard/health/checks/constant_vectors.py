"""Norms and biases that are exactly 1 or 0 in one layer, or in attention alone, while the model's others have moved."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import Tensor, nn

from regard.health.checks.rule import NotApplicable, Rule
from regard.health.checks.untrained_layers import is_trained
from regard.health.probe.trial import Trial

KEYS_ALONE = re.compile(r"(^|[._])(k|key|k_proj|linear_k|k_lin|to_k)(_proj)?\.bias$")  # softmax gives them no gradient
ATTENTION = re.compile(r"attn|attention|\bq_|\bk_|\bv_|query|key|value|qkv|in_proj", re.IGNORECASE)
NUMBER = re.compile(r"\d+")
RULES = (
    Rule(
        "RG610", "vectors at their start",
        "norms and biases have all been loaded", "warning", "a trained model",
        "a vector is exactly constant, as a new module's is, while vectors of the same kind are not; a frozen layer "
        "looks the same",
        "The checkpoint's name for it was not matched, so the module kept its start.",
        "Load the state dict with strict=True, and map the names that are reported missing.",
        ("transformers#46634",), explains=("RG24", "RG306", "RG310", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    groups = group_vectors(trial.part)
    constant = {name for members in groups.values() for name, x in members if is_start(x)}
    moved = {name for members in groups.values() for name, _ in members} - constant
    scales = [name for name in moved if name.endswith("weight")]
    if not scales and (norms := [name for name in constant if name.endswith("weight")]) and is_trained(trial.part):
        text = f"All {len(norms)} weights of norms are exactly at their start (first {sorted(norms)[0]}), and matrices "
        return trial.find(RULES[0], "warning", [], f"{text}are trained.", "all numbers of a vector equal to 0 or to 1")
    if len(moved) < 2 or not scales:
        raise NotApplicable("no norm has moved from its start: the model is not trained")
    found = []
    for role, members in groups.items():
        names = [name for name, _ in members if name in constant]
        if not names or KEYS_ALONE.search(names[0]):
            continue
        if len(names) < len(members):
            found.append((names, f"unlike the other {len(members) - len(names)} of their kind"))
        elif has_moved_sisters(role, groups, constant):
            found.append((names, "in every layer, while other vectors of these layers have moved"))
    if not found:
        return []
    texts = [
        f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} {'is' if len(names) == 1 else 'are'} exactly "
        f"{float(dict(trial.part.named_parameters())[names[0]].flatten()[0]):g}, {why}"
        for names, why in found[:4]
    ]
    keys = [key for key in trial.keys if any(name.startswith(f"{key[0]}.") for names, _ in found for name in names)]
    return trial.find(RULES[0], "warning", keys, "; ".join(texts) + ".", "all numbers of a vector equal to 0 or to 1")


def group_vectors(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    """The vectors of norms and linear layers by their names without numbers."""
    groups: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, x in model.named_parameters():
        if x.ndim == 1 and x.numel() >= 8 and not x.is_meta and name.endswith(("weight", "bias")):
            groups[NUMBER.sub("#", name)].append((name, x.detach()))
    return groups


def is_start(x: Tensor) -> bool:
    """True for a vector of zeros or of ones."""
    return bool((x == 0).all()) or bool((x == 1).all())


def has_moved_sisters(role: str, groups: dict, constant: set[str]) -> bool:
    """True if a role of attention is constant in every layer, and other vectors of its suffix there are not.

    Biases that no other module of these layers has were put there on purpose: 0 in every layer is where they began.
    """
    suffix, stem = role.rpartition(".")[2], role.split("#")[0]
    if "#" not in role or not ATTENTION.search(role):
        return False
    alike = [other for other in groups if other.startswith(stem) and other.endswith(suffix) and "#" in other]
    sisters = [name for other in alike if other != role for name, _ in groups[other]]
    if suffix == "bias" and all(ATTENTION.search(other) for other in alike):
        return all(name in constant for name in sisters)
    return len(sisters) >= 2 and sum(name not in constant for name in sisters) > len(sisters) / 2
