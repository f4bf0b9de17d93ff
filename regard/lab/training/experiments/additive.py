"""Additive, dot-product and scaled dot-product scores at d_k = 16, 64 and 256: the notes' claim additive-vs-dot.

Additive scores w·tanh(q + k) have d_k more weights per head and layer than the others, 256 in all of 0.85 million.
"""

from regard.lab.figure import Figure
from regard.lab.training.experiment import Experiment, Preset, Setting
from regard.lab.training.language import LanguageTrial
from regard.lab.training.results import course, ends, in_words

WIDTH = 256
DIMS = (16, 64, 256)
SCORES = {"additive": "additive", "dot": "dot", "scaled": "scaled_dot"}


def make(setting: Setting) -> LanguageTrial:
    trial = LanguageTrial(setting)
    trial.graph = setting.options["attention"]["score"] != "additive"  # it recomputes in backward: no graph
    return trial


def figures(result):
    loss = {name: ends(result, {d: f"{name}-d{d}" for d in DIMS}) for name in SCORES}
    return {
        "loss": Figure(
            "bands",
            "d_k",
            "validation loss",
            loss,
            log_x=True,
            alt=f"Validation loss at d_k 16, 64 and 256 with 95 % intervals over seeds: {in_words(loss)}.",
        ),
        "course": Figure(
            "bands",
            "step",
            "validation loss",
            {name: course(result, f"{name}-d256", "loss") for name in SCORES},
            alt="Validation loss over training at d_k 256; bands are the range over seeds.",
        ),
    }


experiment = Experiment(
    name="additive",
    question="Does unscaled dot product fall behind additive attention as d_k grows, and does scaling keep up?",
    variants={
        f"{name}-d{d}": {"heads": WIDTH // d, "attention": {"score": score}}
        for name, score in SCORES.items()
        for d in DIMS
    },
    make=make,
    presets={
        "small": Preset(
            steps=30,
            every=15,
            sizes={"layers": 1, "width": WIDTH, "length": 24, "batch": 8, "validation": 768},
            learner="scaled-d64",
            learns={"loss": 2.0},
        ),
        "full": Preset(
            steps=500, every=100, sizes={"layers": 1, "width": WIDTH, "length": 64, "batch": 16, "validation": 4096}
        ),
    },
    figures=figures,
)
