"""QK-clip: after an optimizer step, shrinks the query and key weights of heads whose logits have grown too large."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.health.capture.interception import as_written, refuse_data_parallel
from regard.health.qk_clip.max_logits import OBSERVERS, MaxLogits, remove_copied_hooks
from regard.health.qk_clip.weights import holders_of, select_projections, tensors_to_shrink
from regard.nn.projections import NotFound, bounded_scores_reason, projections

__all__ = ["Clip", "Clipped", "qk_clip", "stop"]


class Clip(NamedTuple):
    """One head that was clipped: its largest logit, and the factor that brought it to the threshold."""

    layer: str
    head: int
    max_logit: float
    factor: float


class Clipped:
    """What a call of `qk_clip` did, read from the device only on request.

    `heads`: the heads that were clipped; `max_logit`: layer → the largest logit of each head; `skipped`: layer → why
    its weights are not clipped.
    """

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self._found: dict[str, tuple[Tensor, Tensor | None]] = {}  # layer -> largest logits, factors

    @property
    def max_logit(self) -> dict[str, list[float]]:
        return {name: largest.tolist() for name, (largest, _) in self._found.items()}

    @property
    def heads(self) -> list[Clip]:
        found = []
        for name, (largest, factors) in self._found.items():
            for head, factor in enumerate([] if factors is None else factors.tolist()):
                if factor < 1.0:
                    found.append(Clip(name, head, largest[head].item(), factor))
        return found

    def __repr__(self) -> str:
        return f"Clipped(heads={self.heads}, skipped={self.skipped})"


def qk_clip(
    model: nn.Module, threshold: float = 100.0, *, group: Any = None, names: tuple[str, str] | None = None
) -> Clipped:
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

    Call it after every `optimizer.step()`. The logits are those of the training forwards since the last call,
    scale·q·k over the visible keys, before soft cap, bias and temperature. The first call starts to observe; for
    `regard.nn` it already knows the last forward, in other models, and where forwards are checkpointed, it clips from
    the next step on. It costs one fused pass over q and k per forward and does not wait for the GPU.
    `regard.qk_clip.stop(model)` ends it.

    It observes the forward of `model` itself. What `torch.compile` returned may be given too: its training forwards
    then run uncompiled, and layers have the names of the model as written. If the model given was compiled and the
    compiled one runs, or only a part of it is called, the last forward of each `regard.nn` module counts; other
    attentions cannot be seen then, and a call after a step in which none was seen raises.

    If several query heads share a key head, or one more key is learned (torch's add_bias_kv), the key weights stay and
    the query takes the whole factor τ/m. Frozen weights (`requires_grad` False) stay too, and the other side takes the
    whole factor. Heads below the threshold keep their weights to the bit; so does a head whose logit is not finite.
    Skipped, with the reason: scores that do not follow the weights' size (cosine, additive, a QK-norm module), weights
    that something else uses too, and weights that are computed (weight_norm, LoRA). A stacked layer must hold all
    queries, then all keys, then all values; do not clip a model that normalises q and k inside its forward.

    Args:
        model: holds, at any depth, `regard.nn.MultiheadAttention`, torch's `nn.MultiheadAttention`, attention layers of
            transformers, or others whose queries and keys come from linear layers named as usual, or by `names`.
        threshold: τ, the largest logit a head may have.
        group: the process group whose ranks hold the same weights; None is all of them, if there are any. All call it
            after the same steps; each may have run other layers, in another order, or none. A layer that no rank had
            run before may be clipped one call later.
        names: the attributes of an attention module that hold its query and key layers, such as ("wq", "wk"), where
            they are not named as usual.

    Returns:
        A `Clipped`: `.heads`, `.max_logit` and `.skipped` with the reasons.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: `threshold` is not a positive, finite number, no attention was seen since the last call, or the
            model is `nn.DataParallel` over several devices.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not (is_number and 0 < threshold < math.inf):
        raise ValueError(f"threshold must be a positive, finite number, got {threshold!r}")
    refuse_data_parallel(model)
    observer = OBSERVERS.get(model)
    if observer is None:
        observer = OBSERVERS[model] = MaxLogits(model)
    observer.read_modules()
    modules, holders = dict(as_written(model).named_modules()), holders_of(model)
    result = Clipped()
    for name, largest in observer.take(model, group).items():
        if name not in modules:  # it was removed from the model
            continue
        factors = None
        try:
            chosen = select_projections(*projections(modules[name], *observer.shapes[name], names))
            tensors = tensors_to_shrink(chosen, holders, modules[name])
        except NotFound as reason:
            result.skipped[name] = str(reason)
        else:
            factors = torch.where(largest.isfinite() & (largest > threshold), threshold / largest, 1.0)
            for tensor in tensors:
                tensor.shrink(factors if len(chosen) == 1 else factors.sqrt())
        result._found[name] = largest, factors
    result.skipped |= observer.unseen
    observer.unseen.clear()
    for name in (observer.regard_modules.keys() & modules.keys()) - result._found.keys():
        if (why := bounded_scores_reason(modules[name])) is not None:
            result.skipped[name] = why
    observer.mark_weights(model)
    return result


def stop(model: nn.Module) -> None:
    """Stops observing `model` for `qk_clip`; the model is as it was."""
    observer = OBSERVERS.pop(model, None)
    if observer is not None:
        observer.close()
    remove_copied_hooks(model)


qk_clip.stop = stop  # type: ignore[attr-defined]
