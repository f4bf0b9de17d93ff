"""A model on pieces of a sequence: inputs are cut on the way in, attention spans the ranks, outputs are whole again.

    with regard.using(model, context_parallel=mesh):
        logits = model(input_ids=ids).logits        # every rank passes the whole ids, and computes its piece

Embeddings, norms and projections work position by position, so that only attention needs to know. Position numbers are
those of the whole sequence. What a decoder may see is its causal order (and window), which `regard.parallel.attention`
is told in place of the mask that the model makes for its piece.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.health.capture.call import Call
from regard.health.distributed import checks as fits
from regard.parallel.group import RankGroup
from regard.parallel.handshake import SKETCHED, compare_calls, sketch, sketches_match
from regard.parallel.layout import shard, unshard
from regard.parallel.sharded import attention

CUT = ("input_ids", "inputs_embeds", "token_type_ids")  # along their dimension 1
WHOLE = dict(logits=3, last_hidden_state=3, start_logits=2, end_logits=2)  # what is joined, and its dimensions
HINT = dict(pooler_output="; make the model with add_pooling_layer=False")


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
        window = self.told.get("sliding_window", getattr(self.module, "sliding_window", None))
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
        self.seen = self.length = self.total = 0  # attention calls of this forward; positions of this rank, and of all
        self.pulls = self.inside = False  # are gradients wanted of this forward; does it run?
        self.model = model
        fits.check_model(model)
        self.hooks = [
            model.register_forward_pre_hook(self._cut, with_kwargs=True),
            model.register_forward_hook(self._join),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def call(self, call: Call) -> Call:
        if not self.inside and torch._C._current_graph_task_id() == -1:  # nor computed again in backward
            raise ValueError(
                "context_parallel: call the model itself; its parts, or its forward, would take the whole for a piece"
            )
        if "position_bias" in call.options or fits.biased(call):
            raise ValueError(
                "context_parallel: a bias between positions is made for the rank's piece alone, not for all"
            )
        fits.check_window(call, self.model, self.total)
        if self.pulls and not torch.is_grad_enabled():
            raise ValueError(
                "context_parallel: reentrant checkpointing computes attention again in backward, which may run where "
                "nothing leads it here; pass use_reentrant=False"
            )
        self.seen += 1
        return PieceCall.of(call, self.group, self.key_lengths)

    def _cut(self, model: nn.Module, args: tuple, kwargs: dict):
        """This rank's piece of the inputs, once every rank has told that it has the same whole."""
        line = RankGroup.from_torch(self.group)
        found: Any = None
        alike: dict[str, object] = {}
        marks: list[int] = []
        failure: Exception | None = None
        try:
            found, positions = self._checked(model, *fits.named(model, args, kwargs))
            whole = {name: found[1][name] for name in CUT if found[1].get(name) is not None}
            for name, x in (*whole.items(), ("position_ids", positions)):
                alike[f"the model with {name} of different shapes"] = tuple(x.shape)
                if not x.is_floating_point():
                    alike[f"the model with different {name}"] = fits.mark(x)
            marks = sketch(whole["inputs_embeds"].flatten()[:SKETCHED]) if "inputs_embeds" in whole else []
        except Exception as error:
            failure = error
        told = compare_calls(line, "a model in pieces", marks, alike, failure)
        for rank, theirs in enumerate(told):
            if marks and not sketches_match(told[0], theirs):
                raise ValueError(f"rank {rank} and rank 0 call the model with different inputs_embeds")
        args, kwargs = found
        kwargs["position_ids"] = shard(positions, 1, self.group)
        self.seen, self.length, self.inside = 0, kwargs["position_ids"].shape[1], True
        for name in whole:
            kwargs[name] = shard(kwargs[name], 1, self.group)
        if getattr(getattr(model, "config", None), "use_cache", False):
            kwargs["use_cache"] = False
        return args, kwargs

    def _checked(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple[tuple, dict], Tensor]:
        """((args, kwargs) without the attention_mask, the positions of the whole); what cannot be done is raised."""
        fits.check_inputs(kwargs, CUT)
        given = next((kwargs[name] for name in CUT if kwargs.get(name) is not None), None)
        if given is None:
            raise ValueError(f"context_parallel needs {' or '.join(CUT[:2])} of the whole sequence")
        length = self.total = given.shape[1]
        mask, positions = kwargs.pop("attention_mask", None), kwargs.get("position_ids")
        self.key_lengths = fits.lengths(mask, length)
        if positions is None and (why := fits.own_positions(model)):
            raise ValueError(f"context_parallel: pass position_ids of the whole sequence, since {why}")
        positions = torch.arange(length, device=given.device)[None] if positions is None else positions
        self.pulls = torch.is_grad_enabled() and model.training
        fits.check_positions(model, positions, length, dist.get_world_size(self.group), mask is not None)
        return (args, kwargs), positions

    def _join(self, model: nn.Module, args: tuple, output):
        layers = fits.layers(model)
        if self.seen < max(1, layers):
            raise RuntimeError(
                f"context_parallel: {max(1, layers)} layers, but {self.seen} attention calls were led here; "
                "the others saw this rank's piece alone (attention computed by hand, or layers of another kind)"
            )
        if isinstance(output, Tensor):
            return self._whole("the output", output, max(3, output.ndim))
        if isinstance(output, (tuple, list)) or not hasattr(output, "__dict__"):
            raise RuntimeError(
                f"context_parallel cannot tell the parts of a {type(output).__name__}; use return_dict=True"
            )
        parts = dict(output.items() if hasattr(output, "items") else vars(output))
        for name, part in parts.items():
            if name == "hidden_states" and isinstance(part, tuple):
                setattr(output, name, tuple(self._whole(name, x, 3) for x in part))
            elif isinstance(part, (Tensor, tuple, list)) and name not in WHOLE:
                raise RuntimeError(
                    f"context_parallel: {name} is of this rank's piece alone, and cannot be joined{HINT.get(name, '')}"
                )
            elif isinstance(part, Tensor):
                setattr(output, name, self._whole(name, part, WHOLE[name]))
        return output

    def _leave(self, model: nn.Module, args: tuple, output) -> None:
        """Mark the end of the model's forward, also after an error."""
        self.inside = False

    def _whole(self, name: str, x: Tensor, dims: int) -> Tensor:
        if x.ndim != dims or x.shape[1] != self.length:
            raise RuntimeError(
                f"context_parallel: {name} of shape {tuple(x.shape)} does not have one row per position "
                f"(this rank has {self.length}), so that it cannot be joined"
            )
        return unshard(x, 1, self.group)
