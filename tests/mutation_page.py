"""docs/mutants.md: what became of the mutants that `tests/mutation.py` has tried, and which compute the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "mutants.md"
EQUIVALENT = {  # the line of a survivor and what it became there: why no test can notice
    ("safe_top = torch.where(self.top == -math.inf, torch.zeros_like(self.top), self.top)", "(math.inf)"): (
        "a part without keys has no ties, so it adds 0 whatever its u is"
    ),
    ("setattr(state, name, getattr(state, name) + torch.where(folded > 0, folded * term, 0.0))", "(folded >= 0)"): (
        "0·u is 0: the terms are finite"
    ),
    ("state.lse = state.lse * fall + torch.where(folded > 0, folded * fall, 0.0)", "(folded >= 0)"): (
        "0·exp(top − max) is 0: it lies between 0 and 1"
    ),
    ("gain = torch.where(z2 > 0, numerator / torch.where(z2 > 0, z2, 1.0), 0.0)", "(z2 >= 0)"): (
        "where Σv is 0 no score rises: the numerator is 0 too, and a quotient of zeros is hidden by the other"
    ),
    (
        "above = value((x - middle).clamp_min(0.0), theta).sum(-1, keepdim=True) >= 1.0",
        "(value((x - middle).clamp_min(0.0), theta).sum(-1, keepdim=True) > 1.0)",
    ): "where Σp is exactly 1, bisection ends at the same τ from the other side",
    ("gain = torch.where(g > 0, pairs / torch.where(g > 0, g, 1.0), 0.0)", "(g >= 0)"): (
        "Σg′ is 0 only in a row without keys, whose gain is set to 0 at the end"
    ),
    (
        "if (j0 < highest) & (j0 + C.BN > lowest):",
        "(j0 + C.BN >= lowest)",
    ): "one block more, in which nobody sees a key",
    (
        "z = tl.load(sums + row, mask=i < tl.where(block < end, opt.queries, 0), other=0.0)",
        "(block <= end)",
    ): "numbers behind the last block: NaN there has the blocks looked at one by one, and none is done for it",
    ("while (tl.max(far) > 0) & (step < LIMIT):", "(step <= LIMIT)"): "the limit is never met: rows arrive long before",
    (
        "near = s.abs() < 1.0  # exp(s) − 1 without cancellation near 0, without overflow far from it",
        "(s.abs() <= 1.0)",
    ): ("at |s| = 1 both forms are exact"),
    (
        "above = weights(-(middle**gain)).sum(-1, keepdim=True) >= 1.0",
        "(weights(-middle ** gain).sum(-1, keepdim=True) > 1.0)",
    ): "where Σp is exactly 1, bisection ends at the same τ from the other side",
    ("fall += tiles.fold(tl.where(t > 0.0, C.F.slope(t, scene.theta), 0.0), C)", "(t >= 0.0)"): (
        "entmax's own slope is 0 at t = 0"
    ),
    ("return tl.where(x < 0.0, 0.0, x)", "(x <= 0.0)"): "0 either way at x = 0",
    ("return tl.where(s <= 0.0, 0.0, s)  # a maximum would lose a NaN", "(s < 0.0)"): "0 either way at s = 0",
    ("return top.masked_fill(top == -math.inf, 0.0)", "(math.inf)"): "of a row without keys, which no sum reads",
    ("high = high.masked_fill(high == -math.inf, 0.0)", "(math.inf)"): "of a row without keys, which no sum reads",
    (
        "coarse, fine, chunk, chunk_u = 0.0, 0.0, x[start : start + CHUNK], u[start : start + CHUNK]",
        "(start - CHUNK)",
    ): "of u's piece compiled code takes the beginning alone; how long it is, x's says",
    ("sooner = (b.n > 0) & ((a.n == 0) | (b.first < a.first))", "(b.n >= 0)"): (
        "a part without keys has its first at inf, with weight 0, as the other has if it is empty too"
    ),
    (
        "pairs = ties * (ties - 1.0) * u * u + 2.0 * ties * u * self.u + self.u**2 - self.square",
        "(ties * (ties - 1.0) * u)",
    ): "the frame of an exponential map is the maximum: u is 1 there",
    ("near = s.abs() < 1.0", "(s.abs() <= 1.0)"): "at |s| = 1 both forms are exact",
    (
        "fall = torch.where(self.n > 0, torch.exp(safe_top - torch.where(top == -math.inf, safe_top, top)), 0.0)",
        "(math.inf)",
    ): "the maximum of both is −inf only where neither has keys, and there the fall is 0",
    ("highest = torch.where(k > 0, -torch.expm1(-k * n) / k.where(k > 0, 1.0), n)", "(k >= 0)"): (
        "at k = 0 the quotient is not the one chosen, and nobody differentiates here"
    ),
    ("c = torch.minimum(c, highest)", "torch.maximum"): "where Newton's steps begin; the first one brings it back",
    ("return bool(side(np.float64(0.0), np.float64(-np.inf), np.float64(0.5)) == 0.0)", "(np.inf)"): (
        "an end that is not seen costs a selection, which gives the same 0"
    ),
    (
        "self.width = max(1, min(self.n, self.left + self.right + 1))  # keys that one query sees, at most",
        "(self.left + self.right - 1)",
    ): "how many rows make a block, not which keys they see",
    ("if 2 * count < size:", "(2)"): "when entries are packed, which drops none that can count",
    ("if i > 0:", "(i >= 0)"): "before the first piece the sums are 0, and what they are multiplied by is finite",
    ("inverse = tl.minimum(1.0 / tl.where(m > 0.0, m, 1.0), 2.0**126)", "(m >= 0.0)"): "at m = 0 the other is chosen",
    ("e = tl.where(tl.abs(y) < 0.5, y * c * q, e - c)", "(tl.abs(y) <= 0.5)"): "at |y| = 0.5 both forms are exact",
    (
        "return tl.where(part < parts, tl.load(x + (first + tl.minimum(part, parts - 1)) * SIZE + cell), 0.0)",
        "(parts + 1)",
    ): "what is read beyond the last part is not used",
    (
        "moved, near = real(tau + newton_step(value, slope, gain)), value - 1 < (1e-4 if tile.lanes == 16 else 1e-8)",
        "(value + 1)",
    ): "one more step, which moves nothing",
    ("near = w.abs() < 0.1", "(w.abs() <= 0.1)"): "at |w| = 0.1 both forms are exact",
}


def publish(files: list[Path]) -> None:
    """docs/mutants.md from the outcomes, the later file's where two tell of one mutant: a line per file, and all."""
    latest = {place(entry): entry for file in files for entry in json.loads(file.read_text(encoding="utf-8"))}
    entries = {entry["mutant"] + " " * entry["column"]: entry for entry in latest.values()}
    entries = dict(sorted(entries.items()))
    for entry in entries.values():
        if entry["outcome"] == "SURVIVED" and (why := EQUIVALENT.get((entry["text"], entry["new"]))):
            entry["outcome"] = f"computes the same: {why}"
    kinds = Counter(entry["outcome"].split(":")[0] for entry in entries.values())
    counted = len(entries) - kinds["computes the same"]
    commits = ", ".join(sorted({f"`{entry['commit']}`" for entry in entries.values()}))
    text = [
        "# Mutants\n",
        f"Written by `python tests/mutation.py --publish` from runs at {commits}: {len(entries)} changes of the "
        f"mathematics, {kinds['noticed']} noticed, {kinds['SURVIVED']} survived, {kinds['computes the same']} that "
        f"compute the same; {kinds['noticed'] / counted:.1%} of those that could be noticed.\n",
        "| file | mutants | noticed | survived | the same |\n| --- | ---: | ---: | ---: | ---: |",
    ]
    for path in sorted({name.split(":")[0] for name in entries}):
        of = Counter(e["outcome"].split(":")[0] for name, e in entries.items() if name.startswith(f"{path}:"))
        row = (sum(of.values()), of["noticed"], of["SURVIVED"], of["computes the same"])
        text.append(f"| `{path}` | {' | '.join(map(str, row))} |")
    text.append("\n| change | outcome |\n| --- | --- |")
    for name, entry in entries.items():
        change = name.strip().replace("|", "\\|").replace("`", "'")
        text.append(f"| `{change}` | {entry['outcome'].replace('|', chr(92) + '|')} |")
    PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")


def place(entry: dict) -> tuple:
    """What stays of a mutant's place when lines move."""
    return entry["mutant"].split(":")[0], entry["text"], entry["column"], entry["new"]
