"""`check`: the contract of attention, as one call that is red or green."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.health import checks
from regard.health.checks import Rule, find_all
from regard.health.checks.finding import sort_findings
from regard.health.contract.run import LOSS, SECONDS, Checks, describe_raised, run_checks
from regard.health.contract.selection import choose_rules
from regard.health.contract.verdict import Skipped, Verdict
from regard.health.measure.batches import as_batches, evaluation_mode, is_function, run_batch
from regard.health.measure.heads import heads_of, keep_on_host, layers_without_rows
from regard.health.measure.one_pass import Pass, find_missed, measure, name_model, require_measurable
from regard.health.probe.modes import preserved
from regard.health.probe.trial import KEPT
from regard.health.progress import Progress
from regard.health.tokens.text import as_token_batch

MEASURED, SEQUENCES, LENGTH = 2, 4, 512  # batches whose attention is measured, and how much of each
IGNORED = -100  # label of a token that is not predicted
NO_CALL, NO_HEAD = "no attention call was captured", "no head could be measured"


def check(
    model: nn.Module,
    batches: Any,
    select: str | Iterable[str] | None = None,
    ignore: str | Iterable[str] | None = None,
    tokenizer: Any = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    causal: bool | None = None,
    *,
    predictor: nn.Module | None = None,
    trained: bool = True,
    title: str | None = None,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] | bool | None = None,
) -> Verdict:
    """Check the contract of attention on a few batches: what a token sees, the same answer in every way, configuration.

    >>> class Peeks(torch.nn.Module):  # a language model without a causal mask
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = torch.nn.Embedding(32, 16)
    ...         self.layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    ...         self.head = torch.nn.Linear(16, 32)
    ...     def forward(self, ids):
    ...         return self.head(self.layer(self.embedding(ids)))
    >>> verdict = regard.check(Peeks(), torch.randint(32, (2, 24)), select="RG101", causal=True)
    >>> bool(verdict), [(one.code, one.layer) for one in verdict.failures]
    (False, [('RG101', 'layer.self_attn')])

    Args:
        model: any nn.Module that `examine` takes. It runs in evaluation mode; nothing of it is changed.
        batches: as for `examine`; the first 8 are used.
        select: codes ("RG101"), beginnings of codes ("RG3") or kinds of what to check; None for everything.
        ignore: those to leave out.
        tokenizer: names the mask, pad and end tokens, where the configuration does not.
        loss: `loss(model, batch)` runs the model and returns the mean loss of a batch; None to find out.
        causal: True if the model must not see later tokens, False if it may; None to find out.
        predictor: a model that holds `model` and returns logits; None for `model` itself.
        trained: False if the weights are random; statistics of heads and losses are not judged then.
        title: the model's name in the verdict.
        seconds: after which no further check begins; those left are listed as not checked.
        progress: True for a line on standard error; or called with (code, number, total) before each check.

    Returns:
        A `Verdict`: `.failures`, `.notes`, `.diagnosis`, `.passed`, `.skipped`, `.seconds`, and `.error`, the reason
        why it is incomplete. It is true if nothing failed and there is no error.

    Raises:
        TypeError: `model` is not an nn.Module or is TorchScript, or `batches` is not an iterable of batches.
        ValueError: There is no batch, all labels are −100, weights are on the meta device, or `select` names no rule.

    An error of the model on a whole batch is raised; one that a check provokes is listed in `.skipped`, with its line.
    """
    started = time.perf_counter()
    chosen = choose_rules(select, ignore)
    idle = set() if trained else {code for code in chosen if _needs_training(checks.rules()[code])}
    chosen -= idle
    model = require_measurable(model)
    given = list(itertools.islice(as_batches(batches), KEPT))
    if not given:
        raise ValueError("batches is empty; pass at least one batch")
    if all(_is_empty(batch) for batch in given):
        raise ValueError("the batches have no sequences; pass at least one that has")
    if all(_is_unlabelled(batch) for batch in given):
        raise ValueError(f"all labels are {IGNORED}, so no token is predicted; check what the collator masks")
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices), preserved(model):  # dropout that ignores the mode draws numbers
        seen, problem = _measure(model, given)
    heads = [] if seen is None else _read_heads(seen)
    layers = [] if seen is None else seen.layers
    found = [one for one in find_all(heads, layers, [] if seen is None else seen.mixers) if one.code in chosen]
    kept = [batch for batch in given if not is_function(batch)]
    line = Progress("check") if progress is True else None
    with evaluation_mode(list(model.named_modules())), torch.no_grad(), line or contextlib.nullcontext():
        outcome, found = run_checks(
            model, kept, layers, heads, found, causal=causal, loss=loss, predictor=predictor, tokenizer=tokenizer,
            chosen=chosen, seconds=seconds, progress=line.check if line else progress if callable(progress) else None,
        )  # fmt: skip
    if outcome.is_stopped:
        raise KeyboardInterrupt
    _judge_readings(outcome, chosen, bool(layers), bool(heads), seen is not None and bool(seen.mixers), problem)
    unmeasured = [(layer.name, layer.reason) for layer in layers if layer.reason is not None]
    if seen is not None:
        unmeasured += [*layers_without_rows(layers, heads), *find_missed(seen.modules, layers).items()]
    wanted = chosen | idle
    outcome.reasons += [(code, "the weights are random") for code in idle]
    failed = {one.code for one in found}
    titles = checks.rules()
    passed = sorted((set(outcome.made) & chosen) - failed - {code for code, _ in outcome.reasons})
    skipped = [
        Skipped(code, titles[code].title if code in titles else "loss and what-ifs", why, code in outcome.absent)
        for code, why in sorted(outcome.reasons) if code in (wanted | {LOSS}) - failed
    ]  # fmt: skip
    gaps = [one.reason for one in skipped if not one.is_absent]
    error = outcome.error
    if problem in gaps:
        error = f"attention could not be measured: {problem}"
    elif gaps and not passed and not found:
        error = f"nothing was checked: {gaps[0]}"
    return Verdict(
        title or name_model(model),
        sort_findings(one for one in found if one.severity != "note"),
        [one for one in found if one.severity == "note"],
        passed, skipped, time.perf_counter() - started, outcome.loss, unmeasured, error=error,
    )  # fmt: skip


def _needs_training(rule: Rule) -> bool:
    """True if random weights say nothing about a rule: statistics of heads, sizes of logits, losses."""
    return rule.code.startswith(("RG3", "RG401")) or "loss" in rule.needs


def _measure(model: nn.Module, given: list[Any]) -> tuple[Pass | None, str | None]:
    """One pass over the begin of the first batches; (None, why) if the model runs but cannot be measured."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        return measure(model, [_shorten(batch, device) for batch in given[:MEASURED]]), None
    except Exception:  # arguments that are not cut alike, a model of one length
        pass
    try:
        return measure(model, given[:1]), None
    except Exception as error:
        with evaluation_mode(list(model.named_modules())), torch.no_grad():
            run_batch(model, given[0], 0, 2**31)  # raises what the model itself raises
        return None, describe_raised(error)


