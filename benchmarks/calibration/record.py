"""The record of a calibration: docs/records/calibration.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """# Calibration: how often findings are right

`python -m benchmarks.calibration --data FILE.txt --cache FOLDER --pretrained FOLDER … --out FILE.md`,
{minutes:.0f} minutes on one core that others used too. Models and bugs are split by their place in the lists:
thresholds were set on the first half, the second was held out. *Found*: a warning or worse, or the first line of the
report says "Untrained or broken". *Named*: a finding (a note counts) of a kind that names the bug. *With a reference*:
`regard.compare(model, reference, batches)` sees a difference.
"""


@dataclass(frozen=True)
class Outcome:
    """One examination: what it was of, and what was found."""

    subject: str
    group: str  # "sound", "fresh", "pretrained", or the bug
    half: int
    grave: list[str] = field(default_factory=list)  # kinds of warnings and worse
    notes: list[str] = field(default_factory=list)
    named: bool = False
    located: bool | None = None  # by a reference

    @property
    def found(self) -> bool:
        return bool(self.grave) or "untrained or broken" in self.notes


def rate(outcomes: Sequence[Outcome], has) -> str:
    """ "7 of 10 (70 %)"."""
    count, total = sum(map(has, outcomes)), len(outcomes)
    return f"{count} of {total} ({100 * count / total:.0f} %)" if total else "none examined"


def write_record(path: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Write the rates, the table of bugs and the false alarms."""
    groups = ("sound", "fresh", "pretrained")
    bugs = [one for one in outcomes if one.group not in groups]
    lines = [HEAD.format(minutes=seconds / 60), "", "| quantity | rate | aim |", "| --- | ---: | ---: |"]
    held_out = [one for one in bugs if one.half == 1]
    seen = [one for one in bugs if one.half == 0]
    compared = [one for one in held_out if one.located is not None]
    for name, part in (("held out", held_out), ("first half", seen)):
        lines.append(f"| bugs found, {name} | {rate(part, lambda one: one.found)} | 70 % |")
        lines.append(f"| bugs named, {name} | {rate(part, lambda one: one.named)} | 50 % |")
    lines.append(f"| bugs seen with a reference, held out | {rate(compared, lambda one: bool(one.located))} | 90 % |")
    for half, name in ((1, "held out"), (0, "first half")):
        part = [one for one in outcomes if one.group == "sound" and one.half == half]
        lines.append(f"| sound trained models with a warning or worse, {name} | {rate(part, has_alarm)} | 1 % |")
    for group in ("fresh", "pretrained"):
        part = [one for one in outcomes if one.group == group]
        lines.append(f"| {group} models with a warning or worse | {rate(part, has_alarm)} | 1 % |")
    lines += ["", "## Bugs", "", "| bug | half | examined | found | named | with a reference | findings |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for name in dict.fromkeys(one.group for one in bugs):
        same = [one for one in bugs if one.group == name]
        kinds = ", ".join(sorted({kind for one in same for kind in one.grave})) or "–"
        noted = ", ".join(sorted({kind for one in same for kind in one.notes}))
        located = [one for one in same if one.located is not None]
        with_reference = f"{sum(bool(one.located) for one in located)}" if located else "–"
        lines.append(
            f"| {name} | {'held out' if same[0].half else 'first'} | {len(same)} | {sum(one.found for one in same)} | "
            f"{sum(one.named for one in same)} | {with_reference} | {kinds}{f'; notes: {noted}' if noted else ''} |"
        )
    lines += ["", "## Sound, fresh and pretrained models with a warning or worse", ""]
    alarms = [
        f"- {one.group}: {one.subject}: {', '.join(one.grave)}" for one in outcomes if one.group in groups and one.grave
    ]
    lines += alarms or ["None."]
    count = {group: len([one for one in outcomes if one.group == group]) for group in groups}
    lines += ["", f"Examined: {count['sound']} stages of sound models, {count['fresh']} fresh kinds, "
              f"{count['pretrained']} examinations of pretrained models, {len(bugs)} examinations of "
              f"{len({one.group for one in bugs})} kinds of bugs."]  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def has_alarm(one: Outcome) -> bool:
    return bool(one.grave)
