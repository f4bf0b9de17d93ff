"""The calls whose kernels `compile_kernels.py` compiles: normaliser × option × dtype × head width × size × direction.

Of the product the table has every option of five normalisers in bfloat16 with heads of 64, and a part of the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import regard
from regard import Mask, bias
from regard.normalizers import jit, tl


@jit
def fade(s, i, j, h, rate):
    return s - rate * tl.log(1.0 + tl.abs(i - j))


@jit
def constant(s, i, j, h, rate):
    return 1.0


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor on the GPU that is not there."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def documents(n: int, *others: Mask) -> Mask:
    """Return the mask of three documents, and others."""
    return Mask(Mask.documents([0, n // 3, n // 2, n]).parts + tuple(part for other in others for part in other.parts))


def draw_relative(h: int, m: int, n: int) -> bias.Bias:
    """Return a relative bias, one table per head."""
    return bias.relative(draw(h, 2 * max(m, n) - 1))


FADE = regard.bias.ScoreFunction(fade, constant, (0.3,))
BOOL, INT = dict(dtype=torch.bool), dict(dtype=torch.int64)
CAUSAL = Mask.causal()
OPTIONS: dict[str, Callable[[int, int, int, int], dict]] = {  # of (batch entries, heads, queries, keys)
    "plain": lambda b, h, m, n: {},
    "causal": lambda b, h, m, n: dict(is_causal=True),
    "window": lambda b, h, m, n: dict(window=(64, 0)),
    "two-sided-window": lambda b, h, m, n: dict(window=(64, 64)),
    "lengths": lambda b, h, m, n: dict(key_lengths=draw(b, **INT)),
    "causal-lengths": lambda b, h, m, n: dict(key_lengths=draw(b, **INT), is_causal=True),
    "documents": lambda b, h, m, n: dict(attn_mask=documents(n, CAUSAL)),
    "full-documents": lambda b, h, m, n: dict(attn_mask=documents(n)),
    "window-documents": lambda b, h, m, n: dict(attn_mask=documents(n, CAUSAL, Mask.window(64, 64))),
    "length-documents": lambda b, h, m, n: dict(attn_mask=documents(n, CAUSAL), key_lengths=draw(b, **INT)),
    "prefix": lambda b, h, m, n: dict(attn_mask=Mask.prefix(n // 3)),
    "left-padding": lambda b, h, m, n: dict(attn_mask=Mask.padding(draw(b, n, **BOOL)) & CAUSAL),
    "chunks": lambda b, h, m, n: dict(attn_mask=Mask.chunks(96)),
    "intervals": lambda b, h, m, n: dict(attn_mask=Mask.intervals(draw(b, h, m, **INT), draw(b, h, m, **INT))),
    "mask": lambda b, h, m, n: dict(attn_mask=draw(b, 1, m, n, **BOOL)),
    "padding": lambda b, h, m, n: dict(attn_mask=draw(b, 1, 1, n, **BOOL)),
    "causal-mask": lambda b, h, m, n: dict(attn_mask=draw(b, h, m, n, **BOOL), is_causal=True),
    "bias": lambda b, h, m, n: dict(attn_mask=draw(h, m, n)),
    "bias-and-mask": lambda b, h, m, n: dict(attn_mask=(draw(b, 1, m, n, **BOOL), draw(h, m, n))),
    "key-bias": lambda b, h, m, n: dict(attn_mask=draw(b, 1, 1, n)),
    "alibi": lambda b, h, m, n: dict(attn_mask=(CAUSAL, bias.alibi(h))),
    "two-sided-alibi": lambda b, h, m, n: dict(attn_mask=bias.alibi(h)),
    "relative": lambda b, h, m, n: dict(attn_mask=draw_relative(h, m, n)),
    "causal-relative": lambda b, h, m, n: dict(attn_mask=(CAUSAL, draw_relative(h, m, n))),
    "relative-documents": lambda b, h, m, n: dict(attn_mask=(documents(n, CAUSAL), draw_relative(h, m, n))),
    "forgetting": lambda b, h, m, n: dict(attn_mask=(CAUSAL, bias.forgetting(draw(b, h, n)))),
    "forgetting-documents": lambda b, h, m, n: dict(attn_mask=(documents(n, CAUSAL), bias.forgetting(draw(b, h, n)))),
    "softcap": lambda b, h, m, n: dict(softcap=30.0),
    "softcap-documents": lambda b, h, m, n: dict(softcap=30.0, attn_mask=documents(n, CAUSAL)),
    "score": lambda b, h, m, n: dict(score_mod=FADE),
    "score-documents": lambda b, h, m, n: dict(score_mod=FADE, attn_mask=documents(n, CAUSAL)),
    "head-temperature": lambda b, h, m, n: dict(temperature=draw(h)),
    "row-temperature": lambda b, h, m, n: dict(temperature=draw(b, h, m, 1)),
    "temperature-documents": lambda b, h, m, n: dict(temperature=draw(h), attn_mask=documents(n, CAUSAL)),
    "sink": lambda b, h, m, n: dict(sink=draw(h)),
    "sink-documents": lambda b, h, m, n: dict(sink=draw(h), attn_mask=documents(n, CAUSAL)),
    "dropout": lambda b, h, m, n: dict(dropout_p=0.1),
    "dropout-documents": lambda b, h, m, n: dict(dropout_p=0.1, attn_mask=documents(n, CAUSAL)),
    "alpha": lambda b, h, m, n: dict(normalizer=regard.normalizers.get("entmax", alpha=draw(h))),
    "alpha-documents": lambda b, h, m, n: dict(
        normalizer=regard.normalizers.get("entmax", alpha=draw(h)), attn_mask=documents(n, CAUSAL)
    ),
    "policy-forgetting": lambda b, h, m, n: dict(
        temperature=regard.temperature.SSMax(), attn_mask=(CAUSAL, bias.forgetting(draw(b, h, n)))
    ),
    "grouped": lambda b, h, m, n: dict(enable_gqa=True, is_causal=True),
    "unaligned": lambda b, h, m, n: dict(is_causal=True),
}
SIZES = {  # (batch entries, heads, queries, keys)
    "n1024": (4, 8, 1024, 1024),
    "n197": (32, 8, 197, 197),
    "n4096": (2, 8, 4096, 4096),
    "n16384": (1, 16, 16384, 16384),
    "decode": (8, 8, 1, 4096),
    "few": (8, 8, 32, 4096),
}
MAIN = ("entmax15", "sparsemax", "entmax(alpha=1.7)", "softmax", "sigmoid")
OTHERS = ("softmax1", "relu", "softpick")
FEW = ("causal", "window", "lengths", "documents", "mask", "bias", "relative", "forgetting", "softcap")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """A call of `regard.attention`, and how it is differentiated; "keys": what keys get is read after it.

    "logits": no call, but the kernel of its largest logits.
    """

    normalizer: str
    option: str
    dtype: torch.dtype = BF16
    width: int = 64
    size: str = "n1024"
    stats: bool = False
    direction: str = "forward"

    def __str__(self) -> str:
        dtype, stats = str(self.dtype).removeprefix("torch."), "statistics" if self.stats else "no-statistics"
        return f"{self.normalizer} {self.option} {dtype} d{self.width} {self.size} {stats} {self.direction}"

    @property
    def is_valid(self) -> bool:
        """True if regard takes such a call."""
        if "dropout" in self.option and self.stats:
            return False
        if "sink" in self.option and self.normalizer not in ("softmax", "softmax1"):
            return False
        if "alpha" in self.option and "entmax(" not in self.normalizer:
            return False
        return not (self.direction == "tangent" and (self.stats or "score" in self.option or "alpha" in self.option))


def make_calls() -> list[Call]:
    """Return the table; calls without statistics, where most failures were, come first."""
    bare, measured, trained = (False, "forward"), (True, "forward"), (False, "backward")
    n, every, masked = ("n1024",), tuple(OPTIONS), ("causal", "documents", "mask", "forgetting")
    parts: list[tuple] = [
        (MAIN, every, (BF16,), (64,), n, (bare,)),
        (MAIN, every, (BF16,), (64,), n, (measured,)),
        (MAIN, every, (BF16,), (64,), n, (trained,)),
        (MAIN, FEW, (BF16,), (128,), n, (measured, trained)),
        (OTHERS, FEW, (BF16,), (64,), n, (measured, trained)),
        (MAIN, masked, (FP32,), (64,), n, (measured, trained)),
        (("entmax15", "softmax"), masked, (FP16,), (64, 80, 256), n, (measured, trained)),
        (MAIN, ("causal", "documents", "window"), (BF16,), (64,), ("n197", "n4096"), (measured, trained)),
        (("entmax15", "entmax(alpha=1.7)"), ("causal",), (BF16,), (64, 256), ("n16384",), (trained,)),
        (MAIN, ("plain", "lengths", "head-temperature"), (BF16,), (64,), ("decode",), (bare, measured)),
        (("softmax", "softmax1"), FEW, (BF16,), (64,), n, ((True, "backward"),)),
        (MAIN, masked, (BF16,), (64,), n, ((False, "tangent"),)),
        (("softmax", "entmax15"), ("causal", "documents", "mask"), (BF16,), (64, 128, 256), n, ((False, "keys"),)),
        (("softmax", "entmax15"), ("plain",), (BF16,), (64, 128, 256), ("few",), (bare, measured)),
        (("softmax",), ("grouped",), (BF16,), (64,), ("few",), (measured,)),
        (("softmax",), ("causal",), (BF16, FP16, FP32), (24, 64, 80, 128, 256), n, ((False, "logits"),)),
    ]
    calls = (Call(*call, *kind) for part in parts for *call, kind in itertools.product(*part))
    return list(dict.fromkeys(call for call in calls if call.is_valid))


def is_quick(call: Call) -> bool:
    """True for calls of --quick: every option once, and the width and dtype that most models have."""
    return call.normalizer in ("entmax15", "softmax") and call[2:] == Call("", "")[2:]
