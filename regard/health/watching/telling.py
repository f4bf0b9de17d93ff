"""Tells of samples and incidents: writes them to the log and the black box, warns, and calls `on_alarm`.

| `log` | recognised by | receives |
| --- | --- | --- |
| a path | str or PathLike | JSONL: a line per sample, per alarm and, with heads, per head |
| TensorBoard | `add_scalar` | a scalar per series; alarms as text |
| Weights & Biases | `define_metric` and `log` | a dict per sample with its own step axis, `attention/step` |
| MLflow, Lightning's loggers, Comet | `log_metrics` | `log_metrics(dict, step=step)` |
| `transformers.Trainer` | `log` and `state.global_step` | `log(dict)`: goes to all that `report_to` names |
| `accelerate.Accelerator` | `trackers` and `log` | each tracker's `log(dict, step=step)` |
| another object, trackio | `log` | `log(dict, step=step)` |
| a function | callable | a dict per sample, per alarm and, with heads, per head |
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.health.capture.forwards import find_caller
from regard.health.probe.task import finite
from regard.health.qk_clip.max_logits import is_clipped
from regard.health.watching.black_box import BlackBox
from regard.health.watching.incidents import Alarm, Incidents
from regard.health.watching.ranks import Joined
from regard.health.watching.sample import flags_of, head_rows, scalars_of, series_names

IN_TROUBLE = 8  # heads whose own numbers are logged because a finding has them
HARMLESS = ("positional", "diffuse", "bounded")  # findings that have no head logged


class AttentionWarning(UserWarning):
    """Warns that a head is unhealthy or about to be, or that something is not watched."""


class Teller:
    """Writes and reports what one monitor has found; on the first rank alone, but for calls of `on_alarm`."""

    def __init__(
        self, log: Any, heads: bool, metrics: Any, on_alarm: Callable[[Alarm], object] | None, box: BlackBox,
        incidents: Incidents,
    ) -> None:  # fmt: skip
        self.writers = [] if log is None else [make_writer(log)]
        self.heads, self.metrics, self.on_alarm = heads, metrics, on_alarm
        self.box, self.incidents = box, incidents
        self.alarms: list[Alarm] = []
        self.layers: dict[str, str] = {}  # series name -> label
        self._names: dict[str, str] = {}  # label -> series name
        self._warned: set[str] = set()

    def tell_sample(self, joined: Joined, model: nn.Module, loss: float, is_first: bool) -> dict[str, float]:
        """Reports a sample and its incidents, the same on every rank; returns its scalars."""
        step, layers = joined.step, joined.layers
        if any(layer.label not in self._names for layer in layers):
            self._names = series_names([layer.label for layer in layers])
            self.layers = {series: label for label, series in self._names.items()}
        rows, flags = head_rows(layers, self._names, step), flags_of(layers)
        scalars = scalars_of(layers, self._names)
        alarms = self.incidents.add(step, rows, flags, is_clipped(model), bool(joined.loss.get("jumped")))
        kept = {name: x for name, x in scalars.items() if self.metrics is None or name.endswith("max_logit")}
        kept |= {"attention/loss": loss} if loss == loss else {}
        kept["attention/alarms"] = sum(one.severity != "note" for one in self.incidents.find_open())
        if is_first:
            self._log(step, kept, self._select(rows, flags), [])
        self.tell_alarms(step, alarms, is_first)
        return scalars

    def tell_alarms(self, step: int, alarms: Iterable[Alarm], is_first: bool) -> None:
        """Writes what changed on the first rank, and calls `on_alarm` on all."""
        opened = [alarm for alarm in alarms if alarm.event not in ("resolved", "settled")]
        self.alarms += opened
        if alarms and is_first:
            self._log(step, None, [], list(alarms))
        if opened and self.box.path is not None and is_first:
            try:
                self.box.write(self.box.path, self.incidents.all)
            except Exception as error:
                self.warn_once("box", f"The black box could not be written at step {step}: {error!r}")
        for alarm in opened:
            if self.on_alarm is not None:
                try:
                    self.on_alarm(alarm)
                except Exception as error:
                    self.warn_once("on_alarm", f"on_alarm raised at step {alarm.step}: {error!r}")
            if alarm.severity != "note" and is_first:
                warn(str(alarm))

    def _select(self, rows: list[dict], flags: Mapping[str, Mapping]) -> list[dict]:
        """Returns the heads whose own numbers are logged: all on request, else some of those in trouble."""
        if self.heads:
            return rows
        places = {place for kind, found in flags.items() if kind not in HARMLESS for place in found}
        return [row for row in rows if (row["layer"], row["head"]) in places][:IN_TROUBLE]

    def _log(self, step: int, scalars: dict[str, float] | None, rows: list[dict], alarms: list[Alarm]) -> None:
        try:
            for writer in self.writers:
                if scalars is not None:
                    writer.write(step, scalars, rows)
                for alarm in alarms:
                    writer.write_alarm(alarm.to_json())
        except Exception as error:  # a failing log must not stop training
            self.warn_once("log", f"The monitor's log failed at step {step}, and rows are lost: {error!r}")

    def use_loggers(self, loggers: Sequence[Any]) -> None:
        """Writes to these too, if there is no log."""
        self.writers = self.writers or [make_writer(logger) for logger in loggers]

    def warn_once(self, kind: str, text: str) -> None:
        """Warns once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)


