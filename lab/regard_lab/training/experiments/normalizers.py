"""Eight normalisers, the same parameters and tokens, in a character model and in a translator: loss, BLEU, sharpness.

sigmoid has the bias −ln 128 of its paper for rows of 128 keys, and −ln 16 in the translator, where an average sentence
has some 14 words; entmax has α = 1.25, between softmax and entmax15.
"""

from functools import partial

from regard_lab.training.experiment import Experiment, Preset
from regard_lab.training.results import draw_runs, draw_training
from regard_lab.training.trials import head_dims
from regard_lab.training.trials.language import LanguageTrial
from regard_lab.training.trials.translation import TranslationTrial

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
        "small": Preset.small(60, 20, "softmax", 2.0, layers=1, width=128, length=48, batch=8, validation=2048),
        "full": head_dims.FULL,
    },
    figures=figures,
)

translation = Experiment(
    name="translation",
    question="How do the normalisers compare in translation at equal parameters and tokens: BLEU, loss, sharpness?",
    variants={
        name: {"attention": {"normalizer": "sigmoid(bias=-2.773)" if name == "sigmoid" else spec}}
        for name, spec in NORMALIZERS.items()
    },
    make=TranslationTrial,
    presets={
        "small": Preset.small(
            120, 40, "softmax", 0.8, layers=1, heads=2, width=64, length=12, batch=32, dropout=0.0, rate=5e-3
        ),
        "full": Preset(
            steps=1600,
            every=400,
            sizes=dict(layers=2, heads=4, width=256, length=32, batch=128, dropout=0.2, rate=1e-3),
        ),
    },
    reads="folder",
    metric="bleu",
    figures=partial(figures, metric="bleu", title="BLEU"),
)
