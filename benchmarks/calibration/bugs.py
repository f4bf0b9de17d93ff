"""The bugs of the calibration: what is put into a sound model, which models can have it, and which findings name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.calibration.zoo import PAD, Zoo

FUTURE, MIXED, SCALE = "sees the future", "heads mixed with time", "scale off"
BROKEN, ORDER, STRANGERS = "untrained or broken", "heads in another order", "q and k are strangers"
ROTARY, PADDING, ENCODER = "rotary positions off", "sees padding", "encoder ignored"
INVERTED, OFF, ADDED = "mask inverted", "mask off by one", "mask hides nothing"


class Bug(NamedTuple):
    """One kind of bug."""

    name: str
    names: tuple[str, ...]  # kinds of findings that name it rightly
    suits: str = "any"  # which models: "causal", "rope", "learned", "window", "grouped", "seq2seq" or "any"
    change: Callable[[Zoo], None] | None = None  # of the weights; None: an option of the zoo
    batches: Callable[[list], list] | None = None  # of the text
    trained: bool = False  # is the model trained with it, rather than broken afterwards?

    @property
    def is_in_batches(self) -> bool:
        """True if the model itself is sound, so that a reference cannot tell."""
        return self.name in ("padding not marked", "padding on the left")


def suits(bug: Bug, model: Zoo) -> bool:
    """True if the model can have the bug."""
    o = model.options
    return {
        "any": True,
        "causal": o.kind != "masked",
        "plain": o.kind == "causal",
        "plain, learned": o.kind == "causal" and o.positions == "learned",
        "rope": o.positions == "rope",
        "learned": o.positions == "learned",
        "window": o.window is not None,
        "grouped": 1 < o.kv_heads < o.heads,
        "heads": o.kv_heads == o.heads,
        "seq2seq": o.kind == "seq2seq",
    }[bug.suits]


@torch.no_grad()
def fresh_layer(model: Zoo) -> None:
    for linear in (model.blocks[1].attention.q, model.blocks[1].attention.k, model.blocks[1].attention.v):
        torch.nn.init.normal_(linear.weight, std=0.5 * model.options.width**-0.5)


def on_attention(change: Callable) -> Callable[[Zoo], None]:
    """The change made to every self-attention of the decoder, or of the encoder where there is no other."""

    @torch.no_grad()
    def apply(model: Zoo) -> None:
        for block in model.blocks:
            change(block.attention, model.options.head_dim)

    return apply


def copy_head(attention, d: int) -> None:
    for linear in (attention.q, attention.k):
        if linear.weight.shape[0] > d:
            linear.weight[d : 2 * d] = linear.weight[:d]


def set_nan(attention, d: int) -> None:
    attention.v.weight[0, 0] = torch.nan


@torch.no_grad()
def copy_layer(model: Zoo) -> None:
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())


@torch.no_grad()
def fresh_head(model: Zoo) -> None:
    torch.nn.init.normal_(model.head.weight, std=0.02)


@torch.no_grad()
def fresh_model(model: Zoo) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.02)


@torch.no_grad()
def no_positions(model: Zoo) -> None:
    model.position.weight.zero_()


def pad_right(batches: list) -> list:
    """The second half of each odd row becomes padding."""
    return [dict(zip(("input_ids", "attention_mask"), _pad(batch), strict=True)) for batch in batches]


def pad_left(batches: list) -> list:
    padded = [_pad(batch) for batch in batches]
    return [dict(input_ids=_roll(ids, mask), attention_mask=_roll(mask, mask)) for ids, mask in padded]


def pad_unmarked(batches: list) -> list:
    return [dict(input_ids=_pad(batch)[0].flip(1)) for batch in batches]


def _pad(ids: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(ids)
    mask[::2, ids.shape[1] // 2 :] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def _roll(x: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([row.roll(int((m == 0).sum())) for row, m in zip(x, mask, strict=True)])


BUGS = [
    Bug("no causal mask", (FUTURE,), "causal"),
    Bug("no causal mask, one layer", (FUTURE,), "causal"),
    Bug("mask −5", (FUTURE,), "causal"),
    Bug("mask −1", (FUTURE,), "causal"),
    Bug("mask −0.1, one layer", (FUTURE,), "causal"),
    Bug("mask 1 ahead", (FUTURE, OFF), "causal"),
    Bug("mask 2 ahead", (FUTURE,), "causal"),
    Bug("mask 1 behind", (OFF, "rows that see no key"), "causal"),
    Bug("mask inverted", (INVERTED, FUTURE), "causal"),
    Bug("mask transposed", (INVERTED, FUTURE), "causal"),
    Bug("mask of 1 and 0 added", (ADDED, FUTURE), "causal"),
    Bug("rows see one key", ("rows that see one key",), "causal"),
    Bug("window on both sides", (FUTURE,), "window"),
    Bug("scale 1", (SCALE,)),
    Bug("scale 1, one layer", (SCALE,)),
    Bug("scale 1/d", (SCALE,)),
    Bug("scale √d", (SCALE, "collapsed", "exploding logits")),
    Bug("scale 1/√hidden", (SCALE,)),
    Bug("queries scaled twice", (SCALE,)),
    Bug("heads mixed with time", (MIXED,)),
    Bug("queries mixed with time", (MIXED,)),
    Bug("values mixed with time", (MIXED,)),
    Bug("output not transposed", (MIXED,)),
    Bug("attention over heads", (MIXED,), "heads"),
    Bug("attention over the batch", ("sequences mixed",)),
    Bug("key heads rolled", (ORDER, STRANGERS), "heads"),
    Bug("key heads rolled, one layer", (ORDER, STRANGERS), "heads"),
    Bug("value heads rolled", (ORDER,), "heads"),
    Bug("key head 0 for all", (ORDER, STRANGERS), "heads"),
    Bug("key-value groups tiled", (ORDER,), "grouped"),
    Bug("q and k exchanged", ("q and k exchanged",), "heads"),
    Bug("k and v exchanged", (STRANGERS, BROKEN)),
    Bug("rotary on queries only", (ROTARY,), "rope"),
    Bug("rotary on keys only", (ROTARY,), "rope"),
    Bug("rotary keys 3 late", (ROTARY,), "rope"),
    Bug("rotary base 100", (ROTARY,), "rope"),
    Bug("rotary pairs are neighbours", (ROTARY,), "rope"),
    Bug("positions off by one", (), "learned"),
    Bug("positions reversed", (), "learned"),
    Bug("position table zero", (), "learned", no_positions),
    Bug("token ids off by one", (BROKEN,)),
    Bug("output layer not loaded", (BROKEN,), "any", fresh_head),
    Bug("no weights loaded", (BROKEN,), "any", fresh_model),
    Bug("one layer not loaded", (STRANGERS,), "any", fresh_layer),
    Bug("a layer read twice", ("duplicate layers",), "any", copy_layer),
    Bug("a head copied", ("duplicate heads",), "heads", on_attention(copy_head)),
    Bug("queries zero", ("diffuse",), "any", on_attention(lambda a, d: a.q.weight.zero_())),
    Bug("values of a head zero", ("dead",), "any", on_attention(lambda a, d: a.v.weight[:d].zero_())),
    Bug("output of a head zero", ("dead",), "any", on_attention(lambda a, d: a.out.weight[:, :d].zero_())),
    Bug(
        "output weights transposed",
        (BROKEN,),
        "any",
        on_attention(lambda a, d: a.out.weight.copy_(a.out.weight.mT.clone())),
    ),
    Bug(
        "queries × 30", ("exploding logits", "collapsed", SCALE), "any", on_attention(lambda a, d: a.q.weight.mul_(30))
    ),
    Bug("NaN in the values", ("not finite",), "any", on_attention(set_nan)),
    Bug("norms left out", (BROKEN,)),
    Bug("residual left out", ("rank collapse", BROKEN)),
    Bug("dropout in attention", ("dropout in evaluation",)),
    Bug("dropout after blocks", ("random in evaluation",)),
    Bug("padding mask left out", (PADDING,), "plain", batches=pad_left),
    Bug("padding not marked", (PADDING,), "plain", batches=pad_unmarked),
    Bug("padding mask inverted", (INVERTED, PADDING, "rows that see no key"), "plain", batches=pad_right),
    Bug("padding on the left", ("padding moves the text", PADDING), "plain, learned", batches=pad_left),
    Bug("cross-attention reads the decoder", (ENCODER,), "seq2seq"),
    Bug("encoder output zero", (ENCODER,), "seq2seq"),
    Bug("cross-attention sees one key", ("rows that see one key",), "seq2seq"),
    Bug("trained without a causal mask", (FUTURE,), "causal", trained=True),
    Bug("trained with scale 1", (SCALE,), "any", trained=True),
    Bug("trained with heads mixed with time", (MIXED,), "any", trained=True),
]
OPTIONS = {
    "trained without a causal mask": "no causal mask",
    "trained with scale 1": "scale 1",
    "trained with heads mixed with time": "heads mixed with time",
}
