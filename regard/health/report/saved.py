"""Reports read back from their JSON files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from regard.health.checks.finding import Finding
from regard.health.contract.rounding import RoundingEffect
from regard.health.contract.run import Ablation, Checks, LossChange, LossReading
from regard.health.measure.heads import HeadReading
from regard.health.measure.histogram import Spreads
from regard.health.report import files
from regard.health.report.report import Report, WhatIfReading

REQUIRED = ("entropy_ratio", "max_weight", "first_key_mass", "gain_ratio", "max_logit")
MOST = 1_000_000  # layers, or heads of a layer
LARGEST = sys.float_info.max


@dataclass(frozen=True)
class SavedSpread:
    """One statistic of one head as a file has it; a number that is not finite is NaN."""

    numbers: Mapping[str, float | None]

    def __getattr__(self, key: str) -> float:
        if key not in ("mean", "std", "min", "max"):
            raise AttributeError(key)
        return _number(self.numbers.get(key))

    def quantile(self, share: float) -> float:
        """The 0.05, 0.5 or 0.95 quantile; the file has no others."""
        key = f"q{round(100 * share):02d}"
        if key not in self.numbers or not math.isclose(100 * share, round(100 * share)):
            raise ValueError(f"share must be 0.05, 0.5 or 0.95 in a report loaded from JSON, got {share!r}")
        return _number(self.numbers[key])

    def to_json(self) -> dict[str, float | None]:
        return dict(self.numbers)


class SavedSpreads(dict[str, SavedSpread]):
    """The statistics of one head by name."""

    def mean(self, name: str) -> float:
        return self[name].mean

    def max(self, name: str) -> float:
        return self[name].max

    def min(self, name: str) -> float:
        return self[name].min


def load_report(path: str | os.PathLike) -> Report:
    data = read_json(path)
    try:
        what_if = {
            name: WhatIfReading(_heads(one), _findings(one), _pairs(one["refused"]), _loss_change(one.get("loss")))
            for name, one in data["what_if"].items()
        }
        return Report(
            data["title"], _heads(data), _findings(data), _pairs(data["unmeasured"]), what_if, data["how"],
            data["interrupted"], tokens=data.get("tokens"), checks=_checks(data.get("checks")),
            mixers=data.get("mixers"),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a whole report: {type(error).__name__}: {error}") from None


def _pairs(given: list) -> list[tuple[str, str]]:
    return [(layer, reason) for layer, reason in given]


def _heads(data: dict) -> list[HeadReading]:
    found = []
    for head in data["heads"]:
        spreads = SavedSpreads({name: SavedSpread(x) for name, x in head["statistics"].items()})
        found.append(HeadReading(
            head["layer"], head["index"], head["head"], cast(Spreads, spreads), None,
            _number(head.get("predicted_logit_variance")), can_be_judged=head.get("judged", True),
            ablation=_number(head.get("ablation")), gate=_number(head.get("gate")),
            gate_near_zero=_number(head.get("gate_near_zero")), saved_rows=head.get("rows"),
        ))  # fmt: skip
    return found


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def _checks(data: dict | None) -> Checks | None:
    if data is None:
        return None
    loss = None if data["loss"] is None else LossReading(
        **data["loss"] | {name: _number(data["loss"][name]) for name in ("mean", "low", "high")}
    )  # fmt: skip
    what_if = {name: change for name, one in data["what_if"].items() if (change := _loss_change(one))}
    rounding = {name: RoundingEffect.from_json(one) for name, one in data.get("rounding", {}).items()}
    ablation = _ablation(data["ablation"])
    return Checks(data["done"], _pairs(data["skipped"]), loss, what_if, rounding, ablation, data["seconds"])


def _loss_change(data: dict | None) -> LossChange | None:
    names = ("loss", "change", "low", "high")
    return None if data is None else LossChange(*(_number(data[name]) for name in names))


def _ablation(data: dict | None) -> Ablation | None:
    if data is None:
        return None
    heads = {(one["index"], one["head"]): one["change"] for one in data["heads"]}
    layers = {one["index"]: one["change"] for one in data["layers"]}
    return Ablation(
        data["unit"], _number(data["own"]), heads, layers, data["missing"], data["seconds"], data["sequences"]
    )


def _findings(data: dict) -> list[Finding]:
    return [Finding(**{key: _tuple(value) for key, value in one.items()}) for one in data["findings"]]


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """A report's JSON, checked; raise a ValueError of one line if the file has none."""
    try:
        data = json.loads(files.read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        page = "; pass the .json of a report, not its page" if str(path).endswith((".html", ".htm")) else ""
        raise ValueError(f"{str(path)!r} is not JSON: {error}{page}") from None
    problem = find_problem(data)
    if problem:
        raise ValueError(f"{str(path)!r} is not a report of regard examine: {problem}; make one with --json")
    return data


def find_problem(data: Any) -> str | None:
    """What is wrong with a report's JSON in the parts that are read here; schema.json has the whole form."""
    if not isinstance(data, dict):
        return f"it holds a {type(data).__name__}"
    if not isinstance(data.get("title"), str):
        return "it has no title"
    for name, is_valid in (("heads", _is_head), ("findings", _is_finding)):
        if not isinstance(data.get(name), list):
            return f"it has no list of {name}"
        bad = next((at for at, one in enumerate(data[name]) if not is_valid(one)), None)
        if bad is not None:
            return f"{name}[{bad}] is invalid"
    return None if isinstance(data.get("unmeasured", []), list) else "unmeasured is not a list"


def _is_head(head: Any) -> bool:
    try:
        places = head["index"], head["head"]
        spreads = [head["statistics"][name] for name in REQUIRED] + list(head["statistics"].values())
        numbers = [value for spread in spreads for value in (spread["mean"], *spread.values())]
    except (KeyError, TypeError, AttributeError):
        return False
    return (
        isinstance(head.get("layer"), str)
        and all(type(place) is int and 0 <= place < MOST for place in places)
        and all(x is None or (type(x) in (int, float) and abs(x) <= LARGEST) for x in numbers)
    )


def _is_finding(one: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(one.get("kind"), str) and isinstance(one.get("heads"), list)):
        return False
    indices = one.get("indices")
    return (
        isinstance(indices, list)
        and len(indices) == len(one["heads"])
        and all(isinstance(head, list) and len(head) == 2 for head in one["heads"])
    )
