"""Two models on the same batches: the first attention layer that differs, in what, and what that usually means."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from regard.health.capture.interception import as_written, check_model
from regard.health.examine import as_batches, evaluation_mode, is_function
from regard.health.probing.probe import CapturedCall, Key, Probe, relative_change
from regard.health.report.terminal import printable
from regard.health.tokens.text import as_batch
from regard.scores import resolve_scale
from regard.table import Table

TOLERANCE = 1e-3  # relative difference of a tensor, where none is given
BATCHES = 4  # that are compared, at most
SAME = 1e-3  # relative difference up to which a hypothesis explains what was seen
SCORED = 256  # queries and keys of the scores that are compared
PARTS = ("q", "k", "v", "scores", "output")
AFTER_ALL = (
    "The attention agrees; the difference is after the last attention: its output projection, the last MLP, the final "
    "norm or the output layer."
)


@dataclass(frozen=True)
class LayerDifference:
    """One attention layer of both models: the relative difference of each tensor."""

    index: int
    layer: str  # its name in the model
    reference: str  # its name in the reference
    q: float
    k: float
    v: float
    scores: float  # of the logits, on keys that both see; inf where the visible keys differ
    output: float

    @property
    def numbers(self) -> list[float]:
        """The differences in the order of `PARTS`."""
        return [getattr(self, part) for part in PARTS]

    def parts(self, tolerance: float) -> list[str]:
        """The names of the tensors that differ."""
        return [part for part, number in zip(PARTS, self.numbers, strict=True) if not number <= tolerance]


@dataclass(frozen=True)
class ModelComparison:
    """What differs between a model and a reference that should compute the same.

    Attributes:
        layers: every layer, in order of execution.
        first: the first layer that differs, None if none does.
        parts: what differs in it, of q, k, v, scores and output.
        meaning: what that usually means.
        output: the relative difference of the models' outputs.
    """

    layers: list[LayerDifference]
    first: LayerDifference | None
    parts: list[str]
    meaning: str
    output: float
    tolerance: float

    def summary(self) -> list[str]:
        """The comparison in a few lines."""
        lines = [f"The outputs differ by {self.output:.2g} of their size."]
        if self.first is None:
            return [*lines, f"No attention layer differs by more than {self.tolerance:g}.", self.meaning]
        first = self.first
        where = f"layer {first.index} ({first.layer or 'the model itself'})"
        listed = ", ".join(f"{part} ({getattr(first, part):.2g})" for part in self.parts)
        return [*lines, f"First difference: {where}, in {listed}.", self.meaning]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts; an infinite difference is None."""
        layers = [
            {key: None if value == float("inf") else value for key, value in asdict(layer).items()}
            for layer in self.layers
        ]
        first = None if self.first is None else self.first.index
        return dict(layers=layers, first=first, parts=self.parts, meaning=self.meaning, output=self.output)

    def show(self, file: TextIO | None = None) -> None:
        """Print the summary and a row per layer."""
        file = sys.stdout if file is None else file
        for line in self.summary():
            print(printable(line), file=file)
        rows = [[str(one.index), printable(one.layer), *(f"{x:.2g}" for x in one.numbers)] for one in self.layers]
        Table(["", "layer", *PARTS], rows, "relative differences").show(file)

    def __str__(self) -> str:
        return "\n".join(self.summary())


