"""Gradients of attention: every parameter gets one, and all are finite.

The output is multiplied by fixed random numbers and differentiated once; no `.grad` is touched.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.forwards import uncaptured
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.probe import Key, main_output
from regard.health.probe.trial import TRAINING, Trial
from regard.health.tokens.text import TokenBatch

MOST_WEIGHTS = 500_000_000  # of a model that is differentiated
SEQUENCES, LENGTH = 2, 32
NEEDS = "token ids and attention calls"
MISSING = Rule(
    "RG620", "parameters without gradient", "every attention parameter gets a gradient", "warning", NEEDS,
    "a parameter of a layer whose attention ran has no gradient, or one that is exactly 0, for random directions of "
    "the output: training cannot change it",
    "It is used under no_grad or after detach, in a cache that was detached, or not used at all.",
    "Use it in the forward without detach, no_grad or .data.",
    ("arXiv 2508.10925",), explains=("RG611",),
)  # fmt: skip
NOT_FINITE = Rule(
    "RG510", "gradients are not finite", "gradients of attention are finite", "critical", NEEDS,
    "the output is finite and a gradient is not",
    "A row that sees no key has a softmax of −inf alone, whose output was replaced and whose gradient was not.",
    "Give such rows a key or a finite mask, and set their output to 0 afterwards.",
    ("transformers#41727",),
)  # fmt: skip
RULES = (MISSING, NOT_FINITE)
REENTRANT = dict(
    cause="Gradient checkpointing is reentrant, and the layers' input, of frozen embeddings, needs no gradient.",
    fix="Call enable_input_require_grads(), or checkpoint with use_reentrant=False.",
)
NUMBER = re.compile(r"^(.*?\.?)(\d+)(?=\.|$)")  # of a layer in its list, in a module's name
BY_DESIGN = (
    "lora_",
    "adaption_prompt",  # behind a gate that is 0 at first
    "indexer",
    "compressor",
    "relative_",  # tables of distances, of which one text uses a part
    "inv_freq",
    "router",
    "gate.weight",
    "mask_token",
)


def check(trial: Trial) -> list:
    if not trial.captured[1]:
        raise NotApplicable("no attention call was captured")
    if sum(p.numel() for p in trial.model.parameters()) > MOST_WEIGHTS:
        raise NotApplicable(f"the model has more than {MOST_WEIGHTS:,} parameters")
    names = dict(attention_parameters(trial))
    if not names:
        raise NotApplicable("attention has no parameters")
    text = trial.tokens.cut(SEQUENCES, LENGTH) if trial.batches else trial.sample
    found = differentiate(trial, text, names)
    missing = find_missing(trial, found)
    if missing and (segments := with_segments(trial, text)) is not None:  # XLNet's seg_embed waits for them
        more = differentiate(trial, segments, names)
        missing = find_missing(trial, {name: more[name] if is_dead(grad) else grad for name, grad in found.items()})
    if missing:  # LeViT keeps its biases from a pass without gradients in evaluation
        with suppress(NotApplicable), trial.mode(TRAINING):
            more = differentiate(trial, text, names)
            missing = find_missing(trial, {name: more[name] if is_dead(grad) else grad for name, grad in found.items()})
    return (missing or find_untrained(trial, text, names, found)) + find_not_finite(trial, found)


def differentiate(trial: Trial, text: TokenBatch, names: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The gradients of these parameters, for random directions of the output."""
    with requiring_grad(names.values()), torch.enable_grad():
        outputs = real_outputs(trial.probe.run_model(text))
        if not outputs[0].requires_grad:
            raise NotApplicable("the model's output has no gradient: it runs under no_grad")
        if not bool(torch.isfinite(outputs[0]).all()):
            raise NotApplicable("the output is not finite")
        generator = torch.Generator().manual_seed(0)
        parts = [(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs if x.requires_grad]
        total = torch.stack([part.double() for part in parts]).sum()
        grads = torch.autograd.grad(total, list(names.values()), allow_unused=True)
    return dict(zip(names, grads, strict=True))


def find_untrained(
    trial: Trial, text: TokenBatch, names: dict[str, nn.Parameter], found: dict[str, Tensor | None]
) -> list:
    """Trainable parameters beside frozen ones that get a gradient in evaluation, and none in training as it is set."""
    names = {name: p for name, p in names.items() if p.requires_grad and not is_dead(found[name])}
    if not names or all(p.requires_grad for p in trial.model.parameters()):
        return []
    lost = [name for name, grad in train(trial, text, names).items() if is_dead(grad)]
    if not lost:
        return []
    cured = train(trial, text, {name: names[name] for name in lost}, follows_embeddings=True)
    more: dict[str, Any] = {} if any(map(is_dead, cured.values())) else REENTRANT
    shown = ", ".join(lost[:2]) + (" …" if len(lost) > 2 else "")
    words = f"In training mode no gradient reaches {len(lost)} of {len(names)} trainable parameters ({shown})."
    limit = "no gradient in training, one in evaluation"
    return trial.find(MISSING, "warning", keys_of(trial, lost), words, limit, **more)


def train(
    trial: Trial, text: TokenBatch, names: dict[str, nn.Parameter], follows_embeddings: bool = False
) -> dict[str, Tensor | None]:
    """The gradients that a step in training mode leaves, dropout at 0; optionally embeddings follow gradients."""

    def follow(module: nn.Module, given: Any, output: Any) -> None:
        if follows_embeddings:
            output.requires_grad_(True)

    kept = [(p, p.grad) for p in trial.model.parameters()]
    hooks = [one.register_forward_hook(follow) for one in trial.model.modules() if isinstance(one, nn.Embedding)]
    try:
        for p, _ in kept:
            p.grad = None
        with trial.mode(TRAINING), uncaptured(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what is found here
            output = main_output(trial.probe.run_model(text))
            if output.requires_grad:  # .backward, because reentrant checkpoints refuse autograd.grad
                noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
                (output * noise.to(output)).sum().backward()
        return {name: p.grad for name, p in names.items()}
    finally:
        for p, grad in kept:
            p.grad = grad
        for hook in hooks:
            hook.remove()


def real_outputs(result: Any) -> list[Tensor]:
    """The main output, and what a forward returns beside it: pooled vectors, what towers return; if finite."""
    main = main_output(result)
    parts = list(
        result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
    )
    parts += [x for tower in parts if isinstance(tower, Mapping) for x in tower.values()]
    others = [x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x is not main]
    return [main, *(x for x in others if bool(torch.isfinite(x).all()))]


def with_segments(trial: Trial, text: TokenBatch) -> TokenBatch | None:
    """The text with token_type_ids of 0; None where the batch has its own, or forward takes none."""
    if "token_type_ids" not in signature(trial.model.forward).parameters or "token_type_ids" in text.named:
        return None
    return text.put("token_type_ids", torch.zeros_like(text.ids))


def attention_parameters(trial: Trial) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the modules whose attention calls were captured, and whose keys have different values.

    Where all values are equal, as those of MaskFormer's first queries, which are 0, no weight changes the output.
    """
    calls = [(key, one) for key, one in trial.captured[1].items() if one.k.shape[2] > 1]
    owners = {one.call.module: key for key, one in calls if not has_equal_values(one.v)}
    seen: set[int] = set()
    for module, key in owners.items():
        for name, p in module.named_parameters():
            if id(p) not in seen and p.is_floating_point() and not p.is_meta:
                seen.add(id(p))
                yield f"{key[0]}.{name}".lstrip("."), p


def has_equal_values(v: Tensor) -> bool:
    """True if the values [B, H, N, D] of all keys are equal but for rounding."""
    return bool((v - v[:, :, :1]).abs().max() <= 4 * torch.finfo(v.dtype).eps * v.abs().max())


@contextmanager
def requiring_grad(parameters) -> Iterator[None]:
    """Parameters follow gradients inside the block, whether or not they are frozen."""
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def is_dead(grad: Tensor | None) -> bool:
    return grad is None or not bool(grad.any())


def dead_block(grad: Tensor | None, width: int) -> tuple[int, int] | None:
    """(first, last) of rows without gradient in a stacked projection that has some: whole heads, side by side."""
    if grad is None or grad.ndim != 2 or not bool(grad.any()):
        return None
    dead = (grad == 0).all(1).nonzero().flatten().tolist()
    if len(dead) < max(width, len(grad) // 8) or dead[-1] - dead[0] + 1 != len(dead):
        return None
    return dead[0], dead[-1]


def find_missing(trial: Trial, grads: dict[str, Tensor | None]) -> list:
    if all(map(is_dead, grads.values())):
        return []  # the output does not depend on attention: other checks say so
    names = [name for name, grad in grads.items() if is_dead(grad) and not any(part in name for part in BY_DESIGN)]
    names = [name for name in names if not name.endswith("bias") or f"{name[:-4]}weight" in names]  # k's bias has none
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    text = f"{shown}: no gradient reaches {'it' if len(names) == 1 else 'them'}."
    if not names:
        width = min(one.q.shape[-1] for one in trial.captured[1].values())
        blocks = {name: rows for name, grad in grads.items() if (rows := dead_block(grad, width)) is not None}
        tables = {f"{name}.weight" for name, one in trial.part.named_modules() if isinstance(one, nn.Embedding)}
        names = [name for name in blocks if name not in tables and not any(part in name for part in BY_DESIGN)]
        if not names:
            return []
        first, last = blocks[names[0]]
        text = (
            f"No gradient reaches rows {first} to {last} of {len(grads[names[0]])} in {names[0]}"  # type: ignore[arg-type]
            f"{f', and as many in {len(names) - 1} more' if len(names) > 1 else ''}: what they project is not used."
        )
    keys = keys_of(trial, names)
    is_unused = have_no_next(trial, keys) or all(grads[name] is None for name in names)  # another stream, or input
    severity = "note" if is_unused and is_library_code(trial.model) else "warning"
    return trial.find(MISSING, severity, keys, text, "a gradient that is missing or exactly 0")


def have_no_next(trial: Trial, keys: list[Key]) -> bool:
    """True if each of these layers is the last of its list: no module has its name with the next number."""
    names = {name for name, _ in trial.part.named_modules()}
    found = [NUMBER.search(key[0]) for key in keys]
    return all(one is not None and f"{one[1]}{int(one[2]) + 1}" not in names for one in found)


def find_not_finite(trial: Trial, grads: dict[str, Tensor | None]) -> list:
    names = [name for name, grad in grads.items() if grad is not None and not bool(torch.isfinite(grad).all())]
    if not names:
        return []
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    text = f"The output is finite, and the gradients of {shown} are not."
    return trial.find(NOT_FINITE, "critical", keys_of(trial, names), text, "a gradient that is NaN or infinite")


def keys_of(trial: Trial, names: list[str]) -> list[Key]:
    """The layers that own these parameters."""
    return [key for key in trial.captured[1] if any(name.startswith(f"{key[0]}.") for name in names)]
