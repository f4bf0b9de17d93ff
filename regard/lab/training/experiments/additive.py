"""Additive, dot-product and scaled dot-product scores at d_k = 16, 64 and 256: the notes' claim additive-vs-dot.

Additive scores w·tanh(q + k) have d_k more weights per head and layer than the others, 512 in all of 1.6 million.
"""

from regard.lab.figure import Figure
from regard.lab.training.experiment import Experiment, Preset, Setting
from regard.lab.training.language import LanguageTrial
from regard.lab.training.results import course

WIDTH = 256
DIMS = (16, 64, 256)
SCORES = {"additive": "additive", "dot": "dot", "scaled": "scaled_dot"}


def make(setting: Setting) -> LanguageTrial:
    trial = LanguageTrial(setting)
    trial.graph = setting.options["attention"]["score"] != "additive"  # it recomputes in backward: no graph
    return trial


def figures(result):
    told = result["summary"]
    sides = ("low", "mean", "high")
    loss = {
        name: (DIMS, *([told[f"{name}-d{d}"].get("loss", {}).get(side) for d in DIMS] for side in sides))
        for name in SCORES
    }
    words = "; ".join(f"{name} {', '.join(f'{y:.3f}' for y in c[2] if y is not None)}" for name, c in loss.items())
    return {
        "loss": Figure(
            "bands",
            "d_k",
            "validation loss",
            loss,
            log_x=True,
            alt=f"Validation loss at d_k 16, 64 and 256 with 95 % intervals over seeds: {words}.",
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
            learns={"loss": 2.2},
        ),
        "full": Preset(steps=1500, every=100, seeds=5, sizes={"layers": 2, "width": WIDTH, "length": 64, "batch": 32}),
    },
    figures=figures,
)
