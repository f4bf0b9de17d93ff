"""Eight normalisers in a translator, all its attentions alike: loss and BLEU at equal parameters and tokens.

sigmoid has the bias −ln 16: an average sentence has some 14 words.
"""

from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.experiments import normalizers
from regard.lab.training.trials.translation import TranslationTrial


def figures(result):
    return normalizers.figures(result, metric="bleu", title="BLEU")


experiment = Experiment(
    name="translation",
    question="How do the normalisers compare in translation at equal parameters and tokens: BLEU, loss, sharpness?",
    variants={
        name: {"attention": {"normalizer": "sigmoid(bias=-2.773)" if name == "sigmoid" else spec}}
        for name, spec in normalizers.NORMALIZERS.items()
    },
    make=TranslationTrial,
    presets={
        "small": Preset(
            steps=120,
            every=40,
            sizes={"layers": 1, "heads": 2, "width": 64, "length": 12, "batch": 32, "dropout": 0.0, "rate": 5e-3},
            learner="softmax",
            learns={"loss": 0.8},
        ),
        "full": Preset(
            steps=1600,
            every=400,
            sizes={"layers": 2, "heads": 4, "width": 256, "length": 32, "batch": 128, "dropout": 0.2, "rate": 1e-3},
        ),
    },
    reads="folder",
    metric="bleu",
    figures=figures,
)
