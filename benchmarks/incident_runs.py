"""The trainings of `incidents.py`: what happens to each, which causes name that, and sound ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.health.watching.incidents import (
    AGAIN,
    DATA,
    DEAD,
    FUTURE,
    LARGE,
    MOVED,
    NOT_FINITE,
    OVERWRITTEN,
    STEPS,
)  # fmt: skip

BATCH, EARLY, LATE, AFTER = 4, 160, 720, 50  # sequences; the steps of early and late faults; steps after them
SLOW = 180  # steps of a slow early run
WEIGHTS = (LARGE, MOVED, STEPS)
INPUT = (DATA, MOVED)


@dataclass
class Run:
    """One training: what happens to it, which causes name that, and its settings."""

    name: str
    causes: tuple[str, ...] = ()  # none: sound
    at: int | None = None  # the step of a sudden fault
    break_: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None  # done once, before step `at`
    corrupt: Callable[[Tensor], Tensor] | None = None  # of the batches from `at` on
    rate: float = 2e-3
    factor: Callable[[int], float] = lambda step: 1.0  # of the rate
    warmup: int = 20
    clip: float | None = 1.0
    seed: int = 0
    sgd: bool = False
    late: bool = False
    easy: Callable[[Tensor], Tensor] | None = None  # of the batches before `at`
    each: Callable[[nn.Module, int], None] | None = None  # done before each step
    loss_factor: Callable[[int], float] = lambda step: 1.0
    half: str = ""  # "seen", "unseen", "new" or "reported"
    model: dict = field(default_factory=dict)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [block.attention for block in model.blocks]


def scale_queries(by: float):
    def act(model, optimizer):
        with torch.no_grad():
            for one in attentions(model):
                one.qkv.weight[: one.qkv.weight.shape[1] * 2] *= by

    return act


def put(value: float, where: str):
    def act(model, optimizer):
        with torch.no_grad():
            weight = model.blocks[0].mlp[0].weight if where == "mlp" else attentions(model)[-1].qkv.weight
            weight[0, 0] = value

    return act


def drop_values(model, optimizer):
    with torch.no_grad():
        for one in attentions(model):
            one.qkv.weight[-one.qkv.weight.shape[1] :] = 0.0


def lose_scale(model, optimizer):
    for one in attentions(model):
        one.scale = 2.0


def wipe_embedding(model, optimizer):
    with torch.no_grad():
        model.token.weight.normal_()


def shuffle(ids: Tensor) -> Tensor:
    return ids.flatten()[torch.randperm(ids.numel())].view_as(ids)


def bytes_in_half(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[::2] = torch.randint(0, 256, ids[::2].shape)
    return ids


def reverse(ids: Tensor) -> Tensor:
    return ids.flip(1)


def wrong_labels(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 1::2] = torch.randint(32, 127, ids[:, 1::2].shape)
    return ids


def jump(by: float, at: int):
    return lambda step: by if step >= at else 1.0


def sudden(late: bool) -> list[Run]:
    at, word = (LATE, "late") if late else (EARLY, "early")
    more: dict[str, Any] = dict(at=at, late=late)
    return [
        Run(f"{word}: rate times 30", WEIGHTS, factor=jump(30.0, at), clip=None, **more),
        Run(f"{word}: rate times 100", WEIGHTS, factor=jump(100.0, at), **more),
        Run(f"{word}: tokens shuffled", INPUT, corrupt=shuffle, **more),
        Run(f"{word}: random bytes in half of the batch", INPUT, corrupt=bytes_in_half, **more),
        Run(f"{word}: NaN in a weight", (NOT_FINITE,), break_=put(math.nan, "mlp"), **more),
        Run(f"{word}: infinity in q", (NOT_FINITE,), break_=put(math.inf, "attention"), **more),
        Run(f"{word}: weights of q and k times 30", (LARGE, OVERWRITTEN), break_=scale_queries(30.0), **more),
        Run(f"{word}: weights of q and k times 10", (LARGE, MOVED, OVERWRITTEN), break_=scale_queries(10.0), **more),
        Run(f"{word}: every second token random", INPUT, corrupt=wrong_labels, **more),
        Run(f"{word}: text read backwards", INPUT, corrupt=reverse, **more),
        Run(f"{word}: values lost", (DEAD, OVERWRITTEN), break_=drop_values, **more),
        Run(f"{word}: embedding lost", (OVERWRITTEN, *INPUT), break_=wipe_embedding, **more),
    ]


def grow(by: float, since: int = 0):
    return lambda step: by ** max(0, step - since)


SLOW_RUNS = [
    Run("slow: rate 0.06", WEIGHTS, rate=0.06, seed=1),
    Run("slow: rate 0.1", WEIGHTS, rate=0.1, seed=2),
    Run("slow: rate growing by 4 % a step", WEIGHTS, factor=grow(1.04), seed=3),
    Run("slow: rate 0.05, no warm-up, no clip", WEIGHTS, rate=0.05, warmup=0, clip=None, seed=4),
    Run("slow: no scale, rate 0.03", WEIGHTS, rate=0.03, seed=5, model=dict(scale=1.0)),
    Run("slow: no scale, 4 layers, rate 0.03", WEIGHTS, rate=0.03, seed=6, model=dict(layers=4, scale=1.0)),
    Run("slow: scale √d, rate 0.03", WEIGHTS, rate=0.03, seed=7, model=dict(scale=4.0)),
    Run("slow: bf16 logits, rate 0.06", WEIGHTS, rate=0.06, seed=8, model=dict(bf16=True)),
    Run("late: rate growing by 5 % a step", WEIGHTS, factor=grow(1.05, LATE), late=True),
    Run("late: rate growing by 8 % a step", WEIGHTS, factor=grow(1.08, LATE), late=True),
]  # fmt: skip
FAILING = [*sudden(False), *sudden(True), *SLOW_RUNS]
SOUND = [
    *(Run(f"seed {seed}", seed=seed) for seed in range(10, 16)),
    Run("rate 5e-4", rate=5e-4, seed=16), Run("rate 1e-3", rate=1e-3, seed=17), Run("rate 4e-3", rate=4e-3, seed=18),
    Run("rate 6e-3", rate=6e-3, seed=19), Run("rate 8e-3", rate=8e-3, seed=20), Run("no warm-up", warmup=0, seed=21),
    Run("no gradient clip", clip=None, seed=22), Run("4 layers", seed=23, model=dict(layers=4)),
    Run("4 layers, rate 4e-3", rate=4e-3, seed=24, model=dict(layers=4)),
    Run("post-norm, rate 1e-3", rate=1e-3, seed=25, model=dict(post_norm=True)),
    Run("1 head", seed=26, model=dict(heads=1)), Run("8 heads", seed=27, model=dict(heads=8)),
    Run("width 128, 8 heads", rate=1e-3, seed=28, model=dict(width=128, heads=8)),
    Run("width 128, 8 heads, rate 3e-3", rate=3e-3, seed=29, model=dict(width=128, heads=8)),
    Run("QK-norm", seed=30, model=dict(qk_norm=True)),
    Run("QK-norm, 6e-3", rate=6e-3, seed=31, model=dict(qk_norm=True)),
    Run("bf16 logits", seed=32, model=dict(bf16=True)), Run("SGD", rate=0.3, sgd=True, seed=33),
    Run("late: goes on", late=True), Run("late: goes on, other batches", late=True, seed=41),
    Run("late: rate falls to 0", late=True, seed=42, factor=lambda step: max(0.0, 1 - (step - 700) / 80)),
    Run("late: rate warms up again", late=True, seed=43, factor=lambda step: min(1.0, (step - 700) / 40)),
    Run("late: rate doubled", late=True, seed=44, factor=jump(2.0, LATE)),
    Run("late: no clip", late=True, clip=None, seed=45),
    Run("late: rate times 3", late=True, seed=46, factor=jump(3.0, LATE)),
    Run("late: other batches", late=True, seed=47),
]  # fmt: skip


# written after all rules, by nobody who had seen what they do: reported before any rule was changed by them
def lose_mask(model, optimizer):
    """Every position sees those after it, the one to predict too."""
    for one in attentions(model):
        one.is_causal = False


def lose_positions(model, optimizer):
    with torch.no_grad():
        model.position.weight.zero_()


def zero_a_head(model, optimizer):
    out = attentions(model)[0].out
    width = out.weight.shape[1] // attentions(model)[0].heads
    out.register_forward_pre_hook(lambda module, inputs: (inputs[0] * (torch.arange(inputs[0].shape[-1]) >= width),))


def overwrite_rows(model, optimizer):
    """The embeddings of the most frequent letters, by those of others."""
    with torch.no_grad():
        model.token.weight[97:123] = model.token.weight[150:176]


def overflow_in_fp16(model, optimizer):
    """The hidden numbers of the first MLP pass what float16 holds."""
    model.blocks[0].mlp[0].register_forward_hook(lambda module, inputs, output: (output * 1e5).half().float())


def shift_labels(ids: Tensor) -> Tensor:
    """Every second byte is that of another place, as if labels were out of step."""
    return torch.cat([ids[:, :1], ids[:, 1:].roll(1, 0)], 1)


class Repeat:
    """The same batch again and again, as a loader that does not move on."""

    def __init__(self) -> None:
        self.first: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        self.first = ids if self.first is None else self.first
        return self.first


def triangle(low: float, high: float, period: int, growth: float = 1.0, since: int = 0):
    """A rate that goes up and down, its peaks `growth` times those before."""

    def factor(step: int) -> float:
        cycle, within = divmod(max(0, step - since), period)
        return (low + (high - low) * (1.0 - abs(2.0 * within / period - 1.0))) * growth**cycle

    return factor


def add_dropout(model, optimizer):
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1, module.training))


def freeze_first_layer(model, optimizer):
    model.blocks[0].requires_grad_(False)


def forget_moments(model, optimizer):
    """A resume without the optimizer's state."""
    optimizer.state.clear()


