"""`Trial`: a model, some of its text, and what several checks need of them, each computed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.finding import LAYERS, MODEL, Finding, Heads, Layers, fill_finding, places_in
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.measure.query_rows import pad_of
from regard.health.probe.differences import budget, largest_change, rounding_noise
from regard.health.probe.losses import LossTasks
from regard.health.probe.modes import checkpointing, implementation, training_without_dropout
from regard.health.probe.probe import CapturedCall, Key, Probe, relative_change
from regard.health.probe.task import LossReading, Task, names_next_token, predicts_next_token
from regard.health.probe.texts import Leak, change_later, choose_longest, find_leaks, plain_text
from regard.health.tokens.forms import DECODERS
from regard.health.tokens.text import TokenBatch, as_batch, as_token_batch

SEQUENCES, LENGTH = 2, 128  # of the text on which the checks run
ROWS = 4  # of images, sounds or vectors
KEPT = 8  # batches that are kept for the checks
# relative change that rounding cannot explain
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


TRAINING, CHECKPOINTING, WEIGHTS = "training", "checkpointing", "weights"
MODES = {
    TRAINING: "in training mode with every dropout at 0",
    CHECKPOINTING: "with gradient checkpointing",
    WEIGHTS: "with output_attentions=True",
}


class Trial:
    """A model in evaluation mode inside `probe.active()`, and the batches that the checks may run."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], layers: Layers, heads: Heads, causal: bool | None,
        loss: Callable | None, part: nn.Module | None = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.layers, self.heads, self.loss = model, layers, heads, loss
        self.part = model if part is None else part  # whose modules the layers' names are of
        self.pad, self.tokenizer = pad_of(model), tokenizer
        self.skipped: list[tuple[Rule, Any]] = []  # (part of a check, text or error why it was not made)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._causal, self.may_see_later = causal, causal is False  # as the user says
        self.given = batches
        self._outputs: dict[str, Tensor | NotApplicable] = {}
        self.batches = [one for batch in batches if (one := as_token_batch(batch, self.device, model)) is not None]

    @cached_property
    def probe(self) -> Probe:
        """Runs the model, and captures or changes its attention calls."""
        return Probe(self.model, self.part)

    @property
    def is_stopped(self) -> bool:
        """True if a forward was refused because the time of the checks is over."""
        return "probe" in vars(self) and self.probe.was_stopped

    @property
    def tokens(self) -> TokenBatch:
        """The first sequences of the first batch, cut short."""
        if not self.batches:
            raise NotApplicable("the batches hold no token ids [B, N]")
        return self._tokens

    @cached_property
    def _longest_batch(self) -> TokenBatch:
        return max(self.batches[:4], key=lambda batch: min(batch.ids.shape[0], SEQUENCES) * batch.ids.shape[1])

    @cached_property
    def _tokens(self) -> TokenBatch:
        whole = self._longest_batch
        short = whole.cut(SEQUENCES, LENGTH)
        try:
            self.probe.run(short)
        except Exception:  # a model of one length, or arguments that are not cut alike
            return whole
        return short

    @cached_property
    def sample(self) -> TokenBatch:
        """`tokens`; where the batches hold none, the first rows of images, sounds, or vectors [B, N, C]."""
        if self.batches:
            return self._tokens
        found = next((one for one in self.inputs if isinstance(one.ids, Tensor) and one.ids.ndim > 1), None)
        if found is None:
            raise NotApplicable("the batches hold no token ids, images or vectors")
        given = [x for x in (*found.args, *found.named.values()) if isinstance(x, Tensor) and x.ndim > 1]
        is_by_row = all(x.shape[0] == found.ids.shape[0] for x in given)
        return found.select(torch.arange(min(ROWS, found.ids.shape[0]), device=self.device)) if is_by_row else found

    @cached_property
    def captured(self) -> tuple[Tensor, dict[Key, CapturedCall]]:
        """The main output and the attention calls on `sample`."""
        sample = self.sample  # raises before the model is intercepted
        return self.probe.capture(sample)

    @cached_property
    def text_keys(self) -> set[Key]:
        """The attention calls that read the text, where a tower of images or sounds has others."""
        calls = self.captured[1]
        if not any(isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2 for x in self.sample.given):
            return set(calls)
        ids = self.sample.targets
        try:
            after = self.probe.capture(
                self.sample.with_targets(self.sample.exchange(ids, torch.ones_like(ids).bool()))
            )[1]
        except Exception:  # places of images among the tokens: the text holds the images
            return set(calls)
        return {key for key, one in calls.items() if key not in after or not torch.equal(one.q, after[key].q)}

    @property
    def keys(self) -> list[Key]:
        """The attention calls on the text; none where the batches hold no token ids."""
        return list(self.captured[1]) if self.batches else []

    @cached_property
    def tolerance(self) -> float:
        """The relative change above which two outputs differ by more than rounding."""
        dtypes = {self.captured[0].dtype} | {one.q.dtype for one in self.captured[1].values()}
        return max(TOLERANCE.get(dtype, 3e-2) for dtype in dtypes)

    @cached_property
    def noise(self) -> float:
        """The relative change of the output between two equal forwards."""
        sample = self.sample
        return relative_change(self.probe.run(sample), self.probe.run(sample))

    def require_repeatable(self) -> None:
        """Raises NotApplicable if the model's output is random or not finite."""
        if self.noise > self.tolerance:
            raise NotApplicable("two equal forwards differ")
        if not bool(torch.isfinite(self.captured[0]).all()):
            raise NotApplicable("the output is not finite")

    def require_sequences(self) -> None:
        """Raises NotApplicable if the first axis holds patches of several images, packed one after another."""
        packed = [name for name in self.sample.named if name.endswith("grid_thw") or name.startswith("cu_seq")]
        if packed and not self.batches:
            raise NotApplicable(f"the first axis holds packed patches ({packed[0]}), not sequences")

    def require_rows(self) -> Tensor:
        """Returns the output [B, N, …] with a row per token, or raises NotApplicable."""
        output, given = self.captured[0], self.sample.targets
        if not self.batches and given.ndim > 3:
            raise NothingToCheck("images have no order of tokens")
        if output.ndim < 3 or given.ndim > 3 or output.shape[:2] != given.shape[:2]:
            raise NotApplicable("the output has no row per token")
        return output

    @cached_property
    def rounding(self) -> float:
        """The largest relative change of an output row that rounding explains, measured with `rounding_noise`."""
        output = self.captured[0]
        with rounding_noise(self.model):
            shaken = self.probe.run(self.sample)
        return budget(self.change(output, shaken), output.dtype)

    @cached_property
    def leaks(self) -> list[Leak]:
        """What later tokens change, from each of `PLACES` on."""
        self.require_rows()
        found = find_leaks(lambda batch: self.probe.run(batch), self.sample, self.captured[0])
        if not found:
            raise NotApplicable("no place with text lies before another")
        return found

    def require_causal(self) -> None:
        """Raises NotApplicable unless the model, as it is, hides later tokens."""
        self.require_repeatable()
        if self.leak > self.rounding:
            raise NotApplicable("the model sees later tokens in evaluation too")

    @contextmanager
    def mode(self, name: str) -> Iterator[None]:
        """Inside, the model runs in another way of `MODES`, or with an attention implementation of this name.

        Raises NotApplicable if it has no such way.
        """
        with ExitStack() as stack:
            try:
                if name in (TRAINING, CHECKPOINTING):
                    stack.enter_context(training_without_dropout(self.model))
                    stack.enter_context(torch.enable_grad())  # layers are checkpointed only where gradients are asked
                if name == CHECKPOINTING:
                    stack.enter_context(checkpointing(self.model))
                elif name == WEIGHTS:
                    stack.enter_context(self.weights_asked())
                elif name != TRAINING:
                    stack.enter_context(implementation(self.model, name))
            except ValueError as reason:
                raise NotApplicable(str(reason)) from None
            yield

    def output_in(self, name: str) -> Tensor:
        """The output in a mode; raises NotApplicable if there is none, or if two forwards differ there."""
        if name not in self._outputs:
            self.rounding  # noqa: B018 – measured as the model is, not in the mode
            try:
                with self.mode(name):
                    output = self.probe.run(self.sample)
                    if self.differs(output) and self.change(output, self.probe.run(self.sample)) > self.rounding:
                        raise NotApplicable(f"two equal forwards differ {MODES.get(name, name)}")
                self._outputs[name] = output
            except NotApplicable as reason:
                self._outputs[name] = reason
            except Exception as error:  # of the library or the user, who may not have this way
                first = str(error).strip().split("\n")[0][:120]
                self._outputs[name] = NotApplicable(f"{name}: {type(error).__name__}: {first}")
        known = self._outputs[name]
        if isinstance(known, NotApplicable):
            raise known
        return known

    @cached_property
    def text_rows(self) -> Tensor | None:
        """True at the places [B, N] of `sample` that are text, False at padding; None without padding."""
        shown = self.sample.text_mask(self.pad) if self.batches else None
        return None if shown is None or bool(shown.all()) or not bool(shown.any()) else shown

    def change(self, output: Tensor, other: Tensor) -> float:
        """The largest relative change between the rows of text of two outputs for `sample`."""
        return largest_change(output, other, self.text_rows)

    def differs(self, output: Tensor) -> bool:
        """True if rounding does not explain what is between an output for `sample` and the model's own."""
        return self.change(self.captured[0], output) > self.rounding

    def differs_between(self, output: Tensor, batch: TokenBatch) -> bool:
        """True if rounding does not explain what is between an output and that of another batch."""
        return largest_change(output, self.probe.run(batch)) > self.rounding

    def find_new_leak(self, rule: Rule, name: str) -> list[Finding]:
        """Finds later tokens that change earlier outputs in a mode, of a model that hides them otherwise."""
        before = self.output_in(name)
        if not self.differs(before):
            return []  # the same outputs depend on the same tokens
        with self.mode(name):
            worst = max(find_leaks(self.probe.run, self.sample, before), key=lambda leak: leak.amount)
            if not worst.amount > self.rounding:
                return []
            keys = self.first_changed(worst.cut)
        begins = f" The first layer is {keys[0][0] or 'the model itself'}." if keys else ""
        return self.find(
            rule, rule.severity, keys, f"{worst} {MODES.get(name, f'with {name!r}')}, and not as the model is.{begins}",
            f"relative change of an earlier row > {self.rounding:.2g}, which rounding explains",
        )  # fmt: skip

    def first_changed(self, cut: int) -> list[Key]:
        """[The first attention call whose rows before `cut` change with the tokens behind], or []."""
        before, after = (self.probe.capture(batch)[1] for batch in (self.sample, change_later(self.sample, cut)))
        length = self.sample.targets.shape[1]
        for key, one in before.items():
            other = after.get(key)
            if other is not None and one.output.shape == other.output.shape and one.output.shape[2] == length:
                if relative_change(one.output[:, :, :cut], other.output[:, :, :cut]) > self.rounding:
                    return [key]
        return []

    @contextmanager
    def weights_asked(self) -> Iterator[None]:
        """Inside, forwards ask for attention weights; raises NotApplicable if forward does not take that."""
        accepted = inspect.signature(self.model.forward).parameters
        is_known = "output_attentions" in accepted or hasattr(getattr(self.model, "config", None), "output_attentions")
        if not is_known:
            raise NothingToCheck("forward does not take output_attentions")
        before, self.probe.extra = self.probe.extra, {"output_attentions": True}
        try:
            yield
        finally:
            self.probe.extra = before

    @property
    def leak(self) -> float:
        """The largest relative change of an output row by later tokens."""
        return max(leak.amount for leak in self.leaks)

    @cached_property
    def text(self) -> TokenBatch:
        """Two long rows of text alone: no padding, positions, labels or masks of two axes; their mask is all ones."""
        if self.tokens is self._longest_batch or self.tokens.has_decoder:
            return plain_text(self.tokens, self.pad)
        return plain_text(choose_longest(self._longest_batch, self.pad, SEQUENCES).cut(SEQUENCES, LENGTH), self.pad)

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
        if self._lacks_decoder:
            return None  # the library makes the decoder's tokens of the encoder's, which all see one another
        if named is not None:
            return f"{type(self.model).__name__} predicts the next token" if named else None
        if any(predicts_next_token(batch) for batch in self.batches):
            return "its labels are the next tokens"
        calls = [one for one in self.captured[1].values() if not one.call.is_cross(one.key[0])]
        masked = [one for one in calls if self.is_causal_call(one)]
        if calls and 2 * len(masked) > len(calls):
            return f"{len(masked)} of {len(calls)} self-attention layers are causal"
        if self.predicts_next:
            return "it predicts the next token better than the text's frequencies do"
        return None

    @property
    def _lacks_decoder(self) -> bool:
        """True for an encoder-decoder whose batches hold no tokens of a decoder."""
        config = getattr(self.model, "config", None)
        has_decoder = any(one.has_decoder or one.key in DECODERS for one in self.batches)
        return bool(getattr(config, "is_encoder_decoder", False)) and not has_decoder

    @property
    def why_inconsistent(self) -> str | None:
        """Why a model of which nothing else is known hides later tokens: it does in a part of the text."""
        if self._causal is False or names_next_token(self.model) is False or self._lacks_decoder:
            return None
        text = self.sample.text_mask(self.pad) if self.batches else None
        if text is not None and not bool(text[:, -1].any()):
            return None  # the last tokens are padding, which changes nothing anyway
        amounts = [leak.amount for leak in self.leaks]
        return "it hides them in another part of the text" if min(amounts) <= self.rounding < max(amounts) else None

    @cached_property
    def _losses(self) -> LossTasks:
        return LossTasks(self)

    @property
    def task(self) -> Task | None:
        """The model's loss on its text, if it has one: the given one, else that of its labels, else of its tokens."""
        return self._losses.task

    @property
    def token_task(self) -> Task | None:
        """The loss per label or token, beside which frequencies stand, whatever loss is given."""
        return self._losses.token_task

    @property
    def predicts_next(self) -> bool:
        """True if the outputs are logits that predict the next token better than the text's unigrams, not the same."""
        return self._losses.predicts_next

    def names_vocabulary(self, output: Tensor) -> bool:
        """True if the output's last axis can be the vocabulary: as many entries as some embedding has rows."""
        return self._losses.names_vocabulary(output)

    @cached_property
    def inputs(self) -> list[TokenBatch]:
        """All batches on the model's device, of tokens or not."""
        return [as_batch(batch, self.device, self.model) for batch in self.given if not callable(batch)]

    @cached_property
    def losses(self) -> Tensor | None:
        """The model's own losses, one per sequence."""
        return None if self.task is None else self.task.losses()

    @cached_property
    def loss_reading(self) -> LossReading | None:
        """The model's loss beside that of the text's frequencies."""
        return None if self.task is None or self.losses is None else self.task.read(self.losses)

    @cached_property
    def token_reading(self) -> LossReading | None:
        """The loss per token beside the text's frequencies, also where another loss is given."""
        task = self.token_task
        if task is None or task is self.task:
            return self.loss_reading
        return task.read(task.losses())

    def ask_each(self, ways: Sequence[tuple[Rule, Callable[[Trial, Rule], list[Finding]]]]) -> list[Finding]:
        """The findings of several rules of one file; why one could not be asked is kept in `skipped`."""
        found: list[Finding] = []
        for rule, find in ways:
            try:
                found += find(self, rule)
            except Exception as reason:  # one does not keep the others from being asked
                self.skipped.append((rule, reason))
        return found

    def layer_of(self, key: Key):
        """The layer of the report that a captured call belongs to, None if it has none."""
        same = (layer for layer in self.layers if layer.name == key[0])
        return next((layer for layer in same if layer.use == key[1] or layer.together), None)

    def find(
        self, rule: Rule, severity: str, keys: Sequence[Key], evidence: str, threshold: str = "", remedy: str = "",
        **more: Any,
    ) -> list[Finding]:  # fmt: skip
        """[Finding] about these calls' layers, or the whole model if there are none; `more`: fields of `Finding`."""
        layers = [layer for key in keys if (layer := self.layer_of(key)) is not None and layer.heads]
        if not keys:
            layers = [layer for layer in self.layers if layer.heads]
        places = [place for place, _ in places_in(layers)]
        heads, indices = tuple((one.layer, one.head) for one in places), tuple(one.index for one in places)
        where = dict(scope=LAYERS, layer=keys[0][0]) if keys else dict(scope=MODEL)
        return [fill_finding(rule, severity, heads, evidence, threshold, remedy, indices=indices, **(where | more))]
