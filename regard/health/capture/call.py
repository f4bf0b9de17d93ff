"""One attention call of a model: its inputs in `regard.attention`'s terms, and the model's own way to compute it."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import regard
from regard._call.arguments import AttentionOptions
from regard._call.mask.attn_mask import densify
from regard._call.mask.mask import Mask
from regard._call.problem import Problem
from regard._call.scores import soft_cap
from regard._call.validation import is_autocast, under_autocast
from regard._core.execute import apply_policy
from regard._core.formulas import apply_gate
from regard._core.prepare import prepare
from regard.bias import Bias
from regard.health.capture.forwards import running_frame
from regard.masks import blanked
from regard.reference import score_of, with_sink

CROSS_NAMES = ("cross", "encoder_attn", "encdec")  # parts of the names of cross-attention modules, or of their parents
HIDES_ALWAYS = -1e8  # an additive mask at or below this hides a key: exp() of it is 0 in every dtype
HIDES_AMONG_ZEROS = -9e3  # so it does from here on if all other entries are 0: older models write −1e4
MAX_USES = 64
MAX_DENSE = 2**30  # entries of a dense mask or bias
UNDER_VMAP = "it is called under torch.vmap, where no value can be read"
NESTED = "its tensors are nested, one length for each sequence; pass padded tensors with a mask"


@dataclass
class Call:
    """One attention call: q, k, v as [B, H, M, D], [B, G, N, D], [B, G, N, E], and options of `regard.attention`."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    own: Callable[[Tensor | None], Tensor]  # rows (None: all) -> the model's output [B, H, rows, E], without dropout
    kind: str  # the function that was captured: "sdpa", "eager", … or "regard"
    mask: Tensor | None = None  # bool (True = visible) or additive, broadcasting to [B, H, M, N]
    causal: bool = False
    options: dict = field(default_factory=dict)  # more keyword arguments of regard.attention
    dropout: float = 0.0  # what the model's own function drops
    cross: bool | None = None  # cross-attention? None: see `is_cross`
    sliceable: bool = True  # may `own` be asked for a few rows only?
    obstacle: str | None = None  # why it cannot be measured
    three_dims: bool = False  # of three dims, which may hold heads among the sequences
    rounded: torch.dtype | None = None  # the narrowest dtype on the model's way to its weights, where q has another
    wants_weights: bool = False  # does the model want the weights as well?
    model_options: dict = field(default_factory=dict)  # what else the model passed to its attention function
    weights: list[Tensor] | None = None  # where `run` puts the weights, if they are wanted
    compute: Callable[[Call], Tensor] | None = None  # what `run` calls in the place of regard.attention
    parts: tuple[Mask | Bias, ...] = ()  # what else hides or is added, and is not N × N: packed documents, ALiBi

    @property
    def arguments(self) -> dict:
        """Keyword arguments of `regard.attention` besides q, k, v."""
        given = (*self.parts, self.mask) if self.parts else self.mask
        return dict(attn_mask=given, is_causal=self.causal, enable_gqa=True, **self.options)

    def changed(self, **changes: Any) -> Call:
        """Returns a copy with some fields changed, in an eighth of the time of `dataclasses.replace`."""
        made = object.__new__(Call)
        made.__dict__.update(self.__dict__, **changes)
        return made

    def with_options(self, **changes: Any) -> Call:
        """Returns a copy with some options of `regard.attention` changed."""
        return self.changed(options={**self.options, **changes})

    def densified(self) -> Call:
        """Returns the call with one tensor in the place of `parts` and mask, for what reads a mask entry by entry."""
        if not self.parts:
            return self
        entries = self.q.shape[2] * self.k.shape[2]
        if entries > MAX_DENSE:
            raise ValueError(f"its mask would take {entries:,} entries; examine shorter sequences")
        mask = densify((*self.parts, self.mask), self.q, self.k.shape[2])
        assert mask is not None  # each part hides or adds
        return self.changed(parts=(), mask=mask[(None,) * (4 - mask.ndim)])

    def run(self) -> Tensor:
        """Returns the output of `regard.attention`, dropout included."""
        if self.compute is not None:
            return self.compute(self)
        if self.weights is not None:
            output, p = output_and_weights(self)
            self.weights[:] = [p]
            return output
        return regard.attention(self.q, self.k, self.v, dropout_p=self.dropout, **self.arguments)

    def is_cross(self, name: str) -> bool:
        """True for cross-attention, by the call itself or else by the module's name."""
        return is_cross_name(name) if self.cross is None else self.cross

    def first_sequences(self, count: int | None) -> Call:
        """Returns the call for the first few sequences of its batch alone; None for all of them."""

        def cut(x: Any) -> Any:
            return x[:count] if isinstance(x, Tensor) and x.ndim and x.shape[0] == batch else x

        batch = self.q.shape[0]
        if count is None or count >= batch:
            return self
        per_batch = {"key_lengths": cut(self.options.get("key_lengths"))}
        for name in ("temperature", "sink", "gate"):
            value = self.options.get(name)
            per_batch[name] = cut(value) if isinstance(value, Tensor) and value.ndim == 4 else value
        mask = cut(self.mask) if self.mask is not None and self.mask.ndim == 4 else self.mask
        small = self.changed(q=cut(self.q), k=cut(self.k), v=cut(self.v), mask=mask)
        return small.with_options(**{key: value for key, value in per_batch.items() if value is not None})


