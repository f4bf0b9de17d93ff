"""What wins at 30 million parameters: a byte model over 100 million tokens, one run per variant.

A run is too long for five seeds: intervals are over the validation windows, which two runs share.
"""

from regard.lab.training import comparison
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.trials.attention import compared
from regard.lab.training.trials.bytes import ByteTrial

LENGTH = 1024
TOKENS = 100_000_000
BATCH = 64
DENSE = ("stick-breaking",)  # no fused kernel: too slow at this length

experiment = Experiment(
    name="variants-large",
    question="Do the best of the small models stay ahead at 30 million parameters and 100 million tokens?",
    variants=compared(LENGTH, but=DENSE),
    make=ByteTrial,
    presets={
        "small": Preset(
            steps=60,
            every=30,
            sizes={"layers": 1, "heads": 2, "width": 64, "length": 64, "batch": 8, "rate": 5e-3, "windows": 16},
            learner="softmax",
            learns={"loss": 2.6},
        ),
        "full": Preset(
            steps=-(-TOKENS // (BATCH * LENGTH)),
            every=250,
            sizes=dict(layers=6, heads=10, width=640, length=LENGTH, batch=BATCH, rate=1e-3, windows=512),
            seeds=1,
        ),
    },
    figures=comparison.figures,
    table=comparison.table,
)
