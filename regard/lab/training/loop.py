"""One run: train, evaluate every so many steps, save, and go on from where a killed run stood.

A run's files are `VARIANT-seedN.safetensors` (where it stands) and `VARIANT-seedN.json` (its record, once it is over).
On the CPU a resumed run ends with the same bits as one that was never stopped. A run whose loss stops being finite is
recorded as diverged at that step, counted from 1 as in its history, and ends there.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import regard
from regard.lab.training import checkpoint
from regard.lab.training.chance import Chance
from regard.lab.training.experiment import Experiment, Trial
from regard.lab.training.step import Step

Tick = Callable[[int, float], None]  # step, loss
PAUSE = 10.0


def run(
    experiment: Experiment,
    preset: str,
    variant: str,
    seed: int,
    folder: Path,
    data: Path | None = None,
    device: str = "cpu",
    tick: Tick = lambda step, loss: None,
    pause: float = PAUSE,
) -> dict:
    """The record of one run, trained now, gone on with, or read if it is over.

    `tick` hears of every evaluation; `pause` is the least time in seconds between two checkpoints
    (one more is made at the end; with an infinite pause, none).
    """
    steps = advance(experiment, preset, variant, seed, folder, data, device, tick, pause)
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value


def advance(
    experiment: Experiment,
    preset: str,
    variant: str,
    seed: int,
    folder: Path,
    data: Path | None,
    device: str,
    tick: Tick = lambda step, loss: None,
    pause: float = PAUSE,
) -> Generator[int, None, dict]:
    """The same step by step: yields after each, returns the record. Several can take turns on one CUDA device."""
    place = torch.device(device)
    plan, setting = experiment.presets[preset], experiment.setting(preset, variant, seed, data, place)
    identity = dict(
        experiment=experiment.name,
        preset=preset,
        variant=variant,
        seed=seed,
        steps=plan.steps,
        options=json.loads(json.dumps(dict(setting.options))),
        data=fingerprint(data),
        device=place.type,
    )
    over, state = folder / f"{variant}-seed{seed}.json", folder / f"{variant}-seed{seed}.safetensors"
    if over.exists():
        return _record(over, identity)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees none here; train where there is one, or pass --device cpu")
    chance = Chance(seed, place)
    with chance:
        trial = experiment.make(setting)
        optimizer = trial.optimizer()
        history, start, spent = [], 0, 0.0
        if state.exists():
            notes = checkpoint.load(state, trial.model, optimizer, lambda notes: _ours(notes, identity, state))
            history, start, spent = notes["history"], notes["step"], notes["seconds"]
        else:
            history.append({"step": 0, **evaluation(trial)})
    began = saved = time.perf_counter()
    step, bad = Step(trial, optimizer, plan.steps), None
    for done in range(start + 1, plan.steps + 1):
        with chance:
            step(done - 1)
            looks = done % plan.every == 0 or done == plan.steps
            bad = step.first_bad() if looks else None
            if looks and bad is None:
                history.append({"step": done, **evaluation(trial)})
                bad = None if math.isfinite(history[-1].get("loss", 0.0)) else done
        if bad is not None:
            break
        if looks:
            tick(done, history[-1].get("loss", math.nan))
            now = time.perf_counter()
            if now - saved >= pause or (done == plan.steps and pause < math.inf):
                notes = dict(identity=identity, step=done, history=history, seconds=spent + now - began)
                with chance:
                    checkpoint.save(state, trial.model, optimizer, notes)
                saved = now
        yield done
    with chance:
        final = None if bad is not None else rounded({**history[-1], **finish(trial)})
    record = dict(
        **identity,
        where=where(place),
        diverged=bad is not None,
        diverged_at=bad,
        parameters=sum(p.numel() for p in trial.model.parameters()),
        seconds=round(spent + time.perf_counter() - began, 2),
        history=[rounded(entry) for entry in history],
        final=final,
    )
    write(over, record)
    return record


def where(device: torch.device) -> str:
    """The machine and the versions that a record comes from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, regard {regard.__version__}"


def evaluation(trial: Trial) -> dict[str, float]:
    trial.model.eval()
    with torch.no_grad():
        numbers = trial.evaluate()
    trial.model.train()
    return numbers


def finish(trial: Trial) -> dict[str, Any]:
    trial.model.eval()
    with torch.no_grad():
        return trial.finish()


def write(path: Path, content: dict) -> None:
    checkpoint.written_whole(path, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def rounded(x: Any) -> Any:
    """Five digits, and null for what is not finite."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    return x


@cache
def fingerprint(data: Path | None) -> str:
    """The name of the data and the digest of its bytes; a folder's are those of its files in order."""
    if data is None:
        return "built-in"
    digest = hashlib.sha256()
    for path in sorted(p for p in data.iterdir() if p.is_file()) if data.is_dir() else [data]:
        digest.update(path.read_bytes())
    return f"{data.name} {digest.hexdigest()[:12]}"


def _record(path: Path, identity: dict) -> dict:
    """The record of a run that is over."""
    with checkpoint.readable(path):
        record = json.loads(path.read_text(encoding="utf-8"))
        _has(record, *identity, "where", "diverged", "history", "final")
    _must_be(identity, record, path)
    return record


def _ours(notes: dict, identity: dict, path: Path) -> None:
    """Are a checkpoint's notes whole, and of this run?"""
    with checkpoint.readable(path):
        _has(notes, "identity", "history", "step", "seconds")
    _must_be(identity, notes["identity"], path)


def _has(found: dict, *names: str) -> None:
    missing = ", ".join(name for name in names if name not in found)
    if missing:
        raise LookupError(f"it has no {missing}")


def _must_be(identity: dict, found: dict, path: Path) -> None:
    for name, value in identity.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path} is of another run: its {name} is {found.get(name)!r}, not {value!r}; remove it or choose "
                "another --out"
            )
