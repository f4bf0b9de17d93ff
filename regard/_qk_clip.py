"""QK-clip: after an optimizer step, shrink the query and key weights of heads whose logits have grown too large."""

from __future__ import annotations

import math
import numbers
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from regard._attention import attention
from regard.health.call import forget_masks
from regard.health.intercept import Interception, enter
from regard.nn import MultiheadAttention
from regard.nn.projections import NotFound, Projection, not_growing, projections


class Clip(NamedTuple):
    """One head that was clipped: its largest logit, and the factor that brought it to the threshold."""

    layer: str
    head: int
    max_logit: float
    factor: float


class Clipped:
    """What a call of `qk_clip` found, read from the device only when it is asked for.

    `heads`: the heads that were clipped; `max_logit`: layer → the largest logit of each head; `skipped`: layer → why
    its weights cannot be clipped.
    """

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._found: dict[str, tuple[Tensor, Tensor | None]] = {}  # layer -> largest logits, factors

    @property
    def max_logit(self) -> dict[str, list[float]]:
        return {name: tops.tolist() for name, (tops, _) in self._found.items()}

    @property
    def heads(self) -> list[Clip]:
        found = []
        for name, (tops, factors) in self._found.items():
            for head, factor in enumerate([] if factors is None else factors.tolist()):
                if factor < 1.0:
                    found.append(Clip(name, head, tops[head].item(), factor))
        return found

    def __repr__(self) -> str:
        return f"Clipped(heads={self.heads}, skipped={self.skipped})"


def qk_clip(model: nn.Module, threshold: float = 100.0, *, group=None) -> Clipped:
    """W_q, W_k ← √(τ/m)·W_q, √(τ/m)·W_k for every head whose largest logit m passed the threshold τ, as Kimi K2 does.

    >>> import regard, torch
    >>> model = regard.nn.MultiheadAttention(8, num_heads=2)
    >>> with torch.no_grad():
    ...     _ = model.q_proj.weight[:4].mul_(1e4)  # head 0 explodes
    >>> x = torch.randn(2, 6, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    >>> [(clip.layer, clip.head) for clip in regard.qk_clip(model, threshold=100.0).heads]
    [('', 0)]
    >>> _, stats = model(x, return_stats=("max_logit",))
    >>> f"{stats.max_logit[:, 0].max():.1f}"
    '100.0'

    Call it after every `optimizer.step()`; nothing else need be done. The logits are those of the training forwards
    since the last call, scale·q·k over the visible keys, before soft cap, bias and temperature. The first call starts
    to watch; for `regard.nn` it already knows the last forward, in other models it clips from the next step on.
    Watching costs one fused pass over q and k per forward; nothing waits for the GPU. `regard.qk_clip.stop(model)` ends
    it.

    It watches the forward of `model` itself. Where that runs compiled, or only a part of the model is called, the last
    forward of each `regard.nn` module counts; other attentions cannot be seen then, and a call after a step in which
    none was seen raises.

    Where several query heads share a key head, its weights cannot shrink for one of them: the query takes the whole
    factor τ/m there. Heads below the threshold keep their weights to the bit. A head whose logit is not finite is
    left alone. Scores that do not follow the weights' size (cosine, QK-norm, additive) are skipped, with the reason;
    so are weights that something else uses too and weights that are computed (weight_norm, LoRA). Queries and keys of
    one layer may share theirs.

    Args:
        model: holds, at any depth, `regard.nn.MultiheadAttention`, torch's `nn.MultiheadAttention`, attention layers of
            transformers, or others whose queries and keys come from linear layers named as usual.
        threshold: τ, the largest logit a head may have.
        group: the process group whose ranks hold the same weights; None is all of them, if there are any.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not (number and 0 < threshold < math.inf):
        raise ValueError(f"threshold must be a positive, finite number, got {threshold!r}")
    watch = _WATCHES.get(model)
    if watch is None:
        watch = _WATCHES[model] = _Watch(model)
    watch.read_modules()
    watch.check(model)
    modules, places = dict(model.named_modules()), _places(model)
    result = Clipped()
    for name, tops in watch.take(group).items():
        factors = None
        try:
            query, key = projections(modules[name], len(tops), watch.head_dim[name])
            shrunk = [query] if query.heads != key.heads else [query, key]
            parts = _parts(shrunk, places, modules[name])
        except NotFound as reason:
            result.skipped[name] = str(reason)
        else:
            factors = torch.where(tops.isfinite() & (tops > threshold), threshold / tops, 1.0)
            for part in parts:
                part.shrink(factors if len(shrunk) == 1 else factors.sqrt())
        result._found[name] = tops, factors
    for name in watch.ours.keys() - result._found.keys():
        why = not_growing(modules[name])
        if why is not None:
            result.skipped[name] = why
    watch.weights = versions(model)
    return result


def stop(model: nn.Module) -> None:
    """Stop watching `model` for `qk_clip`; the model is as it was."""
    watch = _WATCHES.pop(model, None)
    if watch is not None:
        watch.close()
    _unhook(model)


def _unhook(model: nn.Module) -> None:
    """Take off what a copy of a watched model, or one loaded from a file, has brought along."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for at in [at for at, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Watch)]:
            del hooks[at]
            model._forward_hooks_always_called.pop(at, None)


