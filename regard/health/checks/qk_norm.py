"""QK-norm that a layer holds and does not use, or applies after the rotation."""

from __future__ import annotations

import re

import torch
from torch import nn

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.configuration import layer_config
from regard.health.probe.probe import Key
from regard.health.probe.projections import capture_inside
from regard.health.probe.rotation import recover_rotation
from regard.health.probe.texts import repeat_one_token
from regard.health.probe.trial import Trial

NAMES = re.compile(r"(^|\.)(q_?norm|norm_?q|q_?layer_?norm|query_?(layer_?)?norm|k_?norm|norm_?k|k_?layer_?norm|"
                   r"key_?(layer_?)?norm)$")  # fmt: skip
AFTER = ("hunyuan", "llama4", "nanochat", "mistral_large4", "muse", "zaya")  # model types that norm after the rotation
NEEDS = "token ids and layers with norms of q and k"
UNUSED = Rule(
    "RG417", "QK-norm is not applied", "norms of q and k that a layer holds are applied", "warning", NEEDS,
    "a norm of q or k never ran in a forward in which its layer did",
    "A replaced forward, or a kernel for models without QK-norm, goes past it.",
    "Apply q_norm and k_norm to the projections, before the rotation.",
    ("arXiv 2302.05442",), explains=("RG301", "RG303", "RG401"),
)  # fmt: skip
LATE = Rule(
    "RG419", "QK-norm after the rotation", "q and k are normed before they are rotated", "note", NEEDS,
    "the input of a norm of q or k turns with the position; with weights that are not all equal that is another model "
    "than one that norms first",
    "The order of norm and rotation was exchanged.",
    "Apply q_norm and k_norm first, if the weights were trained so.",
)  # fmt: skip
RULES = (UNUSED, LATE)


def check(trial: Trial) -> list:
    norms = {key: found for key, one in trial.captured[1].items() if (found := norms_of(one.call.module))}
    if not norms:
        raise NothingToCheck("no layer holds norms of q and k")
    inside = capture_inside(trial)
    idle: list[tuple[Key, str]] = []
    for key, names in norms.items():
        ran = {name for name, _, _ in inside[key].runs}
        if not ran:
            continue  # another use of the module was followed
        idle += [(key, name) for name in names if name not in ran and not shares_keys(key, name, trial, ran)]
    findings = []
    if idle:
        key, name = idle[0]
        text = f"{key[0]}.{name} never ran, as {len(idle)} norms of q or k in {len(norms)} layers (first that one)."
        findings += trial.find(UNUSED, "warning", list(dict.fromkeys(key for key, _ in idle)), text)
    return findings + find_late(trial, norms)


def norms_of(module: nn.Module) -> list[str]:
    """The names, below an attention module, of norms of q and k that have weights."""
    return [name for name, child in module.named_modules() if name and NAMES.search(name) and is_norm(child)]


def is_norm(module: nn.Module) -> bool:
    """True for a leaf with weights whose class is called a norm."""
    return not module._modules and bool(module._parameters) and "norm" in type(module).__name__.lower()


def shares_keys(key: Key, name: str, trial: Trial, ran: set[str]) -> bool:
    """True for a norm of keys in a layer that takes its keys from another one, so that its projection did not run."""
    projections = [one for one in ran if re.search(r"(^|\.)(k|kv|key|qkv|k_proj|kv_proj|qkv_proj)(_proj)?$", one)]
    return "k" in name.rpartition(".")[2].lower().replace("qk", "") and not projections


def find_late(trial: Trial, norms: dict[Key, list[str]]) -> list:
    """[Finding] about norms whose input is rotated already."""
    inputs: dict[tuple[Key, str], torch.Tensor] = {}
    hooks = []
    try:
        for key, names in norms.items():
            config = layer_config(trial, trial.captured[1][key])
            if config is not None and str(config.get("model_type") or "").startswith(AFTER):
                continue
            module = trial.captured[1][key].call.module
            for name in names:
                hooks.append(module.get_submodule(name).register_forward_pre_hook(keep(inputs, (key, name))))
        trial.probe.run(repeat_one_token(trial))
    finally:
        for hook in hooks:
            hook.remove()
    late = [(key, name) for (key, name), x in inputs.items() if turns(x)]
    if not late:
        return []
    key, name = late[0]
    weights = next(trial.captured[1][key].call.module.get_submodule(name).parameters())
    if bool((weights == weights.flatten()[0]).all()):
        return []  # equal weights: the order makes no difference
    text = f"{key[0]}.{name} is given vectors that are rotated already, as {len(late)} norms of q and k are."
    return trial.find(LATE, "note", list(dict.fromkeys(key for key, _ in late)), text)


def keep(inputs: dict, at: tuple[Key, str]):
    def hook(module: nn.Module, given: tuple) -> None:
        if given and isinstance(given[0], torch.Tensor):
            inputs[at] = given[0].detach()

    return hook


def turns(x: torch.Tensor) -> bool:
    """True if the input of a norm, of one repeated token, is rotated by its position."""
    if x.ndim == 4 and x.shape[0] == 1:
        for heads in (x[0], x[0].transpose(0, 1)):
            if heads.shape[1] >= 8 and (found := recover_rotation(heads)) is not None:
                return float(found.angles.abs().max()) > 1e-2
    return False
