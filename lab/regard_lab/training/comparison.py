"""`compare`: every variant of a result against one of them, with a 95 % interval of the mean difference.

Both sides of a difference share the seed, hence first weights of equal size and every batch; d̄ ± t·s/√n over the n
differences. A result of one long run takes the differences window by window of the validation text: that interval
holds the chance in what was read at the end, not the chance in training.
"""

from __future__ import annotations

from regard.table import Table
from regard_lab.estimate import Estimate
from regard_lab.figure import Figure
from regard_lab.training.results import draw_runs, estimate, paired_differences, plus_minus, sign_of

BASE = "softmax"
WINDOWS = "window_losses"  # in a record's final: the loss of each validation window


def compare(result: dict, metric: str | None = None, base: str = BASE) -> dict[str, Estimate]:
    """Return variant → the mean of variant − base with its interval, for variants with two differences or more."""
    found = {}
    windows = {r["variant"]: r["final"].get(WINDOWS, []) for r in result["records"] if not r["diverged"]}
    for variant in result["summary"]:
        differences = paired_differences(result, variant, base, metric)
        if len(differences) == 1:  # one run per variant: window by window
            differences = [a - b for a, b in zip(windows[variant], windows[base], strict=True)]
        if variant != base and len(differences) > 1:
            found[variant] = estimate(differences)
    return found


def describe(difference: Estimate, lower_is_better: bool) -> str:
    """Return "better" or "worse" if the interval leaves out 0, else "not distinguishable"."""
    sign = sign_of(difference)
    if sign == 0:
        return "not distinguishable"
    return "better" if (sign < 0) == lower_is_better else "worse"


def is_lower_better(result: dict) -> bool:
    """True for losses, False for BLEU and accuracy."""
    return result["metric"] == "loss"


def table(result: dict) -> Table:
    """Return a row per variant, best first: its metric, the difference to softmax with its interval, a verdict."""
    metric, differences = result["metric"], compare(result)
    rows = []
    for name in sorted_by_metric(result):
        told, ours = result["summary"][name], differences.get(name)
        mean = f"{told[metric]['mean']:.4g}" if metric in told else ""
        judged = [plus_minus(ours), describe(ours, is_lower_better(result))] if ours else ["", ""]
        counts = f"{told['parameters'] / 1e6:.2f} M", f"{told['diverged']} of {told['runs']}"
        rows.append([name, mean, *judged, *counts])
    difference = f"− {BASE}, {result['how']['level']:.0%}"
    columns = ["variant", metric, difference, "verdict", "parameters", "diverged"]
    return Table(columns, rows, numbers=[metric, "parameters"])


def sorted_by_metric(result: dict) -> list[str]:
    """Return every variant, best mean first; those without one last."""
    better = 1 if is_lower_better(result) else -1
    means = {name: told.get(result["metric"], {}).get("mean") for name, told in result["summary"].items()}
    return sorted(means, key=lambda name: (means[name] is None, better * (means[name] or 0.0)))


def figures(result: dict) -> dict[str, Figure]:
    """Draw the metric of every run, a column of dots per variant, best mean first."""
    title = "validation loss" if result["metric"] == "loss" else "BLEU"
    return {"quality": draw_runs(result, sorted_by_metric(result), title, f"{title} of every run; the means are")}
