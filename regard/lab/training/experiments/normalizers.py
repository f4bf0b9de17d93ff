"""Eight normalisers, the same model, the same parameters and tokens: loss, sharpness, time.

sigmoid has the bias −ln 128 of its paper for rows of 128 keys; entmax has α = 1.25, between softmax and entmax15.
"""

from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.results import draw_runs, draw_training
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
    shown = {name: name for name in SHOWN if name in result["summary"]}
    return {
        "quality": draw_runs(result, list(result["summary"]), title, f"{title} of every run; the means are", metric),
        "entropy": draw_training(result, shown, "entropy_ratio", "entropy / ln n"),
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
