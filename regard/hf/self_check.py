"""Is "regard" right for an architecture? A small twin with random weights runs the model's eager code, then "regard".

The twin is made from the configuration by `tiny_architectures.shrink`, in a thread of its own: contexts of the caller
(meta device, inference mode, autocast) do not reach it, and the caller's model is not touched. The answer is kept for
the process; another asks anew, which takes 0.02 to 1.2 s of CPU time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.models.tiny_architectures import WAYS, NotBuilt, find_class, shrink
from regard.health.models.tiny_inputs import find_runnable

TOLERANCE = 1e-4  # of the largest output; a wrong mask or bias is off by 0.01 and more
EQUAL, PARTS = "equal", ("padded", "without padding", "decoding with a cache")
_known: dict[tuple[type, str], str] = {}  # class and small configuration -> EQUAL, "unchecked: why", or what differs
_running = threading.local()
_log = logging.getLogger("regard.hf")


def check_architecture(kind: type, config: Any) -> None:
    """Raises ValueError if the twin of an architecture gives other outputs under "regard" than its eager code.

    One that cannot be made small is not checked: that is in the log, and raises where transformers has no "sdpa" of it.
    """
    if os.environ.get("REGARD_HF_CHECK") == "0" or getattr(_running, "is_twin", False) or torch.compiler.is_compiling():
        return
    found = _look_up(kind, config)
    if found.startswith("unchecked"):
        if not getattr(kind, "_supports_sdpa", True):
            raise ValueError(
                f"attn_implementation='regard' could not be checked for {kind.__name__} ({found}), which does not "
                "support 'sdpa', whose rules it follows; use regard.using (REGARD_HF_CHECK=0 leaves this check out)"
            )
        _log.warning("attn_implementation='regard' was not checked for %s: %s", kind.__name__, found[11:])
    elif found != EQUAL:
        raise ValueError(
            f"attn_implementation='regard' is not right for {kind.__name__}: {found}; load it with "
            "attn_implementation='eager' and use regard.using (REGARD_HF_CHECK=0 leaves this check out)"
        )


def _look_up(kind: type, config: Any) -> str:
    try:
        key = kind, json.dumps(_shrink(config).to_dict(), sort_keys=True, default=str)
    except Exception as error:
        return f"unchecked: {error}"
    if key not in _known:
        _known[key] = _run_in_thread(kind, config)
    return _known[key]


def _shrink(config: Any) -> Any:
    """Returns the configuration made small in the first way that its class takes."""
    for way in WAYS[:-1]:
        with contextlib.suppress(Exception):
            return shrink(config, way)
    return shrink(config, WAYS[-1])


def _run_in_thread(kind: type, config: Any) -> str:
    found: list[str] = []
    worker = threading.Thread(target=lambda: found.append(_compare_twins(kind, config)), name="regard.hf check")
    worker.start()
    worker.join()
    return found[0] if found else "unchecked: the check was ended"


def _compare_twins(kind: type, config: Any) -> str:
    _running.is_twin = True
    state, numbers = torch.random.default_generator.get_state(), random.getstate()
    try:
        with torch.no_grad(), torch.device("cpu"):
            torch.random.default_generator.manual_seed(0)
            try:
                model, make = make_twin(kind, config)
            except Exception as error:
                return f"unchecked: {' '.join(str(error).split())[:200]}"
            return compare(model, make, "regard") or EQUAL
    finally:
        torch.random.default_generator.set_state(state)
        random.setstate(numbers)


def make_twin(kind: type, config: Any) -> tuple[nn.Module, Callable[..., dict[str, Any]]]:
    """Returns a small model of the same architecture under its eager code, and what makes its batches."""
    try:
        find_class(config)
    except NotBuilt:  # code from outside transformers: its own class
        return find_runnable(partial(shrink, config), (kind,))
    return find_runnable(partial(shrink, config))


def compare(
    model: nn.Module, make: Callable[..., dict[str, Any]], implementation: str, tolerance: float = TOLERANCE
) -> str:  # fmt: skip
    """Returns what differs between a small model's eager code and `implementation`; "" if nothing does."""
    other: Any = copy.deepcopy(model)
    try:
        other.set_attn_implementation(implementation)
    except ValueError as error:
        return f"refused: {_one_line(error)}"
    checked = 0
    for part in PARTS:
        try:
            expected = list(_outputs(model, make, part))
        except Exception as error:
            if part == PARTS[0]:
                return f"unchecked: its eager code: {type(error).__name__}: {_one_line(error)}"
            continue
        try:
            found = list(_outputs(other, make, part))
        except Exception as error:
            return f"refused: {_one_line(error)}"
        checked += len(expected)
        for a, b in zip(expected, found, strict=True):
            if a.shape != b.shape or not torch.allclose(a.isfinite(), b.isfinite()):
                return (
                    f"{part}, its output has shape {tuple(b.shape)}, not {tuple(a.shape)}, or is not finite elsewhere"
                )
            a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
            off = float((a - b).abs().max()) / max(1.0, float(a.abs().max())) if a.numel() else 0.0
            if not off <= tolerance:
                return f"{part}, its output differs from its eager code's by {off:.2g}"
    return "" if checked else "unchecked: it returns no numbers"


def _outputs(model: nn.Module, make: Callable[..., dict[str, Any]], part: str) -> Iterator[Tensor]:
    """Yields the numbers that a model returns for one kind of batch."""
    padding = 3 if part == PARTS[0] else 0
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in make(padding=padding).items()}
    torch.random.default_generator.manual_seed(1)  # models that draw: masks of pretraining, codebooks
    if part != PARTS[2]:
        mask = batch.get("attention_mask")
        for output in _numbers(model(**batch)):
            if padding and mask is not None and output.shape[:2] == mask.shape:
                output = output[mask.bool()]  # rows of padding mean nothing
            yield output
        return
    if "input_ids" not in batch or "decoder_input_ids" in batch:
        return
    ids = batch["input_ids"]
    first = model(input_ids=ids[:, :-2], use_cache=True)
    cache = getattr(first, "past_key_values", None)
    if cache is None:
        return
    for at in (-2, -1):
        stop = ids.shape[1] + at + 1
        yield from _numbers(model(input_ids=ids[:, stop - 1 : stop], past_key_values=cache, use_cache=True))


def _numbers(output: Any) -> Iterator[Tensor]:
    """Yields the floating tensors of an output, caches left out."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        for name, value in output.items():
            if name not in ("past_key_values", "cache_params", "attentions"):
                yield from _numbers(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _numbers(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
