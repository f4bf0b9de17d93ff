"""One row of scores through every normaliser, and what sharper scores do to it: docs/figures/eight.png.

python docs/figures/eight.py        (make figures)
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from regard import normalizers, reference, statistics

INK, PALE, ZERO = "#22262e", "#c3c9d4", "#d1495b"
NAMES = ("softmax", "softmax1", "sigmoid", "relu", "softpick", "entmax(alpha=1.25)", "entmax15", "sparsemax")
COLOURS = dict(
    zip(NAMES, ("#2f5fc4", "#5aa9e6", "#8a6bbe", "#4f9d69", "#b5b02c", "#f2a65a", "#e2711d", "#b23a48"), strict=True)
)
STORY = """becomes eight different rows of weights, each measured while it is computed.
A red tick: a weight of exactly 0.   Effective keys: e^entropy, how many keys share the weight.
Gradient gain: the trace of ∂p/∂s, how much the weights still respond to the scores; at 0 nothing is learned."""
SPREADS = torch.logspace(-1, 2, 241, dtype=torch.float64)


def show_scores(axis, scores) -> None:
    axis.bar(range(len(scores)), scores, width=0.85, color=PALE)
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.set(xlim=(-0.7, len(scores) - 0.3), xticks=[])
    axis.set_title("one row of 20 scores", fontsize=10, loc="left", color=INK)


def show_weights(axis, name, scores) -> None:
    """Bars of weights, a red tick below every weight that is exactly 0, and the row's statistics."""
    weights = reference.normalize(scores, name)
    row = statistics.of_scores(scores[None], normalizer=name)
    keys = range(len(scores))
    axis.bar(keys, weights, width=0.85, color=COLOURS[name])
    high = 0.9
    zeros = [key for key in keys if weights[key] == 0]
    axis.plot(zeros, [-0.045 * high] * len(zeros), "|", color=ZERO, markersize=5, clip_on=False)
    axis.set(ylim=(0, high), xlim=(-0.7, len(scores) - 0.3), xticks=[], yticks=[0, high])
    axis.text(0, 1.17, name, transform=axis.transAxes, fontsize=10, color=INK, weight="bold")
    axis.text(0, 1.04, normalizers.get(name).formula, transform=axis.transAxes, fontsize=8, color=INK)
    told = [
        f"{row.effective_keys.item():.1f} effective keys, entropy {row.entropy.item():.2f}",
        f"support {row.support.item():.0f} of {len(scores)}, sum {row.mass.item():.2f}",
        f"gradient gain {row.gradient_gain.item():.2f}",
    ]
    axis.text(0, -0.12, "\n".join(told), transform=axis.transAxes, fontsize=8, va="top", color=INK, linespacing=1.35)


def show_curves(axis, scores, statistic, title) -> None:
    """A statistic of the same scores as they are multiplied by 0.1 … 100."""
    for name in NAMES:
        rows = statistics.of_scores(SPREADS[:, None] * scores, normalizer=name)
        axis.plot(
            SPREADS,
            rows[statistic],
            color=COLOURS[name],
            label=name,
            linewidth=1.8,
            linestyle="--" if name == "softmax1" else "-",
        )
    axis.set(xscale="log", xlim=(0.1, 100))
    axis.set_title(title, fontsize=10, loc="left", color=INK)
    axis.set_xlabel("the scores, multiplied by", fontsize=8, color=INK)


def main() -> None:
    torch.manual_seed(11)
    scores = 0.9 * torch.randn(20, dtype=torch.float64)
    figure = plt.figure(figsize=(12, 9.6))
    rows = figure.add_gridspec(
        4, 1, height_ratios=(0.55, 1, 1, 1.25), hspace=0.85, left=0.045, right=0.985, top=0.955, bottom=0.06
    )
    show_scores(figure.add_subplot(rows[0].subgridspec(1, 4)[0, :1]), scores)
    figure.text(0.3, 0.965, STORY, color=INK, fontsize=10.5, va="top", linespacing=1.6)
    for line, names in ((rows[1], NAMES[:4]), (rows[2], NAMES[4:])):
        for cell, name in zip(line.subgridspec(1, 4, wspace=0.22), names, strict=True):
            show_weights(figure.add_subplot(cell), name, scores)
    left, right = (figure.add_subplot(cell) for cell in rows[3].subgridspec(1, 2, wspace=0.13))
    show_curves(left, scores, "effective_keys", "How many keys share the weight as scores sharpen: effective keys")
    show_curves(right, scores, "gradient_gain", "How much the weights still respond: gradient gain, tr ∂p/∂s")
    right.set(yscale="log", ylim=(1e-4, 30))
    left.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    left.set_ylim(0, 22)
    for axis in figure.get_axes():
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7, length=2)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
