"""Grouped queries: key-value head g serves the query heads g·r … g·r + r − 1, not g, g + G, g + 2G, …"""

from __future__ import annotations

from torch import Tensor

from regard.health.checks.rule import NothingToCheck, Rule
from regard.health.probe.configuration import layer_config
from regard.health.probe.trial import Trial

NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
RULES = (
    Rule(
        "RG415", "key-value heads serve the wrong queries",
        "every group of query heads reads its own key-value head", "warning",
        "token ids and a config with fewer key-value heads than heads",
        "key-value heads repeat as a, b, a, b, where weights of grouped-query models expect a, a, b, b",
        "repeat was used where repeat_interleave is meant.",
        "Repeat with k.repeat_interleave(heads // kv_heads, dim=1), or pass enable_gqa=True.",
        ("arXiv 2305.13245", "keras#23038"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    tiled, judged = [], 0
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        groups = None if config is None else config.number_of(*NAMES)
        heads = one.q.shape[1]
        if type(one.call.module).__module__.startswith("transformers.models."):
            continue  # its own code repeats as its weights were trained; `computes_otherwise` judges its functions
        if groups is None or one.k.shape[1] != heads or not 1 < groups[1] < heads or heads % int(groups[1]):
            continue
        judged += 1
        if any(is_tiled(x, int(groups[1])) for x in (one.k, one.v)):
            tiled.append((key, int(groups[1]), heads))
    if not judged:
        raise NothingToCheck("no call repeats key-value heads")
    if not tiled:
        return []
    key, few, heads = tiled[0]
    return trial.find(
        RULES[0], "warning", [key for key, *_ in tiled],
        f"Query head i reads key-value head i mod {few}, where it is i // {heads // few} (first in {key[0]}).",
        "equal heads of k or v at a distance of the number of key-value heads, and not side by side",
    )  # fmt: skip


def is_tiled(x: Tensor, groups: int) -> bool:
    """True if heads of x [B, H, N, D] repeat as a, b, a, b and not as a, a, b, b."""
    each = x.shape[1] // groups
    as_tiles, as_runs = x.unflatten(1, (each, groups)), x.unflatten(1, (groups, each))
    tiles = bool((as_tiles == as_tiles[:, :1]).all())
    return tiles and not bool((as_runs == as_runs[:, :, :1]).all())
