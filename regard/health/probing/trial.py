"""`Trial`: a model, some of its text, and what several checks need of them, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.findings._finding import Heads, Layers, make_finding, places_in
from regard.health.measurement.query_rows import pad_of
from regard.health.probing.probe import CapturedCall, Key, Probe, relative_change
from regard.health.probing.task import GIVEN, LABELS, MASKED, NEXT, LossReading, Task, names_next_token
from regard.health.tokens.text import TokenBatch, as_batch, as_token_batch, exchange_tokens

SEQUENCES, LENGTH = 2, 128  # of the text on which the checks run
LOSS_SEQUENCES, LOSS_LENGTH = 16, 256  # of the text whose loss is computed
KEPT = 8  # batches that are kept for the checks
# relative change that rounding cannot explain
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class NotApplicable(Exception):
    """Says in a few words why a check was not made."""


class Trial:
    """A model in evaluation mode inside `probe.active()`, and the batches that the checks may run."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], layers: Layers, heads: Heads, causal: bool | None,
        loss: Callable | None, part: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.model, self.layers, self.heads, self.loss = model, layers, heads, loss
        self.part = model if part is None else part  # whose modules the layers' names are of
        self.pad = pad_of(model)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._causal = causal
        self.given = batches
        self.batches = [one for batch in batches if (one := as_token_batch(batch, self.device)) is not None]

    @cached_property
    def probe(self) -> Probe:
        """Runs the model, and captures or changes its attention calls."""
        return Probe(self.model, self.part)

    @property
    def tokens(self) -> TokenBatch:
        """The first sequences of the first batch, cut short."""
        if not self.batches:
            raise NotApplicable("the batches hold no token ids [B, N]")
        return self._tokens

    @cached_property
    def _tokens(self) -> TokenBatch:
        whole = max(self.batches[:4], key=lambda batch: min(batch.ids.shape[0], SEQUENCES) * batch.ids.shape[1])
        short = whole.cut(SEQUENCES, LENGTH)
        try:
            self.probe.run(short)
        except Exception:  # a model of one length, or arguments that are not cut alike
            return whole
        return short

    @cached_property
    def captured(self) -> tuple[Tensor, dict[Key, CapturedCall]]:
        """The main output and the attention calls on `tokens`."""
        tokens = self.tokens  # raises before the model is intercepted
        return self.probe.capture(tokens)

    @cached_property
    def tolerance(self) -> float:
        """The relative change above which two outputs differ by more than rounding."""
        dtypes = {self.captured[0].dtype} | {one.q.dtype for one in self.captured[1].values()}
        return max(TOLERANCE.get(dtype, 3e-2) for dtype in dtypes)

    @cached_property
    def noise(self) -> float:
        """The relative change of the output between two equal forwards."""
        tokens = self.tokens
        return relative_change(self.probe.run(tokens), self.probe.run(tokens))

    def require_repeatable(self) -> None:
        """Raises NotApplicable if the model's output is random or not finite."""
        if self.noise > self.tolerance:
            raise NotApplicable("two equal forwards differ")
        if not bool(torch.isfinite(self.captured[0]).all()):
            raise NotApplicable("the output is not finite")

    def require_rows(self) -> Tensor:
        """Returns the output [B, N, …] with a row per token, or raises NotApplicable."""
        output, targets = self.captured[0], self.tokens.targets
        if output.ndim < 3 or output.shape[:2] != targets.shape:
            raise NotApplicable("the output has no row per token")
        return output

    @cached_property
    def after_change(self) -> tuple[int, Tensor, dict[Key, CapturedCall]]:
        """(c, output, calls) with other tokens from position c on."""
        ids = self.tokens.targets
        c = max(1, ids.shape[1] // 2)
        later = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) >= c
        return c, *self.probe.capture(self.tokens.with_targets(exchange_tokens(ids, later)))

    @cached_property
    def leak(self) -> float:
        """The relative change of the output before c when tokens from c on are changed."""
        before = self.require_rows()
        c, after, _ = self.after_change
        return relative_change(before[:, :c], after[:, :c])

    def is_causal_call(self, one: CapturedCall) -> bool:
        """True if the call hides every later key from a query, by its own mask."""
        queries, keys = one.q.shape[2], one.k.shape[2]
        if queries != keys or one.call.is_cross(one.key[0]):
            return False
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=one.q.device).triu(1)
        return not bool((one.visible & ahead).any())

    @cached_property
    def why_causal(self) -> str | None:
        """Why the model may not see later tokens; None if it may, or if nobody knows."""
        if self._causal is not None:
            return "causal=True" if self._causal else None
        named = names_next_token(self.model)
        if named is not None:
            return f"{type(self.model).__name__} predicts the next token" if named else None
        calls = [one for one in self.captured[1].values() if not one.call.is_cross(one.key[0])]
        masked = [one for one in calls if self.is_causal_call(one)]
        if calls and 2 * len(masked) > len(calls):
            return f"{len(masked)} of {len(calls)} self-attention layers are causal"
        if self.predicts_next:
            return "it predicts the next token better than the text's frequencies do"
        return None

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
        """The model's loss on its text, if it has one."""
        if self.loss is not None:
            return self._make_task(GIVEN)
        if any("labels" in batch.named for batch in self.batches):
            return self._make_task(LABELS)
        if type(self.model).__name__.endswith("ForMaskedLM") and self.mask_token is not None:
            return self._make_task(MASKED)
        if self._causal is False or not self.batches:
            return None
        if names_next_token(self.model) or self.why_causal is not None:
            return self._make_task(NEXT)
        is_open = names_next_token(self.model) is None
        if is_open and self.noise <= self.tolerance and self.leak <= self.tolerance:
            return self._make_task(NEXT)
        return None

    @property
    def mask_token(self) -> int | None:
        """The id of the mask token, if the model's configuration has it."""
        found = getattr(getattr(self.model, "config", None), "mask_token_id", None)
        return found if isinstance(found, int) else None

    @cached_property
    def losses(self) -> Tensor | None:
        """The model's own losses, one per sequence."""
        return None if self.task is None else self.task.losses()

    @cached_property
    def loss_reading(self) -> LossReading | None:
        """The model's loss beside that of the text's frequencies."""
        return None if self.task is None or self.losses is None else self.task.read(self.losses)

    def _make_task(self, kind: str) -> Task | None:
        if kind == GIVEN:
            whole = [as_batch(batch, self.device) for batch in self.given]
            return Task(self.probe, whole, kind, self.loss, self.pad)
        batches, sequences = [], 0
        for batch in self.batches:
            if sequences < LOSS_SEQUENCES:
                batches.append(batch if kind == LABELS else batch.cut(LOSS_SEQUENCES - sequences, LOSS_LENGTH))
                sequences += batches[-1].ids.shape[0]
        if kind == LABELS:
            batches = [batch for batch in batches if "labels" in batch.named]
            has_loss = isinstance(getattr(self.probe.run_model(batches[0]), "loss", None), Tensor)
            return Task(self.probe, batches, kind, None, self.pad) if has_loss else None
        output, targets = self.probe.run(batches[0]), batches[0].targets
        is_logits = output.ndim == 3 and output.shape[:2] == targets.shape and output.shape[-1] > int(targets.max())
        if not (is_logits and self.names_vocabulary(output)):
            return None
        return Task(self.probe, batches, kind, None, self.pad, self.mask_token)

    def names_vocabulary(self, output: Tensor) -> bool:
        """True if the output's last axis can be the vocabulary: as many entries as some embedding has rows."""
        config = getattr(self.model, "config", None)
        config = getattr(config, "text_config", None) or config
        known = {getattr(config, "vocab_size", None)}
        known |= {module.num_embeddings for module in self.model.modules() if isinstance(module, nn.Embedding)}
        return output.shape[-1] in known

    def layer_of(self, key: Key):
        """The layer of the report that a captured call belongs to, None if it has none."""
        same = (layer for layer in self.layers if layer.name == key[0])
        return next((layer for layer in same if layer.use == key[1] or layer.together), None)

    def find(self, kind: str, severity: str, keys: Sequence[Key], evidence: str, threshold: str, remedy: str) -> list:
        """[Finding] about every head of these calls' layers; of all layers if none of them is in the report."""
        layers = [layer for key in keys if (layer := self.layer_of(key)) is not None and layer.heads]
        layers = layers or [layer for layer in self.layers if layer.heads]
        return make_finding(kind, severity, places_in(layers), evidence, threshold, remedy)
