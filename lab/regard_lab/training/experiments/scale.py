"""The scale of the scores, none, 1/√d_k and 1/d_k, at d_k = 16, 64 and 256: equal parameters, equal tokens."""

import math

from regard_lab.training.experiment import Experiment, Preset
from regard_lab.training.results import draw_training
from regard_lab.training.trials import head_dims
from regard_lab.training.trials.language import LanguageTrial

SCALES = {
    "none": lambda d: {"score": "dot"},
    "sqrt": lambda d: {"score": "scaled_dot"},
    "inverse": lambda d: {"score": "scaled_dot", "temperature": math.sqrt(d)},
}


def figures(result):
    shown = {f"{name}, d_k {d}": f"{name}-d{d}" for d in (16, 256) for name in SCALES}
    return {
        "loss": head_dims.loss_figure(result, SCALES),
        "entropy": draw_training(result, shown, "entropy_ratio", "entropy / ln n"),
        "gradient-gain": draw_training(result, shown, "gradient_gain", "gradient gain"),
    }


experiment = Experiment(
    name="scale",
    question="What does the scale of the scores do to loss, entropy and gradient gain over training, by d_k?",
    variants=head_dims.variants(SCALES),
    make=LanguageTrial,
    presets={
        "small": Preset.small(60, 20, "sqrt-d64", 1.9, **head_dims.sizes(layers=1, length=48, batch=8, rows=32)),
        "full": head_dims.FULL,
    },
    figures=figures,
)
