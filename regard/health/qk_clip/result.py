"""What a call of `qk_clip` found and did."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Clip(NamedTuple):
    """One head that was clipped: its largest logit, and the factor that brought it to the threshold."""

    layer: str
    head: int
    max_logit: float
    factor: float


class Clipped:
    """What a call of `qk_clip` found, read from the device only when it is asked for.

    `heads`: the heads that were clipped; `max_logit`: layer → the largest logit of each head; `skipped`: layer → why
    its weights, or those of some heads, are not clipped.
    """

    def __init__(self) -> None:
        self._skipped: dict[str, str] = {}
        self._found: dict[str, tuple[Tensor, Tensor | None]] = {}  # layer -> largest logits, factors
        self._left: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> 1 for heads: normalised, from elsewhere

    @property
    def skipped(self) -> dict[str, str]:
        told = dict(self._skipped)
        for name, (normalised, elsewhere) in self._left.items():
            heads = normalised.nonzero().flatten().tolist()
            if elsewhere.any() and len(heads) < len(elsewhere):
                told[name] = (
                    "its queries and keys are not, head by head, what the rows taken for theirs give: these stand "
                    "otherwise (q, k, v side by side in each head?), or more than a rotation changes what they give"
                )
            elif heads:
                which = ", ".join(map(str, heads))
                told[name] = (
                    f"the queries or keys of its heads {which} are normalised: they do not grow with the weights"
                )
        return told

    @property
    def max_logit(self) -> dict[str, list[float]]:
        return {name: tops.tolist() for name, (tops, _) in self._found.items()}

    @property
    def heads(self) -> list[Clip]:
        found = []
        for name, (tops, factors) in self._found.items():
            for head, factor in enumerate([] if factors is None else factors.tolist()):
                if factor < 1.0:
                    found.append(Clip(name, head, tops[head].item(), factor))
        return found

    def __repr__(self) -> str:
        return f"Clipped(heads={self.heads}, skipped={self.skipped})"
