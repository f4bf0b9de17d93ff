"""Eight normalisers, the same model, the same parameters and tokens: loss, sharpness, time.

sigmoid has the bias −ln 128 of its paper for rows of 128 keys; entmax has α = 1.25, between softmax and entmax15.
"""

from regard.lab.figure import Figure
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.results import final_values, training_bands
from regard.lab.training.trials import head_dims
from regard.lab.training.trials.language import LanguageTrial

NORMALIZERS = {
    "softmax": "softmax",
    "softmax1": "softmax1",
    "entmax": "entmax(alpha=1.25)",
    "entmax15": "entmax15",
    "sparsemax": "sparsemax",
    "relu": "relu",
    "sigmoid": "sigmoid(bias=-4.852)",
    "softpick": "softpick",
}
SHOWN = ("softmax", "entmax", "entmax15", "sparsemax", "relu", "softpick")  # six lines are distinguishable


def figures(result, metric="loss", title="validation loss"):
    seeds = {name: list(final_values(result, name, metric).values()) for name in result["summary"]}
    means = ", ".join(f"{name} {sum(values) / len(values):.4g}" for name, values in seeds.items() if values)
    runs = {"a run": ([n for n, v in seeds.items() for _ in v], [x for v in seeds.values() for x in v])}
    return {
        "quality": Figure("dots", "", title, runs, alt=f"{title} of every run; the means are {means}."),
        "entropy": Figure(
            "bands",
            "step",
            "entropy / ln n",
            {name: training_bands(result, name, "entropy_ratio") for name in SHOWN if name in result["summary"]},
            alt="Entropy over ln n in training, a line for each normaliser; bands are the range over seeds.",
        ),
    }


experiment = Experiment(
    name="normalizers",
    question="How do the normalisers compare at equal parameters and tokens: loss, sharpness, time?",
    variants={name: {"heads": 4, "attention": {"normalizer": spec}} for name, spec in NORMALIZERS.items()},
    make=LanguageTrial,
    presets={
        "small": Preset(
            steps=60,
            every=20,
            sizes={"layers": 1, "width": 128, "length": 48, "batch": 8, "validation": 2048},
            learner="softmax",
            learns={"loss": 2.0},
        ),
        "full": head_dims.FULL,
    },
    figures=figures,
)
