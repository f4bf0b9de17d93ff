"""Records the largest logits of a model's training forwards as they run, and reduces them over ranks.

Ranks may run other layers (layer drop), in another order.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._core.attention import attention
from regard.health.capture.call import UNDER_VMAP, Call
from regard.health.capture.interception import as_written
from regard.health.measurement.side_stream import HostCopies
from regard.health.watching.hooks import ForwardInterceptions
from regard.nn import MultiheadAttention
from regard.nn.projections import bounded_scores_reason

Shapes = dict[str, tuple[int, int]]  # layer -> query heads and their width


class MaxLogits:
    """Observes the training forwards of a model: the largest logit of every head since `take` was last called."""

    def __init__(self, model: nn.Module) -> None:
        self.largest: dict[str, Tensor] = {}  # layer -> [H]
        self.shapes: Shapes = {}
        self.unseen: dict[str, str] = {}  # layer -> why its logits cannot be read
        self.forwards = 0
        self._ranks = RankReduction()
        self.is_clipped = False  # did the last `qk_clip` clip, rather than only log?
        self.version: int | None = None  # of the weights, at the end of the last `qk_clip`
        self._interceptions = ForwardInterceptions()
        named = as_written(model).named_modules()
        own = {name: module for name, module in named if isinstance(module, MultiheadAttention)}
        self.regard_modules = weakref.WeakValueDictionary(own)
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward, prepend=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def __getstate__(self) -> dict:
        """In a copy of the model, or in a file of it, the hooks record nothing until `qk_clip` is called for that."""
        return {"_hooks": []}

    def close(self) -> None:
        self._interceptions.close(succeeded=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ask_modules(False)

    def _ask_modules(self, asked: bool) -> None:
        for module in self.regard_modules.values():
            module._is_clipped = asked

    def start(self) -> None:
        """Makes `regard.nn` modules remember their next forwards, and forgets those before."""
        self._ask_modules(True)
        for module in self.regard_modules.values():
            module._last.clear()

    def read_modules(self) -> None:
        """Adds the training calls that `regard.nn` modules remember and that were not observed."""
        self._interceptions.close(succeeded=False)  # of a forward that Ctrl-C ended
        self._ask_modules(True)
        for name, module in self.regard_modules.items():
            for thread in list(module._last):
                self._read_module(name, thread)

    def _read_module(self, name: str, thread: int) -> bool:
        module = self.regard_modules.get(name)
        last = None if module is None else module._last.pop(thread, None)
        if last is None:
            return False
        q, k, scale, options = last
        self._add(name, q, k, scale=scale, **options)
        return True

    def _complaint(self, model: nn.Module) -> str | None:
        """Returns what is wrong if steps or forwards were made and no attention was seen in them."""
        stepped = self.version is not None and self.version != weights_version(model)
        if self.largest or self.unseen or not (self.forwards or stepped):
            return None
        modules = list(self.regard_modules.values())
        if modules and all(map(bounded_scores_reason, modules)):
            return None  # `skipped` says so
        seen = "training forwards of it, and no attention call in them"
        return f"since the last call for this model, it saw {seen if self.forwards else 'no training forward of it'}"

    def take(self, model: nn.Module, group: Any) -> dict[str, Tensor]:
        """Returns layer → largest logits [H], the same on every rank, and forgets them; no wait for a GPU.

        Attention that one rank alone misses (layer drop) is not missed.
        """
        is_distributed = dist.is_available() and dist.is_initialized()
        complaint = self._complaint(model)
        found, self.largest, self.forwards = self.largest, {}, 0
        reduced, late = found, set[str]()
        if is_distributed:
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            reduced, late = self._ranks.reduce(found, self.shapes, group, device)
        if complaint is not None and not reduced:
            raise ValueError(
                f"qk_clip: {complaint}. It captures regard.nn, torch's nn.MultiheadAttention and "
                "scaled_dot_product_attention, and attention layers of transformers, in forwards of the module that it "
                "is given. If torch.compile returned the module that runs, pass that; a module compiled in place, or "
                "called in parts, works with regard.nn alone"
            )
        for name in late:
            self._add_largest(name, found[name])
        return reduced

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        output = run_original()
        if (call.obstacle is not None and call.kind != "regard") or call.obstacle == UNDER_VMAP:
            self.unseen[name] = call.obstacle
            return output
        if self._read_module(name, threading.get_ident()):  # the call itself has its temperature in the scale
            return output
        names = ("scale", "window", "key_lengths")
        options = {key: call.options[key] for key in names if call.options.get(key) is not None}
        self._add(name, call.q.detach(), call.k.detach(), attn_mask=call.mask, is_causal=call.causal, **options)
        return output

    def _add(self, name: str, q: Tensor, k: Tensor, attn_mask: Tensor | None = None, **options: Any) -> None:
        """Adds the largest logit per head of one call, [B, H, M, D] with [B, G, N, D]."""
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask != -math.inf
        with torch.no_grad():
            if q.numel() and k.numel():
                stats = attention(q, k, k, attn_mask, enable_gqa=True, return_stats=("max_logit",), **options)[1]
                largest = stats.max_logit.amax((0, 2)).float()
            else:  # an empty batch has no logits, and counts as seen
                largest = q.new_full((q.shape[1],), -math.inf, dtype=torch.float32)
        self.shapes[name] = q.shape[1], q.shape[-1]
        self._add_largest(name, largest)

    def _add_largest(self, name: str, largest: Tensor) -> None:
        known = self.largest.get(name, largest)
        self.largest[name] = torch.maximum(known, largest.to(known.device))

    def _begin_forward(self, module: nn.Module, inputs: tuple) -> None:
        if torch.compiler.is_compiling() or not self._hooks:
            return
        self._interceptions.close(succeeded=False)
        if module.training and torch.is_grad_enabled():
            self.forwards += 1
            self._interceptions.open(module, self)

    def _end_forward(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        if self._hooks and not torch.compiler.is_compiling():
            self._interceptions.close(succeeded=output is not None)


class RankReduction:
    """Takes the maximum over ranks in one collective over every layer that any rank has seen.

    The ranks exchange the list of layers while it is empty, and again after a call in which one of them met a new
    layer: a flag for that travels with the logits and is read at the next call, so that no rank waits for its GPU.
    """

    def __init__(self) -> None:
        self.agreed: Shapes = {}
        self._met_new_layer = False
        self._copies = HostCopies()  # of the flag

    def reduce(
        self, found: Mapping[str, Tensor], shapes: Shapes, group: Any, device: torch.device
    ) -> tuple[dict[str, Tensor], set[str]]:
        """Returns layer → [H], the same on every rank, and the layers of `found` that wait for the next call.

        `found`: the logits of this rank; `shapes`: of all layers it has ever seen, to which others' are added.
        """
        self._copies.finish()
        if self._met_new_layer or not self.agreed:
            self._exchange_layers(shapes, group)
        if not self.agreed:
            return {}, set()
        late = {name for name in found if self.agreed.get(name) != shapes[name]}
        device = next((largest.device for largest in found.values()), device)
        parts = [torch.full((1,), float(bool(late)), device=device)]  # no copy from the host to wait for
        for name, (heads, _) in self.agreed.items():
            seen = name in found and name not in late
            parts.append(found[name].to(device) if seen else torch.full((heads,), -math.inf, device=device))
        joined = torch.cat(parts)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        flag, *parts = joined.split([1, *(heads for heads, _ in self.agreed.values())])
        self._copies.add(flag, self._receive_flag)
        self._copies.start()
        reduced = zip(self.agreed, parts, strict=True)
        return {name: largest for name, largest in reduced if self.agreed[name] == shapes[name]}, late

    def _receive_flag(self, flag: Tensor) -> None:
        self._met_new_layer |= bool(flag > 0)

    def _exchange_layers(self, shapes: Shapes, group: Any) -> None:
        gathered: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, shapes, group=group)
        self.agreed, self._met_new_layer = dict(sorted(item for one in gathered for item in one.items())), False
        shapes.update({name: shape for name, shape in self.agreed.items() if name not in shapes})


def observe(model: nn.Module) -> MaxLogits:
    """Returns the observer of a model; the first call registers its hooks."""
    if model not in OBSERVERS:
        OBSERVERS[model] = MaxLogits(model)
    return OBSERVERS[model]


def is_clipped(model: nn.Module) -> bool:
    """True if QK-clip is in use for `model`, as it was written or as torch.compile returned it; not with `log_only`."""
    return any(one.is_clipped and as_written(known) is as_written(model) for known, one in list(OBSERVERS.items()))


def stop(model: nn.Module) -> None:
    """Stops observing `model` for `qk_clip`; the model is as it was."""
    if (observer := OBSERVERS.pop(model, None)) is not None:
        observer.close()


def weights_version(model: nn.Module) -> int:
    """Returns a number that changes when the weights are written to."""
    return sum(parameter._version for parameter in model.parameters())


OBSERVERS: weakref.WeakKeyDictionary[nn.Module, MaxLogits] = weakref.WeakKeyDictionary()
