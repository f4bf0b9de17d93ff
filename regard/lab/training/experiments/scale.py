"""The scale of the scores, none, 1/√d_k and 1/d_k, at d_k = 16, 64 and 256: equal parameters, equal tokens."""

import math

from regard.lab.figure import Figure
from regard.lab.training.experiment import Experiment, Preset
from regard.lab.training.language import LanguageTrial
from regard.lab.training.results import course

WIDTH = 256
DIMS = (16, 64, 256)
SCALES = {
    "none": lambda d: {"score": "dot"},
    "sqrt": lambda d: {"score": "scaled_dot"},
    "inverse": lambda d: {"score": "scaled_dot", "temperature": math.sqrt(d)},
}


def figures(result):
    def over_training(metric, title, scale_names, dims):
        return Figure(
            "bands",
            "step",
            title,
            {f"{scale}, d_k {d}": course(result, f"{scale}-d{d}", metric) for d in dims for scale in scale_names},
            alt=f"{title} over training at d_k {', '.join(map(str, dims))}; bands are the range over seeds.",
        )

    final = result["summary"]
    by_dim = {
        scale: (DIMS, *([final[f"{scale}-d{d}"].get("loss", {}).get(side) for d in DIMS] for side in
                        ("low", "mean", "high")))
        for scale in SCALES
    }  # fmt: skip
    ends = {scale: [f"{y:.3g}" for y in columns[2] if y is not None] for scale, columns in by_dim.items()}
    return {
        "loss": Figure(
            "bands", "d_k", "validation loss", by_dim, log_x=True,
            alt="Validation loss against d_k: " + "; ".join(f"{s} {', '.join(y)}" for s, y in ends.items()) + ".",
        ),
        "entropy": over_training("entropy_ratio", "entropy / ln n", SCALES, (16, 256)),
        "gradient-gain": over_training("gradient_gain", "gradient gain", SCALES, (16, 256)),
    }  # fmt: skip


experiment = Experiment(
    name="scale",
    question="What does the scale of the scores do to loss, entropy and gradient gain over training, by d_k?",
    variants={f"{name}-d{d}": {"heads": WIDTH // d, "attention": of(d)} for name, of in SCALES.items() for d in DIMS},
    make=LanguageTrial,
    presets={
        "small": Preset(
            steps=60,
            every=20,
            sizes={"layers": 1, "width": WIDTH, "length": 48, "batch": 8, "validation": 2048},
            learner="sqrt-d64",
            learns={"loss": 2.2},
        ),
        "full": Preset(steps=1500, every=100, sizes={"layers": 3, "width": WIDTH, "length": 128, "batch": 32}),
    },
    figures=figures,
)
