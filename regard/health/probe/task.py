"""What a model predicts, and its loss on the examined text, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.health.probe.labels import IGNORED, Relation, each_label, loss_of
from regard.health.probe.probe import Probe, Transform, main_output
from regard.health.tokens.text import TokenBatch

STUDENT = {
    2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20, 16: 2.13, 32: 2.04,
}  # fmt: skip
NO_DIFFERENCE = 0.002  # of the loss: a change below it is none, however sure
NEXT, MASKED, LABELS, GIVEN = "next token", "masked token", "labels of the batches", "the given loss"
VISIBLE = "visible token"  # of a masked model whose mask token nobody knows
# models with a language model's head that see the whole text; CPM-Ant takes all of it as context
BOTH_WAYS = ("xlnet", "xlm", "flaubert", "cpmant")
MOST = 0.9  # of the labels, for what they are
HIDDEN = 0.15  # of the tokens, for a masked model
WORDS = dict(helps="helps", same="no difference", worse="makes it worse now; may help training", unknown="cannot tell")


@dataclass(frozen=True)
class LossReading:
    """The model's loss on the examined text in nats, beside that of the text's own frequencies."""

    kind: str  # what is predicted
    mean: float
    low: float  # 95 % interval over sequences
    high: float
    sequences: int
    tokens: int = 0  # that were predicted; 0 where they are not known
    unigram: float | None = None
    bigram: float | None = None
    uniform: float | None = None  # ln(vocabulary)

    def describe(self) -> str:
        """`2.25 ± 0.07`, without an interval of one sequence."""
        half, size = (self.high - self.low) / 2, math.log10(max(abs(self.mean), 1e-9))
        spread = f" ± {round(half, 2 - math.floor(size)) or half:.2g}" if math.isfinite(half) else ""
        return f"{self.mean:.3g}{spread}"

    def to_json(self) -> dict[str, Any]:
        """The reading as schema.json describes it; numbers that are not finite are None."""
        return {key: finite(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class LossChange:
    """The loss under a change minus the model's own, over the same sequences: mean and 95 % interval."""

    loss: float  # under the change
    change: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """ "helps", "no difference", "makes it worse now; may help training" or "cannot tell"."""
        small = NO_DIFFERENCE * abs(self.loss - self.change)
        if not math.isfinite(self.change):
            return WORDS["worse"]
        if self.high < 0 and self.change < -small:
            return WORDS["helps"]
        if self.low > 0 and self.change > small:
            return WORDS["worse"]
        if abs(self.change) <= small or (math.isfinite(self.low) and self.low <= 0 <= self.high):
            return WORDS["same"]
        return WORDS["unknown"]

    def to_json(self) -> dict[str, Any]:
        return {**{key: finite(value) for key, value in asdict(self).items()}, "word": self.word}

    @property
    def delta(self) -> str:
        """`Δ −0.014 [−0.028, −0.001]`, or `|Δ| < 0.0007` if the whole interval is too small to matter.

        >>> LossChange(2.72, -0.0141, -0.0277, -0.00079).delta, LossChange(2.74, 4e-07, -0.00067, 0.00067).delta
        ('Δ −0.014 [−0.028, −0.001]', '|Δ| < 0.0007')
        """
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            return f"Δ {self.change:+.2g}".replace("-", "−")
        most = max(abs(self.low), abs(self.high))
        if most < NO_DIFFERENCE * abs(self.loss - self.change):
            step = 10.0 ** math.floor(math.log10(max(most, 1e-6)))
            return f"|Δ| < {math.ceil(max(most, 1e-6) / step - 1e-9) * step:.1g}"
        digits = max(0, 1 - math.floor(math.log10(max(self.high - self.low, 1e-9) / 2)))
        return f"Δ {self.change:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]".replace("-", "−")

    def __str__(self) -> str:
        return f"loss {self.loss - self.change:.3g} → {self.loss:.3g}, {self.word} ({self.delta})"


