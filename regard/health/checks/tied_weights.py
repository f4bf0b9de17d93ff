"""Weights that are one in the configuration and two in the model, and layers that are one module by mistake."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.trial import Trial

TIED = Rule(
    "RG612", "tied weights came apart", "tied weights are one tensor", "warning",
    "a model with tie_word_embeddings in its config",
    "the configuration ties the output layer to the embedding, and the two hold different numbers",
    "One of the two was loaded or trained alone, or replaced without tying again.",
    "Call model.tie_weights() after loading, or set tie_word_embeddings=False if they are meant to differ.",
    ("transformers#46634",), explains=("RG24", "RG8"),
)  # fmt: skip
SHARED = Rule(
    "RG613", "layers are one module", "every layer has weights of its own", "warning", "a model of two layers or more",
    "several entries of a list of layers are the same object, so that they share all weights",
    "The list was made as [Layer()] * n, or with one object in a loop.",
    "Make each layer anew: nn.ModuleList(Layer() for _ in range(n)).",
)  # fmt: skip
RULES = (TIED, SHARED)


def check(trial: Trial) -> list:
    found = find_untied(trial) + find_shared(trial)
    if (
        not found
        and not is_tied_by_config(trial.model)
        and not any(isinstance(module, nn.ModuleList) for module in trial.part.modules())
    ):
        raise NothingToCheck("the configuration ties no weights, and there is no list of layers")
    return found


def is_tied_by_config(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    inner = getattr(config, "text_config", None)
    return getattr(config, "tie_word_embeddings", getattr(inner, "tie_word_embeddings", False)) is True


def find_pair(model: Any) -> tuple[Any, Any]:
    """(embedding's weight, output layer's): the two that the class ties, which may be the decoder's embedding.

    (None, None) of a library class that ties other weights than its output layer's, as Pop2Piano and LUKE do.
    """
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None, None
    weights = getattr(embedding, "weight", None), getattr(head, "weight", None)
    tied = getattr(model, "_tied_weights_keys", None)
    if not type(model).__module__.startswith("transformers.") or not isinstance(tied, dict):
        return weights
    named = dict(model.named_parameters(remove_duplicate=False))
    own = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    others = [(b if re.search(a, name) else a) for name in own for a, b in tied.items() if re.search(f"{a}|{b}", name)]
    if not others:
        return None, None
    partner = next((p for name, p in named.items() if any(re.search(one, name) for one in others)), None)
    return (weights[0] if partner is None else partner), weights[1]


def find_untied(trial: Trial) -> list:
    model: Any = trial.model
    if not is_tied_by_config(model):
        return []
    a, b = find_pair(model)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a is b or a.shape != b.shape or a.is_meta or b.is_meta:
        return []
    if a.data_ptr() == b.data_ptr() or a.equal(b):
        return []
    off = float((a - b).float().norm() / a.float().norm().clamp_min(1e-30))
    return trial.find(
        TIED, "warning", [],
        f"The output layer and the embedding differ by {off:.2g} of their size, though tie_word_embeddings is true.",
        "any difference of the two tensors",
    )  # fmt: skip


def find_shared(trial: Trial) -> list:
    """[Finding] about lists of layers that hold one module several times; classes of transformers do so on purpose."""
    if type(trial.part).__module__.startswith("transformers."):
        return []
    for name, owner in trial.part.named_modules():
        if not isinstance(owner, (nn.ModuleList, nn.Sequential)):
            continue
        places: dict[int, list[str]] = defaultdict(list)
        for place, child in owner._modules.items():
            if child is not None and any(True for _ in child.parameters()) and child._modules:
                places[id(child)].append(place)
        same = next((group for group in places.values() if len(group) > 1), None)
        if same is not None:
            return trial.find(
                SHARED, "warning", [],
                f"{name}[{', '.join(same[:6])}] are one module: its {len(same)} layers share all weights.",
                "one object at several places of a list of layers",
            )  # fmt: skip
    return []