def decay_weights(model, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1


def restarts(period: int, since: int = 0):
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * (max(0, step - since) % period) / period))


def new_faults(late: bool) -> list[Run]:
    at, word = (LATE, "late") if late else (EARLY, "early")
    more: dict[str, Any] = dict(at=at, late=late, half="new")
    return [
        Run(f"{word}: mask lost", (FUTURE,), break_=lose_mask, **more),
        Run(f"{word}: positions lost", (OVERWRITTEN,), break_=lose_positions, **more),
        Run(f"{word}: a head zeroed", (DEAD, *INPUT), break_=zero_a_head, **more),
        Run(f"{word}: embedding rows overwritten", (OVERWRITTEN, *INPUT), break_=overwrite_rows, **more),
        Run(f"{word}: scale 4 times as large", (LARGE, MOVED), break_=rescale(4.0), **more),
        Run(f"{word}: one batch for ever", (AGAIN,), corrupt=Repeat(), **more),
        Run(f"{word}: overflow in float16", (NOT_FINITE,), break_=overflow_in_fp16, **more),
        Run(f"{word}: labels of other texts", INPUT, corrupt=shift_labels, **more),
    ]


def rescale(by: float):
    def act(model, optimizer):
        for one in attentions(model):
            one.scale = by * (one.qkv.weight.shape[1] // one.heads) ** -0.5

    return act


def repeat_half(ids: Tensor) -> Tensor:
    """The second half of each text is the first again, which induction heads learn all at once."""
    half = ids.shape[1] // 2
    return torch.cat([ids[:, : ids.shape[1] - half], ids[:, :half]], 1)


def lower(ids: Tensor) -> Tensor:
    """Text without capitals, an easier one."""
    return torch.where((ids >= 65) & (ids <= 90), ids + 32, ids)


NEW_FAILING = [
    *new_faults(False), *new_faults(True),
    Run("slow: rate in cycles that grow", WEIGHTS, rate=4e-3, factor=triangle(0.1, 1.0, 30, 2.0), seed=50, half="new"),
    Run("slow: rate growing by 3 % a step, no clip", WEIGHTS, factor=grow(1.03), clip=None, seed=51, half="new"),
    Run("late: rate in cycles that grow", WEIGHTS, factor=triangle(1.0, 6.0, 16, 2.5, LATE), late=True, half="new"),
    Run("late: rate growing by 6 % a step, no clip", WEIGHTS, factor=grow(1.06, LATE), clip=None, late=True, seed=53,
        half="new"),
]  # fmt: skip
NEW_SOUND = [
    Run("harder text midway", at=EARLY, corrupt=lambda ids: ids, easy=lower, seed=60, half="new"),
    Run("longer text midway", at=EARLY, corrupt=lambda ids: ids, easy=lambda ids: ids[:, :17], seed=61, half="new"),
    Run("induction heads form", easy=repeat_half, corrupt=repeat_half, rate=4e-3, seed=62, half="new"),
    Run("warm restarts", factor=restarts(45), rate=4e-3, seed=63, half="new"),
    Run("rate in cycles", factor=triangle(0.2, 1.0, 40), rate=4e-3, seed=64, half="new"),
    Run("batch of 4 to 1", at=EARLY, corrupt=lambda ids: ids[:1], seed=65, half="new"),
    Run("late: batch of 4 to 1", at=LATE, late=True, corrupt=lambda ids: ids[:1], seed=66, half="new"),
    Run("late: warm restarts", late=True, factor=restarts(25, 700), seed=67, half="new"),
    Run("dropout midway", at=EARLY, break_=add_dropout, seed=68, half="new"),
    Run("late: dropout", at=LATE, late=True, break_=add_dropout, seed=69, half="new"),
    Run("late: first layer frozen", at=LATE, late=True, break_=freeze_first_layer, seed=70, half="new"),
    Run("late: optimizer's state lost", at=LATE, late=True, break_=forget_moments, seed=71, half="new"),
    Run("weight decay midway", at=EARLY, break_=decay_weights, seed=72, half="new"),
    Run("late: another text", at=LATE, late=True, corrupt=lower, seed=73, half="new"),
]  # fmt: skip

for _runs in (FAILING, SOUND):
    for _at, _run in enumerate(_runs):
        _run.half = ("seen", "unseen")[_at % 2]
FAILING, SOUND = [*FAILING, *NEW_FAILING], [*SOUND, *NEW_SOUND]
