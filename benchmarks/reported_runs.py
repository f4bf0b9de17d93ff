"""Trainings with faults that people have reported, and sound ones, for `incidents.py`: the part "reported".

Written before the rules of the causes "attention computed otherwise", "weights overwritten" and those beside them, and
run for the first time after them.

| fault | report |
| --- | --- |
| the mask lets each position see the next one | GCYZSL/MoLA#21, facebookresearch/xformers#103 |
| the mask hides by a number that logits overcome | karpathy/minGPT#75 |
| all positions are the same | fla-org/flame#19 |
| a layer is initialised again at a resume | NVIDIA-NeMo/Megatron-Bridge#6032 |
| rows of q, k and v come back in another order | hpcaitech/ColossalAI#817 |
| gradients vanish in float16 | engichang1467/Open-Rig3R#35 |
| the optimizer's second moments are lost | NVIDIA/Megatron-LM#1842, NVIDIA/apex#480 |
| the learning rate begins anew | ultralytics/yolov5#292 |
| ids are off by one | huggingface/transformers#1078 |
| padding on the left is seen | NVIDIA-NeMo/Automodel#3704 |
| scores are divided by √(model width) | FareedKhan-dev/train-llm-from-scratch#3 |
| the loss is summed over micro-batches | agokrani/distillKitPlus#5 |
| a batch without a label | EleutherAI/bergson#461 |
| logits grow from step to step | marin-community/marin#1368 |
| bad batches, more and more | stanford-crfm/mistral#115 |
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.early_warning import LENGTH
from benchmarks.incident_runs import (
    EARLY,
    INPUT,
    LARGE,
    LATE,
    MOVED,
    NOT_FINITE,
    WEIGHTS,
    Run,
    attentions,
    grow,
    jump,
    restarts,
)
from regard.health.watching.incidents import FUTURE, OVERWRITTEN, SMALL


def set_mask(mask: Tensor):
    def act(model, optimizer):
        for one in attentions(model):
            one.mask = mask

    return act


SEES_NEXT = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WEAK = torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, -2.0)
PREFIX = CAUSAL | (torch.arange(LENGTH) < LENGTH // 4)


def make_positions_equal(model, optimizer):
    model.position.register_forward_hook(lambda module, inputs, output: output[:1].expand_as(output))


def initialize_layer(model, optimizer):
    for module in model.blocks[-1].modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def reorder_rows(model, optimizer):
    """Stacked [q, k, v] are taken for [q, k, v] of each head."""
    with torch.no_grad():
        for one in attentions(model):
            weight = one.qkv.weight
            weight.copy_(weight.unflatten(0, (one.heads, 3, -1)).transpose(0, 1).flatten(0, 2).clone())


def lose_gradients(model, optimizer):
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)


def lose_second_moments(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg_sq"] *= 1e-4


def scale_by_width(model, optimizer):
    for one in attentions(model):
        one.scale = one.qkv.weight.shape[1] ** -0.5


def shift_ids(ids: Tensor) -> Tensor:
    return (ids + 1) % 256


def pad_left(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, : ids.shape[1] // 2] = 0
    return ids


def spoil(since: int, share: float):
    """Puts random bytes in place of a share of the tokens that grows with each batch."""
    step = since

    def act(ids: Tensor) -> Tensor:
        nonlocal step
        step += 1
        bad = torch.rand(ids.shape) < share * (step - since)
        return torch.where(bad, torch.randint(0, 256, ids.shape), ids)

    return act


def grow_queries(by: float, since: int):
    def act(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for one in attentions(model) if step > since else ():
                one.qkv.weight[: 2 * one.qkv.weight.shape[1]] *= by

    return act


def reported_faults(late: bool) -> list[Run]:
    at, word = (LATE, "late") if late else (EARLY, "early")
    more: dict[str, Any] = dict(at=at, late=late, half="reported", seed=80 + late)
    return [
        Run(f"{word}: next token seen", (FUTURE,), break_=set_mask(SEES_NEXT), **more),
        Run(f"{word}: mask too weak", (FUTURE,), break_=set_mask(WEAK), **more),
        Run(f"{word}: positions all alike", INPUT, break_=make_positions_equal, **more),
        Run(f"{word}: a layer initialised again", (OVERWRITTEN, *INPUT), break_=initialize_layer, **more),
        Run(f"{word}: rows of q, k and v reordered", (OVERWRITTEN, *INPUT), break_=reorder_rows, **more),
        Run(f"{word}: gradients vanish", (), break_=lose_gradients, **more),
        Run(f"{word}: second moments lost", WEIGHTS, break_=lose_second_moments, **more),
        Run(f"{word}: rate begins anew, 10 times as high", WEIGHTS, factor=jump(10.0, at), **more),
        Run(f"{word}: ids off by one", INPUT, corrupt=shift_ids, **more),
        Run(f"{word}: padding on the left seen", INPUT, corrupt=pad_left, **more),
        Run(f"{word}: scores divided by √width", (SMALL, MOVED), break_=scale_by_width, **more),
        Run(f"{word}: loss summed", INPUT, loss_factor=jump(8.0, at), **more),
        Run(f"{word}: a batch without a label", (NOT_FINITE,), loss_factor=jump(math.nan, at), **more),
    ]


REPORTED_FAILING = [
    *reported_faults(False), *reported_faults(True),
    Run("slow: q and k grow by 2 % a step", (LARGE,), each=grow_queries(1.02, 30), seed=82, half="reported"),
    Run("slow: rate growing by 5 % a step, 4 layers", WEIGHTS, factor=grow(1.05), seed=83, half="reported",
        model=dict(layers=4)),
    Run("slow: rate 0.08, post-norm, no warm-up", WEIGHTS, rate=0.08, warmup=0, seed=84, half="reported",
        model=dict(post_norm=True)),
    Run("late: q and k grow by 5 % a step", (LARGE,), each=grow_queries(1.05, LATE), late=True, seed=85,
        half="reported"),
    Run("late: rate growing by 7 % a step", WEIGHTS, factor=grow(1.07, LATE), late=True, seed=86, half="reported"),
    Run("late: worse data with each step", INPUT, corrupt=spoil(700, 0.01), late=True, seed=87, half="reported"),
]  # fmt: skip


class Lookahead:
    """Every sixth step the weights go half of the way back to where they were (Lookahead, averaging of weights)."""

    def __init__(self) -> None:
        self.slow: list[Tensor] = []

    def __call__(self, model: nn.Module, step: int) -> None:
        with torch.no_grad():
            if step % 6 == 0:
                for parameter, slow in zip(model.parameters(), self.slow, strict=False):
                    parameter.copy_((parameter + slow) / 2)
                self.slow = [parameter.clone() for parameter in model.parameters()]


class Echo:
    """Gives each batch twice."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        given, self.last = (ids, ids) if self.last is None else (self.last, None)
        return given


