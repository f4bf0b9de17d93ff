"""The refit of `regard.temperature.Adaptive`: where its slope comes from, and docs/figures/adaptive.png.

python docs/figures/adaptive.py        (a minute or two; docs/remedies.md tells the derivation)

A retrieval head gives key j the score s_j = g·(x_j + r·e_j): x_j is what it looks for, e_j its own error, both standard
normal, and the winner is the largest x. Heads differ in their error r (log-uniform, 0.01 … 0.3) and in their gain
g = u·g*(r), where g* is best for rows of 2 … 16 keys and u (log-uniform, 0.1 … 1) says how short of it training
stopped. Rows have n = 2, 4, …, 65536 keys. Among β(H) = 1 + a·max(H − 1/2, 0), which leaves sharp rows alone and
never falls, the slope a is the one with the least mean of −log (weight of the winner).
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

ERRORS = (0.01, 0.3)
SHORT = 0.1
FLOOR = 0.5
BETAS = np.exp(np.linspace(0.0, np.log(64.0), 121))
PUBLISHED = (-0.037, 0.481, -2.3, 4.917, -1.791)


def rows(chance, n, error, gain):
    """Scores [m, n] with their maximum at 0, and the winner of each row."""
    shape = (len(error), n)
    x = chance.standard_normal(shape, dtype=np.float32)
    s = gain[:, None] * (x + error[:, None] * chance.standard_normal(shape, dtype=np.float32))
    return s - s.max(1, keepdims=True), x.argmax(1)


def loss(s, winner, beta):
    """−log softmax(β·s) at the winner."""
    return np.log(np.exp(beta * s).sum(1)) - beta * np.take_along_axis(s, winner[:, None], 1)[:, 0]


def entropy(s):
    p = np.exp(s)
    z = p.sum(1)
    return np.log(z) - (p * s).sum(1) / z


def least(f, low, high):
    """Where a convex function is smallest, by golden section."""
    golden = (np.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-4:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2.0


def best_gains(chance, count=8, each=4000):
    """(r, g*(r)): the gain that loses least over rows of 2 … 16 keys."""
    errors = np.geomspace(*ERRORS, count).astype(np.float32)
    gains = []
    for error in errors:
        drawn = [rows(chance, n, np.full(each, error), np.ones(each, np.float32)) for n in range(2, 17, 2)]
        gains.append(np.exp(least(lambda g: np.mean([loss(s, w, np.exp(g)).mean() for s, w in drawn]), 0.0, 6.0)))
    return errors, np.array(gains)


def sample(seed=0, longest=16, keys=2**21, at_least=512):
    """(H, weight, −log p of the winner at each of BETAS) of many rows; every length weighs the same."""
    chance = np.random.default_rng(seed)
    errors, gains = best_gains(chance)
    found = []
    for n in (2**k for k in range(1, longest + 1)):
        count = min(8192, max(at_least, keys // n))
        error = np.exp(chance.uniform(*np.log(ERRORS), count)).astype(np.float32)
        gain = np.exp(np.interp(np.log(error), np.log(errors), np.log(gains)) + chance.uniform(np.log(SHORT), 0, count))
        for first in range(0, count, max(1, keys // n)):
            part = slice(first, first + max(1, keys // n))
            s, winner = rows(chance, n, error[part], gain[part].astype(np.float32))
            found.append((entropy(s), np.full(len(s), 1.0 / count), np.stack([loss(s, winner, b) for b in BETAS], 1)))
    return tuple(np.concatenate(column) for column in zip(*found, strict=True))


def mean_loss(drawn, beta):
    """The mean loss when row i is sharpened by beta[i], linear between the tabulated β."""
    _, weight, table = drawn
    at = np.clip(np.log(beta) / np.log(BETAS[1]), 0, len(BETAS) - 1.001)
    low = at.astype(int)
    part = (beta - BETAS[low]) / (BETAS[low + 1] - BETAS[low])
    each = np.arange(len(beta))
    return np.average((1 - part) * table[each, low] + part * table[each, low + 1], weights=weight)


def line(slope, h):
    return 1.0 + slope * np.maximum(h - FLOOR, 0.0)


def published(h):
    return np.where(h > FLOOR, np.maximum(np.polyval(PUBLISHED, h), 1.0), 1.0)


def slope(drawn) -> float:
    return least(lambda a: mean_loss(drawn, line(a, drawn[0])), 0.0, 4.0)


def best_by_entropy(drawn, edges):
    """[(H, β)]: the best β of the rows whose entropy lies between two edges."""
    h, weight, table = drawn
    found = []
    for low, high in pairwise(edges):
        inside = (h >= low) & (h < high)
        found.append(((low + high) / 2, BETAS[np.average(table[inside], 0, weight[inside]).argmin()]))
    return np.array(found).T


def main() -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    drawn = sample()
    fitted = slope(drawn)
    h = drawn[0]
    edges = np.r_[0.5, 1.0, np.arange(1.5, 11.1, 0.75)]
    of_bins = np.digitize(h, edges)
    bound = sum(np.average(drawn[2][of_bins == b], 0, drawn[1][of_bins == b]).min() * drawn[1][of_bins == b].sum()
                for b in np.unique(of_bins)) / drawn[1].sum()  # fmt: skip
    print(f"slope {fitted:.3f}: beta(H) = {fitted:.3f} H + {1 - fitted * FLOOR:.3f}")
    for name, beta in (("none", np.ones_like(h)), ("published", published(h)), ("refit", line(fitted, h))):
        print(f"mean loss, {name}: {mean_loss(drawn, beta):.3f}")
    print(f"mean loss, the best beta of every bin of H: {bound:.3f}")
    figure, axis = plt.subplots(figsize=(7, 4))
    grid = np.linspace(0, 11, 400)
    axis.plot(*best_by_entropy(drawn, edges), "o", color="#c3c9d4", label="best for rows of this entropy")
    axis.plot(grid, line(fitted, grid), color="#2f5fc4", label=f"refit, 1 + {fitted:.2f}·(H − ½)")
    axis.plot(grid, published(grid), color="#d1495b", label="published polynomial")
    axis.set(xlabel="entropy H of the row, nats", ylabel="β = 1/T", ylim=(0, 11), xlim=(0, 11))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
