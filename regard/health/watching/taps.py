"""Taps: the largest logits and the size of the values of every attention call, written into a tensor of its module.

They work inside graphs of torch.compile without a graph break: a hook under one name on every module with linear layers
tells whose call comes next, `F.scaled_dot_product_attention` is replaced by a function that calls the op first, and the
op writes into `module.regard_logits`. The path to all three is the same in every block, so blocks that are compiled one
by one share a graph; the tensor's address never changes, so that a CUDA graph writes into it at each replay.

| place in `regard_logits` | holds |
| --- | --- |
| 0, 1 | heads and their width, 0 before the first call |
| 2 | the mean norm of values of a few keys, the largest of the calls since it was last read |
| 3 … | the largest logit of each head since it was last read; NaN where one was not finite |
| the last | the scale of the last call since then, negative where a query sees a later key; NaN if not self-attention |
"""

from __future__ import annotations

import math
import sys
import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.health.capture.call import HIDES_ALWAYS, as_four_dims, is_vmapped, mask_as_four_dims
from regard.health.capture.forwards import STATE as CAPTURES
from regard.health.capture.forwards import as_written, uncaptured
from regard.health.capture.guard import guarded
from regard.health.capture.sdpa_name import run_sdpa, take_sdpa, tap_sdpa
from regard.health.measure.side_stream import HostCopies
from regard.masks import resolve_causal_bias

MOST_HEADS = 509
FIRST, LEADING = 3, 2  # place of the first head; numbers before the logits in what `Taps.read` returns
KEY = "regard"  # of the hooks, the same in every module: a number of torch's would compile each block anew
MULTI_HEAD = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")  # arguments of torch's module
ROWS = 16  # queries of one sequence that a look of every step takes


class _State:
    """Read while a graph is traced: the tapped modules that run, and whether all rows are looked at."""

    running: list[nn.Module]  # the innermost last
    whole: bool = False
    eagerly: bool = False  # do calls outside compiled graphs count too?
    allowed: bool | None = None  # torch's own answer to side effects under a checkpoint, while it is replaced
    in_full: bool = False  # does a forward run whose calls outside graphs are looked at as those in graphs are?

    def __init__(self) -> None:
        self.running = []

    @property
    def seen(self) -> Tensor | None:
        """The tensor of the innermost module."""
        return self.running[-1].__dict__.get("regard_logits") if self.running else None


STATE = _State()
_TAPPED: weakref.WeakSet[Taps] = weakref.WeakSet()

_LIBRARY = torch.library.Library("regard_taps", "DEF")
_LIBRARY.define(
    "note(Tensor q, Tensor k, Tensor? v, Tensor? mask, bool causal, float? scale, bool whole, Tensor(a!) seen) -> ()"
)


def note(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, causal: bool, scale: float | None, whole: bool,
    seen: Tensor,
) -> None:  # fmt: skip
    """seen ← max(seen, the largest logit per head) of one call, […, M, D] with […, N, D]; never raises."""
    guarded(lambda run: _note(q, k, v, mask, causal, scale, whole, seen), lambda: None)


