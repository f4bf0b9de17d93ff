"""Why two models that give the same logits give other losses: which labels their rows are trained on, and how much.

The gradient of a loss Σ wᵢ·CE(zᵢ, yᵢ) by the logits is wᵢ·(softmax(zᵢ) − yᵢ). It tells the label and the weight of each
row, however the loss is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.health.comparing.causes.trial import Cause
from regard.health.probe.labels import loss_of
from regard.health.probe.probe import main_output
from regard.health.tokens.text import TokenBatch

NEAR = 1e-3  # relative error up to which a loss is explained
MOST = 0.8  # of the rows that count, which must be trained on the labels at one offset


@dataclass(frozen=True)
class Rows:
    """A loss as a sum over rows of logits [R, V]: each row's weight, label and smoothing."""

    loss: float
    weight: Tensor
    label: Tensor
    smoothing: float
    logits: Tensor

    def compute(self, logits: Tensor) -> float:
        """The loss that these labels and weights give other logits."""
        log_p = logits.log_softmax(-1)
        each = (1 - self.smoothing) * log_p.gather(1, self.label[:, None])[:, 0] + self.smoothing * log_p.mean(-1)
        return float(-(self.weight * each).sum())

    @property
    def counts(self) -> Tensor:
        """True for the rows that the loss is of."""
        return self.weight.abs() > 1e-6 * self.weight.abs().max()


def read_rows(model: nn.Module, run: Callable[[nn.Module], object]) -> Rows | None:
    """The rows of a model's loss, by its gradient; None if it is no cross entropy of its logits."""
    frozen: list[Tensor] = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with torch.enable_grad():
            result = run(model)
            loss, logits = loss_of(result), main_output(result)
            if loss is None or not loss.requires_grad or logits.ndim < 2:
                return None
            (slope,) = torch.autograd.grad(loss, logits, allow_unused=True)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    if slope is None or not bool(slope.any()):
        return None
    z, g = (x.detach().double().cpu().flatten(0, -2) for x in (logits, slope))
    p, label = z.softmax(-1), g.argmin(-1)
    others = torch.ones_like(p).scatter(1, label[:, None], 0.0)  # there g = w·(p − ε/V)
    count = others.sum(-1, keepdim=True)
    mean_p, mean_g = ((others * x).sum(-1, keepdim=True) / count for x in (p, g))
    spread = (others * (p - mean_p).square()).sum(-1)
    weight = (others * (p - mean_p) * (g - mean_g)).sum(-1) / spread.clamp_min(1e-300)
    weight = weight.where(g.abs().amax(-1) > 1e-9 * g.abs().max(), 0.0)
    rest = ((weight[:, None] * p - g) * others).sum() / (weight * (others.sum(-1) / p.shape[-1])).sum()
    found = Rows(float(loss.detach()), weight, label, max(round(float(rest), 4), 0.0), z)
    return found if abs(found.compute(z) - found.loss) <= NEAR * max(abs(found.loss), NEAR) else None


def explain_loss(
    models: tuple[nn.Module, nn.Module], run: Callable[[nn.Module], object], given: TokenBatch
) -> tuple[Cause | None, list[str]]:
    """(the cause or None, what was tried) of losses that differ where the logits do not."""
    tried = ["the rows, labels and weights of a cross entropy"]
    found = [read_rows(model, run) for model in models]
    a, b = found
    if a is None or b is None or a.logits.shape != b.logits.shape:
        return None, tried
    if abs(b.compute(a.logits) - b.loss) > NEAR * max(abs(b.loss), NEAR):
        return None, tried
    both = a.counts & b.counts
    said = [*_say_labels(a, b, both, given), *_say_rows(a, b, given)]
    if not said:
        said = _say_weights(a, b)
    if abs(a.smoothing - b.smoothing) > 1e-3:
        said.append(f"labels are smoothed by {a.smoothing:g} in A and {b.smoothing:g} in B")
    if not said:
        return None, tried
    numbers = f"The loss is {a.loss:.4g} in A and {b.loss:.4g} in B for the same logits"
    return Cause(f"{numbers}: {'; '.join(said)}.", frozenset({"loss"})), tried


