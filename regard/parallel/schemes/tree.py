"""Merge every rank's part of the same rows in ⌈log₂ W⌉ rounds.

    all_merge   each round exchanges with the rank whose number differs in one bit; every rank ends with the whole
    merge_at    each round halves the ranks that hold a part; the root ends with the whole

The lower rank's part always comes first, so that every rank computes the same tree, bit for bit. If W is no power of
two, the ranks beyond the last power of two send their parts first and receive the whole at the end.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from regard._core.problem import Part
from regard.parallel.group import RankGroup
from regard.parallel.merge import Total, merge_states
from regard.statistics import State


def all_merge(group: RankGroup, total: Total, step: str = "tree") -> Total:
    """Return the merged total on every rank."""
    size = 1 << (group.world.bit_length() - 1)  # the largest power of two
    rank, extra = group.rank, group.world - size
    if rank >= size:
        _send(group, total, rank - size, step, 0)
        return _receive(group, total, rank - size, step, size.bit_length())
    if rank < extra:
        total = _merge_totals(total, _receive(group, total, rank + size, step, 0))
    for round_ in range(size.bit_length() - 1):
        partner = rank ^ (1 << round_)
        other = _exchange(group, total, partner, step, 1 + round_)
        total = _merge_totals(total, other) if rank < partner else _merge_totals(other, total)
    if rank < extra:
        _send(group, total, rank + size, step, size.bit_length())
    return total


def merge_at(group: RankGroup, total: Total, root: int, step: str = "tree") -> Total | None:
    """Return the merged total at the root, None elsewhere."""
    position = (group.rank - root) % group.world
    for round_ in range(math.ceil(math.log2(group.world)) if group.world > 1 else 0):
        apart = 1 << round_
        if position % (2 * apart):
            _send(group, total, (group.rank - apart) % group.world, step, round_)
            return None
        if position + apart < group.world:
            total = _merge_totals(total, _receive(group, total, (group.rank + apart) % group.world, step, round_))
    return total


def _merge_totals(first: Total, second: Total) -> Total:
    total = Total(first.choice, first.o, first.m, first.z, first.slopes, first.state, first.merged)
    total.add(Part(second.o, second.m, second.z, second.slopes, stats=second.merged))
    if second.state is not None:
        total.state = merge_states(first.state, second.state, first.choice)
    return total


def _exchange(group: RankGroup, total: Total, partner: int, step: str, at: int) -> Total:
    sent = _pack(total)
    received = group.send_receive(sent, torch.empty_like(sent), partner, partner, step, at).wait()
    return _unpack(received, total)


def _send(group: RankGroup, total: Total, to: int, step: str, at: int) -> None:
    group.send_receive(_pack(total), None, to, to, step, at).wait()


def _receive(group: RankGroup, like: Total, source: int, step: str, at: int) -> Total:
    received = group.send_receive(None, torch.empty_like(_pack(like)), source, source, step, at).wait()
    return _unpack(received, like)


def _tensors(total: Total) -> list[Tensor]:
    tensors = [x for x in (total.o, total.m, total.z, total.slopes) if x is not None]
    tensors += [] if total.merged is None else [total.merged[name] for name in sorted(total.merged)]
    return tensors + ([] if total.state is None else [getattr(total.state, field.name) for field in fields(State)])


def _pack(total: Total) -> Tensor:
    wide = torch.float64 if total.state is not None else total.o.dtype
    return torch.cat([x.to(wide).reshape(-1) for x in _tensors(total)])


def _unpack(flat: Tensor, like: Total) -> Total:
    pieces, at = [], 0
    for x in _tensors(like):
        pieces.append(flat[at : at + x.numel()].view(x.shape).to(x.dtype))
        at += x.numel()
    o, m, z, *more = pieces
    slopes = more.pop(0) if like.slopes is not None else None
    mix = None if like.merged is None else {name: more.pop(0) for name in sorted(like.merged)}
    state = None
    if like.state is not None:
        state = State(**{field.name: x for field, x in zip(fields(State), more, strict=True)})
    return Total(like.choice, o, m, z, slopes, state, mix)
