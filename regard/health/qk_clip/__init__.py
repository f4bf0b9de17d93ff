"""QK-clip: after an optimizer step, shrink the query and key weights of heads whose logits have grown too large."""

from __future__ import annotations

import math
import numbers

import torch
from torch import nn

from regard.health.capture.interception import as_copied, as_written
from regard.health.qk_clip.result import Clip, Clipped
from regard.health.qk_clip.watch import WATCHES, Watch, unhook
from regard.health.qk_clip.weights import parts, places, shrinking
from regard.nn.projections import NotFound, bounded_scores_reason, projections

__all__ = ["Clip", "Clipped", "qk_clip", "stop"]


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
    to watch; for `regard.nn` it already knows the last forward, in other models, and where forwards are checkpointed,
    it clips from the next step on. Watching costs one fused pass over q and k per forward; nothing waits for the GPU.
    `regard.qk_clip.stop(model)` ends it.

    It watches the forward of `model` itself. What `torch.compile` returned may be given too: its training forwards then
    run uncompiled, and layers have the names of the model as written. Where the model given was compiled and the
    compiled one runs, or only a part of it is called, the last forward of each `regard.nn` module counts; other
    attentions cannot be seen then, and a call after an optimizer's step in which none was seen raises. Of
    `nn.DataParallel` over several devices it watches the module inside, in whichever copy of it a thread runs.

    Where several query heads share a key head, its weights cannot shrink for one of them: the query takes the whole
    factor τ/m there, and where one key more is learned beside them (torch's add_bias_kv). So does the other side of
    frozen weights (`requires_grad` False), which stay as they are. Heads below the threshold keep their weights to the
    bit. A head whose logit is not finite is left alone. Scores that do not follow the weights' size (cosine, QK-norm,
    additive) are skipped, with the reason; so are weights that something else uses too and weights that are computed
    (weight_norm, LoRA). Queries and keys of one layer may share theirs.
    Where normalising is written inside a forward, and no name tells of it, the lengths of queries and keys do: they
    no longer vary with the tokens as the projections' outputs do. They tell as well where a stack holds its rows
    otherwise than all queries, then all keys (q, k and v of each head side by side): such a layer is skipped.

    Args:
        model: holds, at any depth, `regard.nn.MultiheadAttention`, torch's `nn.MultiheadAttention`, attention layers of
            transformers, or others whose queries and keys come from linear layers named as usual.
        threshold: τ, the largest logit a head may have.
        group: the process group whose ranks hold the same weights; None is all of them, if there are any. All call it
            after the same steps; each may have run other layers, in another order, or none. A layer that no rank had
            run before may be clipped one call later, and that none saw any attention is told at the next call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not (number and 0 < threshold < math.inf):
        raise ValueError(f"threshold must be a positive, finite number, got {threshold!r}")
    model = as_copied(model)
    watch = WATCHES.get(model)
    if watch is None:
        watch = WATCHES[model] = Watch(model)
    watch.read_modules()
    modules, held = dict(as_written(model).named_modules()), places(model)
    result = Clipped()
    for name, (tops, normalised, elsewhere) in watch.take(model, group).items():
        if name not in modules:  # it was taken out of the model
            continue
        factors = None
        try:
            shrunk = shrinking(*projections(modules[name], *watch.shapes[name]))
            tensors = parts(shrunk, held, modules[name])
        except NotFound as reason:
            result._skipped[name] = str(reason)
        else:
            factors = torch.where(tops.isfinite() & (tops > threshold), threshold / tops, 1.0)
            factors = torch.where((normalised > 0) | (elsewhere > 0), 1.0, factors)
            result._left[name] = normalised, elsewhere
            for tensor in tensors:
                tensor.shrink(factors if len(shrunk) == 1 else factors.sqrt())
        result._found[name] = tops, factors
    result._skipped |= watch.unseen
    watch.unseen.clear()
    for name in (watch.ours.keys() & modules.keys()) - result._found.keys():
        why = bounded_scores_reason(modules[name])
        if why is not None:
            result._skipped[name] = why
    watch.mark(model)
    return result


def stop(model: nn.Module) -> None:
    """Stop watching `model` for `qk_clip`; the model is as it was."""
    model = as_copied(model)
    watch = WATCHES.pop(model, None)
    if watch is not None:
        watch.close()
    unhook(model)


qk_clip.stop = stop  # type: ignore[attr-defined]
