"""`examine`: run a model on batches, measure every attention head, report problems."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from regard.health import findings
from regard.health.capture.call import forget_derived
from regard.health.capture.interception import Interception, as_written, check_model, describe_changes
from regard.health.checks import KEPT, run_checks
from regard.health.measurement.norms import OutputColumns
from regard.health.measurement.query_rows import is_inverted, is_two_sided, pad_of, padding_of
from regard.health.measurement.recorder import Layer, Recorder, merge_uses
from regard.health.readings.heads import heads_if, heads_of, keep_on_host, layers_without_rows, read_early
from regard.health.readings.histogram import LAYOUT
from regard.health.report.report import Report, WhatIfReading, describe_measurement
from regard.health.tokens.text import as_batch, first_text
from regard.health.what_if import WhatIf, parse_all

Modules = list[tuple[str, nn.Module]]
LEAST_ABLATION, ABLATION = 2.0, 30.0  # seconds: by default at least, and with ablate=True
POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # names of learned position tables
# parts of the names of kernels that are not captured
NOT_CAPTURED = ("flex_attention", "flash_attn", "memory_efficient_attention", "varlen_attn", "sageattn")
NAMED_ATTENTION = re.compile(r"(Attention|Attn)(Block|Layer|Module|\d[dD])?$")  # names of classes


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
    causal: bool | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    predictor: nn.Module | None = None,
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
        progress: True for a line that counts batches, in a terminal or notebook; or called with the number finished.
        backend: as in `regard.attention`.
        group: ranks of `torch.distributed` that share the batches, True for all: every rank passes the same batches,
            runs its own, and returns the report that one process would.
        snapshot: a file to which the merged readings are saved from time to time; if it exists, the examination resumes
            after its last batch. It is removed at the end.
        tokenizer: names the tokens that the report shows, as in `regard.look`.
        checks: run the model a few times more, on a few sequences: does it see later tokens, other sequences or
            padding, is its loss below that of the text's frequencies, what do what-ifs and remedies do to the loss.
            False measures alone, in little more than a forward; tokens are then shown only with a `tokenizer`.
        ablate: measure the loss without each head: True, False or a budget in seconds; None for as many seconds as the
            measurement took, 2 at least.
        causal: True if the model must not see later tokens, False if it may; None to find out.
        loss: `loss(model, batch)` runs the model and returns the mean loss of a batch; None for the batch's `labels`,
            or the next token if the model predicts it.
        predictor: a model that holds `model` and returns logits, for the checks; None for `model` itself.

    Returns:
        A `Report`: `.heads`, `.findings`, `.unmeasured`, `.what_if`, `.how`, `.checks`, `.loss`.

    Raises:
        TypeError: `model` is not an nn.Module or is TorchScript, or `batches` is not an iterable of batches.
        ValueError: There is no batch or no attention call to measure, a what-if cannot be read, weights are on the
            meta device, or the model is `nn.DataParallel` over several devices.

    A batch that fails, or Ctrl-C, ends the examination: if anything was measured, the report covers it and
    `report.interrupted` gives the reason; else the error is raised, with a note of the batch's number.
    """
    check_model(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is TorchScript, whose calls cannot be captured; pass the module it was made from")
    changes = parse_all(what_if) if what_if != () else []
    if ablate is not None and not isinstance(ablate, bool) and not 0.0 <= ablate < float("inf"):
        raise ValueError(f"ablate must be True, False or seconds from 0 on, got {ablate!r}")
    batches = as_batches(batches)
    if isinstance(progress, bool):
        batches, progress = count_batches(batches) if progress else batches, None
    model = as_written(model)
    recorder = Recorder(changes, backend)
    rounds = None
    if group is not None or snapshot is not None:
        from regard.health.distributed.rounds import Rounds, checksum_weights

        what = dict(model=name_model(model), what_if=[one.name for one in changes], weights=checksum_weights(model))
        what["bins"] = repr(LAYOUT)
        rounds = Rounds(recorder, group, snapshot, what)
    interception = Interception(model, observe=recorder)
    modules = interception.modules

    def list_parameters() -> Iterable[nn.Parameter]:  # shared ones once
        return {id(p): p for _, module in modules for p in module._parameters.values() if p is not None}.values()

    if any(p.is_meta for p in list_parameters()) and not (
        any(hasattr(module, "_hf_hook") for _, module in modules)  # accelerate loads them in each forward
    ):
        raise ValueError("model has weights on the meta device, which have no values; load them first")

    def begin(*_) -> None:
        if not torch.compiler.is_compiling():
            recorder.begin()

    hook = model.register_forward_pre_hook(begin, prepend=True)
    started, done, failure, first = time.perf_counter(), 0, None, None
    two_sided = is_two_sided(model, (name for name, _ in modules))
    pad, room = pad_of(model), max_positions(model, modules)
    columns, kept = OutputColumns(dict(modules)), []  # type: ignore[var-annotated]
    try:
        with evaluation_mode(modules), interception, torch.no_grad(), interception.torch_calls():
            for batch in batches:
                first = first_text(batch) if done == 0 else first
                if rounds is not None:
                    rounds.check_batch(done, batch)
                if rounds is None or rounds.is_mine(done):
                    recorder.rows.padding = padding_of(batch, two_sided)
                    recorder.rows.inverted = bool(recorder.rows.padding) and is_inverted(batch, pad)
                    recorder.begin()  # a function may run only a part of the model, without this hook
                    run_batch(model, batch, done, room)
                    with recorder.on_side_stream():
                        columns.compute(recorder.layers.values())
                    if rounds is None:
                        read_early(recorder)
                    while recorder.finish_batch():
                        recorder.begin()
                        run_batch(model, batch, done, room)
                if checks and len(kept) < KEPT and not is_function(batch):
                    kept.append(batch)
                done += 1
                if rounds is not None:
                    rounds.end_batch(done - 1)
                if progress is not None:
                    progress(done)
            if rounds is not None:
                rounds.end(done)
    except (Exception, KeyboardInterrupt) as error:
        failure = _name_batch(error, done) if rounds is None else error
        recorder.finish_batch()
        if rounds is not None:
            failure, done = rounds.fail(done, error)
    finally:
        hook.remove()
        forget_derived()
    layers = list(recorder.layers.values())
    if rounds is not None:
        layers = rounds.finish() if failure is None else rounds.layers()
    layers = merge_uses(layers)
    if failure is not None and not any(layer.reading for layer in layers):
        raise failure
    if not done and failure is None:
        raise ValueError("batches is empty; there is nothing to examine")
    if not layers:
        raise ValueError(
            f"no attention was found in {type(model).__name__}: it did not call scaled_dot_product_attention, "
            "torch.nn.MultiheadAttention, regard.attention or a known kernel, nor compute softmax(q kᵀ)·v (if you ran "
            f"what torch.compile returned, examine that){_hint_at_missed(modules)}"
        )
    with recorder.on_side_stream():
        columns.find_unused_heads(layers)
        seconds, size = time.perf_counter() - started, sum(p.numel() for p in list_parameters())
        how = describe_measurement(model, size, layers, done, seconds, describe_changes(model))
        report = _make_report(title or name_model(model), modules, layers, changes, how, failure)
    if failure is None and first is not None and (checks or tokenizer is not None):
        from regard.health.look import sample_tokens  # imports this module

        report = replace(report, tokens=sample_tokens(model, first, tokenizer, room, report.title))
    if not checks or failure is not None or rounds is not None or not report.heads:
        return report
    budget = max(LEAST_ABLATION, seconds) if ablate is None else ABLATION if ablate is True else float(ablate)
    with evaluation_mode(modules), torch.no_grad():
        outcome, found = run_checks(
            model, kept, layers, report.heads, report.findings, changes, causal=causal, loss=loss,
            ablation_seconds=budget, predictor=predictor,
        )  # fmt: skip
    return report.with_checks(outcome, found)


def _name_batch(error: BaseException, number: int) -> BaseException:
    """Returns the error that ended a batch, with a note of its number; before Python 3.11 the note is its cause."""
    note = f"regard.examine: raised in batch {number}, counted from 0"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = RuntimeError(note)
    return error


def is_function(batch: Any) -> bool:
    """True for a batch that is called with the model."""
    return callable(batch) and not isinstance(batch, (Tensor, Mapping))


def as_batches(batches: Any) -> Iterable[Any]:
    """Returns an iterable of batches, where one batch alone may be given; raises TypeError for anything else."""
    if isinstance(batches[0] if isinstance(batches, (list, tuple)) and batches else batches, (str, bytes)):
        raise TypeError("batches must be the model's inputs, got text; tokenize it, or run `regard examine`")
    batches = [batches] if isinstance(batches, (Tensor, Mapping)) or callable(batches) else batches
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
    return batches


@contextlib.contextmanager
def evaluation_mode(modules: Modules) -> Iterator[None]:
    """Evaluation mode inside the block."""
    training = [module for _, module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def max_positions(model: nn.Module, modules: Modules | None = None) -> int:
    """The number of positions of text with a learned embedding; a very large number if there are none.

    Tables of a part that takes images or sounds, by transformers' `main_input_name`, do not count. `modules`: those of
    the model by name, if they are known.
    """
    tables = []
    modules = list(model.named_modules()) if modules is None else modules
    others = tuple(
        f"{name}." for name, module in modules
        if name and getattr(module, "main_input_name", "input_ids") not in ("input_ids", "decoder_input_ids")
    )  # fmt: skip
    for name, module in modules:
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITIONS and not name.startswith(others):
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            tables.append(module.num_embeddings - first)
    return min(tables, default=2**31)


def run_batch(model: nn.Module, batch: Any, number: int, room: int) -> None:
    """Runs the model on a batch, on the model's device; `room` is the number of positions that it has."""
    if is_function(batch):
        batch(model)
        return
    given = as_batch(batch, next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu")))
    ids = given.named.get("input_ids")
    if isinstance(ids, Tensor) and ids.shape[-1] > room:
        raise ValueError(
            f"batch {number}: input_ids has {ids.shape[-1]} tokens, but the model has {room} positions; shorten it"
        )
    model(*given.args, **given.named)


def _make_report(
    title: str, modules: Modules, layers: list[Layer], changes: list[WhatIf], how: dict[str, Any],
    failure: BaseException | None,
) -> Report:  # fmt: skip
    heads = heads_of(layers)
    keep_on_host(layers, heads)
    what_if = {}
    for change in changes:
        changed = heads_if(layers, change.name)
        refused = [(layer.name, layer.refused[change.name]) for layer in layers if change.name in layer.refused]
        what_if[change.name] = WhatIfReading(changed, findings.find_all(changed), refused)
    unmeasured = [(layer.name, layer.reason) for layer in layers if layer.reason is not None]
    unmeasured += layers_without_rows(layers, heads)
    unmeasured += find_missed(modules, layers).items()
    interrupted = None
    if failure is not None:
        message = str(failure).strip().splitlines()
        reason = f"{type(failure).__name__}{f': {message[0]}' if message else ''}"
        interrupted = f"{reason} (after {how['batches']} whole batches)"
    return Report(title, heads, findings.find_all(heads, layers), unmeasured, what_if, how, interrupted)


def find_missed(modules: Modules, layers: Sequence[Layer]) -> dict[str, str]:
    """Modules that look like attention but in which no call was captured, with the reason."""
    captured = {layer.name for layer in layers}
    kinds = {name: type(module) for name, module in modules}
    suspected = {name: why for name, kind in kinds.items() if (why := _why_attention(kind))}  # type: ignore[arg-type]

    def is_related(name: str) -> bool:
        return any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in captured)

    missed = [name for name in suspected if name and not is_related(name)]
    return {name: suspected[name] for name in missed if not any(other.startswith(f"{name}.") for other in missed)}


@lru_cache(maxsize=256)
def _why_attention(kind: type[nn.Module]) -> str | None:
    """Why a class should have called attention: its name, or a kernel in its code that is not captured."""
    methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    names = {name for method in methods for name in method.__code__.co_names if "." not in name}  # not imports
    kernel = next((name for name in sorted(names) if any(part in name for part in NOT_CAPTURED)), None)
    if kernel is not None:
        return f"no attention call was seen in it; its code has {kernel}, which is not captured"
    return "no attention call was seen in it" if NAMED_ATTENTION.search(kind.__name__) else None


def _hint_at_missed(modules: Modules) -> str:
    """The first missed module and the kernel in its code, for an error message."""
    for name, reason in find_missed(modules, []).items():
        kernel = reason.partition("its code has ")[2]
        return f"; {name!r} has {kernel}" if kernel else f"; {name!r} is named attention, but computes it by hand"
    return ""


def name_model(model: nn.Module) -> str:
    """The model's name in a report: that of its configuration, or its class."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__


def count_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; write `examine: 3 of 8 batches, 2 s` to standard error, over itself each time.

    >>> from regard.health.examine import count_batches
    >>> list(count_batches("ab"))
    ['a', 'b']
    """
    total = f" of {len(batches)}" if isinstance(batches, Sized) else ""
    started = time.monotonic()
    try:
        for done, batch in enumerate(batches):
            seconds = time.monotonic() - started
            print(f"\rexamine: {done}{total} batches, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
            yield batch
    finally:
        print(f"\rexamine: done, {time.monotonic() - started:.0f} s".ljust(48), file=sys.stderr, flush=True)
