"""`QKClip`: QK-clip for a whole training, as optimizer hook, trainer callback or a call per step."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.qk_clip.clipping import Clipped, Masters, check_arguments, clip_observed
from regard.health.qk_clip.max_logits import observe, stop
from regard.health.watching.writers import make_writer
from regard.nn.projections import NotFound
from regard.parallel.torchrun import is_first_rank

LOW_PRECISION = (torch.bfloat16, torch.float16)


class QKClip:
    """W_q, W_k ← √(τ/m)·W_q, √(τ/m)·W_k after each optimizer step, for every head whose largest logit m passed τ.

    >>> import regard, torch
    >>> model = regard.nn.MultiheadAttention(8, num_heads=2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> clip = regard.QKClip(model, threshold=100.0)
    >>> for _ in range(2):
    ...     model(torch.randn(2, 6, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     clipped = clip.step()
    >>> clipped.heads, clip.steps
    ([], 2)
    >>> clip.close()

    MuonClip's order: forward, backward, optimizer step (weight decay and all), then the clip, by the logits of the
    forwards of that step. They are measured while the model runs, in one fused pass over q and k per attention call;
    no forward is added. `regard.qk_clip` says which weights take which part of the factor. It warns once if the model
    has no query and key layers that it finds.

    Args:
        model: the model in training; what `qk_clip` takes.
        threshold: τ, the largest logit that a head may have.
        log_only: True to measure and report, and leave the weights alone.
        log: where `attention/max_logit`, the same per layer, and `attention/clipped_heads` go after each step: all that
            `regard.Monitor(log=…)` takes. None saves the wait for the GPU that reading them costs.
        group: the process group whose ranks hold the same weights (data-parallel ranks); None is all ranks.
        names: the attributes of an attention module that hold its query and key layers, where their names are unusual.
        masters: a function from a parameter to the float32 copy that the optimizer keeps of it, or None where it keeps
            none. Copies in the state of a hooked optimizer (a key with "master" in it) and in `parameter.main_param`
            (Megatron) are found without it. Sharded parameters (FSDP2) are clipped as they are.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: `threshold` is not a positive, finite number, or the model is `nn.DataParallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        log_only: bool = False,
        *,
        log: Any = None,
        group: Any = None,
        names: tuple[str, str] | None = None,
        masters: Masters | None = None,
    ) -> None:
        check_arguments(model, threshold)
        self.model, self.threshold, self.log_only = model, float(threshold), log_only
        self.group, self.names, self.masters = group, names, masters
        self.steps = 0
        self.last: Clipped | None = None  # of the last step
        self._writer = None if log is None else make_writer(log)
        self._has_warned = False
        self._optimizers: list[weakref.ref] = []
        self._handles: list = []
        observe(model).start()

    def step(self) -> Clipped:
        """Clips by the logits of the forwards since the last call; call it after `optimizer.step()`."""
        masters = self._find_master if self.masters is not None or self._optimizers else _main_param
        self.last = clip_observed(
            self.model, observe(self.model), self.threshold, group=self.group, names=self.names, masters=masters,
            log_only=self.log_only,
        )  # fmt: skip
        self.steps += 1
        if self.last.skipped and not (self.last.knows_a_layer or self.log_only or self._has_warned) and is_first_rank():
            self._has_warned = True
            (layer, reason), *others = self.last.skipped.items()
            warnings.warn(
                f"QKClip can clip no attention layer of {type(self.model).__name__}. It looks for linear layers that "
                f"make the queries and keys: {layer or 'the model itself'}: {reason}"
                f"{f' (and {len(others)} more)' if others else ''}; pass names=, or see `.last.skipped`",
                stacklevel=2,
            )
        if self._writer is not None and is_first_rank():
            self._writer.write(self.steps, self.last.scalars(), [])
        return self.last

    def hook(self, optimizer: torch.optim.Optimizer) -> Any:
        """Makes each `optimizer.step()` end with `self.step()`; returns the handle, whose `remove()` undoes it."""
        if not callable(getattr(optimizer, "register_step_post_hook", None)):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.follow(optimizer)
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        return self._handles[-1]

    def _after_step(self, *_: Any) -> None:
        self.step()

    def follow(self, optimizer: Any) -> None:
        """Keeps the float32 master copies that `optimizer` holds in step with the clipped weights."""
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if isinstance(inner, torch.optim.Optimizer) and all(known() is not inner for known in self._optimizers):
            self._optimizers.append(weakref.ref(inner))

    def close(self) -> None:
        """Stops observing and removes the hooks; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stop(self.model)

    def __enter__(self) -> QKClip:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def trainer_callback(self) -> Any:
        """Returns a callback for `transformers.Trainer(callbacks=[…])` that clips after each optimizer step."""
        from regard.health.watching.callbacks import clip_trainer_callback

        return clip_trainer_callback(self)

    def lightning_callback(self) -> Any:
        """Returns a callback for `lightning.Trainer(callbacks=[…])` that clips after each optimizer step."""
        from regard.health.watching.callbacks import clip_lightning_callback

        return clip_lightning_callback(self)

    def _find_master(self, parameter: Tensor) -> Tensor | None:
        if self.masters is not None:
            return self.masters(parameter)
        if (found := _main_param(parameter)) is not None:
            return found
        optimizers = [one for known in self._optimizers if (one := known()) is not None]
        for optimizer in optimizers:
            for name, value in optimizer.state.get(parameter, {}).items():
                if "master" in str(name) and isinstance(value, Tensor):
                    return value
        held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        if optimizers and parameter.dtype in LOW_PRECISION and id(parameter) not in held:
            raise NotFound(
                f"its {str(parameter.dtype).removeprefix('torch.')} weights are not the tensors that the optimizer "
                "steps, which would overwrite them; pass masters= a function from a parameter to its float32 copy"
            )
        return None


def _main_param(parameter: Tensor) -> Tensor | None:
    """Returns Megatron's float32 copy of a parameter."""
    found = getattr(parameter, "main_param", None)
    return found if isinstance(found, Tensor) else None
