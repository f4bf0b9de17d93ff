"""Duplicate layers: two attention layers hold the same weights, as a conversion that repeats a layer leaves them."""

import torch
from torch import Tensor, nn

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import Key
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG601", "duplicate layers", "no two layers hold the same weights",
    "warning", needs="layers with weights of their own",
    proves="Proves that all weights of two attention modules are equal.",
    cause="A conversion read one layer twice.",
    fix="Check the names in the conversion of weights: one layer was read twice.",
    explains=("RG24", "RG8"),
)  # fmt: skip
RULES = (RULE,)


def check(trial: Trial) -> list[Finding]:
    trial.tokens  # noqa: B018 – without token ids no check is made
    modules = dict(trial.part.named_modules())
    keys = [(layer.name, layer.use) for layer in trial.layers if layer.use == 0]  # the first use of each module
    weights = {key: own for key in keys if (own := weights_of(modules, key[0]))}
    if len(weights) < 2:
        raise NotApplicable("fewer than two layers have weights of their own")
    groups: list[list[Key]] = []
    for key, own in weights.items():
        same = next((group for group in groups if are_equal(weights[group[0]], own)), None)
        if same is None:
            groups.append([key])
        else:
            same.append(key)
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return []
    if len(groups) == 1:
        raise NotApplicable("all layers are copies of one, as a fresh nn.TransformerEncoder has them")
    listed = "; ".join(" = ".join(key[0] for key in group[:4]) for group in repeated[:4])
    return trial.find(
        RULE, "warning", [key for group in repeated for key in group],
        f"Layers hold the same weights: {listed}.",
        "all weights of two attention modules equal, and not those of every other layer",
    )  # fmt: skip


def weights_of(modules: dict[str, nn.Module], name: str) -> list[Tensor]:
    """The weight matrices of a module, or of its parent if it has none."""
    for candidate in (name, name.rpartition(".")[0]):
        found = [p.detach() for p in modules[candidate].parameters() if p.ndim > 1] if candidate in modules else []
        if found or not candidate:
            return found
    return []


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """True if two lists of matrices are equal and not one and the same; shared weights are by design."""
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    if all(x.data_ptr() == y.data_ptr() for x, y in zip(a, b, strict=True)):
        return False
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
