"""Records the largest logits of a model's training forwards as they run, and reduces them over ranks.

Ranks may run other layers (layer drop), in another order. What torch.compile made is read by taps inside its graphs
(`watching/taps.py`); attention there that calls none of torch's functions runs as written instead, and that is said.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._call.arguments import AttnMask
from regard._core.attention import attention
from regard.bias import Bias
from regard.health.capture.call import UNDER_VMAP, Call
from regard.health.capture.forwards import as_written, find_caller
from regard.health.measure.side_stream import HostCopies
from regard.health.watching.sampling import ForwardInterceptions
from regard.health.watching.taps import LEADING, Taps, has_compiled_parts
from regard.health.watching.taps import STATE as TAPS
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
        self.is_joined = False  # did the last forward run under DistributedDataParallel.join()?
        self._ranks: dict[Any, RankReduction] = {}  # by group
        self._taps: Taps | None = Taps(model, whole=True)
        self._tapped = False  # did the last step run compiled?
        self._compiled_forwards = 0  # seen by taps alone, at most one for each `take`
        self.is_clipped = False  # did the last `qk_clip` clip, rather than only log?
        self.version: int | None = None  # of the weights, at the end of the last `qk_clip`
        self._interceptions = ForwardInterceptions()
        named = as_written(model).named_modules()
        own = {name: module for name, module in named if isinstance(module, MultiheadAttention)}
        self.regard_modules = weakref.WeakValueDictionary(own)
        self._ask_modules(True)
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward, prepend=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def __getstate__(self) -> dict:
        """In a copy of the model, or in a file of it, the hooks record nothing until `qk_clip` is called for that."""
        return {"_hooks": []}

    def close(self) -> None:
        if self._taps is not None:
            self._taps.close()
        self._interceptions.close(succeeded=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ask_modules(False)
        for module in self.regard_modules.values():
            module._last.clear()

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
        TAPS.in_full = False
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

    def complain(self, model: nn.Module, has_stepped: bool | None = None) -> str | None:
        """Returns what is wrong if steps or forwards were made and no attention was seen in them."""
        if self.is_joined:
            self.largest.clear()
            return (
                "ranks under DistributedDataParallel.join() whose data have ended take no part in a clip, for which "
                "the others would wait; give all ranks the same number of batches"
            )
        if has_stepped is None:
            has_stepped = self.version is not None and self.version != weights_version(model)
        if self.largest or self.unseen or not (self.forwards or has_stepped):
            return None
        modules = list(self.regard_modules.values())
        if modules and all(map(bounded_scores_reason, modules)):
            return None  # `skipped` says so
        seen = "training forwards of it, and no attention call in them"
        return (
            f"since the last call for this model, it saw {seen if self.forwards else 'no training forward of it'}. "
            "It captures regard.nn, torch's nn.MultiheadAttention and scaled_dot_product_attention, and attention "
            "layers of transformers, in forwards of the module that it is given. Make it before the first compiled "
            "forward; other attention that is compiled in place, or called in parts, cannot be seen"
        )

    def read_taps(self, model: nn.Module) -> None:
        """Adds what compiled graphs have written; where they wrote nothing, the next forwards run as written."""
        if self._taps is None:
            return
        self._taps.place()
        noted = {name: held[LEADING:] for name, held in self._taps.read().items()}
        if self.forwards and not self._compiled_forwards:  # what ran as written was measured in full
            return
        for name, largest in noted.items():
            if bool(largest.max() > -math.inf) if largest.device.type == "cpu" else True:
                self.shapes.setdefault(name, self._taps.shapes[name])
                self._add_largest(name, largest)
                self._tapped = True
        if not self.largest and self._compiled_forwards and not self._tapped:
            self._taps.close()
            self._taps = None
            if not self.regard_modules:
                warnings.warn(
                    f"{type(as_written(model)).__name__} was compiled, and its attention calls none of torch's "
                    "functions there, so its training forwards run as written from now on, which is slower",
                    stacklevel=find_caller()[1] + 1,
                )
        self._compiled_forwards = 0

    def take(self, model: nn.Module, groups: Sequence[Any]) -> dict[str, Tensor]:
        """Returns layer → largest logits [H], the same on every rank of `groups`, and forgets them; no wait for a GPU.

        Attention that one rank alone misses (layer drop) is not missed.
        """
        found, self.largest, self.forwards = self.largest, {}, 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        for group in groups if dist.is_available() and dist.is_initialized() and not self.is_joined else ():
            found, late = self._ranks.setdefault(group, RankReduction()).reduce(found, self.shapes, group, device)
            for name, largest in late.items():
                self._add_largest(name, largest)
        return found

    def __call__(self, call: Call, name: str, run_original: Callable[[], Tensor]) -> Tensor:
        output = run_original()
        if (call.obstacle is not None and call.kind != "regard") or call.obstacle == UNDER_VMAP:
            self.unseen[name] = call.obstacle
            return output
        if self._read_module(name, threading.get_ident()):  # the call itself has its temperature in the scale
            return output
        names = ("scale", "window", "key_lengths")
        options = {key: call.options[key] for key in names if call.options.get(key) is not None}
        options |= dict(attn_mask=call.arguments["attn_mask"], is_causal=call.causal)
        self._add(name, call.q.detach(), call.k.detach(), **options)
        return output

    def _add(self, name: str, q: Tensor, k: Tensor, attn_mask: AttnMask = None, **options: Any) -> None:
        """Adds the largest logit per head of one call, [B, H, M, D] with [B, G, N, D]; biases are left out."""
        given = attn_mask if isinstance(attn_mask, (tuple, list)) else (attn_mask,)
        masks = [x for x in given if x is not None and not isinstance(x, Bias)]
        masks = [x != -math.inf if isinstance(x, Tensor) and x.dtype != torch.bool else x for x in masks]
        seen: Any = tuple(masks) if len(masks) > 1 else masks[0] if masks else None  # calls with a tuple keep no plan
        with torch.no_grad():
            if q.numel() and k.numel():
                stats = attention(q, k, k, seen, enable_gqa=True, return_stats=("max_logit",), **options)[1]
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
            if self._taps is not None and has_compiled_parts(module):
                TAPS.in_full = True  # where the graph does not run, in a sample of a Monitor for one
                self._compiled_forwards += 1
            else:
                self._interceptions.open(module, self)

    def _end_forward(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._hooks:
            TAPS.in_full = False
            self._interceptions.close(succeeded=output is not None)
            self.is_joined = is_under_join(module)


def is_under_join(module: nn.Module) -> bool:
    """True in a forward of DistributedDataParallel, or of a module inside it, whose ranks may have unequal data."""
    if not dist.is_available():
        return False
    active = nn.parallel.DistributedDataParallel._active_ddp_module
    config: Any = getattr(module if hasattr(module, "_join_config") else active, "_join_config", None)
    return config is not None and config.enable


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
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns layer → [H], the same on every rank, and the layers of `found` that wait for the next call.

        `found`: the logits of this rank; `shapes`: of all layers it has ever seen, to which others' are added.
        """
        self._copies.finish()
        if self._met_new_layer or not self.agreed:
            self._exchange_layers(shapes, group)
        if not self.agreed:
            return {}, {}
        late = {name: x for name, x in found.items() if self.agreed.get(name) != shapes[name]}
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
