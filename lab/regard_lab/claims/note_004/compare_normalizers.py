"""Trained: eight normalisers in one character model, equal parameters and tokens."""

from regard_lab import training
from regard_lab.claim import below, claim, conclude
from regard_lab.training.results import estimate, group_by_sign, paired_differences


def normalizer_specs(result):
    """Return variant → the normaliser with its parameter, such as "entmax(alpha=1.25)"."""
    return {record["variant"]: record["options"]["attention"]["normalizer"] for record in result["records"]}


@claim(
    statement="How do the normalisers compare in a trained model? Put as a claim: at equal parameters and tokens each "
    "reaches softmax's loss.",
    derivation=r"\Delta = \mathcal{L}(\text{normaliser}) - \mathcal{L}(\text{softmax})",
    rule="A normaliser falls short if the whole 95 % interval of its validation loss minus softmax's, over seeds, lies "
    "above 0; the condition names those that do not. Not distinguished does not mean equal.",
)
def measure(sampler):
    result = training.shipped("normalizers")
    summary, ran = result["summary"], normalizer_specs(result)
    behind = {name: estimate(paired_differences(result, name, "softmax")) for name in summary if name != "softmax"}
    checks = {
        name: below(f"least that {ran[name]}'s loss can lie above softmax's, nats", 0.0, e.low)
        for name, e in behind.items()
    }
    near = [name for name in behind if checks[name].agrees]
    far = [name for name in behind if name not in near]
    ratio = {name: summary[name]["entropy_ratio"]["mean"] for name in summary}
    sharpness = ", ".join(f"{ran[name]} {ratio[name]:.2f}" for name in sorted(ratio, key=ratio.get))
    losses = ", ".join(f"{ran[name]} {e.value:+.3f} ± {e.high - e.value:.3f}" for name, e in behind.items())
    other = training.shipped("translation")
    there = normalizer_specs(other)
    apart = {there[n]: estimate(paired_differences(other, n, "softmax")) for n in other["summary"] if n != "softmax"}
    signs = group_by_sign(apart)
    return conclude(
        *(checks[name] for name in near),
        *(checks[name].beyond() if near else checks[name] for name in far),
        condition=f"the normaliser is {' or '.join(ran[name] for name in near)}: {summary['softmax']['runs']} seeds do "
        "not tell it from softmax",
        right=f"None does: {losses}",
        remark=f"Loss − softmax's {summary['softmax']['loss']['mean']:.3f}, nats per character: {losses}. "
        f"Entropy / ln n at the end, from sharp to flat: {sharpness}. Trained: {result['how']['command']}; "
        "differences seed by seed; "
        f"{result['how']['where'][0]}. In translation softmax reaches BLEU "
        f"{other['summary']['softmax']['bleu']['mean']:.1f}; against it, behind: {signs[-1]}; ahead: {signs[1]}; not "
        f"distinguished: {signs[0]} ({other['how']['command']}).",
        figure=training.get("normalizers").figures(result)["quality"],
    )
