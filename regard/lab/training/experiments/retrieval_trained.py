"""Max retrieval as in `retrieval`, with a remedy in the model from the first step."""

from dataclasses import replace

from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.experiments.retrieval import (
    PUBLISHED,
    SMALL,
    RetrievalTrial,
    accuracy_figure,
    accuracy_table,
    curve,
)

SHOWN = ("softmax", "ssmax", "adaptive", "query-dependent", "qk-norm", "entmax15")  # six lines are distinguishable


def table(result):
    return accuracy_table(result, {name: (name, "own") for name in result["summary"]}, {})


def figures(result):
    return {
        "length": accuracy_figure({name: curve(result, name, "own") for name in SHOWN if name in result["summary"]})
    }


experiment = Experiment(
    name="retrieval-trained",
    question="Trained on 16 items with a remedy in the model, how far does max retrieval reach?",
    variants={
        "softmax": {"attention": {}},
        "ssmax": {"attention": {"temperature": "ssmax"}},
        "adaptive": {"attention": {"temperature": "adaptive"}},
        "query-dependent": {"attention": {"temperature": "query_dependent"}},
        "qk-norm": {"attention": {"score": "cosine"}},
        "entmax15": {"attention": {"normalizer": "entmax15"}},
        "sparsemax": {"attention": {"normalizer": "sparsemax"}},
        "entmax15-ssmax": {"attention": {"normalizer": "entmax15", "temperature": "ssmax"}},
    },
    make=RetrievalTrial,
    presets={
        "small": replace(SMALL, learner="ssmax"),
        "full": Preset(
            steps=3000,
            every=500,
            sizes={"width": 128, "batch": 256, "tests": list(PUBLISHED), "items": 2**22, "rows": 512, "rate": 2e-3},
        ),
    },
    figures=figures,
    table=table,
    reads="",
    metric="own@1024",
)
