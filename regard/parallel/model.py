"""A model on pieces of a sequence: inputs are cut on the way in, attention spans the ranks, outputs are whole again.

    with regard.using(model, context_parallel=mesh):
        logits = model(input_ids=ids).logits        # every rank passes the whole ids, and computes its piece

Embeddings, norms and projections work position by position, so that only attention needs to know. Position numbers are
those of the whole sequence. What a decoder may see is its causal order (and window), which `regard.parallel.attention`
is told in place of the mask that the model makes for its piece.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.health.call import Call
from regard.parallel._attention import attention
from regard.parallel.layout import shard, unshard

CUT = ("input_ids", "inputs_embeds", "token_type_ids")  # along their dimension 1
WHOLE = ("logits", "last_hidden_state")


@dataclass
class PieceCall(Call):
    """A caught call whose q, k and v are this rank's pieces."""

    group: dist.ProcessGroup | None = None
    key_lengths: Tensor | None = None

    @classmethod
    def of(cls, call: Call, group, key_lengths: Tensor | None) -> PieceCall:
        return cls(**{field.name: getattr(call, field.name) for field in fields(Call)}, group=group,
                   key_lengths=key_lengths)  # fmt: skip

    def run(self) -> Tensor:
        causal = bool(getattr(self.module, "is_causal", self.causal))
        window = getattr(self.module, "sliding_window", None)
        options = dict(self.options)
        if window is not None:
            options["window"] = (int(window) - 1, 0 if causal else int(window) - 1)
        return attention(self.q, self.k, self.v, dropout_p=self.dropout, is_causal=causal, enable_gqa=True,
                         group=self.group, key_lengths=self.key_lengths, **options)  # fmt: skip


class Pieces:
    """The hooks that cut a model's inputs and join its outputs, while they last."""

    def __init__(self, model: nn.Module, mesh):
        self.group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"context_parallel must be a DeviceMesh or a process group, got {type(mesh).__name__}")
        self.key_lengths: Tensor | None = None
        self.hooks = [
            model.register_forward_pre_hook(self._cut, with_kwargs=True),
            model.register_forward_hook(self._join),
        ]

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def call(self, call: Call) -> Call:
        if "position_bias" in call.options or (
            call.mask is not None and call.mask.is_floating_point() and _biased(call)
        ):
            raise ValueError(
                "context_parallel: a bias between positions is made for the rank's piece alone, not for all"
            )
        return PieceCall.of(call, self.group, self.key_lengths)

    def _cut(self, model: nn.Module, args: tuple, kwargs: dict):
        if kwargs.get("labels") is not None:
            raise ValueError("context_parallel: labels stay outside; compute the loss from the logits, which are whole")
        kwargs = dict(kwargs)
        if args and isinstance(args[0], Tensor):
            name = "inputs_embeds" if args[0].is_floating_point() else "input_ids"
            args, kwargs = args[1:], {name: args[0], **kwargs}
        given = next((kwargs[name] for name in CUT if kwargs.get(name) is not None), None)
        if given is None:
            raise ValueError(f"context_parallel needs {' or '.join(CUT[:2])} of the whole sequence")
        length = given.shape[1]
        self.key_lengths = _lengths(kwargs.pop("attention_mask", None), length)
        positions = kwargs.get("position_ids")
        positions = torch.arange(length, device=given.device)[None] if positions is None else positions
        kwargs["position_ids"] = shard(positions, 1, self.group)
        for name in CUT:
            if kwargs.get(name) is not None:
                kwargs[name] = shard(kwargs[name], 1, self.group)
        if getattr(getattr(model, "config", None), "use_cache", False):
            kwargs["use_cache"] = False
        return args, kwargs

    def _join(self, model: nn.Module, args: tuple, output):
        if isinstance(output, Tensor):
            return unshard(output, 1, self.group)
        for name in WHOLE:
            if isinstance(getattr(output, name, None), Tensor):
                setattr(output, name, unshard(getattr(output, name), 1, self.group))
        return output


def _lengths(mask: Tensor | None, length: int) -> Tensor | None:
    """A padding mask [B, L] as numbers of visible keys; None if nothing is padded."""
    if mask is None or bool((mask != 0).all()):
        return None
    shown = mask != 0
    lengths = shown.sum(-1)
    if mask.ndim != 2 or not torch.equal(shown, torch.arange(length, device=mask.device) < lengths[:, None]):
        raise ValueError("context_parallel: attention_mask must be (batch, length) with the padding at the end")
    return lengths


def _biased(call: Call) -> bool:
    """Does an additive mask do more than hide?"""
    return bool(((call.mask != 0) & (call.mask > torch.finfo(call.mask.dtype).min / 2)).any())
