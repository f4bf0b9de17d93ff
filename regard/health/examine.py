"""`examine`: run a model on batches, measure every attention head, report problems."""

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
from regard.health.progress import count_batches
from regard.health.readings.heads import heads_if, heads_of, layers_without_rows, read_early
from regard.health.readings.histogram import LAYOUT
from regard.health.report.how import describe_measurement
from regard.health.report.report import Report, WhatIfReading
from regard.health.what_if import WhatIf, parse_all

Modules = list[tuple[str, nn.Module]]
# parts of the names of kernels that are not captured
NOT_CAPTURED = ("flex_attention", "flash_attn", "memory_efficient_attention", "varlen_attn", "sageattn")
POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # names of learned position tables


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

    Returns:
        A `Report`: `.heads`, `.findings`, `.unmeasured`, `.what_if`, `.how`.

    Raises:
        TypeError: `model` is not an nn.Module or is TorchScript, or `batches` is not an iterable of batches.
        ValueError: There is no batch or no attention call to measure, a what-if cannot be read, weights are on the
            meta device, or the model is `nn.DataParallel` over several devices.

    A batch that fails, or Ctrl-C, ends the examination: if anything was measured, the report covers it and
    `report.interrupted` gives the reason.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is TorchScript, whose calls cannot be captured; pass the module it was made from")
    changes = parse_all(what_if)
    if isinstance(batches, (str, bytes)):
        raise TypeError("batches must be the model's inputs, got text; tokenize it, or run `regard examine`")
    batches = [batches] if isinstance(batches, (Tensor, Mapping)) or callable(batches) else batches
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}")
    refuse_data_parallel(model)
    if isinstance(progress, bool):
        batches, progress = count_batches(batches) if progress else batches, None
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
        raise ValueError("model has weights on the meta device, which have no values; load them first")
    here = threading.get_ident()  # other threads may run the model too

    def begin(*_) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == here:
            recorder.begin()

    hook = model.register_forward_pre_hook(begin, prepend=True)
    started, done, parameters, failure = time.perf_counter(), 0, 0, None
    two_sided = is_two_sided(model, (name for name, _ in modules))
    pad, room = pad_of(model), max_positions(model)
    columns = OutputColumns(dict(modules))
    try:
        with _evaluation_mode(model, modules), interception, torch.no_grad(), interception.torch_calls():
            for batch in batches:
                if rounds is not None:
                    rounds.check_batch(done, batch)
                if rounds is None or rounds.is_mine(done):
                    recorder.rows.padding = padding_of(batch, two_sided)
                    recorder.rows.inverted = bool(recorder.rows.padding) and is_inverted(batch, pad)
                    recorder.begin()  # a function may run only a part of the model, without this hook
                    _run(model, batch, done, room)
                    parameters = parameters or _count_parameters(modules)  # while a GPU is busy
                    with recorder.on_side_stream():
                        columns.compute(recorder.layers.values())
                    if rounds is None:
                        read_early(recorder)
                    while recorder.finish_batch():
                        recorder.begin()
                        _run(model, batch, done, room)
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
            "torch.nn.MultiheadAttention, regard.attention or a transformers attention function (if you ran what "
            f"torch.compile returned, examine that){_hint_at_missed(modules)}"
        )
    with recorder.on_side_stream():
        columns.find_unused_heads(layers)
        how = describe_measurement(model, parameters, layers, done, time.perf_counter() - started)
        return _make_report(title or _title(model), modules, layers, changes, how, failure)


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module, modules: Modules) -> Iterator[None]:
    """Evaluation mode inside the block; other threads wait until it ends."""
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


def max_positions(model: nn.Module) -> int:
    """The number of positions with a learned embedding; a very large number if there are none."""
    tables = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in POSITIONS:
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            tables.append(module.num_embeddings - first)
    return min(tables, default=2**31)


def _run(model: nn.Module, batch: Any, number: int, room: int) -> None:
    if callable(batch) and not isinstance(batch, (Tensor, Mapping)):
        batch(model)
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.shape[-1] > room:
            raise ValueError(
                f"batch {number}: input_ids has {ids.shape[-1]} tokens, but the model has {room} positions; shorten it"
            )
        model(**{key: move(value) for key, value in batch.items()})
    elif isinstance(batch, (tuple, list)):
        model(*map(move, batch))
    else:
        model(move(batch))


def _make_report(
    title: str,
    modules: Modules,
    layers: list[Layer],
    changes: list[WhatIf],
    how: dict[str, Any],
    failure: BaseException | None,
) -> Report:
    heads = heads_of(layers)
    what_if = {}
    for change in changes:
        changed = heads_if(layers, change.name)
        refused = [(layer.name, layer.refused[change.name]) for layer in layers if change.name in layer.refused]
        what_if[change.name] = WhatIfReading(changed, findings.find_all(changed), refused)
    unmeasured = [(layer.name, layer.reason) for layer in layers if layer.reason is not None]
    unmeasured += layers_without_rows(layers, heads)
    unmeasured += _find_missed(modules, layers).items()
    interrupted = None
    if failure is not None:
        message = str(failure).strip().splitlines()
        reason = f"{type(failure).__name__}{f': {message[0]}' if message else ''}"
        interrupted = f"{reason} (after {how['batches']} whole batches)"
    return Report(title, heads, findings.find_all(heads, layers), unmeasured, what_if, how, interrupted)


def _find_missed(modules: Modules, layers: list[Layer]) -> dict[str, str]:
    """Modules that look like attention but in which no call was captured, with the reason."""
    captured = {layer.name for layer in layers}
    reasons = {kind: _why_attention(kind) for kind in {type(module) for _, module in modules}}
    suspected = {name: reason for name, module in modules if (reason := reasons[type(module)])}

    def is_related(name: str) -> bool:
        return any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in captured)

    missed = [name for name in suspected if name and not is_related(name)]
    return {name: suspected[name] for name in missed if not any(other.startswith(f"{name}.") for other in missed)}


def _why_attention(kind: type[nn.Module]) -> str | None:
    """Why a class should have called attention: its name, or a kernel in its code that is not captured."""
    methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    names = {name for method in methods for name in method.__code__.co_names if "." not in name}  # not imports
    kernel = next((name for name in sorted(names) if any(part in name for part in NOT_CAPTURED)), None)
    if kernel is not None:
        return f"no attention call was seen in it; its code has {kernel}, which is not captured"
    return "no attention call was seen in it" if kind.__name__.endswith(("Attention", "Attn")) else None


def _hint_at_missed(modules: Modules) -> str:
    for name, reason in _find_missed(modules, []).items():
        kernel = reason.partition("its code has ")[2]
        return f"; {name!r} has {kernel}" if kernel else f"; {name!r} is named attention, but computes it by hand"
    return ""


def _count_parameters(modules: Modules) -> int:
    """The number of parameters, shared ones counted once."""
    parameters = (p for _, module in modules for p in module._parameters.values() if p is not None)
    return sum({id(p): p.numel() for p in parameters}.values())


def _title(model: nn.Module) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__