def finite(value: Any) -> Any:
    """`value`, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def interval(values: Tensor) -> tuple[float, float, float]:
    """Mean and 95 % interval of independent values; the interval of one value is infinite."""
    count, mean = len(values), float(values.mean())
    if count < 2:
        return mean, -math.inf, math.inf
    student = next((t for many, t in STUDENT.items() if many >= count), 1.98)
    half = student * float(values.std()) / math.sqrt(count)
    return mean, mean - half, mean + half


class Task:
    """A model's loss on some batches: one number per sequence, or per batch where it cannot be taken apart."""

    def __init__(
        self, probe: Probe, batches: Sequence[TokenBatch], kind: str, loss: Callable | None, pad: int | None,
        mask_token: int | None = None, relation: Relation | None = None, by_row: bool = False,
    ) -> None:  # fmt: skip
        self.probe, self.batches, self.kind, self.loss, self.pad = probe, batches, kind, loss, pad
        self.mask_token, self.relation = mask_token, relation
        self.by_row = by_row  # a loss that the user or the model computes is asked for each row
        self.vocabulary: int | None = None

    def on(self, batches: Sequence[TokenBatch]) -> Task:
        """Returns the loss that this task computes, on other batches."""
        return Task(
            self.probe, batches, self.kind, self.loss, self.pad, self.mask_token, self.relation, self.by_row
        )  # fmt: skip

    def losses(self, transform: Transform | None = None) -> Tensor:
        """Returns the losses under a transform of the attention calls, float64."""
        return torch.cat([self._losses(batch, transform) for batch in self.batches]).double().cpu()

    def _losses(self, batch: TokenBatch, transform: Transform | None) -> Tensor:
        if self.kind == GIVEN or (self.kind == LABELS and self.relation is None):
            rows = split_rows(batch) if self.by_row else [batch]
            return torch.cat([self._ask(row, transform) for row in rows])
        if self.kind == LABELS:
            assert self.relation is not None and batch.labels is not None
            logits = main_output(self.probe.run_model(batch, transform))
            self.vocabulary = logits.shape[-1]
            each = each_label(logits, batch.labels, self.relation.offset)
            losses = each if each.ndim == 1 else each.nanmean(1)
            return losses[losses == losses]  # rows without labels have no loss
        hidden, shown = self.predicted(batch), batch
        if self.kind == MASKED:
            shown = batch.with_ids(batch.ids.masked_fill(hidden, self.mask_token or 0))
        logits, targets = main_output(self.probe.run_model(shown, transform)), batch.targets
        self.vocabulary = logits.shape[-1]
        if self.kind == NEXT:
            logits = logits.roll(1, 1)  # the row before predicts a token; the first is never predicted
        each = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        return (each * hidden).sum(1) / hidden.sum(1).clamp_min(1)

    def _ask(self, batch: TokenBatch, transform: Transform | None) -> Tensor:
        """The loss that the user's function or the model itself computes on a batch, [1]."""
        if self.kind == LABELS:
            value: Any = loss_of(self.probe.run_model(batch, transform))
        else:
            assert self.loss is not None
            function, given = self.loss, batch.own  # the batch in the form in which the user gave it
            if given is None:
                given = batch.args if len(batch.args) > 1 else batch.named or batch.args[0]
            value = self.probe.call(lambda: function(self.probe.model, given), transform)
        return torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).cpu()

    def predicted(self, batch: TokenBatch) -> Tensor:
        """True at the tokens that are predicted, [B, N]: all but the first of the text, or a fixed choice of some."""
        text = batch.text_mask(self.pad)
        if self.kind == MASKED:
            chosen = torch.rand(text.shape, generator=torch.Generator().manual_seed(0)).to(text.device) < HIDDEN
            text = text & chosen
        return text & (torch.arange(text.shape[1], device=text.device) > 0)

    def read(self, losses: Tensor) -> LossReading:
        """The reading of the model's own losses."""
        mean, low, high = interval(losses)
        pairs = [] if self.vocabulary is None else [self._pairs(batch) for batch in self.batches]
        if not pairs or self.vocabulary is None:
            return LossReading(self.kind, mean, low, high, len(losses))
        previous, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        unigram, bigram = frequency_losses(previous, targets, self.vocabulary)
        uniform = math.log(self.vocabulary)
        return LossReading(self.kind, mean, low, high, len(losses), len(targets), unigram, bigram, uniform)

    def _pairs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(the token before, the token that is predicted) of every prediction in a batch."""
        if self.kind != LABELS or self.relation is None:
            keep = batch.text_mask(self.pad)[:, 1:]
            return batch.targets[:, :-1][keep], batch.targets[:, 1:][keep]
        labels, offset = batch.labels, self.relation.offset
        assert labels is not None
        if offset is None:
            told = labels[labels != IGNORED]
            return torch.zeros_like(told), told
        follows = offset > 0 or predicts_next_token(batch)
        ids = batch.targets if batch.targets.shape == labels.shape else torch.zeros_like(labels)
        before = ids[:, max(offset - 1, 0) :] if follows else ids.roll(1, 1)
        told = labels[:, offset:] != IGNORED
        return before[:, : labels.shape[1] - offset][told], labels[:, offset:][told]

    def compare(self, own: Tensor, changed: Tensor) -> LossChange:
        """The effect of a change on the same sequences."""
        return LossChange(float(changed.mean()), *interval(changed - own))


def names_next_token(model: nn.Module) -> bool | None:
    """True if the class or configuration says that the model predicts the next token, False if another, else None."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") in BOTH_WAYS and not getattr(config, "causal", False):
        return None
    for name in (kind.__name__ for kind in type(model).__mro__):  # a subclass may have any name
        if name.endswith(("LMHeadModel", "ForCausalLM")) or getattr(config, "is_encoder_decoder", False):
            return True
        if name.endswith(("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForPreTraining")):
            return False
    if getattr(config, "is_decoder", False) is True:
        return True
    return None


