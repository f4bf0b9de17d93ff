"""What a model's configuration says about one attention layer, read by the names that transformers uses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from regard.health.probe.probe import CapturedCall
    from regard.health.probe.trial import Trial

BASES = ("rope_theta", "rotary_emb_base", "rotary_base", "rotary_embedding_base", "rope_base")
FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percentage")
WIDTHS = ("qk_rope_head_dim", "rotary_dim", "rotary_ndims", "rope_n_elem")


@dataclass(frozen=True)
class LayerConfig:
    """A layer's configuration: the record that its module keeps, the layer's number and its type, if it has them."""

    config: Any
    number: int | None
    type: str | None

    def get(self, *names: str) -> Any:
        """The first of these entries that is there and not None."""
        for name in names:
            found = getattr(self.config, name, None)
            if found is not None:
                return found
        return None

    def number_of(self, *names: str) -> tuple[str, float] | None:
        """(name, value) of the first of these entries that is a number."""
        for name in names:
            found = getattr(self.config, name, None)
            if isinstance(found, (int, float)) and not isinstance(found, bool):
                return name, float(found)
        return None

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary entries of this layer; empty where the configuration names none."""
        found = self.get("rope_parameters") or {}
        nested = {name: part for name, part in found.items() if isinstance(part, dict)}
        if nested:
            found = nested.get(self.type or "", {})
        if not found and isinstance(old := self.get("rope_scaling"), dict):
            found = dict(old)
        base = self.number_of(*BASES)
        return {"rope_theta": base[1], **found} if base is not None and "rope_theta" not in found else dict(found)

    @property
    def rope_type(self) -> str:
        return str(self.rope.get("rope_type", self.rope.get("type", "default")) or "default")

    @property
    def yarn_factor(self) -> float | None:
        """The factor of q and k alike under YaRN (0.1·ln s + 1, or by `mscale`); None where nothing is configured."""
        rope = self.rope
        if self.rope_type not in ("yarn", "longrope", "su"):
            return None
        if (given := rope.get("attention_factor")) is not None:
            return float(given)
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings") or self.get("original_max_position_embeddings")
        longest = self.get("max_position_embeddings")
        if self.rope_type != "yarn":
            factor = longest / original if original and longest else factor
            return math.sqrt(1 + math.log(factor) / math.log(original)) if factor and original and factor > 1 else 1.0
        if factor is None:
            return None
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            return yarn_scale(factor, rope["mscale"]) / yarn_scale(factor, rope["mscale_all_dim"])
        return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """0.1·m·ln s + 1 (arXiv 2309.00071), 1 for s ≤ 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def layer_config(trial: Trial, one: CapturedCall) -> LayerConfig | None:
    """The configuration of a captured call's layer: its module's, or that of the nearest module around it."""
    module = one.call.module
    config = getattr(module, "config", None)
    if config is None or isinstance(config, dict):
        config = next((found for found in configs_around(trial, one.key[0])), None)
    if config is None:
        return None
    number = layer_number(module, one.key[0])
    if getattr(config, "is_heterogeneous", False) is True and number is not None:
        config = config.per_layer_config[number]  # the whole's entries raise where layers differ
    kind = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    types = getattr(config, "layer_types", None)
    if not isinstance(kind, str) and types and number is not None and number < len(types):
        kind = types[number]
    return LayerConfig(config, number, kind if isinstance(kind, str) else None)


def configs_around(trial: Trial, name: str) -> Iterator[Any]:
    """The configurations of the modules around a module, innermost first; a text model's own before the whole's."""
    modules = dict(trial.part.named_modules())
    while True:
        config = getattr(modules.get(name), "config", None)
        if config is not None and not isinstance(config, dict):
            yield getattr(config, "text_config", None) or config
        if not name:
            break
        name = name.rpartition(".")[0]
    config = getattr(trial.model, "config", None)
    if config is not None and not isinstance(config, dict):
        yield getattr(config, "text_config", None) or config


def layer_number(module: nn.Module, name: str) -> int | None:
    """The layer's number: the module's `layer_idx`, or the last number in its name."""
    found = getattr(module, "layer_idx", None)
    if isinstance(found, int):
        return found
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[-1] if numbers else None


def expected_angles(one: LayerConfig, width: int, length: int) -> list[Tensor]:
    """The angles per position [pairs] that the configuration may ask of a head of `width`; empty if it asks for none.

    There are several where its entries for the rotated width disagree; classes read one or the other.
    """
    rope, kind = one.rope, one.rope_type
    base = rope.get("rope_theta")
    if base is None or not isinstance(base, (int, float)) or base <= 0 or kind == "dynamic":
        return []  # a dynamic base is that of the longest text so far
    if kind in ("default", "mrope", "linear"):
        factor = float(rope["factor"]) if kind == "linear" else 1.0
        widths = [rotated for rotated in rotated_widths(one, width) if rotated >= 2]
        return [float(base) ** -(torch.arange(0, n, 2, dtype=torch.float64) / n) / factor for n in widths]
    try:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        nested = any(isinstance(part, dict) for part in (one.get("rope_parameters") or {}).values())
        more = dict(layer_type=one.type) if nested else {}
        return [ROPE_INIT_FUNCTIONS[kind](one.config, torch.device("cpu"), seq_len=length, **more)[0].double()]
    except (ImportError, KeyError, TypeError, ValueError, AttributeError):
        return []


def rotated_widths(one: LayerConfig, width: int) -> list[int]:
    """How many numbers of a head are rotated, by each entry that says so."""
    names = (
        WIDTHS[:1] if one.get("rope_parameters") else WIDTHS
    )  # newer classes read a fraction in the place of the others
    exact = [getattr(one.config, name, None) for name in names]
    fractions = [one.rope.get("partial_rotary_factor"), *(getattr(one.config, name, None) for name in FRACTIONS)]
    found = [int(x) for x in exact if isinstance(x, int) and 0 < x <= width]
    found += [int(width * x) for x in fractions if isinstance(x, (int, float)) and 0 < x <= 1]
    return list(dict.fromkeys(found)) or [width]
