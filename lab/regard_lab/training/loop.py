"""`run`: train one run, evaluate at intervals, save checkpoints, and resume a run that was killed.

A run's files are `VARIANT-seedN.safetensors` (its checkpoint) and `VARIANT-seedN.json` (its record, once finished).
On the CPU a resumed run ends with the same bits as one that was never stopped. A run whose loss becomes infinite or
NaN is recorded as diverged at that step, counted from 1 as in its history, and ends there.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import regard
from regard_lab.training import checkpoint
from regard_lab.training.experiment import Experiment, Preset, Trial
from regard_lab.training.step import Step

Tick = Callable[[int, float], None]  # step, loss
IGNORE: Tick = lambda step, loss: None  # noqa: E731
PAUSE = 10.0  # seconds between two checkpoints


def run(
    experiment: Experiment, preset: str, variant: str, seed: int, folder: Path, tick: Tick = IGNORE, **options: Any
) -> dict:
    """Train one run, or resume it, and return its record; `tick` gets (step, loss), the rest is `run_together`'s."""
    return run_together(experiment, preset, variant, [seed], folder, tick=lambda _, *now: tick(*now), **options)[0]


def run_together(
    experiment: Experiment, preset: str, variant: str, seeds: Sequence[int], folder: Path, data: Path | None = None,
    device: str = "cpu", tick: Callable[[int, int, float], None] = lambda seed, step, loss: None, pause: float = PAUSE,
) -> list[dict]:  # fmt: skip
    """Train the seeds of a variant by turns, a step each, or resume them, and return their records.

    A finished run is read, not repeated. `folder` is where checkpoints and records are; `tick` is called with (seed,
    step, loss) after every evaluation; `pause` is the least time between two checkpoints in seconds: one more is saved
    at the end, and none if it is infinite. On CUDA each has a stream of its own, so that small models share the GPU.
    Their dropout then draws from one generator: masks differ from those of a seed that trains alone.
    """
    place = torch.device(device)
    on_gpu = place.type == "cuda" and torch.cuda.is_available()
    streams = [torch.cuda.Stream() if on_gpu else None for _ in seeds]
    runs = [_run(experiment, preset, variant, seed, folder, data, place, partial(tick, seed), pause) for seed in seeds]
    records: dict[int, dict] = {}
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        while len(records) < len(runs):
            for i, (training, stream) in enumerate(zip(runs, streams, strict=True)):
                if i not in records:
                    with torch.cuda.stream(stream):  # None: no change
                        try:
                            next(training)
                        except StopIteration as end:
                            records[i] = end.value
    return [records[i] for i in range(len(runs))]


def _run(
    experiment: Experiment, preset: str, variant: str, seed: int, folder: Path, data: Path | None,
    place: torch.device, tick: Tick, pause: float,
) -> Generator[None, None, dict]:  # fmt: skip
    """Yield after every step and return the record, which is written, or read if there is one."""
    setting = experiment.setting(preset, variant, seed, data, place)
    identity = dict(
        experiment=experiment.name,
        preset=preset,
        variant=variant,
        seed=seed,
        steps=experiment.presets[preset].steps,
        options=json.loads(json.dumps(dict(setting.options))),
        data=fingerprint(data),
        device=place.type,
    )
    path = folder / f"{variant}-seed{seed}.json"
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        _check_identity(identity, record, path)
        return record
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees none here; train where there is one, or pass --device cpu")
    torch.manual_seed(seed)
    record = yield from _train(experiment.make(setting), experiment.presets[preset], identity, path, tick, pause)
    write(path, record)
    return record


def _train(
    trial: Trial, preset: Preset, identity: dict, path: Path, tick: Tick, pause: float
) -> Generator[None, None, dict]:
    """Train from the checkpoint, or from step 0, to the end or to divergence; yield after steps, return the record."""
    state, optimizer = path.with_suffix(".safetensors"), trial.optimizer()
    history, start, spent = [], 0, 0.0
    if state.exists():
        check = partial(_check_identity, identity, path=state)
        notes = checkpoint.load(state, trial.model, optimizer, lambda notes: check(notes["identity"]))
        history, start, spent = notes["history"], notes["step"], notes["seconds"]
    else:
        history.append({"step": 0, **evaluate(trial)})
    began = saved = time.perf_counter()
    step, bad = Step(trial, optimizer, preset.steps), None
    for done in range(start + 1, preset.steps + 1):
        step(done - 1)
        if done % preset.every and done != preset.steps:
            yield
            continue
        bad = step.first_bad()
        if bad is None:
            history.append({"step": done, **evaluate(trial)})
            bad = None if math.isfinite(history[-1].get("loss", 0.0)) else done
        if bad is not None:
            break
        tick(done, history[-1].get("loss", math.nan))
        now = time.perf_counter()
        if now - saved >= pause or (done == preset.steps and pause < math.inf):
            notes = dict(identity=identity, step=done, history=history, seconds=spent + now - began)
            checkpoint.save(state, trial.model, optimizer, notes)
            saved = now
    return dict(
        **identity,
        where=describe_machine(next(trial.model.parameters()).device),
        diverged=bad is not None,
        diverged_at=bad,
        parameters=sum(p.numel() for p in trial.model.parameters()),
        seconds=round(spent + time.perf_counter() - began, 2),
        history=[round_numbers(entry) for entry in history],
        final=None if bad is not None else round_numbers({**history[-1], **evaluate(trial, finished=True)}),
    )


def describe_machine(device: torch.device) -> str:
    """Return the device and the versions that a record comes from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, regard {regard.__version__}"


def evaluate(trial: Trial, finished: bool = False) -> dict[str, Any]:
    """Return the trial's evaluation, or what it adds after the last step, in eval mode and without gradients."""
    trial.model.eval()
    with torch.no_grad():
        numbers = trial.finish() if finished else trial.evaluate()
    trial.model.train()
    return numbers


def write(path: Path, content: dict) -> None:
    """Write a record as JSON."""
    checkpoint.write_atomically(path, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def round_numbers(x: Any) -> Any:
    """Round every float to five digits; None where it is not finite."""
    if isinstance(x, dict):
        return {name: round_numbers(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [round_numbers(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    return x


@cache
def fingerprint(data: Path | None) -> str:
    """Return the name of the data and a digest of its bytes (of a folder, of its files in order)."""
    if data is None:
        return "built-in"
    digest = hashlib.sha256()
    for path in sorted(p for p in data.iterdir() if p.is_file()) if data.is_dir() else [data]:
        digest.update(path.read_bytes())
    return f"{data.name} {digest.hexdigest()[:12]}"


def _check_identity(identity: dict, found: dict, path: Path) -> None:
    for name, value in identity.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path} is of another run: its {name} is {found.get(name)!r}, not {value!r}; remove it or choose "
                "another --out"
            )
