"""Writers of a monitor's numbers: one for each kind of log that `regard.Monitor(log=…)` takes.

| `log` | recognised by | receives |
| --- | --- | --- |
| a path | str or PathLike | JSONL: a line per sample, per alarm and, with heads, per head |
| TensorBoard | `add_scalar` | a scalar per series; alarms as text |
| Weights & Biases | `define_metric` and `log` | a dict per sample with its own step axis, `attention/step` |
| MLflow, Lightning's loggers, Comet | `log_metrics` | `log_metrics(dict, step=step)` |
| `transformers.Trainer` | `log` and `state.global_step` | `log(dict)`: goes to all that `report_to` names |
| `accelerate.Accelerator` | `trackers` and `log` | each tracker's `log(dict, step=step)` |
| another object | `log` | `log(dict, step=step)` |
| a function | callable | a dict per sample, per alarm and, with heads, per head |
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.health.probe.task import finite

Scalars = dict[str, float]
STEP_AXIS = "attention/step"


class Writer:
    """Writes scalars by series name, rows of heads, and alarms; this one writes nothing."""

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        """Writes one sample."""

    def write_alarm(self, alarm: dict) -> None:
        """Writes one alarm, as `Alarm.to_json` returns it."""


class Several(Writer):
    """Writes to several logs."""

    def __init__(self, writers: list[Writer]) -> None:
        self.writers = writers

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        for writer in self.writers:
            writer.write(step, scalars, rows)

    def write_alarm(self, alarm: dict) -> None:
        for writer in self.writers:
            writer.write_alarm(alarm)


class RowWriter(Writer):
    """Calls `send` with a list of dicts: one for the sample and one for each of its heads, or one for an alarm."""

    def __init__(self, send: Callable[[list[dict]], object]) -> None:
        self.send = send

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        self.send([{"step": step, **scalars}, *rows])

    def write_alarm(self, alarm: dict) -> None:
        self.send([alarm])


def _write_lines(path: Path) -> Writer:
    """Returns a writer of one JSON object per line, appended to a file that is opened for each sample."""
    if not path.parent.is_dir():
        raise ValueError(f"log: there is no folder {str(path.parent)!r}; create it first")

    def append(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({name: finite(x) for name, x in row.items()}) + "\n" for row in rows)

    return RowWriter(append)


class TensorBoard(Writer):
    """`add_scalar` for each series, `add_text` for alarms where the writer has it."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        for name, value in (without_nan(scalars) | head_series(rows)).items():
            self.log.add_scalar(name, value, step)

    def write_alarm(self, alarm: dict) -> None:
        if hasattr(self.log, "add_text"):
            text = ". To do: ".join(part for part in (alarm["text"], alarm["action"]) if part)
            self.log.add_text("attention/alarms", text, alarm["step"])


class DictWriter(Writer):
    """Calls `send(dict, step)` with all series of a sample."""

    def __init__(self, send: Callable[[Scalars, int], object]) -> None:
        self.send = send

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        self.send(without_nan(scalars) | head_series(rows), step)


class WeightsAndBiases(Writer):
    """A W&B run, on the step axis `attention/step`; the step of the run is the user's and is not set.

    `commit=False` adds the numbers to the row that the user writes next. If the run's step has not moved since the last
    sample, nobody else writes rows, and the sample before is committed first, so that none is lost.
    """

    def __init__(self, run: Any) -> None:
        self.run, self._step = run, None
        run.define_metric(STEP_AXIS, hidden=True)
        run.define_metric("attention/*", step_metric=STEP_AXIS)

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        at = getattr(self.run, "step", None)
        if self._step is not None and at == self._step:
            self.run.log({}, commit=True)
        self.run.log(without_nan(scalars) | head_series(rows) | {STEP_AXIS: step}, commit=False)
        self._step = getattr(self.run, "step", None)


def make_writer(log: Any) -> Writer:
    """Returns the writer for `log`, the argument of `regard.Monitor`."""
    if log is None:
        return Writer()
    if isinstance(log, (str, os.PathLike)):
        return _write_lines(Path(log))
    if hasattr(log, "add_scalar"):
        return TensorBoard(log)
    has_log = callable(getattr(log, "log", None)) and not isinstance(log, logging.Logger)
    if has_log and hasattr(log, "define_metric"):
        return WeightsAndBiases(log)
    if has_log and hasattr(getattr(log, "state", None), "global_step"):  # whose log_metrics is another thing
        return DictWriter(lambda scalars, step: log.log({**scalars, STEP_AXIS: step}))
    if callable(getattr(log, "log_metrics", None)):
        return DictWriter(lambda scalars, step: log.log_metrics(scalars, step=step))
    if has_log and hasattr(log, "trackers"):
        return Trackers(log)
    if has_log:
        return DictWriter(lambda scalars, step: log.log(scalars, step=step))
    if callable(log):
        return RowWriter(lambda rows: [log(row) for row in rows])
    raise TypeError(
        "log must have add_scalar, log_metrics, or a log method that takes a dict, or be a path or a function, "
        f"got {type(log).__name__}"
    )


class Trackers(Writer):
    """The trackers of an `accelerate.Accelerator`, which exist once `init_trackers` was called; W&B on its own axis."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._writers: dict[int, Writer] = {}

    def write(self, step: int, scalars: Scalars, rows: list[dict]) -> None:
        for tracker in self.accelerator.trackers:
            if id(tracker) not in self._writers:
                run = getattr(tracker, "tracker", None)
                self._writers[id(tracker)] = make_writer(run if hasattr(run, "define_metric") else tracker)
            self._writers[id(tracker)].write(step, scalars, rows)


def without_nan(scalars: Scalars) -> Scalars:
    """Returns the scalars without NaN: a number that a sample lacks has no point in its series."""
    return {name: value for name, value in scalars.items() if not math.isnan(value)}


def head_series(rows: list[dict]) -> Scalars:
    """Returns the numbers of heads by series name."""
    found: Scalars = {}
    for row in rows:
        prefix = f"attention/{row['series']}/head_{row['head']:02}"
        named = {name: x for name, x in row.items() if name not in ("step", "layer", "series", "head")}
        found |= {f"{prefix}/{name}": x for name, x in named.items() if not math.isnan(x)}
    return found
