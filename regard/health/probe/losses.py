"""The losses that a model can be judged by: the user's, that of its labels, and that of the tokens themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from regard.health.probe.labels import has_no_labels, loss_of, relate
from regard.health.probe.task import GIVEN, LABELS, MASKED, NEXT, VISIBLE, Task, names_next_token
from regard.health.tokens.text import TokenBatch, guess_pad

if TYPE_CHECKING:
    from regard.health.probe.trial import Trial

LOSS_SEQUENCES, LOSS_LENGTH = 16, 256  # of the text whose loss is computed
ROWS_AGREE = 0.05  # relative difference of the rows' mean loss and that of their batch, at most


class LossTasks:
    """The losses of one trial, each found once."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    @cached_property
    def predicts_next(self) -> bool:
        """True if the outputs are logits that predict the next token better than the text's unigrams, not the same."""
        task = self._make_task(NEXT)
        if task is None:
            return False
        reading = task.read(task.losses())
        return reading.unigram is not None and reading.high < reading.unigram

    @cached_property
    def task(self) -> Task | None:
        """The model's loss on its text, if it has one: the given one, else that of its labels, else of its tokens."""
        if self.trial.loss is not None:
            return self._given_task(GIVEN)
        related = self.token_task
        if related is not None and related.kind == LABELS:
            return related
        return self._given_task(LABELS) or related

    @cached_property
    def token_task(self) -> Task | None:
        """The loss per label or token, beside which frequencies stand, whatever loss is given."""
        if not self.trial.batches and not any(batch.labels is not None for batch in self.trial.inputs):
            return None
        related = self._labelled_task()
        if related is not None:
            return related
        if type(self.trial.model).__name__.endswith("ForMaskedLM"):
            return self._make_task(VISIBLE if self.mask_token is None else MASKED)
        if self.trial._causal is False or not self.trial.batches:
            return None
        if names_next_token(self.trial.model) or self.trial.why_causal is not None:
            return self._make_task(NEXT)
        output, ids = self.trial.captured[0], self.trial.sample.targets
        is_open = names_next_token(self.trial.model) is None and output.ndim > 2 and output.shape[:2] == ids.shape
        if is_open and self.trial.noise <= self.trial.tolerance and self.trial.leak <= self.trial.tolerance:
            return self._make_task(NEXT)
        return None

    def _labelled_task(self) -> Task | None:
        """The loss of labels where cross entropy relates them to the outputs."""
        probe, known = self.trial.probe, [batch for batch in self.trial.inputs if batch.labels is not None]
        labelled = self._few([batch for batch in known if not has_no_labels(batch.labels)])
        relation = relate(probe.run_model(labelled[0]), labelled[0]) if labelled else None
        return None if relation is None else Task(probe, labelled, LABELS, None, self.trial.pad, relation=relation)

    def _few(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """The first batches, of `LOSS_SEQUENCES` rows together at least."""
        chosen, rows = [], 0
        for batch in batches:
            if rows < LOSS_SEQUENCES:
                chosen.append(batch)
                rows += batch.count
        return chosen

    def _given_task(self, kind: str) -> Task | None:
        """The loss that the user's function or the model computes, row by row where that gives the same mean."""
        batches = [batch for batch in self.trial.inputs if kind == GIVEN or batch.labels is not None]
        if not batches or (kind == LABELS and loss_of(self.trial.probe.run_model(batches[0])) is None):
            return None
        whole = Task(self.trial.probe, batches, kind, self.trial.loss, self.trial.pad)
        if sum(batch.count for batch in batches) > LOSS_SEQUENCES:
            batches = self._few(batches)
        rows = Task(self.trial.probe, batches, kind, self.trial.loss, self.trial.pad, by_row=True)
        try:
            first = rows.on(batches[:1]).losses()
            together = float(whole.on(batches[:1]).losses())
        except Exception:  # the user's function may need the batch as it is
            return whole
        mean = float(first[first == first].mean()) if bool((first == first).any()) else math.nan
        return rows if len(first) > 1 and abs(mean - together) <= ROWS_AGREE * abs(together) else whole

    @property
    def mask_token(self) -> int | None:
        """The id of the mask token, if the configuration or the tokenizer has it."""
        for holder in (getattr(self.trial.model, "config", None), self.trial.tokenizer):
            found = getattr(holder, "mask_token_id", None)
            if isinstance(found, int):
                return found
        return None

    def _make_task(self, kind: str) -> Task | None:
        batches, sequences = [], 0
        for batch in self.trial.batches:
            if sequences < LOSS_SEQUENCES:
                batches.append(batch.cut(LOSS_SEQUENCES - sequences, LOSS_LENGTH))
                sequences += batches[-1].ids.shape[0]
        if not batches:
            return None
        output, targets = self.trial.probe.run(batches[0]), batches[0].targets
        is_logits = output.ndim == 3 and output.shape[:2] == targets.shape and output.shape[-1] > int(targets.max())
        if not (is_logits and self.names_vocabulary(output)):
            return None
        pad = guess_pad(targets) if self.trial.pad is None else self.trial.pad
        return Task(self.trial.probe, batches, kind, None, pad, self.mask_token)

    def names_vocabulary(self, output: Tensor) -> bool:
        """True if the output's last axis can be the vocabulary: as many entries as some embedding has rows."""
        config = getattr(self.trial.model, "config", None)
        config = getattr(config, "text_config", None) or config
        known = {getattr(config, "vocab_size", None)}
        known |= {module.num_embeddings for module in self.trial.model.modules() if isinstance(module, nn.Embedding)}
        return output.shape[-1] in known
