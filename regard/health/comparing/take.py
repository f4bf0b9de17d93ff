"""`regard.fingerprint(model, batches)`: runs a model and takes its fingerprint."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import regard
from regard.health.capture.forwards import as_written
from regard.health.capture.interception import check_model
from regard.health.comparing.causes.masks import describe_mask
from regard.health.comparing.causes.queries import recover_call
from regard.health.comparing.difference import SAFETY, change, find_blocks, first_change, is_within, rounding_of
from regard.health.comparing.fingerprint import WORDS, Fingerprint, is_given
from regard.health.comparing.record import Key, Run, find_dtype, read_field, record
from regard.health.comparing.sketches import list_modules, make_plan, make_sketches, sample_attention
from regard.health.measure.batches import as_batches, is_function
from regard.health.tokens.text import find_ids

BATCHES = 2
SEEDS = (1, 2)
TOKENS = 16_384  # ids of all batches, at most
CONFIG = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "sliding_window", "layer_types", "rope_theta", "rope_parameters", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "hidden_act", "rms_norm_eps", "layer_norm_eps",
    "tie_word_embeddings", "max_position_embeddings", "vocab_size",
)  # fmt: skip


def fingerprint(model: nn.Module, batches: Any) -> Fingerprint:
    """Run a model on a few batches and return what it computes on chosen tokens, layer by layer.

    >>> layer, x = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True), torch.randn(2, 10, 32)
    >>> taken = regard.fingerprint(layer.eval(), [x])
    >>> regard.compare(taken, regard.fingerprint(layer, [x])).same
    True

    Args:
        model: any nn.Module, as in `regard.examine`. It runs in evaluation mode and is not changed.
        batches: an iterable of batches; the first two are used.

    Returns:
        A `Fingerprint`: `.save("model.regard")`, `Fingerprint.load`, and `regard.compare(fingerprint, other)`.

    Raises:
        TypeError: `model` is not an nn.Module, or `batches` is not an iterable of batches.
        ValueError: There is no batch, a batch is too long, or the model computes values that are not finite.
    """
    check_model(model)
    if is_function(batches):
        raise TypeError("batches must be an iterable of batches; a function has no token ids to keep")
    chosen = list(itertools.islice(as_batches(batches), BATCHES))
    if not chosen:
        raise ValueError("batches is empty; there is nothing to take a fingerprint of")
    model = as_written(model)
    parts = [_take_batch(model, batch, number) for number, batch in enumerate(chosen)]
    facts = parts[0][0] | dict(tokens=[part[0]["tokens"][0] for part in parts])
    budgets: dict[str, float] = {}
    tensors: dict[str, np.ndarray] = {}
    for made, found in parts:
        for name, x in found.items():
            whole = name in tensors and not is_given(name) and ".sample." not in name
            tensors[name] = np.concatenate([tensors[name], x]) if whole else x
        for name, budget in made["budgets"].items():
            budgets[name] = max(budgets.get(name, 0.0), budget)
    if sum(x.size for name, x in tensors.items() if name.startswith("ids.")) > TOKENS:
        raise ValueError(f"the batches hold more than {TOKENS:,} token ids; pass shorter ones")
    return Fingerprint(facts | dict(budgets=budgets), tensors)


def _take_batch(model: nn.Module, batch: Any, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    run = record(model, batch)
    blocks = find_blocks(model, run)
    layers = _layers_of(run, blocks)
    if not layers:
        raise ValueError("the model has no layer that keeps its shape and no attention call: nothing to keep")
    size = rounding_of(run)
    plan = make_plan(run, layers)
    tensors = make_sketches(run, layers, plan)
    key = first_change(run, record(model, batch, seed=SEEDS[0]))
    random = "" if key is None else key.module or "the model"
    noisy = [make_sketches(record(model, batch, noise=size, seed=seed), layers, plan) for seed in SEEDS]
    budgets = {
        name: round(SAFETY * max(size, *(_gap(x, other.get(name)) for other in noisy)), 12)
        for name, x in tensors.items() if name != "logits.ids"
    }  # fmt: skip
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    known = {name: _plain(read_field(config, name)) for name in CONFIG}
    facts: dict[str, Any] = dict(
        model=type(model).__name__, dtype=str(find_dtype(model)).removeprefix("torch."), rounding=size,
        versions=_versions(),
        kernel=getattr(config, "_attn_implementation", None) or next((x.kind for x in run.calls.values()), "none"),
        config={name: value for name, value in known.items() if value is not None},
        tokens=[dict(rows=[list(row) for row in plan.rows], inputs=_digest(batch), form=_form_of(batch))],
        layers=[_facts_of(run, layer) for layer in layers], budgets=budgets, random=random,
    )  # fmt: skip
    if number == 0:  # one batch is enough for the samples
        for at, (_, calls) in enumerate(layers):
            for key in calls[:1]:
                found, said = sample_attention(run.calls[key], plan)
                tensors |= {f"layers.{at}.sample.{name}": x for name, x in found.items()}
                facts["layers"][at] |= dict(sample=said) if said else {}
    types = facts["config"].get("layer_types")
    if isinstance(types, list) and len(types) == len(layers):
        for one, kind in zip(facts["layers"], types, strict=True):
            one["type"] = str(kind)
    return facts, tensors | _tokens_of(batch, number)


def _layers_of(run: Run, blocks: list[str]) -> list[tuple[str, list[Key]]]:
    """(name, its attention calls) of every block; of every call where there are no blocks."""
    if blocks:
        return [(name, [key for key in run.calls if is_within(key.module, name)]) for name in blocks]
    return [(key.module, [key]) for key in run.calls]


def _gap(x: np.ndarray, other: np.ndarray | None) -> float:
    """How far noise brought a sketch, row by row."""
    if other is None or x.shape != other.shape or x.dtype.kind != "f":
        return 0.0
    a, b = (torch.from_numpy(one.astype(np.float64)).reshape(len(one), -1) for one in (x, other))
    return change(a, b)


def _facts_of(run: Run, layer: tuple[str, list[Key]]) -> dict[str, Any]:
    name, calls = layer
    if not calls:
        return dict(name=name, kind="mixer without attention", modules=list_modules(run, name, calls))
    key = calls[0]
    kept = run.calls[key]
    facts: dict[str, Any] = dict(
        name=key.module, kind=kept.kind, heads=kept.q.shape[1], groups=kept.k.shape[1], width=kept.q.shape[-1],
    )  # fmt: skip
    if kept.obstacle is not None:
        return facts | dict(obstacle=kept.obstacle)
    scale = kept.scale
    facts |= dict(
        scale=None if isinstance(scale, Tensor) else scale, softcap=kept.softcap, sink=kept.sink is not None,
        bias=kept.bias is not None, temperature=kept.temperature is not None,
        normalizer="softmax" if kept.choice is None else kept.choice.spec,
        mask=describe_mask(kept.seen(), run.real) if kept.is_readable else "",
        modules=list_modules(run, name, calls),
    )  # fmt: skip
    rotary = recover_call(kept, run, key)
    return facts if rotary is None else facts | dict(rotary={part: one.to_json() for part, one in rotary.items()})


def _tokens_of(batch: Any, number: int) -> dict[str, np.ndarray]:
    """The tensors of whole numbers [B, N] of a batch, by their names in the file."""
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {"input_ids": find_ids(batch)}
    names = {word: short for short, word in WORDS.items()}
    found = {}
    for key, x in given.items():
        if isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point() and key != "labels":
            name = f"{names[key]}.{number}" if key in names else f"given.{number}.{key}"
            found[name] = x.detach().cpu().numpy().astype(np.int32)
    return found


def _form_of(batch: Any) -> str:
    return "mapping" if isinstance(batch, Mapping) else "tensor"


def _digest(batch: Any) -> str:
    """A checksum of every tensor of a batch, so that batches without token ids can be told apart."""
    given = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, (tuple, list)) else [batch])
    )
    known = hashlib.sha256()
    for name, x in sorted(given, key=lambda pair: str(pair[0])):
        if isinstance(x, Tensor) and name not in ("labels",):
            wide = x.detach().cpu().to(torch.int64 if not x.is_floating_point() else torch.float32)
            known.update(str(tuple(x.shape)).encode() + wide.contiguous().numpy().tobytes())
    return known.hexdigest()[:16]


def _versions() -> dict[str, str]:
    import sys

    versions = dict(regard=regard.__version__, torch=str(torch.__version__))
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return versions


def _plain(x: Any) -> Any:
    """Plain numbers, words, lists and dicts of a configuration; None for anything else."""
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in sorted(x.items(), key=lambda pair: str(pair[0]))}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    return x if isinstance(x, (str, int, float, bool)) and x == x else None
