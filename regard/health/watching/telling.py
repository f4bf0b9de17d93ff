"""Tells of samples and incidents: writes them to the log and the black box, warns, and calls `on_alarm`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from regard.health.capture.forwards import find_caller
from regard.health.qk_clip.max_logits import is_clipped
from regard.health.watching.black_box import BlackBox
from regard.health.watching.incidents import Alarm, Incidents
from regard.health.watching.ranks import Joined
from regard.health.watching.sample import flags_of, head_rows, scalars_of, series_names
from regard.health.watching.writers import Several, Writer, make_writer

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
        self.writer, self.heads, self.metrics, self.on_alarm = make_writer(log), heads, metrics, on_alarm
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
            if scalars is not None:
                self.writer.write(step, scalars, rows)
            for alarm in alarms:
                self.writer.write_alarm(alarm.to_json())
        except Exception as error:  # a failing log must not stop training
            self.warn_once("log", f"The monitor's log failed at step {step}, and rows are lost: {error!r}")

    def use_loggers(self, loggers: Sequence[Any]) -> None:
        """Writes to these too, if there is no log."""
        if type(self.writer) is Writer and loggers:
            self.writer = Several([make_writer(logger) for logger in loggers])

    def warn_once(self, kind: str, text: str) -> None:
        """Warns once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)


def warn(text: str) -> None:
    """Warns at the line that ran the model."""
    warnings.warn(text, AttentionWarning, stacklevel=find_caller()[1] + 1)
