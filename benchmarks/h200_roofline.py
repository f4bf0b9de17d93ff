"""The roofline of one run of `h200.py`: what each call reaches under the bandwidth and the product measured there."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from h200_cases import DECODE, SHAPES, Case, flops

from regard import statistics

ALL = statistics.NAMES


class Point(NamedTuple):
    label: str
    intensity: float  # FLOP per byte that must move
    speed: float  # TFLOP/s
    kind: str  # "ours" or "torch"


def points(ours, theirs) -> list[Point]:
    """What a few calls reach, from their ms."""
    found = []
    for shape in ("d 128, N 16384", "d 64, N 16384"):
        b, h, _, n, _, d = SHAPES[shape]
        for label, case, products, tensors in (
            ("softmax", Case(shape, "softmax", True, ()), 2, 4),
            ("softmax, 14 statistics", Case(shape, "softmax", True, ALL), 2, 4),
            ("softmax backward", Case(shape, "softmax", True, (), True), 5, 8),
            ("entmax15", Case(shape, "entmax15", True, ()), 2, 4),
        ):
            work = flops(shape, True, products)
            intensity = work / (tensors * 2 * b * h * n * d)
            if case in ours:
                found.append(Point(f"{label}, d {d}", intensity, work / ours[case] / 1e9, "ours"))
            if label.startswith("softmax") and "14" not in label:
                ms = theirs["cuDNN", shape, True][products == 5]
                found.append(Point(f"cuDNN {label}, d {d}", intensity, work / ms / 1e9, "torch"))
    for shape in DECODE:
        case = Case(shape, "softmax", False, ALL)
        b, _, g, _, n, d = DECODE[shape]
        if case in ours:
            work = flops(shape, False, 2)
            found.append(Point(shape, work / (4 * b * g * n * d), work / ours[case] / 1e9, "ours"))
    return found


def draw(path: Path, copy: float, product: float, points: list[Point]) -> None:
    """copy in TB/s, product in TFLOP/s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130)
    low, high = min(p.intensity for p in points) / 2, max(p.intensity for p in points) * 3
    ridge = product / copy
    axes.plot([low, ridge, high], [low * copy, product, product], color="black", linewidth=1.2)
    axes.annotate(f"copy, {copy:.2f} TB/s", (low * 3, low * 3 * copy * 1.6), rotation=43, fontsize=8)
    axes.annotate(f"bf16 product, {product:.0f} TFLOP/s", (ridge * 1.2, product * 1.1), fontsize=8)
    for kind, color in (("ours", "#1f6fb4"), ("torch", "#c8641e")):
        these = [p for p in points if p.kind == kind]
        axes.scatter([p.intensity for p in these], [p.speed for p in these], color=color, label=kind, zorder=3, s=26)
    crowd = sorted((p for p in points if p.intensity > ridge), key=lambda p: p.speed)
    shared: dict[float, list[Point]] = {}  # decoding: one label where two calls lie on one spot
    for p in points:
        if p not in crowd:
            shared.setdefault(round(p.intensity, 3), []).append(p)
    for these in shared.values():
        label, at = " and ".join(p.label for p in these), (these[0].intensity, these[0].speed)
        place = dict(xytext=(6, -5), textcoords="offset points", va="top")
        axes.annotate(label.replace(", 4", ",\n4").replace(" to a", "\nto a"), at, fontsize=6.5, **place)
    for i, p in enumerate(crowd):  # attention, all in one place: a list beside it, with a line to each
        height = product * 0.8 * 1.17 ** (i + 1 - len(crowd))
        line = dict(arrowstyle="-", color="gray", linewidth=0.4, relpos=(1.0, 0.5))
        place = dict(xytext=(ridge * 14, height), ha="right", va="center", arrowprops=line)
        axes.annotate(f"{p.label}: {p.speed:.0f}", (p.intensity, p.speed), fontsize=6.5, **place)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s", xlim=(low, high))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.25, which="both")
    figure.tight_layout()
    figure.savefig(path)
