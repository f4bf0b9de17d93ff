"""A character model made to collapse (no scale, high learning rate), and one variant per remedy.

Queries and keys of width 256 begin with unit variance, so that unscaled scores have a deviation of 16 from the start:
rows are nearly one-hot, their gradient gain is small, and the remaining gradient increases the logits further.
"""

import regard
from regard_lab.training.experiment import Experiment, Preset, Setting
from regard_lab.training.results import draw_runs, draw_training
from regard_lab.training.trials.language import LanguageTrial

REMEDIES = {
    "none": {"score": "dot"},
    "scale": {"score": "scaled_dot"},
    "qk-norm": {"score": "cosine"},
    "dropout": {"score": "dot", "dropout": 0.2},
    "softcap": {"score": "dot", "softcap": 20.0},
    "qk-clip": {"score": "dot"},
    "learned": {"score": "dot", "temperature": "learned"},
    "query-dependent": {"score": "dot", "temperature": "query_dependent"},
    "ssmax": {"score": "dot", "temperature": "ssmax"},
    "entmax15": {"score": "dot", "normalizer": "entmax15"},
    "sigmoid": {"score": "dot", "normalizer": "sigmoid(bias=-4.852)"},
}


class CollapseTrial(LanguageTrial):
    """A language trial whose option qk_clip, a threshold, clips after every step."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.threshold = setting.options.get("qk_clip")
        self.graph = self.threshold is None  # the clip measures every forward, which a graph would skip

    def after_step(self) -> None:
        if self.threshold is not None:
            regard.qk_clip(self.model, self.threshold)


def figures(result):
    names = list(result["summary"])
    shown = {name: name for name in ("none", "scale", "qk-norm", "softcap", "qk-clip", "learned") if name in names}
    return {
        "loss": draw_runs(result, names, "validation loss", "Validation loss with each remedy:"),
        "entropy": draw_training(result, shown, "entropy_ratio", "entropy / ln n"),
        "gradient-gain": draw_training(result, shown, "gradient_gain", "gradient gain"),
        "max-logit": draw_training(result, shown, "max_logit", "largest logit", log="y"),
    }


experiment = Experiment(
    name="collapse",
    question="Attention provoked to collapse, unscaled at a high learning rate: which remedy relieves it?",
    variants={
        name: {"attention": attention, **({"qk_clip": 20.0} if name == "qk-clip" else {})}
        for name, attention in REMEDIES.items()
    },
    make=CollapseTrial,
    presets={
        "small": Preset.small(
            60, 20, "scale", 2.4, layers=1, heads=1, width=128, length=48, batch=8, validation=2048, rate=1e-2
        ),
        "full": Preset(steps=800, every=100, sizes=dict(layers=2, heads=1, width=256, length=128, batch=16, rate=8e-3)),
    },
    figures=figures,
)
