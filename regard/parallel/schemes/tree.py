"""Every rank's part of the same rows, merged in ⌈log₂ W⌉ rounds: for decoding, where a few queries meet all keys.

    all_merge   each round exchanges with the rank whose number differs in one bit: all have the whole at the end
    merge_at    each round halves the ranks that still hold something: one root has it

The lower rank's part is always the first of the two, so that every rank computes the same tree, bit for bit. Where W
is no power of two, the ranks beyond the last power hand their parts over first and get the whole back.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from regard._core.problem import Part
from regard.parallel.group import Line
from regard.parallel.merge import Total, merged
from regard.statistics import State


def all_merge(line: Line, total: Total, step: str = "tree") -> Total:
    """The same whole on every rank."""
    size = 1 << (line.world.bit_length() - 1)  # the largest power of two
    rank, extra = line.rank, line.world - size
    if rank >= size:
        _give(line, total, rank - size, step, 0)
        return _take(line, total, rank - size, step, size.bit_length())
    if rank < extra:
        total = _joined(total, _take(line, total, rank + size, step, 0))
    for round_ in range(size.bit_length() - 1):
        partner = rank ^ (1 << round_)
        other = _swap(line, total, partner, step, 1 + round_)
        total = _joined(total, other) if rank < partner else _joined(other, total)
    if rank < extra:
        _give(line, total, rank + size, step, size.bit_length())
    return total


def merge_at(line: Line, total: Total, root: int, step: str = "tree") -> Total | None:
    """The whole at the root, None elsewhere."""
    place = (line.rank - root) % line.world
    for round_ in range(math.ceil(math.log2(line.world)) if line.world > 1 else 0):
        apart = 1 << round_
        if place % (2 * apart):
            _give(line, total, (line.rank - apart) % line.world, step, round_)
            return None
        if place + apart < line.world:
            total = _joined(total, _take(line, total, (line.rank + apart) % line.world, step, round_))
    return total


def _joined(first: Total, second: Total) -> Total:
    total = Total(first.choice, first.o, first.m, first.z, first.slopes, first.rises, first.state, first.mix)
    total.add(Part(second.o, second.m, second.z, second.slopes, stats=second.mix, rises=second.rises))
    if second.state is not None:
        total.state = merged(first.state, second.state, first.choice)
    return total


def _swap(line: Line, total: Total, partner: int, step: str, at: int) -> Total:
    sent = _packed(total)
    received = line.swap(sent, torch.empty_like(sent), partner, partner, step, at).wait()
    return _unpacked(received, total)


def _give(line: Line, total: Total, to: int, step: str, at: int) -> None:
    line.swap(_packed(total), None, to, to, step, at).wait()


def _take(line: Line, like: Total, source: int, step: str, at: int) -> Total:
    received = line.swap(None, torch.empty_like(_packed(like)), source, source, step, at).wait()
    return _unpacked(received, like)


def _tensors(total: Total) -> list[Tensor]:
    tensors = [x for x in (total.o, total.m, total.z, total.slopes, total.rises) if x is not None]
    tensors += [] if total.mix is None else [total.mix[name] for name in sorted(total.mix)]
    return tensors + ([] if total.state is None else [getattr(total.state, field.name) for field in fields(State)])


def _packed(total: Total) -> Tensor:
    wide = torch.float64 if total.state is not None else total.o.dtype
    return torch.cat([x.to(wide).reshape(-1) for x in _tensors(total)])


def _unpacked(flat: Tensor, like: Total) -> Total:
    pieces, at = [], 0
    for x in _tensors(like):
        pieces.append(flat[at : at + x.numel()].view(x.shape).to(x.dtype))
        at += x.numel()
    o, m, z, *more = pieces
    slopes = more.pop(0) if like.slopes is not None else None
    rises = more.pop(0) if like.rises is not None else None
    mix = None if like.mix is None else {name: more.pop(0) for name in sorted(like.mix)}
    state = None
    if like.state is not None:
        state = State(**{field.name: x for field, x in zip(fields(State), more, strict=True)})
    return Total(like.choice, o, m, z, slopes, rises, state, mix)