qk_clip.stop = stop  # type: ignore[attr-defined]


class _Watch:
    """The largest logit of every head over the training forwards since it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        _unhook(model)
        self.largest: dict[str, Tensor] = {}  # layer -> [H]
        self.head_dim: dict[str, int] = {}
        self.forwards = 0
        self.weights: int | None = None
        self.ours = {
            name: weakref.ref(module)
            for name, module in model.named_modules()
            if isinstance(module, MultiheadAttention)
        }
        self._inside: list = []
        self._hooks = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def __getstate__(self) -> dict:
        """In a copy of the model, or in a file of it, the hooks watch nothing until `qk_clip` is called for that."""
        return {"_hooks": [], "_inside": []}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def read_modules(self) -> None:
        """What `regard.nn` modules remember of a training call that was not watched."""
        for name in self.ours:
            self._read(name)

    def _read(self, name: str) -> bool:
        module = self.ours[name]() if name in self.ours else None
        if module is None or module._last is None:
            return False
        (q, k, scale, options), module._last = module._last, None
        self._add(name, q, k, scale=scale, **options)
        return True

    def check(self, model: nn.Module) -> None:
        """Forwards or steps were made and no attention was seen: say so, or nothing would ever be clipped."""
        if self.largest or not (self.forwards or (self.weights is not None and self.weights != versions(model))):
            return
        if self.ours and all(not_growing(module()) for module in self.ours.values()):
            return  # `skipped` says so
        seen = (
            "training forwards of it, and no attention call in them" if self.forwards else "no training forward of it"
        )
        raise ValueError(
            f"qk_clip: since the last call for this model, it saw {seen}. It catches regard.nn, torch's "
            "nn.MultiheadAttention and scaled_dot_product_attention, and attention layers of transformers, in forwards "
            "of the module it is given; where that runs compiled, or only a part of it is called, regard.nn alone. "
            "Give it the module that is called, not compiled"
        )

    def take(self, group) -> dict[str, Tensor]:
        """Layer → [H], the same on every rank; then forget. Nothing waits for the device."""
        largest, self.largest, self.forwards = self.largest, {}, 0
        if largest and torch.distributed.is_available() and torch.distributed.is_initialized():
            sizes = [len(tops) for tops in largest.values()]
            joined = torch.cat([tops.to(next(iter(largest.values())).device) for tops in largest.values()])
            torch.distributed.all_reduce(joined, torch.distributed.ReduceOp.MAX, group=group)
            return dict(zip(largest, joined.split(sizes), strict=True))
        return largest

    def __call__(self, call, name: str, otherwise) -> Tensor:
        output = otherwise()
        if self._read(name):  # the call itself has its temperature in the scale
            return output
        names = ("scale", "window", "key_lengths")
        options = {key: call.options[key] for key in names if call.options.get(key) is not None}
        self._add(name, call.q.detach(), call.k.detach(), attn_mask=call.mask, is_causal=call.causal, **options)
        return output

    def _add(self, name: str, q: Tensor, k: Tensor, attn_mask=None, **options) -> None:
        """The largest logit per head of one call, [B, H, M, D] with [B, G, N, D]."""
        self.head_dim[name] = q.shape[-1]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask != -math.inf
        with torch.no_grad():
            if q.numel() and k.numel():
                stats = attention(q, k, k, attn_mask, enable_gqa=True, return_stats=("max_logit",), **options)[1]
                tops = stats.max_logit.amax((0, 2)).float()
            else:  # an empty batch has no logits, and counts as seen
                tops = q.new_full((q.shape[1],), -math.inf, dtype=torch.float32)
        self.largest[name] = torch.maximum(self.largest[name], tops) if name in self.largest else tops

    def _before(self, module, inputs) -> None:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._hooks:
            return
        self.forwards += 1
        cast(OrderedDict, module._forward_hooks).move_to_end(self._hooks[1].id)  # what was opened first is closed last
        interception = Interception(module, observe=self)
        interception.start()
        own = module._forward_pre_hooks.keys() | module._forward_hooks.keys()
        for hook in interception._hooks:
            if hook.id in own:  # torch walks through the model's own when its forward raises: nothing may change then
                hook.remove()
        context = interception.torch_calls()
        context.__enter__()
        enter(module)  # in the place of its own hooks
        self._inside.append((interception, context))

    def _after(self, module, inputs, output) -> None:
        if self._inside and self._inside[-1][0].model is module:
            interception, context = self._inside.pop()
            context.__exit__(None, None, None)
            interception.stop()
            forget_masks()


def _parts(shrunk: list[Projection], places: dict[int, list[tuple[int, int]]], module: nn.Module) -> list[Projection]:
    """What to shrink, every tensor once; NotFound where a tensor serves something else as well."""
    parts: dict[tuple, Projection] = {}
    uses: dict[int, int] = {}
    for one in shrunk:
        for tensor, dim in ((one.weight, one.dim), (one.bias, 0)):
            if tensor is not None:
                whole = tensor if tensor._base is None else tensor._base
                matrix = tensor.detach() if tensor.ndim == 2 else tensor.detach()[:, None]
                part = replace(one, weight=matrix, bias=None, dim=dim)
                tied = (_address(whole), tensor.storage_offset(), one.start, dim)
                uses[tied[0]] = uses.get(tied[0], 0) + (tied in parts or tied[0] not in uses)
                parts[tied] = part
    for address, count in uses.items():
        if sum(1 if owner == id(module) else slots for owner, slots in places.get(address, [])) > count:
            raise NotFound("its query or key weights serve another layer too: they cannot shrink for this one alone")
    return list(parts.values())


def _places(model: nn.Module) -> dict[int, list[tuple[int, int]]]:
    """Parameter → the modules that hold it, each with the number of names under which others hold that module."""
    slots: dict[int, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            slots[id(child)] = slots.get(id(child), 0) + 1
    places: dict[int, list[tuple[int, int]]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(_address(parameter), []).append((id(module), max(slots.get(id(module), 1), 1)))
    return places


def _address(tensor: Tensor) -> int:
    """The same for tensors that share their numbers."""
    return (tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0) or id(tensor)


def versions(model: nn.Module) -> int:
    """A number that changes when an optimizer has stepped."""
    return sum(parameter._version for parameter in model.parameters())


_WATCHES: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()
