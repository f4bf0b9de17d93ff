"""What the modules inside an attention layer computed: outputs of its projections and norms, in one forward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.health.probe.probe import Key

if TYPE_CHECKING:
    from regard.health.probe.trial import Trial

EVEN = 2e-3  # relative spread of a ratio of lengths that is the same for all tokens


@dataclass
class Inside:
    """One layer: (name below the attention module, input, output) of every leaf that ran, in order."""

    runs: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def outputs(self, width: int) -> list[tuple[str, Tensor]]:
        """(name, output as [B, N, blocks, width]) of linear projections that hold vectors of this width."""
        fits = [(name, y) for name, _, y in self.runs if y.ndim == 3 and y.shape[-1] % width == 0]
        return [(name, y.unflatten(-1, (-1, width))) for name, y in fits]


def capture_inside(trial: Trial) -> dict[Key, Inside]:
    """What ran inside each captured layer on the trial's tokens; computed once for each trial."""
    kept = trial.__dict__.get("_inside")
    if kept is None:
        kept = trial.__dict__["_inside"] = _capture_inside(trial)
    return kept


def _capture_inside(trial: Trial) -> dict[Key, Inside]:
    found = {key: Inside() for key in trial.captured[1]}
    by_module = {id(one.call.module): key for key, one in trial.captured[1].items() if key[1] == 0}
    with ExitStack() as hooks:
        for key, one in trial.captured[1].items():
            if by_module.get(id(one.call.module)) != key:
                continue
            for name, leaf in one.call.module.named_modules():
                if name and not leaf._modules:
                    hook = leaf.register_forward_hook(_keep(found[key], name))
                    hooks.callback(hook.remove)
        trial.probe.run(trial.sample)
    return found


def _keep(inside: Inside, name: str):
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            inside.runs.append((name, inputs[0].detach(), output.detach()))

    return hook


def length_ratio(x: Tensor, inside: Inside) -> tuple[str, float] | None:
    """(projection, ‖x‖ / ‖its output‖) for x [B, H, N, D], the same for every head and token; None where it is not.

    A rotation keeps lengths, so that the ratio is the factor by which something multiplied the projection's vectors.
    """
    length = x.double().norm(dim=-1).transpose(1, 2)  # [B, N, H]
    for name, blocks in inside.outputs(x.shape[-1]):
        if blocks.shape[:2] != length.shape[:2]:
            continue
        other = blocks.double().norm(dim=-1)  # [B, N, J]
        if not bool((other > 0).all()):
            continue
        ratio = (length[..., :, None] / other[..., None, :]).flatten(0, 1)  # [B·N, H, J]
        mean = ratio.mean(0)
        even = (ratio - mean).abs().amax(0) < EVEN * mean  # [H, J]
        if bool(even.any(-1).all()) and ratio.shape[0] >= 4:
            chosen = torch.stack([mean[h][even[h]][0] for h in range(len(mean))])
            if float(chosen.max() / chosen.min()) < 1 + EVEN:
                return name, float(chosen.mean())
    return None