@dataclass
class Use:
    """One use of a module within a forward: its keys, how many queries it took, and the forward that called it."""

    keys: int
    first: Tensor  # key [D]
    queries: int
    frame: Any

    def takes(self, call: Call, first: Tensor, frame: Any) -> bool:
        """True if a call goes on with a grown cache, or takes other queries of the same text."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        goes_on = frame is not None and frame is self.frame and self.queries + queries <= max(keys, self.keys)
        return (keys == self.keys + queries or goes_on) and first.equal(self.first)


class UseCounter:
    """Counts the uses of each module within a forward: the n-th is reported as a layer of its own."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str], list[Use]] = {}
        self.token: Any = None

    def begin(self) -> None:
        self._known.clear()
        self.token = None

    def count(self, call: Call, name: str, token: Any) -> int:
        """Returns 0, 1, … up to MAX_USES − 1, which all later uses share; `token` identifies the forward."""
        self.token = token
        known = self._known.setdefault((token, name), [])
        last = min(len(known), MAX_USES - 1)
        if call.k.numel() == 0 or call.obstacle is not None:
            return last
        (queries, keys), first, frame = (call.q.shape[2], call.k.shape[2]), call.k.detach()[0, 0, 0], running_frame()
        use = next((at for at, one in enumerate(known) if one.takes(call, first, frame)), last)
        if use < len(known) and known[use].frame is frame:
            queries, keys = known[use].queries + queries, max(known[use].keys, keys)
        known[use : use + 1] = [Use(keys, first.clone(), queries, frame)]
        return use


def is_cross_name(name: str) -> bool:
    """True if a module's name, or its parent's, says cross-attention; names farther up name the model.

    >>> from regard.health.capture.call import is_cross_name
    >>> is_cross_name("decoder.layers.0.encoder_attn"), is_cross_name("crossformer.layers.0.attn")
    (True, False)
    """
    near = ".".join(name.lower().split(".")[-2:])
    return any(part in near for part in CROSS_NAMES)


def as_four_dims(x: Tensor) -> Tensor:
    """Views […, L, D] as [B, H, L, D]: three dims are a batch of single heads, more than four share the batch."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x.reshape(*(1,) * (3 - x.ndim), *x.shape).unsqueeze(1)
    return x.flatten(0, x.ndim - 4)


def mask_as_four_dims(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Views a mask (…, L, S) of a query (…, L, D) as one that broadcasts to [B, H, L, S]."""
    if mask is None or mask.ndim <= 2 or query.ndim == 4:
        return mask
    if query.ndim == 3:
        return mask[:, None]
    return as_four_dims(mask.expand(*query.shape[:-3], *mask.shape[-3:]))


def in_torch_layout(o: Tensor) -> Tensor:
    """Lays [B, H, M, E] out in memory as [B, M, H, E], as torch's fused attention does: models take views of that."""
    return o.transpose(1, 2).contiguous().transpose(1, 2)


def is_vmapped(x: Tensor | None) -> bool:
    """True for a tensor that stands for many inside torch.vmap."""
    while x is not None and torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


_DERIVED: deque = deque(maxlen=16)


def derive(make: Callable, *inputs: Any) -> Any:
    """Returns make(*inputs), computed once for the layers of one forward that share these inputs.

    Never kept: what autograd follows, and tensors of inference mode, which have no version to tell a change by.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if any(x.is_inference() or x.requires_grad or is_vmapped(x) for x in tensors):
        return make(*inputs)
    versions = [x._version for x in tensors]
    others = [Tensor if isinstance(x, Tensor) else x for x in inputs]
    for known_make, known_tensors, known_versions, known_others, known in list(_DERIVED):
        if known_make is make and known_versions == versions and known_others == others:
            if all(a is b for a, b in zip(known_tensors, tensors, strict=True)):
                return known
    made = make(*inputs)
    _DERIVED.append((make, tensors, versions, others, made))
    return made


def forget_derived() -> None:
    """Drops what `derive` has kept; called when a forward ends."""
    _DERIVED.clear()


def causal_rows(rows: Tensor, keys: int) -> Tensor:
    """Returns the rows of torch's causal mask, [1, 1, rows, keys]: query i sees keys ≤ i."""
    return derive(_causal_rows, rows, keys)