def compare_models(
    model: nn.Module, reference: nn.Module, batches: Any, tolerance: float = TOLERANCE
) -> ModelComparison:
    """Run both models on the same batches and find the first attention layer that differs."""
    for name, one in (("a", model), ("b", reference)):
        if not isinstance(one, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module as the other is, got {type(one).__name__}")
        check_model(one)
    if batches is None:
        raise ValueError("batches is missing; two models are compared on batches: compare(model, reference, batches)")
    if is_function(batches):
        raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
    chosen = list(itertools.islice(as_batches(batches), BATCHES))
    if not chosen:
        raise ValueError("batches is empty; there is nothing to compare")
    pairs = [(_run(model, batch), _run(reference, batch)) for batch in chosen]
    outputs = [_difference(a[0], b[0]) for a, b in pairs]
    layers = [compare_calls(list(a[1].values()), list(b[1].values())) for a, b in pairs]
    if not layers[0]:
        raise ValueError("no attention call was captured in both models; regard.examine says why")
    merged = [max(same, key=lambda one: max(one.numbers)) for same in zip(*layers, strict=False)]
    at = next((at for at, one in enumerate(merged) if one.parts(tolerance)), None)
    counts = len(pairs[0][0][1]), len(pairs[0][1][1])
    if at is None:
        meaning = AFTER_ALL if max(outputs) > tolerance else "Both models compute the same."
        if counts[0] != counts[1]:
            meaning = f"The models have {counts[0]} and {counts[1]} attention layers; the common ones agree."
        return ModelComparison(merged, None, [], meaning, max(outputs), tolerance)
    worst = max(range(len(layers)), key=lambda one: layers[one][at].output if at < len(layers[one]) else 0.0)
    a, b = (list(side[1].values()) for side in pairs[worst])
    parts = merged[at].parts(tolerance)
    return ModelComparison(merged, merged[at], parts, explain(a, b, at, parts), max(outputs), tolerance)


def _run(model: nn.Module, batch: Any) -> tuple[Tensor, dict[Key, CapturedCall]]:
    """The main output and the captured calls of one forward in evaluation mode."""
    model = as_written(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    probe = Probe(model)
    with evaluation_mode(probe.modules), torch.no_grad(), probe.active():
        return probe.capture(as_batch(batch, device))


def compare_calls(a: Sequence[CapturedCall], b: Sequence[CapturedCall]) -> list[LayerDifference]:
    """The differences of the calls of two forwards, paired in order of execution."""
    found = []
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        tensors = {part: _difference(getattr(one, part), getattr(other, part)) for part in ("q", "k", "v", "output")}
        scores = _score_difference(one, other) if one.q.shape == other.q.shape else float("inf")
        found.append(LayerDifference(index, one.key[0], other.key[0], scores=scores, **tensors))
    return found


def _difference(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/‖b‖ with shared heads repeated; inf for other shapes."""
    if a.ndim == b.ndim == 4 and a.shape[1] != b.shape[1] and a.shape[1] and b.shape[1]:
        many = max(a.shape[1], b.shape[1])
        if many % a.shape[1] == 0 and many % b.shape[1] == 0:
            a, b = (x.repeat_interleave(many // x.shape[1], 1) for x in (a, b))
    return relative_change(b.cpu(), a.cpu()) if a.shape == b.shape else float("inf")


def _score_difference(one: CapturedCall, other: CapturedCall) -> float:
    a, b = scores_of(one), scores_of(other)
    seen = visible_of(one), visible_of(other)
    if a.shape != b.shape or not torch.equal(seen[0], seen[1]):
        return float("inf")
    return relative_change(b.masked_fill(~seen[0], 0.0), a.masked_fill(~seen[0], 0.0))


def scores_of(one: CapturedCall) -> Tensor:
    """scale·q·kᵀ of the first sequence, [H, M, N] in float64, up to 256 queries and keys."""
    q, k = one.q[0, :, :SCORED].double().cpu(), one.k[0, :, :SCORED].double().cpu()
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scale = resolve_scale(one.call.options.get("scale"), q.shape[-1])
    scale = scale.double().cpu().reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
    scores = scale * q @ k.transpose(-1, -2)
    mask = one.call.mask
    if mask is not None and mask.dtype != torch.bool:
        shape = *one.q.shape[:3], one.k.shape[2]
        scores = scores + mask.double().cpu().expand(shape)[0, :, :SCORED, :SCORED].clamp_min(-1e9)
    return scores


def visible_of(one: CapturedCall) -> Tensor:
    """Which keys each query of the first sequence sees, [H, M, N]."""
    shape = *one.q.shape[:3], one.k.shape[2]
    return one.visible.expand(shape)[0, :, :SCORED, :SCORED].cpu()


def explain(a: Sequence[CapturedCall], b: Sequence[CapturedCall], at: int, parts: Sequence[str]) -> str:
    """What a difference in layer `at` usually means; `parts` are the tensors that differ there."""
    one, other = a[at], b[at]
    inputs = [part for part in parts if part in "qkv"]
    if len(inputs) == 3:
        hint = _explain_tensor(one.q, other.q) or _explain_tensor(one.v, other.v)
        if hint:
            return f"q, k and v: {hint}"
        if at == 0:
            return (
                "q, k and v differ in the first layer: look before its attention, at token ids, embeddings, the "
                "position table, the first norm, or weights of q, k and v that were not loaded or read otherwise."
            )
        return (
            f"q, k and v differ although the attention of layer {at - 1} agrees: look between the two, at the output "
            "projection, MLP and norms of that layer, or at weights of q, k and v that were read in another order."
        )
    if inputs:
        hints = {part: _explain_tensor(getattr(one, part), getattr(other, part)) for part in inputs}
        crossed = _find_exchange(one, other)
        hinted = "; ".join(f"{part}: {hint}" for part, hint in hints.items() if hint)
        rest = "only these weights, their bias, their norm or their rotary positions differ."
        return crossed or hinted or f"{' and '.join(inputs)} differ and the others agree: {rest}"
    if "scores" in parts:
        return _explain_scores(one, other)
    return (
        "q, k, v and the scores agree, but not the attention's output: another normaliser, soft cap or sink, dropout, "
        "or values that are paired with other heads."
    )


def _explain_scores(one: CapturedCall, other: CapturedCall) -> str:
    seen = visible_of(one), visible_of(other)
    if seen[0].shape == seen[1].shape and not torch.equal(*seen):
        more, fewer = int((seen[0] & ~seen[1]).sum()), int((seen[1] & ~seen[0]).sum())
        return (
            f"The masks differ: the model shows {more} keys that the reference hides, and hides {fewer} that it shows."
        )
    d = one.q.shape[-1]
    scales = [resolve_scale(call.call.options.get("scale"), d) for call in (one, other)]
    a, b = (None if isinstance(scale, Tensor) else float(scale) for scale in scales)
    if a is not None and b is not None and abs(a / b - 1) > SAME:
        return f"The scales differ: {a:.4g} here, {b:.4g} in the reference (1/√d is {d**-0.5:.4g})."
    return "The scores differ with equal q, k and scale: an additive mask or a position bias differs."


def _explain_tensor(a: Tensor, b: Tensor) -> str:
    """How [B, H, N, D] tensors are related: a factor, heads in another order, rotated, shifted; empty if unknown."""
    a, b = a.double().cpu(), b.double().cpu()
    if a.shape != b.shape:
        return f"the shapes differ, {list(a.shape)} and {list(b.shape)}."
    factor = float((a * b).sum() / b.square().sum().clamp_min(1e-30))
    if relative_change(b * factor, a) < SAME:
        return f"it is {factor:.4g} times the reference's: a scale applied once too often, or a norm's weight."
    order = _find_order(a, b)
    if order:
        return f"its heads are the reference's in the order {order}: weights sharded, stacked or repeated otherwise."
    if relative_change(a.norm(dim=-1), b.norm(dim=-1)) < SAME:
        if relative_change(b[:, :, :1], a[:, :, :1]) < SAME:
            return "equal norms and an equal first position: another angle (base, scaling, pairs) of rotary positions."
        return "equal norms, other directions: rotary positions that are missing, shifted, or paired in another way."
    flat_a, flat_b = a.flatten().sort().values, b.flatten().sort().values
    if relative_change(flat_b, flat_a) < SAME:
        return "it holds the reference's numbers in other places: a reshape that mixes heads with time."
    return ""


def _find_order(a: Tensor, b: Tensor) -> list[int] | None:
    """order such that head h of `a` is head order[h] of `b`; None if there is none, or if it is the identity."""
    heads = range(b.shape[1])
    order = []
    for h in heads:
        match = next((g for g in heads if relative_change(b[:, g], a[:, h]) < SAME), None)
        if match is None:
            return None
        order.append(match)
    return order if order != list(heads) else None


def _find_exchange(one: CapturedCall, other: CapturedCall) -> str:
    """Which of q, k and v are in each other's places."""
    for x, y in itertools.combinations("qkv", 2):
        pairs = (getattr(one, x), getattr(other, y)), (getattr(one, y), getattr(other, x))
        if all(p.shape == r.shape and relative_change(r.cpu(), p.cpu()) < SAME for p, r in pairs):
            return f"{x} and {y} are exchanged: a stacked matrix was read in another order."
    return ""
