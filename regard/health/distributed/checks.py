"""Refuses models and inputs that would come out wrong on shards of a sequence.

Every check looks at what all ranks have in common (the model, its configuration, the whole inputs), so that every rank
raises alike, before anything was computed or sent.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call
from regard.parallel.layout import count_positions, spans

UNSUPPORTED_INPUTS = dict(
    labels="compute the loss from the logits, which are whole",
    past_key_values="no generate; regard.parallel.decode is for that",
    logits_to_keep="take them from the logits, which are whole",
    num_logits_to_keep="take them from the logits, which are whole",
    decoder_input_ids="encoder-decoders are not supported",
    decoder_inputs_embeds="encoder-decoders are not supported",
    encoder_hidden_states="encoder-decoders are not supported",
    output_attentions="no rank has the weights of whole rows",
)
# settings of a configuration under which a token depends on others, or on their number, outside attention
MIXES_TOKENS = ("trigram_input", "token_dropout", "attn_temperature_tuning", "use_dynamic_ntk", "use_logn_attn")


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model that would attend, count or mix positions within a shard alone."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            "context_parallel: an encoder-decoder has two sequences; use regard.parallel.attention inside it"
        )
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())  # inside data parallel, adapters, compile
    inner = next((module for module in model.modules() if isinstance(module, kind)), model)
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(
            f"context_parallel: {type(inner).__name__} takes no position_ids: it would count each shard from 0"
        )
    for config in _configs(model):
        chunk, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None)
        if chunk is not None and (kinds is None or "chunked_attention" in kinds):
            raise ValueError("context_parallel: attention in chunks (attention_chunk_size) is not supported")
        for name in MIXES_TOKENS:
            if getattr(config, name, False):
                raise ValueError(f"context_parallel: {name} makes a token depend on others, which a rank lacks")
    for name, module in model.named_modules():
        if (isinstance(module, nn.Conv1d) and module.kernel_size != (1,)) or isinstance(module, nn.RNNBase):
            raise ValueError(f"context_parallel: {name} ({type(module).__name__}) mixes positions outside attention")


def name_arguments(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns (args, kwargs) with positional arguments moved to their names, as far as the signature tells them."""
    if not args or not isinstance(args[0], Tensor):
        return args, dict(kwargs)
    first = "inputs_embeds" if args[0].is_floating_point() else "input_ids"
    names = list(inspect.signature(model.forward).parameters)
    if first != names[0] or len(args) > len(names):
        return args[1:], {first: args[0], **kwargs}
    return (), {**dict(zip(names, args, strict=False)), **kwargs}


def check_inputs(kwargs: dict, sharded: tuple[str, ...]) -> None:
    """Raises ValueError for inputs that cannot be sharded along the sequence."""
    for name in UNSUPPORTED_INPUTS:
        if (value := kwargs.get(name)) is not None and (isinstance(value, Tensor) or value != 0):
            raise ValueError(
                f"context_parallel: {name} does not go with a sharded sequence ({UNSUPPORTED_INPUTS[name]})"
            )
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.ndim and name not in (*sharded, "position_ids", "attention_mask"):
            raise ValueError(f"context_parallel does not know how to shard {name}; it takes {', '.join(sharded)}")


def check_positions(model: nn.Module, positions: Tensor, length: int, world: int, masked: bool) -> None:
    """Raises ValueError for packed sequences, for lengths that a rotary embedding depends on, for ranks without tokens.

    masked: was an attention_mask given? Then transformers looks for no packed sequences.
    """
    cut = spans(length, world)
    if not all(map(count_positions, cut)):
        raise ValueError(f"context_parallel: {length} tokens over {world} ranks leave a rank without any")
    if positions.ndim != 2 or positions.shape[1] != length:
        raise ValueError(
            f"context_parallel: position_ids must be (batch, {length}), got shape {tuple(positions.shape)}; "
            "several numbers per position are not supported"
        )
    if not masked and bool((positions.diff(dim=1) != 1).any()):
        raise ValueError(
            "context_parallel: position_ids that do not rise by 1 are several sequences in one, which are not kept "
            "apart here; give each a row of its own (if they are one sequence, pass an attention_mask of ones)"
        )
    longest = [max(int(positions[:, i:j].max()) + 1 for i, j in own if j > i) for own in cut]
    for config in _configs(model):
        for kind, limit in _length_dependent_ropes(config):
            if kind == "dynamic":
                wrong = max(longest) >= limit
            else:
                wrong = kind == "longrope" and len({length > limit for length in longest}) > 1
            if wrong:
                raise ValueError(
                    f"context_parallel: the frequencies of rope_type {kind!r} depend on the length ({max(longest)} "
                    f"here, against {limit}), and ranks would differ in them"
                )


def check_window(call: Call, model: nn.Module, length: int) -> None:
    """Raises ValueError for a window that is only in the mask, which the model made for its shard."""
    config = getattr(call.module, "config", None) or _text_config(getattr(model, "config", None))
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or not 0 < window < length:
        return
    if "sliding_window" in call.model_options or hasattr(call.module, "sliding_window"):
        return
    layer = getattr(call.module, "layer_idx", None)
    if kinds is None or (isinstance(layer, int) and layer < len(kinds) and "sliding" in kinds[layer]):
        raise ValueError(
            f"context_parallel: {type(call.module).__name__} leaves its sliding_window of {window} to the mask, which "
            "is made for the rank's shard alone; sequences beyond that length are not supported"
        )


def explain_own_positions(model: nn.Module) -> str:
    """Returns why the model's own position numbers are not 0, 1, 2, …; "" if they are."""
    for name, module in model.named_modules():
        table = getattr(module, "position_embeddings", None)
        counted = any(hasattr(module, f"create_position_ids_from_{given}") for given in ("input_ids", "inputs_embeds"))
        if counted or (isinstance(table, nn.Embedding) and table.padding_idx is not None):
            return f"{name or 'the model'} counts them in its own way"
    return ""


def count_layers(model: nn.Module) -> int:
    """Returns the number of layers by the model's configuration, 1 if it has none."""
    found = getattr(_text_config(getattr(model, "config", None)), "num_hidden_layers", None)
    return found if isinstance(found, int) else 1


def key_lengths_of(mask: Tensor | None, length: int) -> Tensor | None:
    """Returns the numbers of visible keys of a padding mask [B, L]; None if nothing is padded."""
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        shown = mask != 0
        if bool(shown.all()):
            return None
        counted = shown.sum(-1)
        if torch.equal(shown, torch.arange(length, device=mask.device) < counted[:, None]):
            return counted
    raise ValueError("context_parallel: attention_mask must be (batch, length) with the padding at the end")


def has_bias(call: Call) -> bool:
    """True if an additive mask does more than hide."""
    if call.mask is None or not call.mask.is_floating_point():
        return False
    return bool(((call.mask != 0) & (call.mask > torch.finfo(call.mask.dtype).min / 2)).any())


def _configs(model: nn.Module) -> list:
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return list(found.values())


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _length_dependent_ropes(config: Any) -> list[tuple[str, int]]:
    """Returns (rope_type, the length from which it changes) of rotary embeddings that depend on the length."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        for rope in (given, *(x for x in given.values() if isinstance(x, dict))):
            kind = rope.get("rope_type", rope.get("type"))
            trained = getattr(config, "max_position_embeddings", 0) or 0
            if kind == "dynamic":
                found.append((kind, trained))
            elif kind in ("longrope", "su"):
                first = rope.get("original_max_position_embeddings")
                first = first or getattr(config, "original_max_position_embeddings", None) or trained
                found.append(("longrope", first))
    return found
