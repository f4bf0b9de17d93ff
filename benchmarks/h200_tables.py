"""The tables of `h200.py`: times in, Markdown out."""

from __future__ import annotations

from h200_cases import DECODE, PLAIN, RAGGED, SHAPES, SOME, SPARSE, Case, flops
from h200_rivals import ADASPLASH

from regard import statistics

ALL = statistics.NAMES
ORDER = {True: "causal", False: "full"}


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]] + [""]


def softmax_table(ours, theirs) -> list[str]:
    rows = []
    for shape in SHAPES:
        for causal in (True, False):

            def cell(case, backward=False):
                ms = ours.get(case)
                if ms is None:
                    return "failed", "–"
                anchor = theirs["cuDNN", shape, causal][backward]
                speed = flops(shape, causal, 5 if backward else 2) / ms / 1e9
                return f"{ms:.3f} ({speed:.0f})", f"{anchor / ms:.2f}"

            none, _ = cell(Case(shape, "softmax", causal, ()))
            every, every_ratio = cell(Case(shape, "softmax", causal, ALL))
            back, back_ratio = cell(Case(shape, "softmax", causal, (), True), True)
            a, b = ours.get(Case(shape, "softmax", causal, ())), ours.get(Case(shape, "softmax", causal, ALL))
            cost = "–" if a is None or b is None else f"{100 * (b / a - 1):+.0f} %"
            others = []
            for who in ("cuDNN", "flash"):
                times = theirs.get((who, shape, causal))
                others.append("–" if times is None else f"{times[0]:.3f} / {times[1]:.3f}")
            rows.append([f"{shape} {ORDER[causal]}", *others, none, every, cost, every_ratio, back, back_ratio])
    head = ["work", "cuDNN", "torch default (flash)", "ours, no statistics", "all 14 statistics",
            "their cost", "× cuDNN", "backward", "× cuDNN"]  # fmt: skip
    return ["## Softmax: ms (TFLOP/s); others forward / backward", "", *grid(head, rows)]


def some_table(ours, theirs) -> list[str]:
    rows = []
    for shape in SHAPES:
        anchor, cells = theirs["cuDNN", shape, True][0], []
        for some in ((), *SOME, ALL):
            ms = ours.get(Case(shape, "softmax", True, some))
            cells.append("failed" if ms is None else f"{ms:.3f} ({anchor / ms:.2f})")
        rows.append([f"{shape} causal", *cells])
    head = ["work", "none", *(", ".join(some) for some in SOME), f"all {len(ALL)}"]
    return ["## Softmax with some statistics: ms (× cuDNN's speed without any)", "", *grid(head, rows)]


def others_table(ours) -> list[str]:
    rows = []
    for shape in SHAPES:
        for causal in (True, False):
            base = ours.get(Case(shape, "softmax", causal, ()))
            times = [ours.get(Case(shape, name, causal, ())) for name in PLAIN[1:]]
            cells = ["–" if t is None or base is None else f"{t:.3f} ({base / t:.2f})" for t in times]
            rows.append([f"{shape} {ORDER[causal]}", "–" if base is None else f"{base:.3f}", *cells])
    return ["## Other normalisers, forward without statistics: ms (× our softmax's speed)", "",
            *grid(["work", "softmax", *PLAIN[1:]], rows)]  # fmt: skip


def sparse_table(ours, theirs) -> list[str]:
    rows = []
    for shape in SHAPES:
        for causal in (True, False):
            forward, backward = theirs["cuDNN", shape, causal]
            for name in SPARSE:
                cells = []
                for stats, back, anchor in (((), False, forward), (ALL, False, forward), ((), True, backward)):
                    ms = ours.get(Case(shape, name, causal, stats, back))
                    cells.append("–" if ms is None else f"{ms:.3f} ({ms / anchor:.1f})")
                known = ADASPLASH.get((SHAPES[shape][-1], causal)) if "4096" in shape and name == "entmax15" else None
                other = "–"
                if known is not None:
                    other = "{:.2f} / {:.2f} (cuDNN {:.2f} / {:.2f})".format(*known)
                rows.append([f"{shape} {ORDER[causal]}", name, *cells, other])
    head = ["work", "map", "forward", "all 14 statistics", "backward", "AdaSplash 0.2.2, from another run"]
    return ["## Threshold maps: ms (times cuDNN's softmax)", "", *grid(head, rows)]


def decode_table(ours, copy) -> list[str]:
    rows = []
    for shape, (b, _, g, _, n, d) in DECODE.items():
        for name in PLAIN:
            for stats in ((), ALL):
                ms = ours.get(Case(shape, name, False, stats))
                if ms is not None:
                    speed = 4 * b * g * n * d / ms / 1e9
                    rows.append(
                        [shape, name, str(len(stats)), f"{ms:.3f}", f"{speed:.2f}", f"{100 * speed / copy:.0f}"]
                    )
    return ["## Few queries over 131072 keys, B 8: k and v read once", "",
            *grid(["work", "map", "statistics", "ms", "TB/s", "% of a copy's bandwidth"], rows)]  # fmt: skip


def lengths_table(ours) -> list[str]:
    rows = []
    for d in (128, 64):
        for name, stats in (("softmax", ALL), ("entmax15", ())):
            base, cells = ours.get(Case(f"d {d}, N 4096", name, True, stats)), []
            for shape in (shape for shape in RAGGED if shape.startswith(f"d {d},")):
                ms, n = ours.get(Case(shape, name, True, stats)), RAGGED[shape][3]
                lost = None if ms is None or base is None else ms / n**2 / (base / 4096**2) - 1
                cells.append("failed" if lost is None else f"{100 * lost:+.1f} %")
            rows.append([f"d {d}, {name}, {len(stats)} statistics, causal", *cells])
    head = ["work", *(f"N {n}" for n in sorted({sizes[3] for sizes in RAGGED.values()}))]
    return [
        "## Lengths that are no multiple of a tile: time per query-key pair over that at N 4096",
        "",
        *grid(head, rows),
    ]
