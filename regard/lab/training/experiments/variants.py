"""What wins in a character model: every kind of attention at equal parameters and tokens, five seeds."""

from regard.lab.training import comparison
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.trials.attention import compared
from regard.lab.training.trials.language import LanguageTrial

LENGTH = 128

experiment = Experiment(
    name="variants",
    question="Which kind of attention learns a character model best at equal parameters and tokens?",
    variants=compared(LENGTH),
    make=LanguageTrial,
    presets={
        "small": Preset(
            steps=60,
            every=30,
            sizes=dict(layers=1, heads=4, width=128, length=48, batch=8, validation=2048, readings=False),
            learner="softmax",
            learns={"loss": 2.0},
        ),
        "full": Preset(
            steps=1000,
            every=500,
            sizes=dict(layers=2, heads=4, width=256, length=LENGTH, batch=32, validation=65_536, readings=False),
            seeds=5,
        ),
    },
    figures=comparison.figures,
    table=comparison.table,
)