def alternate(mask: Tensor | None, other: Tensor | None, period: int):
    """In every `period`-th step attention gets `other`, else `mask`."""

    def act(model: nn.Module, step: int) -> None:
        for one in attentions(model):
            one.mask = other if step % period == 0 else mask

    return act


def cut(ids: Tensor) -> Tensor:
    return ids[:, : int(torch.randint(12, ids.shape[1] + 1, ()))]


def warm_up(to: float, since: int, steps: int):
    return lambda step: 1.0 + (to - 1.0) * min(1.0, max(0, step - since) / steps)


SOUND_OF_REPORTED: dict[str, dict[str, Any]] = {
    "seed 90": dict(seed=90),
    "seed 91, rate 3e-3": dict(seed=91, rate=3e-3),
    "rate 1e-2, warm-up of 40 steps": dict(seed=92, rate=1e-2, warmup=40),
    "mask given in every second step": dict(seed=93, each=alternate(None, CAUSAL, 2)),
    "prefix seen in every fourth step": dict(seed=94, each=alternate(None, PREFIX, 4)),
    "each batch twice": dict(seed=95, easy=Echo()),
    "texts of many lengths": dict(seed=96, easy=cut, corrupt=cut, at=EARLY),
    "Lookahead": dict(seed=97, each=Lookahead()),
    "late: Lookahead": dict(seed=98, each=Lookahead(), late=True),
    "late: rate times 4 over 20 steps": dict(seed=99, factor=warm_up(4.0, 700, 20), late=True),
    "late: rate to a tenth": dict(seed=100, factor=jump(0.1, LATE), late=True),
    "late: rate from 0 to the top": dict(seed=101, factor=restarts(30, 685), late=True),
    "late: mask given from then on": dict(seed=102, at=LATE, break_=set_mask(CAUSAL), late=True),
    "late: texts of many lengths": dict(seed=103, at=LATE, corrupt=cut, late=True),
}
REPORTED_SOUND = [Run(name, half="reported", **settings) for name, settings in SOUND_OF_REPORTED.items()]