def warn(text: str) -> None:
    """Warns at the line that ran the model."""
    warnings.warn(text, AttentionWarning, stacklevel=find_caller()[1] + 1)


Scalars = dict[str, float]
STEP_AXIS = "attention/step"


class LogWriter(NamedTuple):
    """How one log takes a sample (step, scalars by series name, rows of heads) and an alarm, as `Alarm.to_json` is."""

    write: Callable[[int, Scalars, list[dict]], object]
    write_alarm: Callable[[dict], object] = lambda alarm: None


def make_writer(log: Any) -> LogWriter:
    """Returns the writer for `log`, the argument of `regard.Monitor`."""
    if isinstance(log, (str, os.PathLike)):
        return _write_lines(Path(log))
    if hasattr(log, "add_scalar"):
        return _write_to_tensorboard(log)
    has_log = callable(getattr(log, "log", None)) and not isinstance(log, logging.Logger)
    if has_log and hasattr(log, "define_metric"):
        return _write_to_wandb(log)
    if has_log and hasattr(getattr(log, "state", None), "global_step"):  # whose log_metrics is another thing
        return _write_dicts(lambda scalars, step: log.log({**scalars, STEP_AXIS: step}))
    if callable(getattr(log, "log_metrics", None)):
        return _write_dicts(lambda scalars, step: log.log_metrics(scalars, step=step))
    if has_log and hasattr(log, "trackers"):
        return _write_to_trackers(log)
    if has_log:
        return _write_dicts(lambda scalars, step: log.log(scalars, step=step))
    if callable(log):
        return _write_rows(lambda rows: [log(row) for row in rows])
    raise TypeError(
        "log must have add_scalar, log_metrics, or a log method that takes a dict, or be a path or a function, "
        f"got {type(log).__name__}"
    )


def _write_rows(send: Callable[[list[dict]], object]) -> LogWriter:
    """Sends a list of dicts: one for the sample and one for each of its heads, or one for an alarm."""
    return LogWriter(lambda step, scalars, rows: send([{"step": step, **scalars}, *rows]), lambda alarm: send([alarm]))


def _write_lines(path: Path) -> LogWriter:
    """Appends one JSON object per line to a file that is opened for each sample."""
    if not path.parent.is_dir():
        raise ValueError(f"log: there is no folder {str(path.parent)!r}; create it first")

    def append(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({name: finite(x) for name, x in row.items()}) + "\n" for row in rows)

    return _write_rows(append)


def _write_dicts(send: Callable[[Scalars, int], object]) -> LogWriter:
    return LogWriter(lambda step, scalars, rows: send(merge_series(scalars, rows), step))


def _write_to_tensorboard(log: Any) -> LogWriter:
    def write(step: int, scalars: Scalars, rows: list[dict]) -> None:
        for name, value in merge_series(scalars, rows).items():
            log.add_scalar(name, value, step)

    def write_alarm(alarm: dict) -> None:
        if hasattr(log, "add_text"):
            text = ". To do: ".join(part for part in (alarm["text"], alarm["action"]) if part)
            log.add_text("attention/alarms", text, alarm["step"])

    return LogWriter(write, write_alarm)


def _write_to_wandb(run: Any) -> LogWriter:
    """Writes on the step axis `attention/step`; the step of the run is the user's and is not set.

    `commit=False` adds the numbers to the row that the user writes next. If the run's step has not moved since the last
    sample, nobody else writes rows, and the sample before is committed first, so that none is lost.
    """
    run.define_metric(STEP_AXIS, hidden=True)
    run.define_metric("attention/*", step_metric=STEP_AXIS)
    last = None

    def write(step: int, scalars: Scalars, rows: list[dict]) -> None:
        nonlocal last
        if last is not None and getattr(run, "step", None) == last:
            run.log({}, commit=True)
        run.log(merge_series(scalars, rows) | {STEP_AXIS: step}, commit=False)
        last = getattr(run, "step", None)

    return LogWriter(write)


def _write_to_trackers(accelerator: Any) -> LogWriter:
    """Writes to each tracker of an `accelerate.Accelerator`: they exist once `init_trackers` was called."""
    known: dict[int, LogWriter] = {}

    def write(step: int, scalars: Scalars, rows: list[dict]) -> None:
        for tracker in accelerator.trackers:
            if id(tracker) not in known:
                run = getattr(tracker, "tracker", None)
                known[id(tracker)] = make_writer(run if hasattr(run, "define_metric") else tracker)
            known[id(tracker)].write(step, scalars, rows)

    return LogWriter(write)


def merge_series(scalars: Scalars, rows: list[dict]) -> Scalars:
    """Returns scalars and the numbers of heads by series name, without NaN: a number that lacks has no point."""
    found = dict(scalars)
    for row in rows:
        prefix = f"attention/{row['series']}/head_{row['head']:02}"
        named = {name: x for name, x in row.items() if name not in ("step", "layer", "series", "head")}
        found |= {f"{prefix}/{name}": x for name, x in named.items()}
    return {name: x for name, x in found.items() if not math.isnan(x)}
