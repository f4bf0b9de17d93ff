"""The blocks that a model's hidden states pass one after another, and which place of one run is which of another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.health.comparing.record import CALL_PARTS, Key, Run

SHARED = 0.7  # part of the places that two runs of the same code have in common, at least


def find_blocks(model: nn.Module, run: Run) -> list[str]:
    """The names of the blocks in order of execution: entries of lists of modules that keep the shape of their input.

    Without such lists: the outermost parts that hold an attention call and keep the shape.
    """
    order = [key.module for key in run.points if key.part == "in" and key.use == 0]
    listed = [name for name in order if name.rpartition(".")[2].isdigit() and _keeps_shape(model, run, name)]
    found = _outermost(listed)
    if found:
        return found
    holding = [name for name in order if name and _keeps_shape(model, run, name)]
    holding = [name for name in holding if sum(is_within(key.module, name) for key in run.calls) in (1, 2)]
    return _outermost(holding)


def _keeps_shape(model: nn.Module, run: Run, name: str) -> bool:
    given, returned = run.points.get(Key("in", name)), run.points.get(Key("out", name))
    if given is None or returned is None or given.shape != returned.shape or not given.is_floating_point():
        return False
    return given.ndim >= 2 and any(True for _ in model.get_submodule(name).children())


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(other != name and is_within(name, other) for other in names)]


def is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or not outer


@dataclass(frozen=True)
class Pairing:
    """Which place of A is which of B.

    Attributes:
        places: from A's places to B's.
        same_code: the modules have the same names, so that every place has its counterpart.
        blocks: A's and B's blocks in order.
    """

    places: dict[Key, Key]
    same_code: bool
    blocks: tuple[list[str], list[str]]

    def block_of(self, key: Key) -> int | None:
        """The index of A's block that holds a place; None outside."""
        return next((at for at, name in enumerate(self.blocks[0]) if is_within(key.module, name)), None)

    def counterpart(self, key: Key) -> Key:
        """B's place for A's, the same where B has none; a call's mask and scores are where its output is."""
        at = key if key in self.places or key.part not in CALL_PARTS else key._replace(part="attention")
        return self.places.get(at, at)._replace(part=key.part)

    def mirrored(self) -> Pairing:
        """The same from B's side."""
        return Pairing({other: key for key, other in self.places.items()}, self.same_code, self.blocks[::-1])

    def forced(self, a: Run, everywhere: bool) -> Run:
        """The inputs that B's modules get instead of their own: those of A's blocks, or of every module."""
        inside = set(self.blocks[0])
        points = {
            self.places[key]: x for key, x in a.points.items()
            if key.part == "in" and key in self.places and (everywhere or key.module in inside)
        }  # fmt: skip
        return Run(points)


def pair(a: Run, b: Run, blocks: tuple[list[str], list[str]]) -> Pairing:
    """Pair the places of two runs by name, or else blocks, attention calls and outputs by order."""
    common = a.points.keys() & b.points.keys()
    modules = [{key.module for key in run.points if key.part in ("in", "out")} for run in (a, b)]
    shared = modules[0] & modules[1]
    if len(shared) >= SHARED * max(len(modules[0]), len(modules[1]), 1):
        return Pairing({key: key for key in a.points if key in common}, True, blocks)
    places: dict[Key, Key] = {}
    names = dict(zip(*blocks, strict=False)) | {"": ""}
    for key in a.points:
        if key.part in ("in", "out") and key.module in names:
            places[key] = key._replace(module=names[key.module])
    for one, other in zip(a.calls, b.calls, strict=False):
        places |= {one._replace(part=part): other._replace(part=part) for part in ("q", "k", "v", "attention")}
    places = {key: other for key, other in places.items() if key in a.points and other in b.points}
    return Pairing({key: places[key] for key in a.points if key in places}, False, blocks)
