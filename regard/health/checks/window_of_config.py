"""The window of visible keys is not the configured one: off by one, in the wrong layers, or not there.

A query of a sliding layer sees its own key and the `sliding_window` − 1 before it; one of a full layer sees them all.
"""

from __future__ import annotations

import torch

from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.configuration import LayerConfig, layer_config
from regard.health.probe.probe import CapturedCall
from regard.health.probe.trial import Trial

RULES = (
    Rule(
        "RG413", "window is not the configured one",
        "every layer sees as many keys as its sliding window says", "warning",
        "token ids, more of them than the window holds, and a config with a window",
        "the farthest key that a query sees is not the one that the configuration's window ends at",
        "The window counts one key too many or too few (i − j ≤ w for i − j < w), or layer types are shifted.",
        "Hide keys with i − j ≥ sliding_window in layers of type sliding_attention, and no others.",
        ("vllm#48621", "transformers#35896"), explains=("RG210", "RG23", "RG24"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    found, judged, short = [], 0, 0
    for key, one in trial.captured[1].items():
        config = layer_config(trial, one)
        queries, keys = one.q.shape[2], one.k.shape[2]
        if config is None or queries != keys or one.call.is_cross(key[0]) or not trial.is_causal_call(one):
            continue
        window = configured_window(config, one)
        if window is None:
            continue
        if window and window + 1 >= queries:
            short += 1
            continue
        judged += 1
        wanted, seen = window or queries, farthest_key(one)
        if seen != min(wanted, queries):
            found.append((key, seen, wanted, bool(window)))
    if not judged:
        if short:
            raise NotApplicable("the text is shorter than the window")
        raise NothingToCheck("no sliding window is configured")
    if not found:
        return []
    key, seen, wanted, is_sliding = found[0]
    says = f"a window of {wanted}" if is_sliding else "full attention"
    return trial.find(
        RULES[0], "warning", [key for key, *_ in found],
        f"Queries see {seen} keys at most, their own included, where the configuration says {says} "
        f"(first in {key[0]}).",
        "visible keys of a query against sliding_window and layer_types",
    )  # fmt: skip


def configured_window(config: LayerConfig, one: CapturedCall) -> int | None:
    """The keys that a query of this layer may see, 0 for all; None where the configuration does not say."""
    window = config.number_of("sliding_window")
    if config.type is not None:
        if config.type == "full_attention":
            return 0
        return int(window[1]) if window and config.type == "sliding_attention" else None
    is_library = type(one.call.module).__module__.startswith("transformers.models.")
    if is_library and one.call.model_options.get("sliding_window") is None:
        return None  # its class has no window in this layer
    if window is None or config.get("use_sliding_window") is False or config.get("layer_types") is not None:
        return None
    return int(window[1]) if config.get("max_window_layers") is None else None


def farthest_key(one: CapturedCall) -> int:
    """How many keys from its own on backwards the widest row sees."""
    queries, keys = one.q.shape[2], one.k.shape[2]
    visible = one.visible.expand(*one.visible.shape[:-2], queries, keys).reshape(-1, queries, keys).any(0)
    if one.call.options.get("window") is not None:
        left = one.call.options["window"][0]
        if left is not None:
            i = torch.arange(queries, device=visible.device)
            visible = visible & (i[:, None] - i <= left)
    rows, columns = visible.nonzero(as_tuple=True)
    return int((rows - columns).max()) + 1 if len(rows) else 0
