"""Training on the GPU: a run killed by force goes on to the same loss, runs in turn end as alone, dropout and all."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from regard_lab import training
from regard_lab.training import loop

CLOSE = 2e-3  # nats: sums in another order, carried through the steps that are left


def translation():
    """The small translation with dropout: what is drawn after the kill depends on the generator that was saved."""
    whole = training.get("translation")
    small = whole.presets["small"]
    small = replace(small, steps=60, every=10, sizes={**small.sizes, "dropout": 0.3})
    return replace(whole, presets={"small": small, "full": small})


def killed_after(steps, folder):
    """Train until the evaluation after `steps` steps has been saved, then kill -9 this very process."""

    def tick(step, loss):
        if step > steps:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.run(translation(), "small", "softmax", 0, Path(folder), device="cuda", tick=tick, pause=0.0)


def losses(record):
    return [entry["loss"] for entry in record["history"]]


def test_a_run_killed_by_force_resumes_to_the_same_loss(tmp_path):
    what = "import sys; sys.path.insert(0, sys.argv[1]); import test_training as t; t.killed_after(30, sys.argv[2])"
    told = subprocess.run([sys.executable, "-c", what, str(Path(__file__).parent), str(tmp_path / "cut")])
    assert told.returncode == -signal.SIGKILL and not (tmp_path / "cut" / "softmax-seed0.json").exists()
    resumed = loop.run(translation(), "small", "softmax", 0, tmp_path / "cut", device="cuda")
    whole = loop.run(translation(), "small", "softmax", 0, tmp_path / "whole", device="cuda")
    print("whole", losses(whole), "resumed", losses(resumed))
    assert losses(whole)[-1] < 0.7 * losses(whole)[0]
    assert losses(resumed) == pytest.approx(losses(whole), abs=CLOSE)
