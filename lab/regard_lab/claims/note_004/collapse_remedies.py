"""Trained: a model provoked to collapse, and the same with a temperature or with attention dropout."""

from regard_lab import training
from regard_lab.claim import above, claim, conclude
from regard_lab.training.results import estimate, group_by_sign, paired_differences

RELIEF = 0.05  # of the gradient gain, which is 0 for one-hot rows and nearly 1 for flat ones
BETTER = 0.05  # nats per character
TRIED = ("scale", "learned", "dropout")


@claim(
    statement="Temperature or attention dropout relieves collapse.",
    derivation=[r"s/\sqrt{d_k}: \ \mathrm{Var} = 1", r"\text{dropout: } p_j m_j/(1 - r), \text{ the scores unchanged}"],
    rule=f"Relieved: the gradient gain ends more than {RELIEF} higher and the loss more than {BETTER} nats lower than "
    "without, 95 % intervals over seeds, seed by seed. Core: a temperature of √d_k, which is the scale 1/√d_k; beyond: "
    "a temperature learned from 1 on, and dropout 0.2.",
)
def measure(sampler):
    result = training.shipped("collapse")
    gain = {name: estimate(paired_differences(result, name, "none", "gradient_gain")) for name in TRIED}
    loss = {name: estimate([-x for x in paired_differences(result, name, "none", "loss")]) for name in TRIED}
    ill, others = result["summary"]["none"], {name: x for name, x in result["summary"].items() if name != "none"}
    ends = {name: (x["loss"]["mean"], x["gradient_gain"]["mean"]) for name, x in others.items() if "loss" in x}
    listed = ", ".join(f"{name} {loss_:.3f} ({gain_:.2f})" for name, (loss_, gain_) in ends.items())
    learned = above("loss won by a temperature learned per head, begun at 1, nats", BETTER, loss["learned"])
    dropout = [
        above("gradient gain won by attention dropout", RELIEF, gain["dropout"]),
        above("loss won by attention dropout, nats", BETTER, loss["dropout"]),
    ]
    beyond = {"one learned per head from 1 on": [learned], "attention dropout": dropout}
    failing = [name for name, checks in beyond.items() if not all(check.agrees for check in checks)]
    lower = group_by_sign({name: estimate(paired_differences(result, name, "none", "loss")) for name in others})
    return conclude(
        above("gradient gain won by the temperature √d_k", RELIEF, gain["scale"]),
        above("loss won by the temperature √d_k, nats", BETTER, loss["scale"]),
        *(check.beyond() for checks in beyond.values() for check in checks),
        condition=f"the remedy is a temperature of √d_k from the start; {' and '.join(failing)} did not relieve it",
        right="Neither does.",
        remark=f"Collapsed: loss {ill['loss']['mean']:.3f}, gradient gain {ill['gradient_gain']['mean']:.3f}, largest "
        f"logit {ill['max_logit']['mean']:.3g}. Loss (gradient gain) with each remedy: {listed}. Loss "
        f"against the collapsed model's, lower: {lower[-1]}; higher: {lower[1]}; not settled: {lower[0]}. Trained: "
        f"{result['how']['command']}; {result['how']['where'][0]}.",
        figure=training.get("collapse").figures(result)["loss"],
    )