def _note(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, causal: bool, scale: float | None, whole: bool,
    seen: Tensor,
) -> None:  # fmt: skip
    mask, causal = resolve_causal_bias(mask, causal, q.device)
    dims = max(q.ndim, k.ndim)
    q, k = (x[(None,) * (dims - x.ndim)] for x in (q, k))
    q, k, mask = as_four_dims(q), as_four_dims(k), mask_as_four_dims(mask, q)
    heads, width = q.shape[1], q.shape[3]
    if heads > MOST_HEADS or not (q.numel() and k.numel()):
        return
    v = None if v is None or not STATE.eagerly else as_four_dims(v)  # a monitor asks for its norms
    factor = width**-0.5 if scale is None else scale
    if q.is_cuda and seen.device == q.device:
        from regard._backends.gpu.max_logits import can_note, note_largest

        if can_note(q, k, mask, factor):
            note_largest(q, k, v, causal, factor, 0 if whole else ROWS, seen)
            if v is not None:
                seen[-1].fill_(describe_call(q, k, None, causal, factor))
            return
    with torch.no_grad(), uncaptured():
        if whole:
            if mask is not None and mask.dtype != torch.bool:
                mask = mask > HIDES_ALWAYS
            stats = regard.attention(q, k, k, mask, is_causal=causal, scale=scale, enable_gqa=True,
                                     return_stats=("max_logit",))[1]  # fmt: skip
            largest = stats.max_logit.amax((0, 2)).float()
        else:
            largest = largest_of_few_rows(q, k, mask, causal, scale)
        if largest.shape != (heads,):
            raise ValueError(f"a tap found logits {tuple(largest.shape)} of {heads} heads")
        seen[0].fill_(heads)
        seen[1].fill_(width)
        if v is not None:
            seen[-1].fill_(describe_call(q, k, mask, causal, factor))
            few = v[0, :, :: max(1, k.shape[2] // ROWS)]
            largest = torch.cat([few.float().norm(dim=-1).mean()[None], largest])
        held = seen[FIRST + heads - len(largest) : FIRST + heads]
        held.copy_(torch.maximum(held, largest.to(held.device)))


def largest_of_few_rows(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Returns the largest logit per head over `ROWS` queries of the first sequence, evenly spread."""
    queries, keys = q.shape[2], k.shape[2]
    stride = max(1, queries // ROWS)
    rows = slice((queries - 1) % stride, None, stride)
    small, k = q[0, :, rows].float(), k[0].float()
    grouped = small.reshape(k.shape[0], -1, small.shape[-1])  # [G, H/G·R, D]
    s = (grouped @ k.transpose(-1, -2)).view(q.shape[1], -1, keys)
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        at = torch.arange(queries, device=q.device)[rows]
        s = s.masked_fill(torch.arange(keys, device=q.device) > at[:, None], -math.inf)
    if mask is not None:
        first = mask[0] if mask.ndim == 4 else mask
        first = first[..., rows, :] if first.ndim >= 2 and first.shape[-2] == queries else first
        hidden = ~first if first.dtype == torch.bool else first <= HIDES_ALWAYS
        s = s.masked_fill(hidden, -math.inf)
    return s.amax((1, 2))


def describe_call(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> float | Tensor:
    """Returns the scale, negative where one of `ROWS` queries of the first sequence sees a later key; NaN across."""
    queries = q.shape[2]
    if queries != k.shape[2] or queries == 1:
        return math.nan
    if causal or mask is None:
        return scale if causal else -scale
    first = mask[0] if mask.ndim == 4 else mask
    at = torch.arange(queries, device=q.device)
    rows = slice(None, None, max(1, queries // ROWS))
    first = first[..., rows, :] if first.shape[-2] == queries else first
    visible = first if first.dtype == torch.bool else first > HIDES_ALWAYS
    return scale - 2.0 * scale * (visible & (at > at[rows, None])).any().float()


_LIBRARY.impl("note", note, "CompositeExplicitAutograd")
torch.library.register_fake("regard_taps::note", lambda *arguments: None, lib=_LIBRARY)


def _tapped_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
) -> Tensor:  # fmt: skip
    """torch's function, with a look at its logits where a tapped module runs."""
    if STATE.seen is not None and torch.compiler.is_compiling():
        torch.ops.regard_taps.note(
            query.detach(), key.detach(), value.detach(), attn_mask if attn_mask is None else attn_mask.detach(),
            is_causal, scale, STATE.whole, STATE.seen,
        )  # fmt: skip
    output = run_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if STATE.seen is not None and not torch.compiler.is_compiling() and (STATE.in_full or not CAPTURES.captures):
        if query.layout == torch.strided and not is_unreadable(query):
            seen: Any = STATE.seen if STATE.in_full else STATE.seen.few  # type: ignore[attr-defined]
            seen.is_used = True
            note(query.detach(), key.detach(), value.detach(), attn_mask, is_causal, scale, STATE.in_full, seen)
    return output


def _enter(module: nn.Module, inputs: tuple) -> None:
    if (
        (STATE.eagerly or STATE.in_full or torch.compiler.is_compiling())
        and module.training
        and torch.is_grad_enabled()
    ):
        STATE.running.append(module)


def _enter_multi_head(module: nn.MultiheadAttention, inputs: tuple, named: dict) -> None:
    """torch.compile hides the function within torch's module, so its queries and keys are computed here."""
    if not torch.compiler.is_compiling():
        _enter(module, inputs)
        return
    if not (module.training and torch.is_grad_enabled()):
        return
    given = {**dict(zip(MULTI_HEAD, inputs, strict=False)), **named}
    query, key = (given[name].detach() for name in ("query", "key"))
    if query.ndim == 2:
        query, key = query[None], key[None]
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    width, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.detach()[:width], module.in_proj_weight.detach()[width : 2 * width]
    else:
        weights = module.q_proj_weight.detach(), module.k_proj_weight.detach()
    bias = None if module.in_proj_bias is None else module.in_proj_bias.detach()
    biases = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])
    q, k = (
        F.linear(x, weight.to(x.dtype), b if b is None else b.to(x.dtype)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, weight, b in zip((query, key), weights, biases, strict=True)
    )
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    visible = None
    if mask is not None:
        visible = ~mask if mask.dtype == torch.bool else mask != -math.inf
        visible = visible if visible.ndim == 2 else visible.unflatten(0, (-1, heads))
    if padding is not None:
        seen = ~padding if padding.dtype == torch.bool else padding != -math.inf
        seen = seen.view(-1, 1, 1, seen.shape[-1])
        visible = seen if visible is None else visible & seen
    torch.ops.regard_taps.note(q, k, None, visible, False, None, STATE.whole, module.regard_logits)


def _leave(module: nn.Module, inputs: tuple, output: Any) -> None:
    """Ends what stands above this module too: an error skips the hooks of the modules within."""
    for at in range(len(STATE.running) - 1, -1, -1):
        if STATE.running[at] is module:
            del STATE.running[at:]
            break


class Taps:
    """The taps of one model, from now until `close`.

    A model that torch.compile has traced is traced again, because its graphs do not have the hooks. `whole` looks at
    all rows of all sequences, which QK-clip needs; otherwise at a few rows of one, which costs nothing measurable.
    """

    def __init__(self, model: nn.Module, whole: bool, eagerly: bool = False) -> None:
        self.whole, self.eagerly = whole, eagerly  # do calls outside compiled graphs count too?
        modules = as_written(model).named_modules()
        # not the model itself: torch.compile may begin within its forward, and would trace its hooks one by one
        tapped = {name: module for name, module in modules if name and _may_attend(module)}
        self.modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary(tapped)
        self.shapes: dict[str, tuple[int, int]] = {}
        self._copies = HostCopies()  # of the shapes
        self.kept: dict[int, Tensor] = {}  # what another's `read` took, by the tensor's id
        for module in self.modules.values():
            before: Any = module._forward_pre_hooks  # keyed by numbers otherwise
            after: Any = module._forward_hooks
            if isinstance(module, nn.MultiheadAttention):
                module._forward_pre_hooks_with_kwargs[KEY] = True  # type: ignore[index]
                before.setdefault(KEY, _enter_multi_head)
            before.setdefault(KEY, _enter)
            after.setdefault(KEY, _leave)
            module._forward_hooks_always_called[KEY] = True  # type: ignore[index]
        _TAPPED.add(self)
        if tapped:
            _forget_graphs({type(module) for module in tapped.values()})
        self.place()
        _update()

    def place(self) -> None:
        """Puts the tensors where the model is now; called between steps, since a model may move."""
        _allow_checkpoints()
        for module in self.modules.values():
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            known = module.__dict__.get("regard_logits")
            if known is None or (known.device != device and device.type != "meta"):
                seen = torch.full(
                    (FIRST + MOST_HEADS + 1,), -math.inf, device="cpu" if device.type == "meta" else device
                )
                seen[:2] = 0.0
                seen._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]  # see mark_static_address
                seen.few = seen.clone()  # type: ignore[attr-defined]  # of calls outside graphs, a few rows of each
                module.__dict__["regard_logits"] = seen

    def read(self) -> dict[str, Tensor]:
        """Returns layer → the last place of its tensor, the norm of its values, the largest logit of each head.

        Of layers that ever made a call; −inf where none was made since.
        """
        found = {}
        self._find_shapes()
        if STATE.running:  # of a forward that Ctrl-C ended: torch ran no hooks
            own = set(self.modules.values())
            STATE.running[:] = [module for module in STATE.running if module not in own]
        for name, module in self.modules.items():
            seen = module.__dict__.get("regard_logits")
            held = None if seen is None else self._take(name, module, seen)
            if self.eagerly and seen is not None and hasattr(seen.few, "is_used"):
                few = self._take(f"{name} eagerly", module, seen.few)
                held = few if held is None else held if few is None else torch.maximum(held, few)
            if held is not None:
                found[name] = held
        return found

    def _take(self, name: str, module: nn.Module, seen: Tensor) -> Tensor | None:
        """Returns what one tensor holds and empties it; others who tap the module find it in `kept`."""
        if name not in self.shapes and hasattr(seen, "is_used"):
            _receive_shapes(self.shapes, [name], seen[:2])
        if name not in self.shapes:
            return None
        new = torch.cat([seen[-1:], seen[FIRST - 1 : FIRST + self.shapes[name][0]]])
        seen[2:].fill_(-math.inf)
        for other in list(_TAPPED):
            if other is not self and any(module is one for one in other.modules.values()):
                known = other.kept.get(id(seen), new)
                other.kept[id(seen)] = torch.maximum(known, new)
        kept = self.kept.pop(id(seen), None)
        return new if kept is None else torch.maximum(kept, new)

    def _find_shapes(self) -> None:
        """Reads which modules have made calls; waits for the device until one has, then asks at the next `read`."""
        self._copies.finish()
        held = {name: module.__dict__.get("regard_logits") for name, module in self.modules.items()}
        unknown = {name: x for name, x in held.items() if x is not None and name not in self.shapes}
        for device in {x.device for x in unknown.values()}:
            names = [name for name, x in unknown.items() if x.device == device]
            numbers = torch.stack([unknown[name][:2] for name in names]).flatten()
            self._copies.add(numbers, partial(_receive_shapes, self.shapes, names))
        self._copies.start()
        if not self.has_seen(wait=False):
            self._copies.finish()

    def has_seen(self, wait: bool = True) -> bool:
        """True if a compiled graph ever made a call; waits for the device until one has."""
        if any(name in self.shapes for name in self.modules):
            return True
        return wait and any(bool(module.__dict__["regard_logits"][0] > 0) for module in self.modules.values())

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            self.close()  # it is still in `_TAPPED` here

    def close(self) -> None:
        if self not in _TAPPED:
            return
        _TAPPED.discard(self)
        kept = {id(module) for taps in _TAPPED for module in taps.modules.values()}
        for module in self.modules.values():
            if id(module) not in kept:
                module._forward_pre_hooks.pop(KEY, None)  # type: ignore[call-overload]
                module._forward_pre_hooks_with_kwargs.pop(KEY, None)  # type: ignore[call-overload]
                module._forward_hooks.pop(KEY, None)  # type: ignore[call-overload]
                module._forward_hooks_always_called.pop(KEY, None)  # type: ignore[call-overload]
                module.__dict__.pop("regard_logits", None)
        _update()


def _receive_shapes(shapes: dict[str, tuple[int, int]], names: list[str], numbers: Tensor) -> None:
    """Adds the heads and widths of modules that have made calls."""
    for name, (heads, width) in zip(names, numbers.view(-1, 2).tolist(), strict=True):
        if heads:
            shapes[name] = int(heads), int(width)


def _update() -> None:
    """Replaces torch's function while a model is tapped."""
    STATE.whole = any(taps.whole for taps in _TAPPED)
    STATE.eagerly = any(taps.eagerly for taps in _TAPPED)
    (tap_sdpa if _TAPPED else take_sdpa)(_tapped_sdpa)
    _allow_checkpoints()


def is_unreadable(x: Tensor) -> bool:
    """True for tensors without values of their own to look at: under vmap, fake, meta, of an inference or a trace."""
    return type(x) not in (Tensor, nn.Parameter) or x.is_meta or is_vmapped(x)


def _may_attend(module: nn.Module) -> bool:
    """True for modules that hold linear layers themselves; one without any leaves its calls to the one around it."""
    if isinstance(module, regard.nn.MultiheadAttention):  # which remembers its calls itself
        return False
    if isinstance(module, nn.MultiheadAttention):
        return True
    if "base_layer" in module._modules:  # an adapter around a linear layer of the module that attends
        return False
    children = module._modules.values()
    return any(getattr(getattr(child, "weight", None), "ndim", 0) == 2 for child in children)


def _allow_checkpoints() -> None:
    """Lets checkpointed blocks be compiled with the hooks in them while a model is tapped, which torch refuses else."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None or bool(_TAPPED) == (STATE.allowed is not None):
        return
    before, STATE.allowed = STATE.allowed, config.skip_fwd_side_effects_in_bwd_under_checkpoint if _TAPPED else None
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = bool(_TAPPED) or before


def _forget_graphs(classes: set[type]) -> None:
    """Drops torch.compile's graphs in which modules of these classes are, because those do not have the hooks."""
    if (frames := sys.modules.get("torch._dynamo.convert_frame")) is None:
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code

    for code in filter(None, [held() for held in frames.input_codes.seen]):
        guards = " ".join(str(entry.guard_manager) for entry in _debug_get_cache_entry_list(code))
        if any(str(id(cls)) in guards for cls in classes):  # a graph checks the class of every module in it
            reset_code(code)


def has_compiled_parts(model: nn.Module) -> bool:
    """True if `model`, or a part of it, is what torch.compile returned or was compiled in place."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in model.modules())
