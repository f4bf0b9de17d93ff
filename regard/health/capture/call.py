"""One attention call inside a model: its inputs in `regard.attention`'s terms, and the model's own way to do it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import regard
from regard.health.capture.attention_weights import weighed

CROSS = ("cross", "encoder_attn", "encdec")  # how modules of cross-attention, or what holds them, are called
HIDDEN = -1e8  # an additive mask at or below this hides a key: exp() of it is 0 in every dtype
MAPPED = "it is called under torch.vmap, where no number can be looked at"
NESTED = "its tensors are nested, one length for each sequence; give it padded ones, with a mask"
HIDING = -9e3  # and so it does from here on where it holds nothing else but 0: −1e4 is what older models write


@dataclass
class Call:
    """q, k, v as [B, H, M, D], [B, G, N, D], [B, G, N, E]; `own(rows)` gives the model's output for these rows."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    own: Callable[[Tensor | None], Tensor]  # rows (None: all) -> [B, H, rows, E]; no dropout
    kind: str  # how it was caught: "sdpa", "eager", … or "regard"
    mask: Tensor | None = None  # bool (True = visible) or additive, broadcasting to [B, H, M, N]
    causal: bool = False
    options: dict = field(default_factory=dict)  # more keyword arguments of regard.attention
    dropout: float = 0.0  # what the model's own way drops while it runs
    cross: bool | None = None  # do the queries come from elsewhere than the keys? None: the module's name tells
    sliceable: bool = True  # may `own` be asked for a few rows only?
    obstacle: str | None = None  # why it cannot be measured, where that is plain from the outside
    folded: bool = False  # of three dims, which may hold heads among the sequences
    shows: bool = False  # does the model want the weights as well?
    told: dict = field(default_factory=dict)  # what the model told its attention function beside all this
    weights: list[Tensor] | None = None  # where they are wanted, for `run` to put them in

    @property
    def arguments(self) -> dict:
        """Keyword arguments of `regard.attention` beside q, k, v."""
        return dict(attn_mask=self.mask, is_causal=self.causal, enable_gqa=True, **self.options)

    def with_options(self, **changes) -> Call:
        return replace(self, options={**self.options, **changes})

    def run(self) -> Tensor:
        """The output by `regard.attention`, dropout included."""
        if self.weights is not None:
            output, p = weighed(self)
            self.weights[:] = [p]
            return output
        return regard.attention(self.q, self.k, self.v, dropout_p=self.dropout, **self.arguments)

    def first(self, sequences: int) -> Call:
        """The same call for the first few sequences of its batch alone."""

        def cut(x):
            return x[:sequences] if isinstance(x, Tensor) and x.ndim and x.shape[0] == batch else x

        batch = self.q.shape[0]
        if sequences >= batch:
            return self
        per_batch = {"key_lengths": cut(self.options.get("key_lengths"))}
        for name in ("temperature", "sink"):
            value = self.options.get(name)
            per_batch[name] = cut(value) if isinstance(value, Tensor) and value.ndim == 4 else value
        mask = cut(self.mask) if self.mask is not None and self.mask.ndim == 4 else self.mask
        small = replace(self, q=cut(self.q), k=cut(self.k), v=cut(self.v), mask=mask)
        return small.with_options(**{key: value for key, value in per_batch.items() if value is not None})


def as_four(x: Tensor) -> Tensor:
    """[…, L, D] as [B, H, L, D]: three dims are a batch of single heads, more than four share the batch."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x.reshape(*(1,) * (3 - x.ndim), *x.shape).unsqueeze(1)
    return x.flatten(0, x.ndim - 4)


def laid_out(o: Tensor) -> Tensor:
    """[B, H, M, E] in memory as [B, M, H, E], as torch's fused attention leaves it: models take views of that."""
    return o.transpose(1, 2).contiguous().transpose(1, 2)


def is_vmapped(x: Tensor | None) -> bool:
    """Does it stand for many tensors, inside torch.vmap?"""
    while x is not None and torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def causal_rows(rows: Tensor, keys: int) -> Tensor:
    """The rows of torch's causal mask, [1, 1, rows, keys]: query i sees keys ≤ i."""
    for known, length, mask in _CAUSAL:  # layers ask for the same
        if known is rows and length == keys:
            return mask
    mask = (torch.arange(keys, device=rows.device) <= rows[:, None])[None, None]
    _CAUSAL.append((rows, keys, mask))
    return mask


def rows_of(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """The rows of a mask or bias, which may broadcast over them."""
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask.index_select(-2, rows)


def cleaned(mask: Tensor | None) -> Tensor | None:
    """The same mask as regard takes it: bool where it only hides, else additive with −inf for what is hidden.

    >>> from regard.health.capture.call import cleaned
    >>> cleaned(torch.tensor([[0.0, -1e9]]))
    tensor([[ True, False]])
    """
    if mask is None or mask.dtype == torch.bool or is_vmapped(mask):
        return mask
    now = None if mask.is_inference() else mask._version
    for raw, version, clean in _CLEANED:  # layers share their mask
        if raw is mask and version == now:
            return clean
    if mask.is_floating_point():
        hidden = mask <= HIDING
        if not bool((hidden | (mask == 0)).all()):
            hidden = mask <= max(HIDDEN, torch.finfo(mask.dtype).min / 2)
        clean = ~hidden if bool((hidden | (mask == 0)).all()) else mask.masked_fill(hidden, -math.inf)
    else:
        clean = mask != 0
    _CLEANED.append((mask, now, clean))
    return clean


_CLEANED: deque = deque(maxlen=4)
_CAUSAL: deque = deque(maxlen=2)


def forget_masks() -> None:
    _CLEANED.clear()
    _CAUSAL.clear()


def joined(
    mask: Tensor | None, bias: Tensor | None, causal: bool, queries: int, keys: int
) -> tuple[Tensor | None, bool]:
    """A clean mask, a bias and causal order as one (mask, causal) pair; a mask of transformers has the order in it."""
    if bias is None:
        return mask, causal and mask is None
    if causal and mask is None:
        mask = causal_rows(torch.arange(queries, device=bias.device), keys)
    if mask is None:
        return bias, False
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -math.inf), False
    return bias + mask.to(bias.dtype), False


def named_cross(name: str) -> bool:
    """Does a module's name, or that of what holds it, say cross-attention? Names farther up say what the model is.

    >>> from regard.health.capture.call import named_cross
    >>> named_cross("decoder.layers.0.encoder_attn"), named_cross("crossformer.layers.0.attn")
    (True, False)
    """
    near = ".".join(name.lower().split(".")[-2:])
    return any(part in near for part in CROSS)
