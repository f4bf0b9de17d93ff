"""Examine a model: run it as it runs, measure every attention head on the way, say what is wrong."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from regard.health import findings
from regard.health.capture.call import forget_derived
from regard.health.capture.interception import Interception, as_written, refuse_data_parallel
from regard.health.measurement.norms import OutputColumns
from regard.health.measurement.query_rows import is_inverted, is_two_sided, pad_of, padding_of
from regard.health.measurement.recorder import Layer, Recorder, merge_uses
from regard.health.readings.heads import heads_if, heads_of, layers_without_rows, read_early
from regard.health.readings.histogram import LAYOUT
from regard.health.report.report import Report, WhatIfReading, how_measured
from regard.health.what_if import parse_all

Modules = list[tuple[str, nn.Module]]
# names of kernels that are not caught, or parts of them
NOT_CAUGHT = ("flex_attention", "flash_attn", "memory_efficient_attention", "varlen_attn", "sageattn")
POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # how tables of learned positions are called


def examine(
    model: nn.Module,
    batches: Any,
    what_if: str | Iterable[str] = (),
    *,
    title: str | None = None,
    progress: Callable[[int], None] | None = None,
    backend: str | None = None,
    group=None,
    snapshot: str | os.PathLike | None = None,
) -> Report:
    """Every attention head of `model` over `batches`: readings, findings and, per what-if, what they would be.

    >>> encoder = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> report = regard.examine(encoder, [torch.randn(2, 10, 32)], what_if=["temperature=2"])
    >>> len(report.heads), report.heads[0].layer, report.unmeasured
    (4, 'self_attn', [])
    >>> flatter = report.what_if["temperature=2"].heads[0]
    >>> flatter.statistics["entropy"].mean >= report.heads[0].statistics["entropy"].mean
    True

    Args:
        model: any nn.Module: a transformers model, torch's own layers, or anything that calls
            `scaled_dot_product_attention`. It is run in evaluation mode without gradients, and left as it was.
        batches: an iterable of batches: a mapping goes in as keywords, a tuple or list as arguments, a tensor as the
            one argument; a function is called with the model (`lambda m: m.generate(ids)`).
        what_if: changes to try on the same scores: "temperature=2", "scale=inverse", "qk_norm", "softcap=50",
            "normalizer=entmax15", "ssmax"; several joined by + are one change.
        title: what to call the model in the report; None takes its own name.
        progress: called with the number of batches done.
        backend: as in `regard.attention`.
        group: ranks of `torch.distributed` that share the batches, True for all of them: every rank passes the same
            batches, runs its own, and gets the same report as one process would.
        snapshot: a file that the merged readings are written to now and then; if it is there, the examination goes on
            after the last batch in it. It is removed at the end.

    A batch that fails, or Ctrl-C, ends the examination: if anything was measured before, the report covers that and
    `report.interrupted` says why it is not all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is TorchScript, whose calls cannot be seen; pass the module that it was made of")
    changes = parse_all(what_if)
    if isinstance(batches, (str, bytes)):
        raise TypeError("batches must be what the model is called with, got text; tokenize it, or run `regard examine`")
    batches = [batches] if isinstance(batches, (Tensor, Mapping)) or callable(batches) else batches
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
    refuse_data_parallel(model)
    model = as_written(model)
    recorder = Recorder(changes, backend)
    rounds = None
    if group is not None or snapshot is not None:
        from regard.health.distributed.checksums import checksum_weights
        from regard.health.distributed.rounds import Rounds

        what = dict(model=_title(model), what_if=[change.name for change in changes], weights=checksum_weights(model))
        what["bins"] = repr(LAYOUT)
        rounds = Rounds(recorder, group, snapshot, what)
    interception = Interception(model, observe=recorder)
    modules = interception.modules
    if any(p.is_meta for _, module in modules for p in module._parameters.values() if p is not None):
        raise ValueError("model has weights on the meta device, which hold no numbers; load them first")
    here = threading.get_ident()  # others may run the model beside

    def begin(*_) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == here:
            recorder.begin()

    opened = model.register_forward_pre_hook(begin, prepend=True)
    started, done, size, failure = time.perf_counter(), 0, 0, None
    two_sided = is_two_sided(model, (name for name, _ in modules))
    pad = pad_of(model)
    columns = OutputColumns(dict(modules))
    try:
        with _evaluating(model, modules), interception, torch.no_grad(), interception.torch_calls():
            for batch in batches:
                if rounds is not None:
                    rounds.check_batch(done, batch)
                if rounds is None or rounds.is_mine(done):
                    recorder.rows.padding = padding_of(batch, two_sided)
                    recorder.rows.inverted = bool(recorder.rows.padding) and is_inverted(batch, pad)
                    recorder.begin()  # a function may run a part of the model, whose hook is not called
                    _run(model, modules, batch, done)
                    size = size or _size(modules)  # while a GPU is at work, and so
                    with recorder.on_side_stream():
                        columns.compute(recorder.layers.values())
                    if rounds is None:
                        read_early(recorder)
                    while recorder.finish_batch():
                        recorder.begin()
                        _run(model, modules, batch, done)
                done += 1
                if rounds is not None:
                    rounds.end_batch(done - 1)
                if progress is not None:
                    progress(done)
            if rounds is not None:
                rounds.end(done)
    except (Exception, KeyboardInterrupt) as error:
        failure = error
        recorder.finish_batch()
        if rounds is not None:
            failure, done = rounds.fail(done, error)
    finally:
        opened.remove()
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
            f"no attention was found in {type(model).__name__}: nothing in it called scaled_dot_product_attention, "
            "torch.nn.MultiheadAttention, regard.attention or a transformers attention function (if what torch.compile "
            f"made of it was run, examine that){_by_hand(modules)}"
        )
    with recorder.on_side_stream():
        columns.find_unread(layers)
        return _report(model, modules, size, layers, changes, done, failure, time.perf_counter() - started, title)


