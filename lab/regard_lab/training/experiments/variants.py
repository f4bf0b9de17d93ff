"""What wins in a character model, in translation, and at 30 million parameters: every kind of attention.

Parameters and tokens are equal, with five seeds. Forgetting and stick-breaking need a causal order and are in the
translator's decoder alone; differential attention is in the self-attention of both sides. An average sentence has 16
words. The large model reads bytes, 100 million of them, in one run per variant: a run is too long for five seeds, so
intervals are over the validation windows, which two runs share.
"""

from functools import partial

from regard_lab.training import comparison
from regard_lab.training.experiment import Experiment, Preset
from regard_lab.training.trials.attention import compared
from regard_lab.training.trials.bytes import ByteTrial
from regard_lab.training.trials.language import LanguageTrial
from regard_lab.training.trials.translation import TranslationTrial

LENGTH, LONG = 128, 1024
TOKENS = 100_000_000
BATCH = 64
QUIET = dict(readings=False)  # an evaluation measures the loss alone
DENSE = ("stick-breaking",)  # no fused kernel: too slow at the long length
Compared = partial(Experiment, figures=comparison.figures, table=comparison.table)

character = Compared(
    name="variants",
    question="Which kind of attention learns a character model best at equal parameters and tokens?",
    variants=compared(LENGTH),
    make=LanguageTrial,
    presets={
        "small": Preset.small(
            60, 30, "softmax", 2.0, layers=1, heads=4, width=128, length=48, batch=8, validation=2048, readings=False
        ),
        "full": Preset(
            steps=1000,
            every=500,
            sizes=dict(layers=2, heads=4, width=256, length=LENGTH, batch=32, validation=65_536, readings=False),
            seeds=5,
        ),
    },
)

translation = Compared(
    name="variants-translation",
    question="Which kind of attention translates best at equal parameters and tokens?",
    variants=compared(keys=16),
    make=TranslationTrial,
    presets={
        "small": Preset.small(
            120, 60, "softmax", 0.8, layers=1, heads=2, width=64, length=12, batch=32, dropout=0.0, rate=5e-3, **QUIET
        ),
        "full": Preset(
            steps=1000,
            every=500,
            sizes=dict(layers=2, heads=4, width=256, length=32, batch=128, dropout=0.2, rate=1e-3, **QUIET),
            seeds=5,
        ),
    },
    reads="folder",
    metric="bleu",
)

large = Compared(
    name="variants-large",
    question="Do the best of the small models stay ahead at 30 million parameters and 100 million tokens?",
    variants=compared(LONG, but=DENSE),
    make=ByteTrial,
    presets={
        "small": Preset.small(
            60, 30, "softmax", 2.6, layers=1, heads=2, width=64, length=64, batch=8, rate=5e-3, windows=16
        ),
        "full": Preset(
            steps=-(-TOKENS // (BATCH * LONG)),
            every=250,
            sizes=dict(layers=6, heads=10, width=640, length=LONG, batch=BATCH, rate=1e-3, windows=512),
            seeds=1,
        ),
    },
)
