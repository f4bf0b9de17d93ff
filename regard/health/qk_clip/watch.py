"""The largest logits of a model's training forwards, as they run anyway."""

from __future__ import annotations

import math
import threading
import weakref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from regard._core.attention import attention
from regard.health.capture.call import MAPPED, NESTED
from regard.health.capture.forward_scope import bury_dead, close_forward, open_forward
from regard.health.capture.interception import Interception, as_written
from regard.health.qk_clip.ranks import Ranks
from regard.health.qk_clip.verification import Outputs
from regard.nn import MultiheadAttention
from regard.nn.projections import bounded_scores_reason


class Watch:
    """The largest logit of every head over the training forwards, in any thread, since it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        unhook(model)
        _count_steps()
        self.largest: dict[str, Tensor] = {}  # layer -> [H]
        self.judged: dict[str, Tensor] = {}  # layer -> [2, H]: see `Outputs.judged`
        self.shapes: dict[str, tuple[int, int]] = {}  # layer -> query heads and their width
        self._ranks = Ranks()
        self._outputs: dict[int, Outputs] = {}  # by thread
        self._told = threading.Lock()  # of the numbers above, while a thread adds to them; never over a forward
        self.unseen: dict[str, str] = {}  # layer -> why its logits cannot be looked at
        self.forwards = 0
        self._marked: tuple[int, int] | None = None
        self.ours = {
            name: weakref.ref(module)
            for name, module in as_written(model).named_modules()
            if isinstance(module, MultiheadAttention)
        }
        self._hooks = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def __getstate__(self) -> dict:
        """In a copy of the model, or in a file of it, the hooks watch nothing until `qk_clip` is called for that."""
        return {"_hooks": []}

    def close(self) -> None:
        bury_dead()
        if self._hooks:
            self._close_outputs(*self._outputs)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ask_modules(False)

    def _ask_modules(self, asked: bool) -> None:
        for reference in self.ours.values():
            module = reference()
            if module is not None:
                module._is_clipped = asked

    def read_modules(self) -> None:
        """What `regard.nn` modules remember of a training call that was not watched."""
        bury_dead()
        self._ask_modules(True)
        for name, module in self.ours.items():
            for thread in list(getattr(module(), "_last", ())):
                self._read(name, thread)

    def _read(self, name: str, thread: int) -> bool:
        module = self.ours[name]() if name in self.ours else None
        last = None if module is None else module._last.pop(thread, None)
        if last is None:
            return False
        q, k, scale, options = last
        self._add(name, q, k, scale=scale, **options)
        return True

    def mark(self, model: nn.Module) -> None:
        """Remember where training stands."""
        self._marked = _STEPS[0], versions(model)

    def _stepped(self, model: nn.Module) -> bool:
        """Has an optimizer changed the weights since? Loading them is no step."""
        return self._marked is not None and self._marked[0] != _STEPS[0] and self._marked[1] != versions(model)

    def _complaint(self, model: nn.Module) -> str | None:
        """Forwards or steps were made and no attention was seen: say so, or nothing would ever be clipped."""
        if self.largest or self.unseen or not (self.forwards or self._stepped(model)):
            return None
        if self.ours and all(bounded_scores_reason(module()) for module in self.ours.values()):
            return None  # `skipped` says so
        seen = (
            "training forwards of it, and no attention call in them" if self.forwards else "no training forward of it"
        )
        return f"since the last call for this model, it saw {seen}"

    def take(self, model: nn.Module, group) -> dict[str, Tensor]:
        """Layer → [3, H], the same on every rank: largest logits, 1 where normalised, 1 where from elsewhere; then
        forget. Nothing waits for the step that a GPU is at.

        Attention that is missed on one rank alone (layer drop) is not missed; what all of them miss is told at the next
        call.
        """
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        complaint = self._complaint(model)
        if complaint is not None and not together:
            raise _missed(complaint)
        if self._ranks.was_blind():
            raise _missed("before the last call for this model, no rank saw an attention call")
        with self._told:
            found = {name: torch.cat([tops[None], self.judged[name]]) for name, tops in self.largest.items()}
            self.largest, self.judged, self.forwards = {}, {}, 0
        if not together:
            return found
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        joined, late = self._ranks.largest(found, self.shapes, group, device, complaint is not None)
        if complaint is not None and not joined:
            raise _missed(complaint)
        with self._told:
            for name in late:
                self._count(name, found[name][0], found[name][1:])
        return joined

    def __call__(self, call, name: str, otherwise) -> Tensor:
        output = otherwise()
        if call.obstacle in (MAPPED, NESTED):
            self.unseen[name] = call.obstacle
            return output
        if self._read(name, threading.get_ident()):  # the call itself has its temperature in the scale
            return output
        names = ("scale", "window", "key_lengths")
        options = {key: call.options[key] for key in names if call.options.get(key) is not None}
        self._add(name, call.q.detach(), call.k.detach(), attn_mask=call.mask, is_causal=call.causal, **options)
        return output

    def _add(self, name: str, q: Tensor, k: Tensor, attn_mask=None, **options) -> None:
        """The largest logit per head of one call, [B, H, M, D] with [B, G, N, D]."""
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask != -math.inf
        with torch.no_grad():
            if q.numel() and k.numel():
                stats = attention(q, k, k, attn_mask, enable_gqa=True, return_stats=("max_logit",), **options)[1]
                tops = stats.max_logit.amax((0, 2)).float()
            else:  # an empty batch has no logits, and counts as seen
                tops = q.new_full((q.shape[1],), -math.inf, dtype=torch.float32)
            outputs = self._outputs.get(threading.get_ident())
            judged = tops.new_zeros(2, len(tops)) if outputs is None else outputs.judged(name, q, k)
        with self._told:
            self.shapes[name] = q.shape[1], q.shape[-1]
            self._count(name, tops, judged)

    def _count(self, name: str, tops: Tensor, judged: Tensor) -> None:
        known, known_of = self.largest.get(name, tops), self.judged.get(name, judged)
        self.largest[name] = torch.maximum(known, tops.to(known.device))  # nn.DataParallel's copies have their own
        self.judged[name] = torch.maximum(known_of, judged.to(known_of.device))

    def _before(self, module, inputs) -> None:
        if torch.compiler.is_compiling() or not self._hooks:
            return
        bury_dead()
        if module.training and torch.is_grad_enabled():
            with self._told:
                self.forwards, shapes = self.forwards + 1, dict(self.shapes)
            self._outputs.setdefault(threading.get_ident(), Outputs()).open(as_written(module), shapes)
            open_forward(Interception(module, observe=self).in_forward())

    def _after(self, module, inputs, output) -> None:
        if not torch.compiler.is_compiling():
            if self._hooks:
                self._close_outputs(threading.get_ident())
            close_forward()

    def _close_outputs(self, *threads: int) -> None:
        for thread in threads:
            if (outputs := self._outputs.pop(thread, None)) is not None:
                outputs.close()


def unhook(model: nn.Module) -> None:
    """Take off what a copy of a watched model, or one loaded from a file, has brought along."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for at in [at for at, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Watch)]:
            del hooks[at]
            model._forward_hooks_always_called.pop(at, None)


def _missed(complaint: str) -> ValueError:
    return ValueError(
        f"qk_clip: {complaint}. It catches regard.nn, torch's "
        "nn.MultiheadAttention and scaled_dot_product_attention, and attention layers of transformers, in forwards "
        "of the module it is given; where that runs compiled, or only a part of it is called, regard.nn alone. "
        "Give it the module that is called: what torch.compile returned, if it is that, and none compiled in place"
    )


def versions(model: nn.Module) -> int:
    """A number that changes when the weights are written to."""
    return sum(parameter._version for parameter in model.parameters())


def _count_steps() -> None:
    if not _STEPS:
        _STEPS.append(0)
        register_optimizer_step_post_hook(_step)


def _step(optimizer, args, kwargs) -> None:
    _STEPS[0] += 1


_STEPS: list[int] = []  # how many steps all optimizers have made since the first model was watched
WATCHES: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
