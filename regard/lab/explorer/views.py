"""`Setting` and `Online`: the numbers and figures of the explorer, from the library's public functions.

>>> from regard.lab.explorer.views import Setting
>>> setting = Setting(d_k=64, keys=12, scale="none", temperature=1.0, normalizer="softmax")
>>> setting.numbers()["effective_keys"] < 2.5
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from html import escape

import torch
from torch import Tensor

import regard
from regard.lab.figure import Figure
from regard.scores import resolve_scale

QUERIES = 256
DIMS = [4, 16, 64, 256]
FLOOR = 1e-12  # a logarithmic axis has no 0: smaller values are drawn here, on a labelled line
SCALES = {"1/√d_k": "sqrt", "none": "none", "1/d_k": "inverse"}
OTHERWISE = {"entmax": "entmax(alpha=1.25)"}  # its default would repeat entmax15
MASKS = ("none", "causal", "window of 4", "padding")
NUMBERS = {
    "entropy": "entropy, nats",
    "effective_keys": "effective keys",
    "max_weight": "largest weight",
    "support": "weights above 0",
    "mass": "sum of weights",
    "logit_variance": "variance of the logits",
    "gradient_gain": "gradient gain",
}


def normalizer_choices() -> list[str]:
    """Return the normalisers to choose from, all different maps of scores whose order does not matter."""
    names = (name for name in regard.normalizers.names() if not regard.normalizers.get(name).ordered)
    return [OTHERWISE.get(name, name) for name in names]


@dataclass(frozen=True)
class Setting:
    """One setting of the controls: 256 unit-normal queries, `keys` unit-normal keys; query 0 is the example row."""

    d_k: int = 64
    keys: int = 12
    scale: str = "sqrt"
    temperature: float = 1.0
    normalizer: str = "softmax"
    seed: int = 0

    def draw(self, d_k: int) -> tuple[Tensor, Tensor]:
        """Draw q (1, 1, 256, d) and k (1, 1, keys, d)."""
        generator = torch.Generator().manual_seed(self.seed)
        k = torch.randn(1, 1, self.keys, d_k, generator=generator)
        return torch.randn(1, 1, QUERIES, d_k, generator=generator), k

    def statistics(self, d_k: int | None = None) -> regard.statistics.Statistics:
        """Return all statistics of the 256 rows."""
        q, k = self.draw(self.d_k if d_k is None else d_k)
        options = dict(scale=self.scale, normalizer=self.normalizer, temperature=self.temperature)
        return regard.attention(q, k, k, return_stats=True, **options)[1]

    def scores_at(self, d_k: int) -> Tensor:
        """Return scale · q kᵀ (256, keys), before the temperature."""
        q, k = (x[0, 0] for x in self.draw(d_k))
        return resolve_scale(self.scale, d_k) * q @ k.T

    @cached_property
    def scores(self) -> Tensor:
        """The scores (256, keys)."""
        return self.scores_at(self.d_k)

    @cached_property
    def weights(self) -> Tensor:
        """The weights (256, keys)."""
        return regard.normalize(self.scores, self.normalizer, temperature=self.temperature)

    def numbers(self) -> dict[str, float]:
        """Return the mean of each statistic over the rows."""
        stats = self.statistics()
        return {name: float(stats[name].mean()) for name in NUMBERS}

    def scores_figure(self) -> Figure:
        """Draw the density of all scores."""
        counts, edges = torch.histogram(self.scores.flatten(), 40)
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        density = (counts / counts.sum() / (edges[1] - edges[0])).tolist()
        deviation = float(self.scores.std())
        words = f"Density of the scores: standard deviation {deviation:.2f}, largest {float(self.scores.max()):.1f}."
        return Figure("lines", "score", "density", {"scores": (middles, density)}, alt=words)

    def weights_figure(self) -> Figure:
        """Draw the weights of the first query."""
        row = self.weights[0]
        words = f"Weights of the first query over {self.keys} keys; the largest is {float(row.max()):.3f}."
        names = [str(j) for j in range(self.keys)]
        return Figure("bars", "key", "weight", {"weights": (names, row.tolist())}, alt=words)

    def jacobian_figure(self) -> Figure:
        """Draw the Jacobian of the first row."""
        matrix = regard.jacobian(self.scores[0], self.normalizer, temperature=self.temperature)
        words = (
            f"Jacobian of the first row: trace {float(matrix.trace()):.3g}, largest entry {float(matrix.max()):.3g}."
        )
        return Figure("heat", "score j", "weight i", rows=matrix.tolist(), alt=words)

    def gain_figure(self) -> Figure:
        """Draw quantiles of tr ∂p/∂s against d_k."""
        return against_d_k("gradient gain", [self.statistics(d).gradient_gain for d in DIMS])

    def gradient_figure(self) -> Figure:
        """Draw quantiles of ‖∂L/∂score‖ against d_k, for a unit-normal ∂L/∂weight."""
        upstream = torch.randn(QUERIES, self.keys, generator=torch.Generator().manual_seed(self.seed + 3))
        norms = [
            regard.vjp(self.scores_at(d), upstream, self.normalizer, temperature=self.temperature).norm(dim=-1)
            for d in DIMS
        ]
        return against_d_k("gradient of a row of scores", norms)

    def masked_figure(self, mask: str) -> Figure:
        """Draw the weights of 12 queries over 12 keys of one sequence under a mask."""
        q, k = (torch.randn(12, self.d_k, generator=torch.Generator().manual_seed(self.seed + i)) for i in (1, 2))
        scores = resolve_scale(self.scale, self.d_k) * q @ k.T
        visible = {
            "none": torch.ones(12, 12, dtype=torch.bool),
            "causal": regard.masks.causal(12),
            "window of 4": regard.masks.window(12, left=3, right=0),
            "padding": regard.masks.padding([8], 12).expand(12, 12),
        }[mask]
        w = regard.normalize(scores, self.normalizer, temperature=self.temperature, mask=visible)
        words = f"Weights of 12 queries over 12 keys, mask: {mask}; {int((w == 0).sum())} of 144 are exactly 0."
        return Figure("heat", "key", "query", rows=w.tolist(), alt=words)

    def mechanics_figure(self) -> Figure:
        """Draw entropy S and heat capacity C = Var(E)/T² of the first row as a Boltzmann distribution."""
        z = self.scores[0].double()
        temperatures = [round(0.1 * 1.25**i, 4) for i in range(22)]
        entropies, capacities = [], []
        for t in temperatures:
            w = regard.softmax(z, temperature=t)
            entropies.append(float(regard.statistics.of_scores(z[None] / t).entropy))
            capacities.append(float((w * (z - (w * z).sum()) ** 2).sum()) / t**2)
        peak = temperatures[capacities.index(max(capacities))]
        words = (
            f"Entropy rises with temperature towards ln {self.keys}; the heat capacity is largest at T = {peak:.2g}."
        )
        series = {"entropy S": (temperatures, entropies), "heat capacity C": (temperatures, capacities)}
        return Figure("lines", "temperature T", "nats", series, log_x=True, alt=words)

    def mechanics(self) -> dict[str, float]:
        """Return F, U and S (F = U − T·S) of the first row at the chosen temperature."""
        z, t = self.scores[0].double(), self.temperature
        w = regard.softmax(z, temperature=t)
        energy = -float((w * z).sum())
        entropy = float(regard.statistics.of_scores(z[None] / t).entropy)
        free = -t * float(regard.logsumexp(z, temperature=t))
        return {"free_energy": free, "energy": energy, "boltzmann_entropy": entropy}


@dataclass(frozen=True)
class Online:
    """Online softmax of the example row, after some of its blocks."""

    setting: Setting
    block: int = 4
    seen: int = 1

    @property
    def steps(self) -> int:
        """The number of blocks."""
        return math.ceil(self.setting.keys / self.block)

    @cached_property
    def state(self) -> regard.OnlineSoftmax:
        """The state after the blocks so far."""
        online = regard.OnlineSoftmax()
        for part in self._row.split(self.block)[: self.seen]:
            online.update(part)
        return online

    @property
    def _row(self) -> Tensor:
        return self.setting.scores[0] / self.setting.temperature

    def numbers(self) -> dict[str, float]:
        """Return m, ℓ and log-sum-exp so far, and the whole row's log-sum-exp."""
        return {
            "online_max": float(self.state.max),
            "online_sum": float(self.state.sum),
            "online_logsumexp": float(self.state.logsumexp),
            "whole_logsumexp": float(regard.logsumexp(self._row)),
        }

    def figure(self) -> Figure:
        """Draw the weights so far beside those of the whole row."""
        row = self._row
        so_far = row[: self.seen * self.block]
        names = [str(j) for j in range(len(row))]
        weights = [*self.state.weights(so_far).tolist(), *[0.0] * (len(row) - len(so_far))]
        words = f"Weights after {min(self.seen, self.steps)} of {self.steps} blocks, and of the whole row."
        series = {"blocks so far": (names, weights), "whole row": (names, regard.softmax(row).tolist())}
        return Figure("bars", "key", "weight", series, alt=words)


def against_d_k(what: str, samples: list[Tensor]) -> Figure:
    """Draw median and 10 to 90 % at each d_k; a mean would hide the rows that learn nothing."""
    columns = [[float(x.flatten().quantile(p)) for x in samples] for p in (0.1, 0.5, 0.9)]
    medians = ", ".join(f"{middle:.2g} at {d}" for middle, d in zip(columns[1], DIMS, strict=True))
    words = f"{what} against d_k, median and 10 to 90 % of the rows; medians {medians}."
    drawn = [[max(value, FLOOR) for value in column] for column in columns]
    guides = {f"{FLOOR:g} or less": FLOOR} if drawn != columns else {}
    return Figure("bands", "d_k", what, {"rows": (DIMS, *drawn)}, log_x=True, log_y=True, guides=guides, alt=words)


def number_list(numbers: dict[str, float], labels: dict[str, str] | None = None) -> str:
    """Return numbers as an HTML list; each value carries its name for tests."""
    cells = "".join(
        f"<div><dt>{escape((labels or {}).get(name, name.replace('_', ' ')))}</dt>"
        f'<dd data-number="{name}">{value:.4f}</dd></div>'
        for name, value in numbers.items()
    )
    return f'<dl class="numbers">{cells}</dl>'
