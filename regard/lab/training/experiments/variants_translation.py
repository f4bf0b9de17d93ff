"""What wins in translation: every kind of attention, self and cross, at equal parameters and tokens, five seeds.

Forgetting and stick-breaking need a causal order and are in the decoder's self-attention alone; differential attention
is in the self-attention of both sides.
"""

from regard.lab.training import comparison
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.trials.attention import compared
from regard.lab.training.trials.translation import TranslationTrial

WORDS = 16  # of an average sentence

experiment = Experiment(
    name="variants-translation",
    question="Which kind of attention translates best at equal parameters and tokens?",
    variants=compared(WORDS),
    make=TranslationTrial,
    presets={
        "small": Preset(
            steps=120,
            every=60,
            sizes=dict(layers=1, heads=2, width=64, length=12, batch=32, dropout=0.0, rate=5e-3, readings=False),
            learner="softmax",
            learns={"loss": 0.8},
        ),
        "full": Preset(
            steps=1000,
            every=500,
            sizes=dict(layers=2, heads=4, width=256, length=32, batch=128, dropout=0.2, rate=1e-3, readings=False),
            seeds=5,
        ),
    },
    reads="folder",
    metric="bleu",
    figures=comparison.figures,
    table=comparison.table,
)
