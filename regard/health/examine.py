"""`examine`: run a model on batches, measure every attention head, report problems."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.health.capture.interception import describe_changes
from regard.health.checks import find_all
from regard.health.contract.run import run_checks
from regard.health.measure.batches import as_batches, evaluation_mode
from regard.health.measure.heads import heads_if, heads_of, keep_on_host, layers_without_rows
from regard.health.measure.one_pass import (
    Pass,
    find_missed,
    hint_at_missed,
    measure,
    name_model,
    require_measurable,
)
from regard.health.measure.recorder import Layer
from regard.health.mixers import MixerReading
from regard.health.probe.trial import KEPT
from regard.health.progress import Progress
from regard.health.report.report import Report, WhatIfReading, describe_measurement
from regard.health.what_if import WhatIf, parse_all

LEAST_ABLATION, ABLATION = 2.0, 30.0  # seconds: by default at least, and with ablate=True
LEAST_CHECKS, CHECKS = 20.0, 3.0  # seconds for the checks at least, and times the measurement's
PATIENCE = 3.0  # times these seconds by the clock, on a machine that is busy with other work


def examine(
    model: nn.Module,
    batches: Any,
    what_if: str | Iterable[str] = (),
    *,
    title: str | None = None,
    progress: Callable[[int], None] | bool | None = None,
    backend: str | None = None,
    group: Any = None,
    snapshot: str | os.PathLike | None = None,
    tokenizer: Any = None,
    checks: bool = True,
    ablate: bool | float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    predictor: nn.Module | None = None,
    measured: Callable[[Report], object] | None = None,
) -> Report:
    """Measure every attention head of `model` over `batches` and report readings, findings and what-ifs.

    >>> encoder = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> report = regard.examine(encoder, [torch.randn(2, 10, 32)], what_if=["temperature=2"])
    >>> len(report.heads), report.heads[0].layer, report.unmeasured
    (4, 'self_attn', [])
    >>> flatter = report.what_if["temperature=2"].heads[0]
    >>> flatter.statistics["entropy"].mean >= report.heads[0].statistics["entropy"].mean
    True

    Args:
        model: any nn.Module: a transformers model, torch's own layers, or anything that calls
            `scaled_dot_product_attention`. It runs in evaluation mode without gradients and is not changed.
        batches: an iterable of batches: a mapping is passed as keywords, a tuple or list as arguments, a tensor as the
            only argument; a function is called with the model (`lambda m: m.generate(ids)`).
        what_if: changes to try on the same scores: "temperature=2", "scale=inverse", "qk_norm", "softcap=50",
            "normalizer=entmax15", "ssmax"; several joined by + are one change.
        title: the model's name in the report; None for its own.
        progress: True for a line that names the stage and moves every second, in a terminal or notebook; or called
            with the number of batches finished.
        backend: as in `regard.attention`.
        group: ranks of `torch.distributed` that share the batches, True for all: every rank passes the same batches,
            runs its own, and returns the report that one process would.
        snapshot: a file to which the merged readings are saved from time to time; if it exists, the examination resumes
            after its last batch. It is removed at the end.
        tokenizer: names the tokens that the report shows, as in `regard.look`.
        checks: run the model a few times more, on a few sequences: does it see later tokens, other sequences or
            padding, is its loss below that of the text's frequencies, what do what-ifs and remedies do to the loss.
            They begin with the gravest and may take 20 seconds, or 3 times the measurement, ablation included; up to
            3 times as long where other processes keep them waiting. False measures alone, in little more than a
            forward; tokens are then shown only with a `tokenizer`.
        ablate: measure the loss without each head: True, False or a budget in seconds; None for as many seconds as the
            measurement took, 2 at least.
        seconds: time for the checks, to which that of ablation is added; None for the time that `checks` names.
        causal: True if the model must not see later tokens, False if it may; None to find out.
        loss: `loss(model, batch)` runs the model and returns the mean loss of a batch; None for the batch's `labels`,
            or the next token if the model predicts it.
        predictor: a model that holds `model` and returns logits, for the checks; None for `model` itself.
        measured: called with the report before the checks begin, to save what there is.

    Returns:
        A `Report`: `.heads`, `.findings`, `.unmeasured`, `.what_if`, `.how`, `.checks`, `.loss`.

    Raises:
        TypeError: `model` is not an nn.Module or is TorchScript, or `batches` is not an iterable of batches.
        ValueError: There is no batch or no attention call to measure, a what-if cannot be read, weights are on the
            meta device, or the model is `nn.DataParallel` over several devices.

    A batch that fails, or Ctrl-C, ends the examination: if anything was measured, the report covers it and
    `report.interrupted` gives the reason; else the error is raised, with a note of the batch's number.
    """
    model = require_measurable(model)
    changes = parse_all(what_if) if what_if != () else []
    if ablate is not None and not isinstance(ablate, bool) and not 0.0 <= ablate < float("inf"):
        raise ValueError(f"ablate must be True, False or seconds from 0 on, got {ablate!r}")
    if seconds is not None and not seconds > 0.0:
        raise ValueError(f"seconds must be above 0, got {seconds!r}")
    batches = as_batches(batches)
    line = Progress("examine") if progress is True else None
    with line or contextlib.nullcontext():
        seen = measure(
            model, line.count(batches) if line else batches, changes, backend=backend,
            progress=progress if callable(progress) else None, group=group, snapshot=snapshot,
            keep=KEPT if checks else 0,
        )  # fmt: skip
        with seen.recorder.on_side_stream():
            report = _make_report(title or name_model(model), seen, changes)
        if measured is not None and checks and seen.failure is None:
            measured(replace(report, interrupted="the checks did not end"))
        if seen.layers and seen.failure is None and seen.first is not None and (checks or tokenizer is not None):
            from regard.health.look import sample_tokens  # imports this module

            if line:
                line.stage("reading what heads look at")
            report = replace(report, tokens=sample_tokens(model, seen.first, tokenizer, seen.room, report.title))
        if checks and seen.failure is None and group is None and snapshot is None:
            budget = max(LEAST_ABLATION, seen.seconds) if ablate is None else ABLATION if ablate is True else ablate
            allowed = max(LEAST_CHECKS, CHECKS * seen.seconds) - (budget if ablate is None else 0.0)
            with evaluation_mode(seen.modules), torch.no_grad():
                outcome, found = run_checks(
                    model, seen.kept, seen.layers, report.heads, report.findings, changes, causal=causal, loss=loss,
                    ablation_seconds=float(budget), predictor=predictor, tokenizer=tokenizer,
                    seconds=allowed if seconds is None else seconds, patience=PATIENCE if seconds is None else 1.0,
                    progress=line.check if line else None,
                )  # fmt: skip
            report = report.with_checks(outcome, found)
            if outcome.is_stopped:
                report = replace(report, interrupted=f"KeyboardInterrupt (after {len(outcome.done)} checks)")
    if not seen.layers and not seen.mixers and not any(one.severity != "note" for one in report.findings):
        raise ValueError(
            f"no attention was found in {type(model).__name__}: it did not call scaled_dot_product_attention, "
            "torch.nn.MultiheadAttention, regard.attention or a known kernel, nor compute softmax(q kᵀ)·v (if you ran "
            f"what torch.compile returned, examine that){hint_at_missed(seen.modules)}"
        )
    return report


def _make_report(title: str, seen: Pass, changes: list[WhatIf]) -> Report:
    layers = seen.layers
    seen.columns.find_unused_heads(layers)
    how = describe_measurement(
        seen.model, seen.parameters, layers, seen.batches, seen.seconds, describe_changes(seen.model)
    )
    heads = heads_of(layers)
    keep_on_host(layers, heads)
    what_if = {}
    for change in changes:
        changed = heads_if(layers, change.name)
        refused = [(layer.name, layer.refused[change.name]) for layer in layers if change.name in layer.refused]
        what_if[change.name] = WhatIfReading(changed, find_all(changed), refused)
    unmeasured = [(layer.name, layer.reason) for layer in layers if layer.reason is not None]
    unmeasured += layers_without_rows(layers, heads)
    unmeasured += find_missed(seen.modules, layers).items()
    interrupted, failure = None, seen.failure
    if failure is not None:
        message = str(failure).strip().splitlines()
        reason = f"{type(failure).__name__}{f': {message[0]}' if message else ''}"
        interrupted = f"{reason} (after {how['batches']} whole batches)"
    found, mixers = find_all(heads, layers, seen.mixers), describe_mixers(layers, seen.mixers)
    return Report(title, heads, found, unmeasured, what_if, how, interrupted, mixers=mixers)


def describe_mixers(layers: Sequence[Layer], mixers: Sequence[MixerReading]) -> dict[str, Any] | None:
    """The token mixers of a hybrid, as plain values: how many are attention, and what was read of the others."""
    if not mixers:
        return None
    attention = len({layer.name for layer in layers})
    return dict(attention=attention, others=[one.to_json() for one in mixers])
