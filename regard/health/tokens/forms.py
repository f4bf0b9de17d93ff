"""What the parts of a batch are: ids, a decoder's ids, labels that forward does not take, or other arguments.

A tuple says nothing about its parts, so the names of forward's parameters do: (src, tgt) are two texts, (idx, targets)
a text and its labels. A second tensor that lands on a parameter called `mask` is a mask only if it holds 0 and 1 alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

SOURCES = ("input_ids", "ids", "tokens", "token_ids", "idx", "x", "src", "source", "source_ids", "src_ids", "inputs")
DECODERS = ("decoder_input_ids", "tgt", "trg", "tgt_ids", "trg_ids", "target_ids", "decoder_ids", "dec_ids", "y_in")
LABELS = ("labels", "label", "targets", "target", "y", "lm_labels", "label_ids")
OTHERS = ("mask", "pos", "type", "segment", "length", "cache", "past", "document", "seqlens")  # in names of arguments


@dataclass(frozen=True)
class Form:
    """Where the parts of a batch are: a place among the arguments or a name; None for a part that is not there."""

    ids: int | str  # of the first input where there are no ids
    decoder: int | str | None = None
    labels: int | str | None = None
    apart: bool = False  # the labels are no argument of forward


def is_ids(x: Any) -> bool:
    """True for a tensor [B, N] of integers."""
    return (
        isinstance(x, Tensor) and x.ndim == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    )


def form_of_mapping(named: Mapping[str, Any], model: nn.Module | None = None) -> Form:
    """The form of keyword arguments; labels that forward does not take are apart if `model` is given.

    >>> from regard.health.tokens.forms import form_of_mapping
    >>> ids = torch.ones(2, 5, dtype=torch.long)
    >>> form_of_mapping(dict(src=ids, tgt=ids)).decoder
    'tgt'
    """
    decoder = next((name for name in DECODERS if is_ids(named.get(name))), None)
    ids = next((name for name in SOURCES if is_ids(named.get(name))), None)
    labels = next((name for name in LABELS if isinstance(named.get(name), Tensor)), None)
    apart = labels is not None and labels not in (ids, decoder) and not _takes_name(model, labels)
    if ids is None and decoder is not None:  # an encoder of sounds or images
        return Form(decoder, None, labels, apart)
    if ids is None:  # images, sounds, vectors
        known = (name for name, x in named.items() if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1)
        ids = next(known, "")
    return Form(ids, decoder, labels, apart)


def form_of_parts(parts: Sequence[Any], model: nn.Module | None = None) -> Form:
    """The form of positional arguments, by the names of forward's parameters.

    >>> from regard.health.tokens.forms import form_of_parts
    >>> ids = torch.arange(10).view(2, 5)
    >>> form_of_parts((ids, ids + 1), nn.Linear(1, 1))
    Form(ids=0, decoder=None, labels=1, apart=True)
    """
    if len(parts) < 2 or not isinstance(parts[1], Tensor):
        return Form(0)
    names, takes = _parameters(model)
    name = names[1].name.lower() if len(names) > 1 else ""
    second, is_optional = parts[1], len(names) > 1 and names[1].default is not inspect.Parameter.empty
    if 1 <= takes < len(parts):  # what forward does not take is what it should predict
        return replace(form_of_parts(parts[:takes], model), labels=takes, apart=True)
    if name in DECODERS or (names and names[0].name.lower() in ("src", "source") and is_ids(second)):
        return Form(0, 1 if is_ids(second) else None)
    if name in LABELS:
        return Form(0, None, 1)
    if "mask" in name and is_ids(second) and not _is_binary(second):
        return Form(0, None, 1, apart=True)
    if any(part in name for part in OTHERS) or not is_ids(second) or not is_ids(parts[0]):
        return Form(0)
    if second.shape == parts[0].shape and (second[:, :-1] == parts[0][:, 1:]).float().mean() > 0.9:
        return Form(0, None, 1)
    return Form(0, None if is_optional or not names else 1)


def decoder_ids_of(model: nn.Module | None, named: Mapping[str, Any]) -> dict[str, Tensor]:
    """{"decoder_input_ids": …} as an encoder-decoder of transformers makes them of its labels; else {}.

    They change nothing of its outputs, and let each side be changed alone.
    """
    labels, config = named.get("labels"), getattr(model, "config", None)
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
    is_given = any(named.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if is_given or not is_ids(labels) or make is None or not getattr(config, "is_encoder_decoder", False):
        return {}
    return {"decoder_input_ids": make(labels)} if _takes_name(model, "decoder_input_ids") else {}


def _parameters(model: nn.Module | None) -> tuple[list[inspect.Parameter], int]:
    """(forward's positional parameters, how many arguments it takes by position)."""
    if model is None:
        return [], 2**31
    try:
        known = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return [], 2**31
    places = [one for one in known if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return places, 2**31 if any(one.kind is one.VAR_POSITIONAL for one in known) else len(places)


def _takes_name(model: nn.Module | None, name: str) -> bool:
    """True if forward takes an argument of this name, or if nobody knows."""
    try:
        known = inspect.signature(model.forward).parameters if model is not None else {}
    except (TypeError, ValueError):
        return True
    return not known or name in known or any(one.kind is one.VAR_KEYWORD for one in known.values())


def _is_binary(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())
