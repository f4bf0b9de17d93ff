"""QK-clip: after an optimizer step, shrinks the query and key weights of heads whose logits have grown too large."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.health.qk_clip.clipping import Clip, Clipped, check_arguments, clip_observed
from regard.health.qk_clip.max_logits import observe, stop
from regard.health.qk_clip.training import QKClip
from regard.health.watching.groups import Groups

__all__ = ["Clip", "Clipped", "QKClip", "qk_clip", "stop"]


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
    >>> _ = regard.qk_clip(model)  # starts to observe
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    >>> [(clip.layer, clip.head) for clip in regard.qk_clip(model, threshold=100.0).heads]
    [('', 0)]
    >>> _, stats = model(x, return_stats=("max_logit",))
    >>> f"{stats.max_logit[:, 0].max():.1f}"
    '100.0'

    Call it after every `optimizer.step()`. The logits are those of the training forwards since the last call,
    scale·q·k over the visible keys, before soft cap, bias and temperature. The first call starts to observe
    and clips nothing. It costs one fused pass over q and k per forward and does not wait for the GPU.
    `regard.qk_clip.stop(model)` ends it.

    It observes the forward of `model` itself. What `torch.compile` returned may be given too, or a model of which it
    compiled a part: there an op in the graph writes the largest logit, without a graph break, of attention that calls
    torch's scaled_dot_product_attention or `regard.nn`; a model whose attention is written out runs as written, and a
    warning says so. Call `qk_clip` before the first compiled forward. A call after a step in which no attention was
    seen raises.

    If several query heads share a key head, or one more key is learned (torch's add_bias_kv), the key weights stay and
    the query takes the whole factor τ/m. In multi-head latent attention (DeepSeek V2 and V3, Kimi K2) q and k without
    position take √(τ/m) each, the rotary query τ/m, and the rotary key, which all heads share, stays. Frozen weights
    (`requires_grad` False) stay too, and the other side takes the whole factor. Heads below the threshold keep their
    weights to the bit; so does a head whose logit is not finite. Skipped, with the reason: scores that do not follow
    the weights' size (cosine, additive, a QK-norm module), weights that something else uses too, and weights that are
    computed (weight_norm, LoRA). A stacked layer must hold all queries, then all keys, then all values; do not clip a
    model that normalises q and k inside its forward.

    Args:
        model: holds, at any depth, `regard.nn.MultiheadAttention`, torch's `nn.MultiheadAttention`, attention layers of
            transformers, or others whose queries and keys come from linear layers named as usual, or by `names`.
        threshold: τ, the largest logit a head may have.
        group: the process group whose ranks hold the same weights; None is all of them, if there are any. All call it
            after the same steps; each may have run other layers, in another order, or none. A layer that no rank had
            run before may be clipped one call later.
        names: the attributes of an attention module that hold its query and key layers, where they are not named as
            usual: ("to_queries", "to_keys").

    Returns:
        A `Clipped`: `.heads`, `.max_logit` and `.skipped` with the reasons.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: `threshold` is not a positive, finite number, no attention was seen since the last call, or the
            model is `nn.DataParallel` over several devices.
    """
    check_arguments(model, threshold)
    observer = observe(model)
    observer.read_modules()
    observer.read_taps(model)
    complaint = observer.complain(model)
    result = clip_observed(model, observer, threshold, Groups((group,)), names=names)
    if complaint is not None and not result._found:
        raise ValueError(f"qk_clip: {complaint}")
    return result


qk_clip.stop = stop  # type: ignore[attr-defined]
