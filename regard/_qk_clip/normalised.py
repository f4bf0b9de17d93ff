"""Are queries and keys normalised inside a forward? Then logits do not follow the weights; clipping would not end.

What a projection gives differs in length from token to token; rotations, scales and biases leave that so, and only a
norm takes it away:  sd log|q| < ½ · sd log|x·W_q|,  over the tokens of one forward.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor, nn

from regard.nn.projections import NotFound, Projection, projections, sources

HALF = 0.5
ENOUGH = 0.02  # lengths that differ by less than 2 % tell nothing


class Outputs:
    """How much the lengths of projected queries and keys vary, layer by layer, in the forward that this thread runs."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.found: dict[tuple[str, int], Tensor] = {}  # layer, 0 for q and 1 for k -> [heads + 1]
        self._hooks: list = []

    def open(self, model: nn.Module, shapes: dict[str, tuple[int, int]]) -> None:
        """Look at the layers of that name, with so many query heads of that width, from now on."""
        self.close()
        modules = dict(model.named_modules()) if shapes else {}
        for name, shape in shapes.items():
            layers = sources(modules[name]) if name in modules else None  # it may have been taken out since
            if layers is None:
                continue
            try:
                made = projections(modules[name], *shape)
            except NotFound:
                continue
            for side, (layer, one) in enumerate(zip(layers, made, strict=True)):
                self._hooks.append(layer.register_forward_hook(partial(self._look, (name, side), one)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.found.clear()

    def _look(self, key: tuple[str, int], one: Projection, layer, inputs, output) -> None:
        own = self.thread == threading.get_ident() and isinstance(output, Tensor)
        if own and output.shape[-1] >= one.start + one.width:
            heads = output.detach().narrow(-1, one.start, one.width).unflatten(-1, (one.heads, -1))
            self.found[key] = variation(heads.flatten(0, -3).transpose(0, 1))

    def normalised(self, name: str, q: Tensor, k: Tensor) -> Tensor:
        """[H], 1.0 for heads whose queries or keys came normalised: q [B, H, M, D], k [B, G, N, D]."""
        answer = q.new_zeros(q.shape[1], dtype=torch.float32)
        for side, x in enumerate((q, k)):
            before = self.found.pop((name, side), None)
            if before is not None and len(before) == x.shape[1] + 1:
                less = (variation(x.transpose(0, 1).flatten(1, 2)) < HALF * before) & (before > ENOUGH)
                less = less[:-1] | less[-1]
                answer = torch.maximum(answer, less.float().repeat_interleave(q.shape[1] // x.shape[1]))
        return answer


@torch.no_grad()
def variation(x: Tensor) -> Tensor:
    """sd log|x| over the tokens of x [heads, tokens, D]: [heads + 1], the last of all together; NaN for one token."""
    lengths = x.float().norm(dim=-1)
    lengths = torch.cat([lengths, lengths.square().sum(0, keepdim=True).sqrt()])
    return (
        lengths.clamp_min(torch.finfo(torch.float32).tiny).log().std(-1)
        if x.shape[1] > 1
        else lengths.sum(-1) * torch.nan
    )
