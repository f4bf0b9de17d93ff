"""Trained: eight normalisers in one character model, equal parameters and tokens."""

from regard.lab import training
from regard.lab.claim import Claim, Finding, below
from regard.lab.estimate import exact
from regard.lab.training.results import estimate, paired, sorted_by_sign


def spelt(result):
    """variant → the normaliser as it was run, "entmax(alpha=1.25)": a name alone would mean its default."""
    return {record["variant"]: record["options"]["attention"]["normalizer"] for record in result["records"]}


def measure(bench):
    result = training.shipped("normalizers")
    told, ran = result["summary"], spelt(result)
    behind = {name: estimate(paired(result, name, "softmax")) for name in told if name != "softmax"}
    checks = {
        name: below(f"least that {ran[name]}'s loss can lie above softmax's, nats", 0.0, exact(e.low))
        for name, e in behind.items()
    }
    near = [name for name in behind if checks[name].agrees]
    far = [name for name in behind if name not in near]
    ratio = {name: told[name]["entropy_ratio"]["mean"] for name in told}
    sharpness = ", ".join(f"{ran[name]} {ratio[name]:.2f}" for name in sorted(ratio, key=ratio.get))
    losses = ", ".join(f"{ran[name]} {e.value:+.3f} ± {e.high - e.value:.3f}" for name, e in behind.items())
    bleu = ""
    if training.has_shipped("translation"):
        other = training.shipped("translation")
        there = spelt(other)
        apart = {there[n]: estimate(paired(other, n, "softmax")) for n in other["summary"] if n != "softmax"}
        told_apart = sorted_by_sign(apart)
        bleu = (
            f" In translation softmax reaches BLEU {other['summary']['softmax']['bleu']['mean']:.1f}; against it, "
            f"behind: {told_apart[-1]}; ahead: {told_apart[1]}; not told apart: {told_apart[0]} "
            f"({other['how']['command']})."
        )
    return Finding(
        [checks[name] for name in near] + [checks[name].beyond() if near else checks[name] for name in far],
        condition=f"the normaliser is {' or '.join(ran[name] for name in near)}: {told['softmax']['runs']} seeds do "
        "not tell it from softmax",
        right=f"None does: {losses}",
        remark=f"Loss − softmax's {told['softmax']['loss']['mean']:.3f}, nats per character: {losses}. Entropy / ln n "
        f"at the end, from sharp to flat: {sharpness}. Trained: {result['how']['command']}; differences seed by seed; "
        f"{result['how']['where'][0]}.{bleu}",
        figure=lambda: training.get("normalizers").figures(result)["quality"],
    )


claim = Claim(
    id="compare-normalizers",
    note="004",
    statement="How do the normalisers compare in a trained model? Put as a claim: at equal parameters and tokens each "
    "reaches softmax's loss.",
    derivation=[r"\Delta = \mathcal{L}(\text{normaliser}) - \mathcal{L}(\text{softmax})"],
    rule="A normaliser falls short if the whole 95 % interval of its validation loss minus softmax's, over seeds, lies "
    "above 0; the condition names those that do not. Not told apart is not the same as equal.",
    measure=measure,
)