def split_rows(batch: TokenBatch) -> list[TokenBatch]:
    """A batch of each row alone, with its own form cut alike."""
    count = batch.count
    if count < 2:
        return [batch]

    def cut(x: Any, row: int) -> Any:
        if isinstance(x, Tensor):
            return x[row : row + 1] if x.ndim and x.shape[0] == count else x
        if isinstance(x, Mapping):
            return {name: cut(part, row) for name, part in x.items()}
        return type(x)(cut(part, row) for part in x) if type(x) in (tuple, list) else x

    return [replace(batch.map(partial(cut, row=row)), own=cut(batch.own, row)) for row in range(count)]


def predicts_next_token(batch: TokenBatch) -> bool:
    """True if a batch's labels are the tokens that follow, or the ids of a decoder that are moved within the model."""
    labels, ids = batch.labels, batch.targets
    if labels is None or labels.shape != ids.shape:
        return False
    told = labels >= 0
    return bool(told[:, :-1].any()) and bool((labels == ids.roll(-1, 1))[:, :-1][told[:, :-1]].float().mean() > MOST)


def frequency_losses(previous: Tensor, targets: Tensor, vocabulary: int) -> tuple[float, float]:
    """(unigram, bigram) loss in nats of `targets` after `previous`, each token left out of its own count.

    >>> from regard.health.probe.task import frequency_losses
    >>> ids = torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]])
    >>> unigram, bigram = frequency_losses(ids[:, :-1], ids[:, 1:], vocabulary=4)
    >>> bigram < unigram < math.log(4)
    True

    Unigram: (1 − λ)·(c(w) − 1)/(n − 1) + λ/V, with λ = (tokens seen once)/n, after Good and Turing. Bigram: (1 − μ)·
    (c(u, w) − 1)/(c(u) − 1) + μ·unigram, with μ = types after u / (types after u + c(u) − 1), after Witten and Bell.
    """
    u, w = previous.flatten(), targets.flatten()
    n = len(w)
    if n < 2:
        return math.log(vocabulary), math.log(vocabulary)
    _, at = w.unique(return_inverse=True)
    counts = torch.bincount(at).double()[at]  # how often each occurs, at its places
    unseen = max(float((counts == 1).sum()), 1.0) / n
    unigram = (1 - unseen) * (counts - 1) / (n - 1) + unseen / vocabulary
    pair = u.long() * (int(w.max()) + 1) + w
    pairs, place = pair.unique(return_inverse=True)
    pair_counts = torch.bincount(place).double()[place]
    contexts, context = u.unique(return_inverse=True)
    context_counts = torch.bincount(context).double()[context]
    first = torch.zeros(len(pairs), dtype=torch.long, device=u.device).scatter_(0, place, context)  # of each pair
    kinds = torch.bincount(first, minlength=len(contexts)).double()[context]
    rest = (context_counts - 1).clamp_min(1e-9)
    back_off = torch.where(context_counts > 1, kinds / (kinds + context_counts - 1), 1.0)
    bigram = (1 - back_off) * (pair_counts - 1) / rest + back_off * unigram
    return float(-unigram.log().mean()), float(-bigram.log().mean())