@contextlib.contextmanager
def _evaluating(model: nn.Module, modules: Modules) -> Iterator[None]:
    """Puts the model into evaluation mode and back; one examination at a time, threads take turns."""
    with _ONE_AT_A_TIME:
        training = [module for _, module in modules if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


_ONE_AT_A_TIME = threading.RLock()


def positions(model: nn.Module) -> int:
    """How many positions the model has a learned embedding for; a very large number if it has none."""
    return room_in(list(model.named_modules()))


def room_in(modules: Modules) -> int:
    tables = []
    for name, module in modules:
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITIONS:
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            tables.append(module.num_embeddings - first)
    return min(tables, default=2**31)


def _run(model: nn.Module, modules: Modules, batch: Any, number: int) -> None:
    if callable(batch) and not isinstance(batch, (Tensor, Mapping)):
        batch(model)
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(x):
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        ids, room = batch.get("input_ids"), room_in(modules)
        if isinstance(ids, Tensor) and ids.shape[-1] > room:
            raise ValueError(
                f"batch {number}: input_ids has {ids.shape[-1]} tokens, but the model has {room} positions; cut it"
            )
        model(**{key: moved(value) for key, value in batch.items()})
    elif isinstance(batch, (tuple, list)):
        model(*map(moved, batch))
    else:
        model(moved(batch))


def _report(
    model, modules: Modules, size: int, layers: list[Layer], changes, done: int, failure, seconds: float, title
) -> Report:
    heads = heads_of(layers)
    what_if = {}
    for change in changes:
        changed = heads_if(layers, change.name)
        refused = [(layer.name, layer.refused[change.name]) for layer in layers if change.name in layer.refused]
        what_if[change.name] = WhatIfReading(changed, findings.find_all(changed), refused)
    unmeasured = [(layer.name, layer.reason) for layer in layers if layer.reason is not None]
    unmeasured += layers_without_rows(layers, heads)
    unmeasured += list(_silent(modules, layers).items())
    interrupted = None
    if failure is not None:
        said = str(failure).strip().splitlines()
        interrupted = f"{type(failure).__name__}{f': {said[0]}' if said else ''} (after {done} whole batches)"
    return Report(
        title=title or _title(model),
        heads=heads,
        findings=findings.find_all(heads, layers),
        unmeasured=unmeasured,
        what_if=what_if,
        how=how_measured(model, size, layers, done, seconds),
        interrupted=interrupted,
    )


def _silent(modules: Modules, layers: list[Layer]) -> dict[str, str]:
    """Modules that are attention by name, or by what they call, in which nothing was caught: and what is said of it."""
    seen = {layer.name for layer in layers}
    suspected = {kind: _suspected(kind) for kind in {type(module) for _, module in modules}}
    names = {name: said for name, module in modules if (said := suspected[type(module)])}

    def related(name: str) -> bool:
        return any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in seen)

    silent = [name for name in names if name and not related(name)]
    return {name: names[name] for name in silent if not any(other.startswith(f"{name}.") for other in silent)}


def _suspected(kind: type[nn.Module]) -> str | None:
    """Why a class should have called attention, if it should: its name, or the name of a kernel that is not caught."""
    methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    called = {
        name for method in methods for name in method.__code__.co_names if "." not in name
    }  # no flash_attn.layers
    kernel = next((name for name in sorted(called) if any(part in name for part in NOT_CAUGHT)), None)
    if kernel is not None:
        return f"no attention call was seen in it; its code has {kernel}, which is not caught"
    return "no attention call was seen in it" if kind.__name__.endswith(("Attention", "Attn")) else None


def _by_hand(modules: Modules) -> str:
    for name, said in _silent(modules, []).items():
        kernel = said.partition("its code has ")[2]
        return f"; {name!r} has {kernel}" if kernel else f"; by name {name!r} is attention, but computes it by hand"
    return ""


def _size(modules: Modules) -> int:
    """How many parameters; shared ones once."""
    return sum(
        {id(p): p.numel() for _, module in modules for p in module._parameters.values() if p is not None}.values()
    )


def _title(model: nn.Module) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__
