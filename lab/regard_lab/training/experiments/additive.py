"""Additive, dot-product and scaled dot-product scores at d_k = 16, 64 and 256: the notes' claim additive-vs-dot.

Additive scores w·tanh(q + k) have d_k more weights per head and layer than the others, 256 in all of 0.85 million.
"""

from regard_lab.training.experiment import Experiment, Preset, Setting
from regard_lab.training.results import draw_training
from regard_lab.training.trials import head_dims
from regard_lab.training.trials.language import LanguageTrial

SCORES = {
    "additive": lambda d: {"score": "additive"},
    "dot": lambda d: {"score": "dot"},
    "scaled": lambda d: {"score": "scaled_dot"},
}


def make(setting: Setting) -> LanguageTrial:
    trial = LanguageTrial(setting)
    trial.graph = setting.options["attention"]["score"] != "additive"  # it recomputes in backward: no graph
    return trial


def figures(result):
    return {
        "loss": head_dims.loss_figure(result, SCORES),
        "course": draw_training(result, {name: f"{name}-d256" for name in SCORES}, "loss", "validation loss"),
    }


experiment = Experiment(
    name="additive",
    question="Does unscaled dot product fall behind additive attention as d_k grows, and does scaling keep up?",
    variants=head_dims.variants(SCORES),
    make=make,
    presets={
        "small": Preset.small(30, 15, "scaled-d64", 2.0, **head_dims.sizes(layers=1, length=24, batch=8, rows=32)),
        "full": Preset(steps=500, every=100, sizes=head_dims.sizes(layers=1, length=64, batch=16, rows=64)),
    },
    figures=figures,
)
