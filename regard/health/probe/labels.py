"""What a batch's labels have to do with the model's outputs: cross entropy per token or per row, and at which offset.

A model of transformers moves the labels itself (row i predicts label i + 1), one written by hand is given labels that
are moved (row i predicts label i). The offset whose cross entropy is the model's own loss is the one that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.health.probe.probe import main_output
from regard.health.tokens.text import TokenBatch

IGNORED = -100
SAME = 2e-3  # relative difference of two losses that are one; other reductions and rounding stay below


@dataclass(frozen=True)
class Relation:
    """How labels are predicted: `offset` 0, 1 or 2 for a label per token, None for one per row."""

    offset: int | None
    is_own: bool  # the model's own loss is this cross entropy


def loss_of(result: Any) -> Tensor | None:
    """The loss that a model returned with its outputs, one number; None if there is none."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    parts = result if isinstance(result, (tuple, list)) else ()
    return next((x for x in parts if isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()), None)


def has_no_labels(labels: Tensor | None) -> bool:
    """True for integer labels that are all ignored."""
    return labels is not None and not labels.is_floating_point() and not bool((labels != IGNORED).any())


def relate(result: Any, batch: TokenBatch) -> Relation | None:
    """How the outputs of a forward predict the batch's labels; None if cross entropy does not say it."""
    labels = batch.labels
    if labels is None or labels.is_floating_point() or has_no_labels(labels):
        return None
    logits, own = main_output(result), loss_of(result)
    top = int(labels.max())
    if labels.ndim == 1 and logits.ndim == 2 and len(labels) == len(logits) and top < logits.shape[1]:
        return _confirm(Relation(None, own is not None), own, each_label(logits, labels, None))
    if labels.ndim != 2 or logits.ndim != 3 or len(logits) != len(labels) or top >= logits.shape[-1]:
        return None
    if logits.shape[1] < labels.shape[1] or (own is None and logits.shape[1] > labels.shape[1]):
        return None  # images before the text have rows and no labels
    if own is not None:
        each = [(offset, each_label(logits, labels, offset)) for offset in (0, 1, 2) if offset < labels.shape[1]]
        # moved in each row, then once more over all rows as one
        flat = logits[:, -labels.shape[1] : -1].flatten(0, 1), labels[:, 1:].flatten()
        each.append((2, each_label(flat[0][None], flat[1][None], 1)))
        return next((one for at, x in each if (one := _confirm(Relation(at, True), own, x)) is not None), None)
    same = labels.shape == batch.targets.shape and bool((labels == batch.targets)[labels != IGNORED].all())
    return Relation(1 if same else 0, False)


def _confirm(relation: Relation, own: Tensor | None, each: Tensor) -> Relation | None:
    mean = float(each[each.isfinite()].mean())
    return relation if own is None or abs(mean - float(own)) <= SAME * max(abs(mean), 1e-3) else None


def each_label(logits: Tensor, labels: Tensor, offset: int | None) -> Tensor:
    """Cross entropy of every label, nan where it is ignored: [B, N − offset], or [B] for a label per row.

    Of more logits than labels the last belong to them.

    >>> from regard.health.probe.labels import each_label
    >>> each_label(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]), 1)
    tensor([[0.6931,    nan]])
    """
    if offset is None:
        return cross_entropy(logits.float(), labels.long(), reduction="none", ignore_index=IGNORED).where(
            labels != IGNORED, torch.nan
        )
    logits, labels = logits[:, -labels.shape[1] :][:, : labels.shape[1] - offset], labels[:, offset:]
    each = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), reduction="none", ignore_index=IGNORED
    ).view(labels.shape)
    return each.where(labels != IGNORED, torch.nan)