def _say_labels(a: Rows, b: Rows, both: Tensor, given: TokenBatch) -> list[str]:
    if not bool(both.any()) or bool((a.label == b.label)[both].all()):
        return []
    first, second = (_find_offset(one, given) for one in (a, b))
    if first is None or second is None or first == second:
        return [f"{int((a.label != b.label)[both].sum())} of {int(both.sum())} rows are trained on other labels"]
    which, more = "A" if first > second else "B", abs(first - second)
    places = [f"labels[i {'+' if n >= 0 else '−'} {abs(n)}] in {name}" for name, n in (("A", first), ("B", second))]
    return [f"row i is trained on {' and on '.join(places)}: {which} shifts the labels {more} more"]


def _find_offset(rows: Rows, given: TokenBatch) -> int | None:
    """o where row i of the logits is trained on labels[i + o]; None if there is no such number."""
    labels = given.labels
    if labels is None or labels.ndim != 2 or labels.is_floating_point() or len(rows.label) % len(labels):
        return None
    label, counts = (x.view(len(labels), -1) for x in (rows.label, rows.counts))
    width, count = labels.shape[1], int(counts.sum())
    at = torch.arange(label.shape[1])
    best: tuple[int, int] | None = None
    for offset in sorted(range(-label.shape[1], width), key=abs):
        inside = (at + offset >= 0) & (at + offset < width)
        hits = int(((labels.cpu()[:, (at + offset).clamp(0, width - 1)] == label) & counts & inside).sum())
        best = (hits, offset) if best is None or hits > best[0] else best
    return best[1] if best is not None and best[0] >= MOST * count else None


def _say_rows(a: Rows, b: Rows, given: TokenBatch) -> list[str]:
    """Which rows count in one loss alone: those of padding, or others."""
    said = []
    for one, name, other in ((a.counts & ~b.counts, "A", "B"), (b.counts & ~a.counts, "B", "A")):
        if not bool(one.any()):
            continue
        offset = _find_offset(a if name == "A" else b, given)
        mask = given.named.get("attention_mask")
        is_padding = False
        if offset is not None and isinstance(mask, Tensor) and given.labels is not None:
            if mask.shape == given.labels.shape:
                shown = torch.roll(mask.cpu() != 0, -offset, 1)
                is_padding = shown.numel() == one.numel() and not bool((shown.flatten() & one).any())
        what = "rows whose labels are padding" if is_padding else "rows"
        said.append(f"{int(one.sum())} {what} count in {name} and not in {other}")
    return said


def _say_weights(a: Rows, b: Rows) -> list[str]:
    """How much a row counts: one over a number of rows, or a number of its own."""
    ratio = (b.weight / a.weight)[a.counts & b.counts]
    if not len(ratio) or float((ratio - 1).abs().max()) < NEAR:
        return []
    if float(ratio.max() - ratio.min()) > NEAR * float(ratio.abs().max()):
        low, high = f"{float(ratio.min()):.4g}", f"{float(ratio.max()):.4g}"
        return [f"a row counts {low} to {high} times as much in B: rows or sequences are averaged in another way"]
    sizes = [_say_weight(one) for one in (a, b)]
    return [f"every row counts {float(ratio.mean()):.4g} times as much in B: {sizes[0]} in A and {sizes[1]} in B"]


def _say_weight(rows: Rows) -> str:
    weight, count = float(rows.weight[rows.counts].mean()), int(rows.counts.sum())
    if abs(weight * count - 1) < NEAR:
        return f"1/{count}, the mean over the rows that count,"
    return "1, the sum," if abs(weight - 1) < NEAR else f"1/{1 / weight:.6g}" if abs(weight) < 1 else f"{weight:.6g}"
