"""The training loop: resumed runs end as whole ones, divergence is recorded, records are not mixed up."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from regard_lab import training
from regard_lab.training import checkpoint, loop, results
from regard_lab.training.experiment import Experiment, Preset, Setting, Trial, experiments
from regard_lab.training.session import train
from torch import nn


class Line(Trial):
    """Fit w of y = w·x with a dropout that draws from the global generator at every step."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rate = setting.options.get("rate", 0.1)
        self.model = nn.Sequential(nn.Dropout(setting.options.get("dropout", 0.2)), nn.Linear(4, 1, bias=False))
        self.truth = torch.arange(4.0)[:, None]
        self.fails_at = setting.options.get("fails_at")
        self.seen = 0

    def batch(self, step):
        self.seen = step
        return (torch.randn(16, 4, generator=self.setting.generator(step)),)

    def loss(self, batch):
        loss = (self.model(batch[0]) - batch[0] @ self.truth).square().mean()
        return loss * math.nan if self.seen == self.fails_at else loss

    def evaluate(self):
        return {"loss": float((self.model[1].weight.T - self.truth).square().mean())}

    def finish(self):
        return {"weight": self.model[1].weight.flatten().tolist(), "exact": float(self.model[1].weight.double().sum())}


def line(**options) -> Experiment:
    small = Preset(steps=30, every=10, learner="plain", learns={"loss": 1.0})
    variants = {"plain": {}, "fast": {"rate": 0.2}, **options}
    return Experiment("line", "?", variants, Line, {"small": small, "full": small}, lambda result: {})


class Killed(Exception):
    pass


def kill_after(steps):
    def tick(step, loss):
        if step > steps:
            raise Killed

    return tick


def weights(folder, name="plain-seed0"):
    from safetensors.torch import load_file

    return load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("stop", [0, 10])
def test_a_killed_run_ends_with_the_same_bits(tmp_path, stop):
    whole = loop.run(line(), "small", "plain", 0, tmp_path / "whole")
    with pytest.raises(Killed):
        loop.run(line(), "small", "plain", 0, tmp_path / "cut", tick=kill_after(stop), pause=0.0)
    assert not (tmp_path / "cut" / "plain-seed0.json").exists()
    torch.manual_seed(99)  # what else happened in between must not matter
    torch.randn(7)
    resumed = loop.run(line(), "small", "plain", 0, tmp_path / "cut")
    assert resumed["history"] == whole["history"] and resumed["final"] == whole["final"]
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert any(name.startswith("optimizer.") for name in a)


def test_a_run_leaves_the_caller_his_random_numbers(tmp_path):
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    loop.run(line(), "small", "plain", 0, tmp_path)
    assert torch.equal(torch.randn(3), expected)


def test_divergence_is_recorded_where_it_happened(tmp_path):
    record = loop.run(line(ill={"fails_at": 13}), "small", "ill", 0, tmp_path)
    assert record["diverged"] and record["diverged_at"] == 14 and record["final"] is None
    assert [entry["step"] for entry in record["history"]] == [0, 10]
    json.loads((tmp_path / "ill-seed0.json").read_text(), parse_constant=pytest.fail)
    told = results.collect(line(), "small", [record])
    assert told["summary"] == {} or told["summary"]["ill"]["diverged"] == 1


def test_diverged_runs_are_counted_not_dropped(tmp_path):
    experiment = line(ill={"fails_at": 5})
    records = [loop.run(experiment, "small", v, seed, tmp_path) for v in ("plain", "ill") for seed in range(3)]
    told = results.collect(experiment, "small", records)["summary"]
    assert told["ill"]["runs"] == 3 and told["ill"]["diverged"] == 3 and "loss" not in told["ill"]
    assert told["plain"]["diverged"] == 0 and told["plain"]["loss"]["n"] == 3
    expected = results.interval([r["final"]["loss"] for r in records[:3]])
    found = told["plain"]["loss"]
    assert (found["low"], found["high"]) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_finished_run_is_read_and_another_is_refused(tmp_path):
    first = loop.run(line(), "small", "plain", 0, tmp_path)
    os.remove(tmp_path / "plain-seed0.safetensors")
    assert loop.run(line(), "small", "plain", 0, tmp_path) == first  # nothing was trained: no file came back
    assert not (tmp_path / "plain-seed0.safetensors").exists()
    changed = line(plain={"rate": 0.3})
    with pytest.raises(ValueError, match=r"plain-seed0.json is of another run: its options is \{\}, not .*--out"):
        loop.run(changed, "small", "plain", 0, tmp_path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full", ".beside")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["state"]


def test_every_seed_meets_other_batches_and_every_variant_the_same():
    a, b = Setting({}, seed=0), Setting({"x": 1}, seed=1)
    draw = [torch.rand(1, generator=s.generator(step)).item() for s in (a, b) for step in (0, 1)]
    assert len(set(draw)) == 4
    assert torch.rand(1, generator=Setting({"x": 1}, seed=0).generator(1)).item() == draw[1]


def test_the_interval_is_students():
    low, high = results.interval([2.0, 4.0, 4.0, 6.0])  # mean 4, s = 1.63299, t(0.975, 3) = 3.18245
    assert (low, high) == pytest.approx((4 - 3.18245 * 1.63299 / 2, 4 + 3.18245 * 1.63299 / 2), abs=1e-4)
    assert results.interval([1.0]) == (-math.inf, math.inf)


def test_a_process_killed_by_force_goes_on(tmp_path):
    """kill -9 in the midst of `regard lab train`, then the same command: the same records as never killed."""
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import test_training_loop as t\n"
        "from regard_lab.training import loop\n"
        "from pathlib import Path\n"
        "def tick(step, loss):\n"
        "    if step > 10:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "loop.run(t.line(), 'small', 'fast', 2, Path(sys.argv[2]), tick=tick, pause=0.0)\n"
    )
    told = subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "cut")])
    assert told.returncode == -signal.SIGKILL
    resumed = loop.run(line(), "small", "fast", 2, tmp_path / "cut")
    whole = loop.run(line(), "small", "fast", 2, tmp_path / "whole")
    assert resumed["final"] == whole["final"] and resumed["history"] == whole["history"]


def test_a_session_trains_every_variant_with_every_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(experiments(), "line", line())
    result = train("line", folder=tmp_path, command="regard lab train line")
    assert [(r["variant"], r["seed"]) for r in result["records"]] == [
        (v, seed) for seed in range(3) for v in ("plain", "fast")
    ]
    assert len({r["final"]["exact"] for r in result["records"]}) == 6
    assert len(capsys.readouterr().err.splitlines()) == 6
    assert training.get("line") is experiments()["line"]
