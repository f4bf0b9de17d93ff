"""A look at every step that costs nothing measurable: is all finite, and what has changed since the step before?

| looked at | told |
| --- | --- |
| 16 rows of one sequence in each attention call (`taps.py`) | logits jumped, values fell, another scale, later keys |
| one number per row of the model's output, or its loss | not finite |
| 256 numbers of each of 32 matrices of weights | weights overwritten, steps too large |
| sums over a part of the batch | the same batch again |

What is found stays on the device and is fetched while the next step runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from regard._core.dtensor import is_dtensor
from regard.health.capture.forwards import as_written
from regard.health.checks.finding import LOGIT_LIMIT
from regard.health.measure.side_stream import HostCopies
from regard.health.qk_clip.max_logits import is_clipped
from regard.health.watching import taps
from regard.health.watching.bands import Level, Steady
from regard.health.watching.groups import PROJECTIONS
from regard.health.watching.symptoms import NOWHERE, Symptom
from regard.table import format_number

GROWN, FALLEN = 8.0, 1.0 / 3.0  # a largest logit, and the norm of values, beside the steps before
RESCALED = 1.2  # a scale of the scores beside the one before
BATCH = 4096  # numbers of a batch that are compared with the one before
AGAIN = 2  # times that a batch may follow itself more often than ever before
MATRICES, NUMBERS = 32, 256  # of weights that are looked at, and how many numbers of each
OVERWRITTEN, FAR = 0.3, 8.0  # the move of a matrix, and beside what was usual, that no optimizer makes in a step
TOO_LARGE, GROWTH = 0.03, 3.0  # the move of the median matrix, and beside its highest level, from which steps harm
LASTING = 3  # steps in a row
MEMORY = 0.999  # what a step leaves of the highest level
SHORT, LAG = 8, 32  # steps of a level, and after which it counts as one from before


class Pulse:
    """The looks at the steps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.taps = model, taps.Taps(model, whole=True, eagerly=True)
        self.largest = -math.inf  # of the step that was read last; NaN where a logit was not finite
        self.is_finite = True  # was its output?
        self.step: int | None = None  # whose numbers were read last
        self.layers: dict[str, Tensor] = {}  # what the taps of the last forward held
        self.sudden: list[Symptom] = []  # changes from one step to the next, of the step that was read last
        self.weights = WeightMoves(model)
        self._levels: dict[str, tuple[Level, Level, Steady, Steady]] = {}  # layer -> logits, values, scale, later keys
        self._batch: Tensor | None = None  # sums of the batch of the forward that runs
        self._last_batch: list[float] = []
        self._changes, self._again, self._longest = 0, 0, 0  # of batches; how often one followed itself, and ever did
        self._copies = HostCopies()

    def begin_forward(self, inputs: Iterable[Any]) -> None:
        """Keeps sums of the batch: of its first tensor of integers with two dims, or else of its first tensor."""
        given = [x for x in inputs if isinstance(x, Tensor) and x.numel() > 1 and not taps.is_unreadable(x)]
        tokens = [x for x in given if x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool]
        self._batch = None
        if tokens or given:
            flat = (tokens or given)[0].detach().reshape(-1)
            few = flat[:: max(1, len(flat) // BATCH)].float()
            self._batch = torch.stack([few.sum(), few.square().sum(), few[::3].sum()])

    def end_forward(self, step: int, output: Any) -> None:
        """Starts to fetch what the forward has left."""
        self.layers = self.taps.read()
        flag = _sum_of(output)
        if not self.layers and flag is None:
            return
        device = next(iter(self.layers.values())).device if self.layers else flag.device  # type: ignore[union-attr]
        empty = torch.zeros(0, device=device)
        batch, self._batch = self._batch, None
        parts = [torch.zeros(1, device=device) if flag is None else flag.reshape(1)]
        parts += [empty if batch is None else batch, *self.layers.values(), self.weights.look()]
        sizes = [len(part) for part in parts]
        receive = partial(self._receive, step=step, names=list(self.layers), sizes=sizes, matrices=self.weights.names)
        self._copies.add(torch.cat([part.to(device) for part in parts]), receive)
        self._copies.start()

    def read(self) -> bool:
        """Reads what the last forward has left; True if there was anything."""
        before, self.sudden = self.step, []
        self._copies.finish()
        return self.step != before

    def _receive(self, numbers: Tensor, step: int, names: list[str], sizes: list[int], matrices: list[str]) -> None:
        total, batch, *held, moves = numbers.split(sizes)
        self.largest = max((float(one[taps.LEADING :].amax()) for one in held), default=-math.inf, key=_nan_first)
        if self.largest == -math.inf and names and not float(total):
            return  # no graph ran
        self.is_finite, self.step = math.isfinite(float(total)) and not math.isnan(self.largest), step
        for name, one in zip(names, held, strict=True):
            call, value = one[: taps.LEADING].tolist()
            self._follow(name, call, value, float(one[taps.LEADING :].amax()))
        self._follow_batch(batch.tolist())
        if len(moves):
            self.weights.is_clipped = is_clipped(self.model)
            self.sudden += self.weights.add(dict(zip(matrices, moves.tolist(), strict=True)))

    def _follow(self, name: str, call: float, value: float, largest: float) -> None:
        """Notes a layer that computes otherwise than in the steps before, or whose logits or values leapt.

        call: see `taps.describe_call`.
        """
        levels = Level(GROWN), Level(FALLEN), Steady(RESCALED), Steady(RESCALED)
        of_logit, of_value, of_scale, of_later = self._levels.setdefault(name, levels)
        place = name, -1

        def tell(kind: str, number: float, text: str) -> None:
            self.sudden.append(Symptom(kind, "warning", place, number, text))

        if math.isfinite(largest) and (found := of_logit.add(largest)) is not None and found[1] > LOGIT_LIMIT:
            tell("jumped", found[1], f"the largest logit of {name} rose {_from_to(found)} between two steps")
        if math.isfinite(value) and (found := of_value.add(value)) is not None:
            tell("values fell", found[1], f"the norm of the values of {name} fell {_from_to(found)} between two steps")
        if not math.isfinite(call):
            return
        if (found := of_scale.add(abs(call))) is not None:
            text = f"{name} multiplies its scores by {format_number(found[1])}, by {format_number(found[0])} before"
            tell("scale changed", found[1] / found[0], text)
        if of_later.add(1.0 if call > 0 else 2.0) is not None and call < 0:
            tell("later keys", 1.0, f"{name} lets queries see later keys, which it hid in all steps before")

    def _follow_batch(self, sums: list[float]) -> None:
        """Notes a batch that follows itself, where batches had changed before."""
        if not sums or not all(map(math.isfinite, sums)):
            return
        if sums != self._last_batch:
            self._changes, self._longest = self._changes + 1, max(self._longest, self._again)
            self._again, self._last_batch = 0, sums
            return
        self._again += 1
        if self._changes > Level.BEFORE and self._again >= max(AGAIN, 2 * self._longest + 1):
            text = f"the model was given the same batch {self._again + 1} times in a row"
            self.sudden.append(Symptom("same batch", "warning", NOWHERE, self._again + 1.0, text))

    def has_seen(self) -> bool:
        """True if a call was ever made in a compiled graph."""
        return self.taps.has_seen()

    def close(self) -> None:
        self.taps.close()


class WeightMoves:
    """Follows how far matrices of weights move from step to step: ‖w − w before‖ / ‖w‖, over a few numbers of each.

    >>> import torch
    >>> from regard.health.watching.pulse import WeightMoves
    >>> moves = WeightMoves(torch.nn.Linear(16, 16))
    >>> found = [moves.add({"weight": x}) for x in [0.01] * 20 + [0.9, 0.01]]
    >>> [one.kind for one in found[-1]]
    ['overwritten']
    """

    def __init__(self, model: nn.Module) -> None:
        known = [(name, x) for name, x in as_written(model).named_parameters() if x.requires_grad and x.ndim > 1]
        known = known[:: max(1, -(-len(known) // MATRICES))]
        self._matrices = {name: x for name, x in known if x.is_floating_point()}
        self.names: list[str] = []  # of those that were looked at last
        self.is_clipped = False  # does QK-clip shrink projections?
        self.highest = 0.0  # level of the median matrix, of which each step leaves a little less
        self._views: dict[str, tuple[int, Tensor | None]] = {}  # name -> address of the weights, a few of their numbers
        self._before: Tensor | None = None
        self._levels: deque[float] = deque(maxlen=SHORT + LAG)  # moves of the median matrix
        self._tops: deque[float] = deque(maxlen=32)  # the largest move of any matrix
        self._large = 0  # consecutive steps that were too large
        self._leapt = 0.0  # the move of the median matrix where all have leapt in the step before

    def look(self) -> Tensor:
        """Returns the move of each matrix in `names` since the last look, on the device; empty if there was none."""
        for name, x in self._matrices.items():
            x = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
            if name not in self._views or self._views[name][0] != x.data_ptr():
                self._views[name] = x.data_ptr(), _numbers_of(x.detach())
        parts = {name: part for name, (_, part) in self._views.items() if part is not None}
        device = next((part.device for part in parts.values()), torch.device("cpu"))
        parts = {name: part.float() for name, part in parts.items() if part.device == device}
        now = torch.stack(list(parts.values())) if parts else torch.zeros(0, device=device)
        before, self._before = self._before, now
        is_known = before is not None and list(parts) == self.names and before.device == device
        self.names = list(parts)
        if not (is_known and parts):
            return now.new_full((len(parts),), math.nan)
        sizes = torch.maximum(now.norm(dim=1), before.norm(dim=1))  # type: ignore[union-attr]
        return (now - before).norm(dim=1) / sizes.clamp_min(1e-30)  # type: ignore[operator]

    def add(self, moves: Mapping[str, float]) -> list[Symptom]:
        """Returns what is wrong with the moves of a step."""
        if self.is_clipped:
            moves = {name: x for name, x in moves.items() if not set(name.split(".")[-2:]) & PROJECTIONS}
        moves = {name: x for name, x in moves.items() if 0.0 < x < math.inf}
        if not moves:
            return []  # no update in this forward
        middle, usual = median(moves.values()), max(self._tops, default=math.inf)
        level = median(list(self._levels)[-SHORT:]) if len(self._levels) >= SHORT else math.inf
        found = []
        over = [name for name, x in moves.items() if x > OVERWRITTEN and x > FAR * usual]
        if self._leapt and middle < self._leapt / 4:  # for one step alone
            found.append(_tell_overwritten(list(moves), self._leapt, usual))
        have_all = bool(over) and middle > FAR * level
        self._leapt = middle if have_all else 0.0
        if over and not have_all and level < math.inf:
            found.append(_tell_overwritten(over, max(moves.values()), usual))
        is_large = middle > self.limit and self.highest > 0
        self._large = self._large + 1 if is_large else 0
        if self._large >= LASTING:
            text = f"weights move by {middle:.2g} of their size in a step, by {self.highest:.2g} at most before"
            found.append(Symptom("steps too large", "warning", NOWHERE, middle, text))
        if not is_large:
            self._levels.append(middle)
            if len(self._levels) == SHORT + LAG:
                self.highest = max(MEMORY * self.highest, median(list(self._levels)[:SHORT]))
        self._tops.append(max(moves.values()))
        return found

    @property
    def limit(self) -> float:
        """The move of the median matrix beyond which steps are too large."""
        return max(self.highest * GROWTH, TOO_LARGE)

    def state(self) -> dict[str, Any]:
        return {"highest": self.highest, "levels": list(self._levels), "tops": list(self._tops)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.highest = state["highest"]
        self._levels.extend(state["levels"])
        self._tops.extend(state["tops"])


def _tell_overwritten(names: list[str], move: float, usual: float) -> Symptom:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"{names[0]}{more} moved by {move:.2g} of the size between two steps, by {usual:.2g} at most before"
    return Symptom("overwritten", "warning", NOWHERE, move, f"{text}: not the optimizer's doing")


def _numbers_of(x: Tensor) -> Tensor | None:
    """Returns a view of a few numbers of a matrix, None where it holds too few."""
    if x.numel() < NUMBERS or taps.is_unreadable(x) or not x.is_contiguous():
        return None
    return x.view(-1)[:: (x.numel() // NUMBERS - 1) | 1][:NUMBERS]


def _from_to(levels: tuple[float, float]) -> str:
    return f"from {format_number(levels[0])} to {format_number(levels[1])}"


def _nan_first(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _sum_of(output: Any) -> Tensor | None:
    """Returns the loss of an output, or the sum of the first entries of its rows: finite if they are."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).float()
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    x = next((x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.numel()), None)
    if x is None or taps.is_unreadable(x):
        return None
    with torch.no_grad():
        return (x.detach()[..., 0] if x.ndim > 1 else x.detach()).sum(dtype=torch.float32).reshape(())
