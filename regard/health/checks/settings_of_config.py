"""Numbers of modules that are not those which the configuration builds: a scale, an eps, an inverse frequency.

A module of a transformers model is made from its configuration alone. The model is built again without values, and
every number and switch that a module keeps is compared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.trial import Trial
from regard.table import format_number

PLAIN = (bool, int, float)
IGNORED = ("training", "gradient_checkpointing", "name_or_path", "p", "inplace", "dropout", "is_gradient_checkpointing",
           "max_seq_len_cached", "output_attentions", "output_hidden_states", "use_cache", "return_dict", "padding_idx",
           "num_embeddings", "layers_are_rescaled")  # fmt: skip
MOST_WEIGHTS = 5_000_000_000  # of a model that is built again; it holds no values
RULES = (
    Rule(
        "RG418", "module differs from its configuration",
        "modules keep the numbers that their configuration gives them", "warning",
        "a transformers model with its config",
        "a number or switch of a module is not the one that the library's class makes from this configuration",
        "The module was changed after it was built, or the configuration was.",
        "Build the model from its configuration and load the weights again, or mend the configuration.",
        (), explains=("RG1", "RG2", "RG3", "RG401", "RG410", "RG411", "RG412", "RG413", "RG416", "RG240", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    fresh = build_again(trial.model)
    fresh_modules = dict(fresh.named_modules())
    found: list[tuple[str, str, Any, Any]] = []
    for name, module in trial.model.named_modules():
        other = fresh_modules.get(name)
        if other is not None and type(other) is type(module):
            found += [(name, *difference) for difference in list_differences(module, other)]
    if not found:
        return []
    keys = (
        [key for key in trial.captured[1] if any(is_near(key[0], name) for name, *_ in found)] if trial.batches else []
    )
    shown = "; ".join(describe(*one) for one in found[:4])
    more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
    return trial.find(
        RULES[0], "warning", keys, f"{shown}{more}.", "any number or switch that differs from a fresh module's"
    )


def is_near(layer: str, name: str) -> bool:
    return layer == name or layer.startswith(f"{name}.") or name.startswith(f"{layer}.")


def build_again(model: nn.Module) -> nn.Module:
    """Returns a new model of this class and configuration, whose tensors have no values."""
    config = getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith("transformers.models."):
        raise NothingToCheck("the model is no class of transformers")
    if sum(p.numel() for p in model.parameters()) > MOST_WEIGHTS:
        raise NotApplicable("the model is too large to be built again")
    from transformers.initialization import no_init_weights

    with torch.random.fork_rng(devices=[]), torch.device("meta"), no_init_weights():
        try:
            return type(model)(copy.deepcopy(config))
        except Exception as error:
            raise NotApplicable(f"its class cannot be built from its configuration ({type(error).__name__})") from error


def list_differences(module: nn.Module, fresh: nn.Module) -> list[tuple[str, Any, Any]]:
    """(attribute, value here, value of a fresh module) where they differ."""
    own, other = vars(module), vars(fresh)
    names = [name for name in own if name in other and name[0] != "_" and not is_ignored(name)]
    both = [(name, own[name], other[name]) for name in names]
    if hasattr(module, "set_shift_and_window_size"):  # Swin's blocks set them by the image
        both = [one for one in both if one[0] not in ("shift_size", "window_size")]
    plain = [(name, a, b) for name, a, b in both if isinstance(a, PLAIN) and isinstance(b, PLAIN)]
    return [(name, a, b) for name, a, b in plain if not is_same(a, b)]


def is_ignored(name: str) -> bool:
    return name in IGNORED or "dropout" in name or "drop_prob" in name


def is_same(a: Any, b: Any) -> bool:
    if a != b and (isinstance(a, float) or isinstance(b, float)):  # infinities are equal, their difference is NaN
        return abs(float(a) - float(b)) <= 1e-6 * abs(float(b))
    return a == b


def describe(module: str, name: str, here: Any, fresh: Any) -> str:
    a, b = (format_number(x) if isinstance(x, float) else repr(x) for x in (here, fresh))
    return f"{module}.{name} is {a}, where its configuration gives {b}"