def _causal_rows(rows: Tensor, keys: int) -> Tensor:
    return (torch.arange(keys, device=rows.device) <= rows[:, None])[None, None]


def select_rows(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """Returns some rows of a mask or bias, which may broadcast over them."""
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask.index_select(-2, rows)


def hide(mask: Tensor, hidden: Tensor) -> Tensor:
    """Returns a mask, bool or additive, that hides these keys too."""
    return mask & ~hidden if mask.dtype == torch.bool else torch.where(hidden, -math.inf, mask)


def clean_mask(mask: Tensor | None) -> Tensor | None:
    """Returns a mask as regard takes it: bool where it only hides, else additive with −inf for what is hidden.

    A mask that needs a gradient stays additive, even if all of it is 0.

    >>> from regard.health.capture.call import clean_mask
    >>> clean_mask(torch.tensor([[0.0, -1e9]]))
    tensor([[ True, False]])
    """
    if mask is None or mask.dtype == torch.bool or is_vmapped(mask):
        return mask
    return derive(_clean_mask, mask)


def _clean_mask(mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= HIDES_AMONG_ZEROS
    hides_only = bool((hidden | (mask == 0)).all())
    if not hides_only:
        hidden = mask <= max(HIDES_ALWAYS, torch.finfo(mask.dtype).min / 2)
        hides_only = bool((hidden | (mask == 0)).all())
    is_learned = mask.requires_grad and torch.is_grad_enabled()
    return ~hidden if hides_only and not is_learned else mask.masked_fill(hidden, -math.inf)


def merge_mask_and_bias(
    mask: Tensor | None, bias: Tensor | None, causal: bool, queries: int, keys: int
) -> tuple[Tensor | None, bool]:
    """Merges a clean mask, a bias and causal order into one (mask, causal); masks of transformers hold the order."""
    if bias is None:
        return mask, causal and mask is None
    if causal and mask is None:
        mask = causal_rows(torch.arange(queries, device=bias.device), keys)
    if mask is None:
        return bias, False
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -math.inf), False
    return bias + mask.to(bias.dtype), False


def output_and_weights(call: Call) -> tuple[Tensor, Tensor]:
    """Returns o and p = dropout(normaliser((cap(scale·q kᵀ) + bias) / T)), [B, H, M, N], in torch's dtypes.

    torch's MultiheadAttention wants p by default, an eager model of transformers with output_attentions. A sink is one
    more key without a value.
    """
    options = AttentionOptions(dropout_p=call.dropout, **call.densified().arguments)
    checked = apply_policy(prepare(call.q, call.k, call.v, options))
    p_dtype = under_autocast(call.q.new_empty(0, dtype=checked.dtype)).dtype
    with torch.autocast(call.q.device.type, enabled=False) if is_autocast(call.q) else contextlib.nullcontext():
        p, v = _weights(checked.problem)
        p = dropout(p, call.dropout) if call.dropout else p
        o = (p @ v).to(checked.dtype)
        return o if checked.gate is None else apply_gate(o, checked.gate), p.to(p_dtype)


def _weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns the weights, and the values with hidden rows zeroed."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # heads that share them
    bias, visible = problem.bias, problem.mask
    if bias is not None:
        visible = bias != -math.inf
        bias = bias.masked_fill(~visible, 0.0)
    if problem.causal:
        order = causal_rows(torch.arange(q.shape[2], device=q.device), k.shape[2])
        visible = order if visible is None else visible & order
    if visible is not None:
        k, v = blanked(visible, k, v)
    s = soft_cap((problem.scale * q) @ k.transpose(-1, -2), problem.softcap)
    if (score := score_of(problem)) is not None:
        i, j = (torch.arange(size, device=q.device) for size in s.shape[-2:])
        s = score.modify(s, (i if problem.interval is None else problem.interval[2])[..., None], j)
    s = s if bias is None else s + bias
    t = 1.0 if problem.temperature is None else problem.temperature[..., None]
    if problem.sink is not None:
        sink = problem.sink[..., None].to(wide)
        visible_keys = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand(s.shape)
        return with_sink(problem.choice, s / t, visible_keys, sink), v
    return regard.normalize(s, problem.choice.spec, temperature=t, mask=visible), v
