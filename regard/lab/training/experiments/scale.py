"""The scale of the scores, none, 1/√d_k and 1/d_k, at d_k = 16, 64 and 256: equal parameters, equal tokens."""

import math

from regard.lab.figure import Figure
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.language import LanguageTrial
from regard.lab.training.results import course, ends, in_words

WIDTH = 256
DIMS = (16, 64, 256)
SCALES = {
    "none": lambda d: {"score": "dot"},
    "sqrt": lambda d: {"score": "scaled_dot"},
    "inverse": lambda d: {"score": "scaled_dot", "temperature": math.sqrt(d)},
}


def figures(result):
    def over_training(metric, title, dims=(16, 256)):
        return Figure(
            "bands",
            "step",
            title,
            {f"{name}, d_k {d}": course(result, f"{name}-d{d}", metric) for d in dims for name in SCALES},
            alt=f"{title} over training at d_k {' and '.join(map(str, dims))}; bands are the range over seeds.",
        )

    loss = {name: ends(result, {d: f"{name}-d{d}" for d in DIMS}) for name in SCALES}
    return {
        "loss": Figure(
            "bands",
            "d_k",
            "validation loss",
            loss,
            log_x=True,
            alt=f"Validation loss at d_k 16, 64 and 256 with 95 % intervals over seeds: {in_words(loss)}.",
        ),
        "entropy": over_training("entropy_ratio", "entropy / ln n"),
        "gradient-gain": over_training("gradient_gain", "gradient gain"),
    }


experiment = Experiment(
    name="scale",
    question="What does the scale of the scores do to loss, entropy and gradient gain over training, by d_k?",
    variants={f"{name}-d{d}": {"heads": WIDTH // d, "attention": of(d)} for name, of in SCALES.items() for d in DIMS},
    make=LanguageTrial,
    presets={
        "small": Preset(
            steps=60,
            every=20,
            sizes={"layers": 1, "width": WIDTH, "length": 48, "batch": 8, "validation": 2048},
            learner="sqrt-d64",
            learns={"loss": 1.9},
        ),
        "full": Preset(
            steps=500, every=100, sizes={"layers": 2, "width": WIDTH, "length": 128, "batch": 16, "validation": 8192}
        ),
    },
    figures=figures,
)