def _shorten(batch: Any, device: torch.device) -> Any:
    """The first tokens of the first sequences of a batch of token ids, any other batch as it is."""
    tokens = None if is_function(batch) else as_token_batch(batch, device)
    if tokens is None or (tokens.ids.shape[0] <= SEQUENCES and tokens.ids.shape[1] <= LENGTH):
        return batch
    short = tokens.cut(SEQUENCES, LENGTH)
    return short.named or short.args


def _read_heads(seen: Pass) -> list:
    with seen.recorder.on_side_stream():
        seen.columns.find_unused_heads(seen.layers)
        heads = heads_of(seen.layers)
        keep_on_host(seen.layers, heads)
    return heads


def _is_empty(batch: Any) -> bool:
    """True if a batch holds tensors and none of them has a row."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    rows = [x.shape[0] for x in parts if isinstance(x, torch.Tensor) and x.ndim]
    return bool(rows) and not any(rows)


def _is_unlabelled(batch: Any) -> bool:
    """True if the batch has labels, all of which are ignored."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_labels = isinstance(labels, Tensor) and labels.numel() > 0 and not labels.is_floating_point()
    return is_labels and bool((labels == IGNORED).all())  # type: ignore[union-attr]


def _judge_readings(
    outcome: Checks, chosen: set[str], layers: bool, heads: bool, mixers: bool, problem: str | None
) -> None:
    """Adds the rules of one pass to those that were made, or to those that were not."""
    for module in checks.modules():
        own = [rule for rule in module.RULES if rule.code in chosen]
        if checks.runs_model(module) or not own:
            continue
        if hasattr(module, "find_in_mixers"):
            is_made, reason = mixers, "no layer mixes tokens without attention"
        else:
            is_made = layers and (heads or hasattr(module, "find_in_layers"))
            reason = problem or (NO_HEAD if layers else NO_CALL)
        if is_made:
            outcome.made += [rule.code for rule in own]
        else:
            outcome.reasons += [(rule.code, reason) for rule in own]
            if hasattr(module, "find_in_mixers"):
                outcome.absent |= {rule.code for rule in own}
