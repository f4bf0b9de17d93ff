"""Runs a model on shards of a sequence: inputs are sharded, attention spans the ranks, outputs are gathered.

    with regard.using(model, context_parallel=mesh):
        logits = model(input_ids=ids).logits        # every rank passes the whole ids, and computes its shard

Embeddings, norms and projections work position by position, so that only attention needs to know. Position numbers are
those of the whole sequence. `regard.parallel.attention` gets the decoder's causal order (and window) in place of the
mask that the model makes for its shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.health.capture.call import Call
from regard.health.distributed import checks
from regard.health.distributed.rounds import checksum_batch
from regard.parallel.group import RankGroup
from regard.parallel.handshake import SKETCHED, compare_calls, sketch, sketches_match
from regard.parallel.layout import shard, unshard
from regard.parallel.sharded import attention

SHARDED = ("input_ids", "inputs_embeds", "token_type_ids")  # along their dimension 1
GATHERED = dict(logits=3, last_hidden_state=3, start_logits=2, end_logits=2)  # outputs, and their dimensions
HINT = dict(pooler_output="; make the model with add_pooling_layer=False")


def attend_over_ranks(call: Call, group: dist.ProcessGroup | None, key_lengths: Tensor | None) -> Tensor:
    """Returns this rank's shard of the output of `regard.parallel.attention`, for shards of q, k and v."""
    causal = bool(getattr(call.module, "is_causal", call.causal))
    window = call.model_options.get("sliding_window", getattr(call.module, "sliding_window", None))
    options = dict(call.options)
    if window is not None:
        options["window"] = (int(window) - 1, 0 if causal else int(window) - 1)
    out = attention(call.q, call.k, call.v, dropout_p=call.dropout, is_causal=causal, enable_gqa=True, group=group,
                    key_lengths=key_lengths, **options)  # fmt: skip
    return cast(Tensor, out)  # without statistics


