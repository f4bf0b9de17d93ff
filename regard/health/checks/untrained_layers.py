"""Layers at their random start in a model whose other layers are trained.

A matrix of independent entries has ‖W‖₂ ≈ σ(√m + √n) (Marchenko and Pastur); training makes a few directions larger.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from statistics import median

import torch
from torch import Tensor, nn

from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.trial import Trial

RANDOM, TRAINED = 1.06, 1.2  # ratio of a random matrix, at most; median of the trained ones, at least
TRACY_WIDOM = 3.0  # one random matrix in ten thousand has a larger norm
SMALLEST = 16  # rows and columns of a matrix that is judged
LARGE, STEPS = 1024, 12  # from which size on the norm is found by power iteration, and in how many steps
WHOLE = 2  # matrices of a layer that must look random if there is but one layer to compare it with
NUMBER = re.compile(r"\d+")
RULES = (
    Rule(
        "RG611", "layers at their random start",
        "every layer has been trained", "warning", "a trained model of two layers or more",
        "the matrices of one layer have the spectral norm of random numbers, those of the others do not",
        "The layer's weights were not in the checkpoint, or under another name, and were left at their start.",
        "Check the missing keys of load_state_dict, and the names in the conversion.",
        (), explains=("RG24", "RG306", "RG310", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    roles: dict[str, list[tuple[str, float]]] = defaultdict(list)
    most: dict[str, float] = {}
    for name, w in trial.part.named_parameters():
        if is_judged(name, w):
            roles[NUMBER.sub("#", name)].append((name, spectral_ratio(w.detach())))
            most[name] = largest_of_random(*w.shape)
    several = {role: members for role, members in roles.items() if len(members) > 1}
    trained = [x for members in several.values() for _, x in members if x > TRAINED]
    if not several:
        raise NotApplicable("the model has fewer than two layers of one kind")
    if len(trained) < sum(map(len, several.values())) / 3:
        raise NotApplicable("most matrices look random: the model is not trained")
    fresh = [
        (name, x, median(y for other, y in members if other != name))
        for members in several.values()
        for name, x in members
        if x < most[name] and median(y for other, y in members if other != name) > TRAINED
    ]
    layers = Counter(NUMBER.search(name)[0] for name, *_ in fresh)  # type: ignore[index]
    if not fresh or (max(map(len, several.values())) < 3 and len(fresh) < WHOLE * len(layers)):
        return []
    random = {name for name, *_ in fresh}
    owners: dict[str, list[str]] = defaultdict(list)
    for members in several.values():
        for name, _ in members:
            owners[name.rpartition(".")[0].rpartition(".")[0]].append(name)
    is_whole = any(len(names) > 1 and random.issuperset(names) for names in owners.values())
    name, x, usual = fresh[0]
    keys = [key for key in trial.keys if any(other.startswith(f"{key[0]}.") for other, *_ in fresh)]
    return trial.find(
        RULES[0], "warning" if is_whole else "note", keys,
        f"{', '.join(other.removesuffix('.weight') for other, *_ in fresh[:4])}{' …' if len(fresh) > 4 else ''}: the "
        f"largest singular value is {x:.2f} times that of random numbers, where the other layers have {usual:.2f}.",
        f"‖W‖₂ / σ(√m + √n) < {most[name]:.3g}, median of the other layers > {TRAINED:g}",
    )  # fmt: skip


def is_all_random(model: nn.Module) -> bool:
    """True if nine matrices of ten have the spectral norm of random numbers: nothing of the model is trained."""
    found = share_of_random(model)
    return found is not None and found >= 0.9


def is_trained(model: nn.Module) -> bool:
    """True if half of the matrices have a larger spectral norm than random numbers."""
    found = share_of_random(model)
    return found is not None and found <= 0.5


def share_of_random(model: nn.Module) -> float | None:
    """The share of matrices whose spectral norm is that of random numbers; None without a matrix to judge."""
    known = [(spectral_ratio(w.detach()), w.shape) for name, w in model.named_parameters() if is_judged(name, w)]
    return sum(x < largest_of_random(*shape) for x, shape in known) / len(known) if known else None


def is_judged(name: str, w: Tensor) -> bool:
    plain = w.is_floating_point() and not w.is_meta and w.ndim == 2
    return plain and name.endswith("weight") and min(w.shape) >= SMALLEST and bool(NUMBER.search(name))


def largest_of_random(m: int, n: int) -> float:
    """The ratio that a matrix of independent entries stays below, by the law of Tracy and Widom; at most RANDOM."""
    edge = (m - 1) ** 0.5 + n**0.5
    spread = edge * ((m - 1) ** -0.5 + n**-0.5) ** (1 / 3)
    return min(RANDOM, (edge**2 + TRACY_WIDOM * spread) ** 0.5 / (m**0.5 + n**0.5))


def spectral_ratio(w: Tensor) -> float:
    """‖W‖₂ / σ(√m + √n): 1 for independent entries.

    >>> from regard.health.checks.untrained_layers import spectral_ratio
    >>> 0.9 < spectral_ratio(torch.randn(64, 128, generator=torch.Generator().manual_seed(0))) < 1.06
    True
    """
    w = w.float()
    m, n = w.shape
    size = float(w.std()) * (m**0.5 + n**0.5)
    if size == 0.0 or not bool(torch.isfinite(w).all()):
        return float("nan")
    if max(m, n) <= LARGE:
        return float(torch.linalg.matrix_norm(w, 2)) / size
    x = nn.functional.normalize(torch.ones(n, device=w.device), dim=0)
    for _ in range(STEPS):
        x = nn.functional.normalize(w.T @ (w @ x), dim=0)
    return float((w @ x).norm()) / size
