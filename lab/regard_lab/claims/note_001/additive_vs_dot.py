"""Trained: additive, dot and scaled dot scores at d_k = 16, 64, 256, the same model and text."""

from regard_lab import training
from regard_lab.claim import above, below, claim, conclude
from regard_lab.training.results import estimate, paired_differences
from regard_lab.training.trials.head_dims import DIMS

AS_WELL = 0.1  # nats per character, 5 % of the loss: what counts as no worse


@claim(
    statement="For small d_k unscaled dot product does as well as additive attention, for large d_k worse; scaled does "
    "well at every d_k.",
    derivation=[
        r"\mathrm{Var}(q \cdot k) = d_k, \quad \mathrm{Var}(q \cdot k/\sqrt{d_k}) = 1",
        r"\mathrm{Var}(w \cdot \tanh(q + k)) < 1 \text{ for } w \sim \mathcal{N}(0, 1/d_k)",
    ],
    rule=f"A score does as well if its validation loss is less than {AS_WELL} nats per character above additive "
    "attention's, and worse if it is more; 95 % intervals over seeds.",
)
def measure(sampler):
    result = training.shipped("additive")
    pairs = [(name, d) for name in ("dot", "scaled") for d in DIMS]
    behind = {(name, d): estimate(paired_differences(result, f"{name}-d{d}", f"additive-d{d}")) for name, d in pairs}
    text = {key: f"{e.value:+.3f}" for key, e in behind.items()}
    return conclude(
        above("loss of unscaled dot − additive, d_k = 256 (“worse”), nats", AS_WELL, behind["dot", 256]),
        below("loss of unscaled dot − additive, d_k = 16 (“as well”), nats", AS_WELL, behind["dot", 16]),
        *(
            below(f"loss of scaled dot − additive, d_k = {d} (“well”), nats", AS_WELL, behind["scaled", d])
            for d in DIMS
        ),
        right=f"Unscaled, the loss lies behind additive attention's by {text['dot', 16]} nats at d_k = 16, "
        f"{text['dot', 64]} at 64 and {text['dot', 256]} at 256; scaled, by {text['scaled', 16]}, {text['scaled', 64]} "
        f"and {text['scaled', 256]}.",
        remark=f"Trained: {result['how']['command']}; {len(DIMS)} head sizes, "
        f"{result['summary']['dot-d16']['runs']} seeds, differences seed by seed; {result['how']['where'][0]}.",
        figure=training.get("additive").figures(result)["loss"],
    )
