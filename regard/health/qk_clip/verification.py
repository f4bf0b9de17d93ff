"""Do the logits of a head follow the weights that `projections` names? What they give is held against what arrives.

What a projection gives differs in length from token to token. Rotations, scales and biases leave that so, and only a
norm takes it away:  sd log|q| < ½ · sd log|x·W_q|,  over the tokens of one forward. Clipping would not end then. And
head by head the two lengths go together,

    log|q_h,t| − log|x_t·W_h| = a_h + b_t,

but where the rows of a stack are another head's, as where q, k and v stand together in each head: clipping would shrink
what it was not asked to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from regard.nn.projections import NotFound, Projection, projections, query_key_layers

HALF = 0.5
ENOUGH = 0.02  # lengths that differ by less than 2 % tell nothing
OTHER = 0.8  # of what heads vary by: another head's rows lie 1 to 1.4 apart, gains, biases and dropout up to 0.7


class Outputs:
    """How long the queries and keys are that their layers give, in the forward that this thread runs."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.modules: dict[str, weakref.ref[nn.Module]] = {}  # a forward that Ctrl-C ended must not keep its model
        self.found: dict[tuple[str, int], Tensor] = {}  # layer, 0 for q and 1 for k -> lengths [heads, tokens]
        self.whole: dict[tuple[str, int], Tensor] = {}  # outputs of layers whose heads are not known yet
        self._hooks: list = []

    def open(self, model: nn.Module, shapes: dict[str, tuple[int, int]]) -> None:
        """Look at the layers of every attention from now on; `shapes`: their query heads and width, where known."""
        self.close()
        for name, module in model.named_modules():
            layers = query_key_layers(module) if name in shapes or module._modules else None
            made: Sequence[Projection | None] = (None, None)
            if layers and name in shapes:
                made = _projections(module, *shapes[name]) or ()
            for side, (layer, one) in enumerate(zip(layers or (), made, strict=False)):
                self.modules[name] = weakref.ref(module)
                self._hooks.append(layer.register_forward_hook(partial(self._look, (name, side), one)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.found.clear()
        self.whole.clear()
        self.modules.clear()

    def _look(self, key: tuple[str, int], one: Projection | None, layer, inputs, output) -> None:
        if self.thread != threading.get_ident() or not isinstance(output, Tensor):
            return
        if one is None:
            self.whole[key] = output.detach()
        elif output.shape[-1] >= one.start + one.width:
            self.found[key] = _lengths(output, one)  # now: the forward may go on in place

    def judged(self, name: str, q: Tensor, k: Tensor) -> Tensor:
        """[2, H]: 1.0 for heads whose queries or keys came normalised, and for those that came from elsewhere.

        q [B, H, M, D], k [B, G, N, D].
        """
        answer = q.new_zeros(2, q.shape[1], dtype=torch.float32)
        module = self.modules[name]() if name in self.modules else None
        made = None if module is None else _projections(module, q.shape[1], q.shape[-1])
        for side, (x, one) in enumerate(zip((q, k), made or (), strict=bool(made))):
            given, whole = self.found.pop((name, side), None), self.whole.pop((name, side), None)
            if whole is not None and whole.shape[-1] >= one.start + one.width:
                given = _lengths(whole, one)
            if given is None or len(given) != x.shape[1]:
                continue
            found = torch.stack([_normalised(given, x), _elsewhere(given, x)])
            answer = torch.maximum(answer, found.float().repeat_interleave(q.shape[1] // x.shape[1], 1))
        return answer


def _projections(module: nn.Module, heads: int, width: int) -> tuple[Projection, Projection] | None:
    try:
        return projections(module, heads, width)
    except NotFound:
        return None


@torch.no_grad()
def _lengths(output: Tensor, one: Projection) -> Tensor:
    """[heads, tokens], of all that a layer gave, [..., outputs]."""
    heads = output.detach().narrow(-1, one.start, one.width).unflatten(-1, (one.heads, -1))
    return heads.float().norm(dim=-1).flatten(0, -2).mT


def _normalised(given: Tensor, x: Tensor) -> Tensor:
    """[heads]: do lengths vary less than those that were given? [heads, tokens] against [B, heads, L, D]."""
    before, now = variation(given), variation(x.float().norm(dim=-1).transpose(0, 1).flatten(1))
    less = (now < HALF * before) & (before > ENOUGH)
    return less[:-1] | less[-1]


@torch.no_grad()
def _elsewhere(given: Tensor, x: Tensor) -> Tensor:
    """[heads], all alike: do they vary otherwise, in whichever order the tokens stand?"""
    batch, heads, length, _ = x.shape
    if given.shape[1] != batch * length or given.shape[1] < 2:
        return torch.zeros(heads, dtype=torch.bool, device=x.device)
    before, now = _own(_log(given)), _own(_log(x.float().norm(dim=-1)).transpose(0, 1))  # now [heads, B, L]
    pairs = [(now.flatten(1), before), (now.mT.flatten(1), before)]
    if heads > 2:  # windows of an image: one head finds who is who, the others have to agree
        pairs.append((_sorted(now.flatten(1)), _sorted(before)))
    apart = torch.stack([_spread(after - given) for after, given in pairs]).amin()
    return ((apart > OTHER * _spread(before)) & (apart > ENOUGH)).expand(heads)


def _spread(logs: Tensor) -> Tensor:
    """The sd over tokens of [heads, tokens], of all heads together."""
    return logs.var(-1).mean().sqrt()


def _own(logs: Tensor) -> Tensor:
    """Without what a token, or its position, does to all heads; of one head the same."""
    return logs - logs.mean(0, keepdim=True) if len(logs) > 1 else logs


def _sorted(logs: Tensor) -> Tensor:
    """[heads, tokens] in the order of the first head."""
    return logs[:, logs[0].argsort()]


@torch.no_grad()
def variation(lengths: Tensor) -> Tensor:
    """sd log|x| over the tokens, [heads, tokens]: [heads + 1], the last of all together; NaN for one token."""
    lengths = torch.cat([lengths, lengths.square().sum(0, keepdim=True).sqrt()])
    return _log(lengths).std(-1) if lengths.shape[1] > 1 else lengths.sum(-1) * torch.nan


def _log(lengths: Tensor) -> Tensor:
    return lengths.clamp_min(torch.finfo(torch.float32).tiny).log()
