"""What wins in max retrieval beyond the trained length: up to 256 items in training, up to 8192 in the test.

The task and the model are those of `retrieval`. There are no positions: the order of items means nothing.
"""

from regard.lab.estimate import Estimate
from regard.lab.figure import Figure
from regard.lab.training.comparison import BASE, compare
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.experiments.retrieval import RetrievalTrial, accuracy_figure, accuracy_table, curve
from regard.lab.training.results import plus_minus
from regard.lab.training.trials.attention import compared
from regard.table import Table

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
        for name, difference in compare(result, f"own@{n}").items():
            differences.setdefault(f"{name} − {BASE}", {})[n] = format_points(difference)
    return accuracy_table(result, {name: (name, "own") for name in result["summary"]}, differences)


def format_points(difference: Estimate) -> str:
    """Return a difference of percentages; without a spread, the number alone."""
    return f"{difference.value:+.1f}" if difference.low == difference.high else plus_minus(difference)


def figures(result: dict) -> dict[str, Figure]:
    """Draw % correct against the number of items."""
    return {"length": accuracy_figure({n: curve(result, n, "own") for n in SHOWN if n in result["summary"]})}


experiment = Experiment(
    name="variants-length",
    question="Trained on up to 256 items, which kind of attention finds the largest of 8192?",
    variants=compared(TRAINED, COMPARED),
    make=RetrievalTrial,
    presets={
        "small": Preset.small(150, 75, "softmax", 1.2, width=64, batch=64, trained=32, items=2**13, rate=3e-3, **SHORT),
        "full": Preset(
            2000, 1000, dict(width=128, batch=128, trained=TRAINED, items=2**21, rows=512, rate=2e-3, **LONG), 5
        ),
    },
    figures=figures,
    table=table,
    reads="",
    metric="own@8192",
)
