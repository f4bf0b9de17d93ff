"""What wins in max retrieval beyond the trained length: up to 256 items in training, up to 8192 in the test.

The task and the model are those of `retrieval`. There are no positions: the order of items means nothing.
"""

from functools import partial

from regard.table import Table
from regard_lab.training.comparison import BASE, compare
from regard_lab.training.experiment import Experiment, Preset
from regard_lab.training.experiments.retrieval import RetrievalTrial, accuracy_table, figures_by_variant
from regard_lab.training.results import plus_minus
from regard_lab.training.trials.attention import compared

TRAINED = 256  # items at most
TESTS = [256, 512, 1024, 2048, 4096, 8192]  # numbers of items
SHORT, LONG = (dict(tests=tests, afterwards=False) for tests in ([32, 128], TESTS))
SHOWN = ("softmax", "ssmax", "asentmax", "entmax15", "entmax-learned", "sigmoid")  # six lines are distinguishable
COMPARED = (*SHOWN, "sink", "temperature", "qk-norm", "sparsemax", "sigmoid-learned")


def table(result: dict) -> Table:
    """Return % correct by number of items, then the differences to softmax of the same seed."""
    tests = sorted(int(name.split("@")[1]) for name in result["summary"][BASE] if name.startswith("own@"))
    differences: dict[str, dict[int, str]] = {}
    for n in tests:
        for name, x in compare(result, f"own@{n}").items():
            text = f"{x.value:+.1f}" if x.low == x.high else plus_minus(x)  # without a spread, the number alone
            differences.setdefault(f"{name} − {BASE}", {})[n] = text
    return accuracy_table(result, {name: (name, "own") for name in result["summary"]}, differences)


figures = partial(figures_by_variant, shown=SHOWN)

experiment = Experiment(
    name="variants-length",
    question="Trained on up to 256 items, which kind of attention finds the largest of 8192?",
    variants=compared(TRAINED, COMPARED),
    make=RetrievalTrial,
    presets={
        "small": Preset.small(150, 75, "softmax", 1.2, width=64, batch=64, trained=32, items=2**13, rate=3e-3, **SHORT),
        "full": Preset(
            steps=2000,
            every=1000,
            sizes=dict(width=128, batch=128, trained=TRAINED, items=2**21, rows=512, rate=2e-3, **LONG),
            seeds=5,
        ),
    },
    figures=figures,
    table=table,
    reads="",
    metric="own@8192",
)