class ModelShards:
    """Hooks that shard a model's inputs and gather its outputs until `stop`."""

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        self.group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"context_parallel must be a DeviceMesh or a process group, got {type(mesh).__name__}")
        self.key_lengths: Tensor | None = None
        self.calls = self.length = self.total = 0  # attention calls of this forward; positions of this rank, and of all
        self.wants_gradients = self.running = False  # of this forward
        self.model = model
        checks.check_model(model)
        self.hooks = [
            model.register_forward_pre_hook(self._shard_inputs, with_kwargs=True),
            model.register_forward_hook(self._gather_outputs),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def shard_call(self, call: Call) -> Call:
        """Returns a captured call as one over the ranks, or raises for what would come out wrong."""
        if not self.running and torch._C._current_graph_task_id() == -1:  # nor computed again in backward
            raise ValueError(
                "context_parallel: call the model itself; its parts, or its forward, would take the whole for a shard"
            )
        if "position_bias" in call.options or checks.has_bias(call):
            raise ValueError(
                "context_parallel: a bias between positions is made for the rank's shard alone, not for all"
            )
        checks.check_window(call, self.model, self.total)
        if self.wants_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "context_parallel: reentrant checkpointing computes attention again in backward, which may run where "
                "it is not intercepted; pass use_reentrant=False"
            )
        self.calls += 1
        return call.changed(compute=partial(attend_over_ranks, group=self.group, key_lengths=self.key_lengths))

    def _shard_inputs(self, model: nn.Module, args: tuple, kwargs: dict):
        """Returns this rank's shard of the inputs, after all ranks have compared the whole."""
        line = RankGroup.from_torch(self.group)
        found: Any = None
        alike: dict[str, object] = {}
        marks: list[int] = []
        failure: Exception | None = None
        try:
            found, positions = self._check_inputs(model, *checks.name_arguments(model, args, kwargs))
            whole = {name: found[1][name] for name in SHARDED if found[1].get(name) is not None}
            for name, x in (*whole.items(), ("position_ids", positions)):
                alike[f"the model with {name} of different shapes"] = tuple(x.shape)
                if not x.is_floating_point():
                    alike[f"the model with different {name}"] = checksum_batch(x)
            marks = sketch(whole["inputs_embeds"].flatten()[:SKETCHED]) if "inputs_embeds" in whole else []
        except Exception as error:
            failure = error
        gathered = compare_calls(line, "a sharded model", marks, alike, failure)
        for rank, theirs in enumerate(gathered):
            if marks and not sketches_match(gathered[0], theirs):
                raise ValueError(f"rank {rank} and rank 0 call the model with different inputs_embeds")
        args, kwargs = found
        kwargs["position_ids"] = shard(positions, 1, self.group)
        self.calls, self.length, self.running = 0, kwargs["position_ids"].shape[1], True
        for name in whole:
            kwargs[name] = shard(kwargs[name], 1, self.group)
        if getattr(getattr(model, "config", None), "use_cache", False):
            kwargs["use_cache"] = False
        return args, kwargs

    def _check_inputs(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple[tuple, dict], Tensor]:
        """Returns ((args, kwargs) without attention_mask, the positions of the whole), or raises ValueError."""
        checks.check_inputs(kwargs, SHARDED)
        given = next((kwargs[name] for name in SHARDED if kwargs.get(name) is not None), None)
        if given is None:
            raise ValueError(f"context_parallel needs {' or '.join(SHARDED[:2])} of the whole sequence")
        length = self.total = given.shape[1]
        mask, positions = kwargs.pop("attention_mask", None), kwargs.get("position_ids")
        self.key_lengths = checks.key_lengths_of(mask, length)
        if positions is None and (why := checks.explain_own_positions(model)):
            raise ValueError(f"context_parallel: pass position_ids of the whole sequence, since {why}")
        positions = torch.arange(length, device=given.device)[None] if positions is None else positions
        self.wants_gradients = torch.is_grad_enabled() and model.training
        checks.check_positions(model, positions, length, dist.get_world_size(self.group), mask is not None)
        return (args, kwargs), positions

    def _gather_outputs(self, model: nn.Module, args: tuple, output):
        layers = checks.count_layers(model)
        if self.calls < max(1, layers):
            raise RuntimeError(
                f"context_parallel: {max(1, layers)} layers, but {self.calls} attention calls were intercepted; "
                "the others saw this rank's shard alone (attention computed by hand, or layers of another kind)"
            )
        if isinstance(output, Tensor):
            return self._gather("the output", output, max(3, output.ndim))
        if isinstance(output, (tuple, list)) or not hasattr(output, "__dict__"):
            raise RuntimeError(
                f"context_parallel does not know the parts of a {type(output).__name__}; use return_dict=True"
            )
        parts = dict(output.items() if hasattr(output, "items") else vars(output))
        for name, part in parts.items():
            if name == "hidden_states" and isinstance(part, tuple):
                setattr(output, name, tuple(self._gather(name, x, 3) for x in part))
            elif isinstance(part, (Tensor, tuple, list)) and name not in GATHERED:
                raise RuntimeError(
                    f"context_parallel: {name} is of this rank's shard alone and cannot be gathered{HINT.get(name, '')}"
                )
            elif isinstance(part, Tensor):
                setattr(output, name, self._gather(name, part, GATHERED[name]))
        return output

    def _leave(self, model: nn.Module, args: tuple, output) -> None:
        """Mark the end of the model's forward, also after an error."""
        self.running = False

    def _gather(self, name: str, x: Tensor, dims: int) -> Tensor:
        if x.ndim != dims or x.shape[1] != self.length:
            raise RuntimeError(
                f"context_parallel: {name} of shape {tuple(x.shape)} does not have one row per position "
                f"(this rank has {self.length}), so that it cannot be gathered"
            )
        return unshard(x, 1, self.group)
