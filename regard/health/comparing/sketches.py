"""What a fingerprint keeps of a run: sketches at chosen tokens, statistics of logits, samples of attention.

A sketch stands for a large vector: its products with signs that a seed gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.health.comparing.difference import SAFETY
from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.record import Key, Run
from regard.health.comparing.scores import Kept

TOKENS = 8  # that are chosen of each batch, at most
HEAD, HIDDEN = 8, 32  # products of each vector of a head, and of each hidden state
LARGE = 1e30  # in the place of ±∞
TOP = 16  # logits that are kept of each token, the largest
SIZES = ((8, HEAD), (6, HEAD), (4, HEAD), (4, 4), (2, 4))  # tokens of a batch, numbers of a head's vector
AIM, SAMPLES = 100_000, 60_000  # bytes of the sketches, and of the samples of attention
SAMPLE_ROWS = 3
MODULES = 24  # of a layer
Layer = tuple[str, list[Key]]  # a block's name, and its attention calls


@dataclass(frozen=True)
class Plan:
    """Which tokens are kept, how many numbers of each head's vector, and of how many heads the attention is sampled."""

    rows: list[tuple[int, int]]
    width: int
    heads: int
    shape: tuple[int, int]
    real: np.ndarray | None = None  # True at tokens that are no padding

    def rows_of(self, batch: int, length: int) -> list[tuple[int, int]]:
        """The chosen tokens of a tensor; of another length than the model's own, those that its length gives."""
        if (batch, length) == self.shape:
            return self.rows
        real = self.real if self.real is not None and self.real.shape == (batch, length) else None
        return choose_tokens(batch, length, real)[: len(self.rows)]


def make_plan(run: Run, layers: list[Layer]) -> Plan:
    """Choose by the size of the file."""
    calls = [run.calls[key] for _, keys in layers for key in keys]
    places = (key for name, _ in layers for key in (Key("out", name), Key("in", name)))
    like = next((run.points[key] for key in places if key in run.points and run.points[key].ndim > 2), None)
    shape = (calls[0].q.shape[0], calls[0].q.shape[2]) if like is None and calls else (1, 1)
    if like is not None:
        shape = like.shape[0], like.shape[1]
    real = None if run.real is None else run.real.numpy()
    heads = sum(2 * one.q.shape[1] + 2 * one.k.shape[1] for one in calls)
    for count, width in SIZES:
        each = heads * (width + 1) + 5 * sum(one.q.shape[1] for one in calls) + 2 * (HIDDEN + 1) * len(layers)
        if 4 * each * count <= AIM:
            break
    keys = max((one.k.shape[2] for one in calls), default=1)
    per_head = 4 * len(calls) * keys * (2 * width + 3 * SAMPLE_ROWS)
    rows = choose_tokens(*shape, real if real is not None and real.shape == shape else None)[:count]
    return Plan(rows, width, SAMPLES // max(per_head, 1), shape, real)


def make_sketches(run: Run, layers: list[Layer], plan: Plan) -> dict[str, np.ndarray]:
    """The tensors of a fingerprint by name, without the samples."""
    found: dict[str, np.ndarray] = {}
    for at, (name, calls) in enumerate(layers):
        for part, key in (("input", Key("in", name)), ("output", Key("out", name))):
            x = run.points.get(key)
            if x is not None and x.is_floating_point():
                found[f"layers.{at}.{part}"] = _at_tokens(x, plan, HIDDEN)
        for number, key in enumerate(calls[:2]):
            prefix = f"layers.{at}." + ("cross." if number else "")
            for part in ("q", "k", "v", "attention"):
                x = run.points.get(key._replace(part=part))
                if x is not None and x.ndim == 4:
                    found[prefix + part] = _at_tokens(x.transpose(1, 2), plan, plan.width)
            if run.calls[key].is_readable:
                found |= {prefix + part: x for part, x in _score_rows(run.calls[key], plan).items()}
        for module in list_modules(run, name, calls):
            if module != "@attention":
                x = run.points[Key("out", f"{name}.{module}")]
                found[f"layers.{at}.at.{module}"] = _at_tokens(x, plan, HEAD)
    final = run.points.get(Key("out", ""))
    if final is not None and final.ndim == 3:
        found["final"] = _at_tokens(final, plan, HIDDEN)
        rows = plan.rows_of(*final.shape[:2])
        top = torch.stack([final[b, n].float() for b, n in rows]).topk(min(TOP, final.shape[-1]))
        found["logits.values"] = top.values.nan_to_num(0.0, float(LARGE), -float(LARGE)).numpy()
        found["logits.ids"] = top.indices.int().numpy()
    elif final is not None:
        found["final"] = sketch(final.float().reshape(max(len(final) if final.ndim else 1, 1), -1)[:8].numpy(), HIDDEN)
    return found


def list_modules(run: Run, name: str, calls: list[Key]) -> list[str]:
    """The innermost modules of a block in order of execution, with "@attention" where its first call is."""
    found: list[str] = []
    prefix = f"{name}."
    inner = [key.module for key in run.points if key.part == "in" and key.use == 0 and key.module.startswith(prefix)]
    for key, x in run.points.items():
        if key.use or not key.module.startswith(prefix):
            continue
        if calls and key == calls[0]:
            found.append("@attention")
        leaf = not any(other.startswith(f"{key.module}.") for other in inner)
        if key.part == "out" and leaf and x.is_floating_point() and x.ndim in (2, 3):
            found.append(key.module.removeprefix(prefix))
    return found[:MODULES]


def _at_tokens(x: Tensor, plan: Plan, count: int) -> np.ndarray:
    """A sketch of x [B, N, …] at the chosen tokens; x [B·N, C] is taken by its rows."""
    batch, length = plan.shape
    if x.ndim == 2:
        x = x.reshape(batch, length, -1) if len(x) == batch * length else x[None]
    picked = torch.stack([x[b, n] for b, n in plan.rows_of(x.shape[0], x.shape[1])]).double()
    if not bool(torch.isfinite(picked).all()):
        raise ValueError("the model computes values that are not finite; regard.check says where they begin")
    return sketch(picked.numpy(), count)


def _cut(kept: Kept, b: int, rows: list[int]) -> Kept:
    """A call of one sequence and a few of its queries."""

    def cut(x: Tensor | None) -> Tensor | None:
        if x is None or x.ndim < 4:
            return x
        return x.expand(*kept.shape[:3], x.shape[-1])[b : b + 1, :, rows]

    return kept.change(
        q=kept.q[b : b + 1, :, rows], k=kept.k[b : b + 1], v=kept.v[b : b + 1], output=kept.output[b : b + 1, :, rows],
        visible=kept.seen()[b : b + 1, :, rows], sink=cut(kept.sink), temperature=cut(kept.temperature),
        bias=None if kept.bias is None else kept.bias.expand(kept.shape)[b : b + 1, :, rows],
    )  # fmt: skip


def _score_rows(kept: Kept, plan: Plan) -> dict[str, np.ndarray]:
    """Of the chosen rows: the logits' max, mean, deviation, log-sum-exp [T, H, 4]; first, last and number of keys."""
    stats, seen = [], []
    for b, n in plan.rows_of(kept.q.shape[0], kept.q.shape[2]):
        one = _cut(kept, b, [n])
        s, shown = one.scores()[0, :, 0], one.seen()[0, :, 0]
        count = shown.sum(-1).clamp_min(1)
        mean = s.masked_fill(~shown, 0.0).sum(-1) / count
        deviation = ((s - mean[:, None]).square().masked_fill(~shown, 0.0).sum(-1) / count).sqrt()
        hidden = s.masked_fill(~shown, -torch.inf)
        stats.append(torch.stack([hidden.amax(-1), mean, deviation, hidden.logsumexp(-1)], -1))
        keys = shown.any(0).nonzero().flatten()
        ends = [int(keys[0]), int(keys[-1]) + 1] if len(keys) else [0, 0]
        seen.append([*ends, int(shown.sum(-1).max()) if len(keys) else 0])
    values = torch.stack(stats).nan_to_num(0.0, float(LARGE), -float(LARGE)).float()
    return dict(scores=values.numpy(), mask=np.array(seen, dtype=np.int32))


def sample_attention(kept: Kept, plan: Plan) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A few heads' logits over all keys in a few rows of one sequence, and sketches of the values: (tensors, facts).

    From these the output of any other mask, cap, sink or normaliser can be computed, as a sketch. `raw` are the logits
    before the soft cap, `tiled` those of grouped heads that are repeated as whole groups.
    """
    if not kept.is_readable or not plan.heads:
        return {}, {}
    rows = plan.rows_of(kept.q.shape[0], kept.q.shape[2])
    b = rows[0][0]
    chosen = [at for at, (one, n) in enumerate(rows) if one == b and (n or len(rows) == 1)][:SAMPLE_ROWS]
    if not chosen:
        return {}, {}
    many, groups = kept.q.shape[1], kept.k.shape[1]
    heads = list(range(min(many, plan.heads)))
    one = _cut(kept, b, [rows[at][1] for at in chosen]).change(bias=None, temperature=None, softcap=None)
    found = dict(raw=one.scores()[0, heads].transpose(0, 1), seen=one.seen()[0, heads].transpose(0, 1).to(torch.int8))
    found["v"] = torch.from_numpy(sketch(one.values()[0, heads].numpy(), plan.width)).transpose(0, 1)
    if 1 < groups < many:
        tiled = one.change(k=one.k.repeat(1, many // groups, 1, 1), v=one.v.repeat(1, many // groups, 1, 1))
        found["tiled"] = tiled.scores()[0, heads].transpose(0, 1)
        found["tiled_v"] = torch.from_numpy(sketch(tiled.values()[0, heads].numpy(), plan.width)).transpose(0, 1)
    whole = _cut(kept, b, [rows[at][1] for at in chosen])
    for name, x in (("bias", whole.bias), ("sink", whole.sink), ("temperature", whole.temperature)):
        if x is not None:
            found[name] = x.expand(1, many, len(chosen), x.shape[-1])[0, heads].transpose(0, 1)
    tensors = {name: _plain(x) for name, x in found.items()}
    return tensors, dict(rows=chosen, heads=heads)


def _plain(x: Tensor) -> np.ndarray:
    x = x.contiguous()
    if x.dtype == torch.int8:
        return x.numpy()
    return x.double().nan_to_num(0.0, 1e30, -1e30).clamp(-1e30, 1e30).float().numpy()


def signs(width: int, count: int) -> np.ndarray:
    """A matrix [width, count] of ±1, the same on every machine; column j does not depend on `count`.

    Entry (i, j) is the top bit of splitmix64(i·2³² + j).

    >>> from regard.health.comparing.sketches import signs
    >>> signs(3, 4)[:, :2].tolist() == signs(3, 2).tolist()
    True
    """
    z: Any = (np.arange(width, dtype=np.uint64)[:, None] << np.uint64(32)) + np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.where(z >> np.uint64(63), 1.0, -1.0)


def sketch(x: np.ndarray, count: int) -> np.ndarray:
    """x […, D] as […, count] products with signs, over √D, and the norm as one more column; x itself if D ≤ count."""
    x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=LARGE, neginf=-LARGE), -LARGE, LARGE)
    width = x.shape[-1]
    if width <= count:
        return x.astype(np.float32)
    products = x @ signs(width, count) / np.sqrt(width)
    norm = np.sqrt(np.square(x).mean(-1, keepdims=True))
    return np.concatenate([products, norm], -1).astype(np.float32)


def choose_tokens(batch: int, length: int, real: np.ndarray | None = None) -> list[tuple[int, int]]:
    """(sequence, place) of up to eight tokens that are not padding: most of the first sequence, the others' last.

    A shorter list is a beginning of a longer one.

    >>> from regard.health.comparing.sketches import choose_tokens
    >>> choose_tokens(1, 10)[:3]
    [(0, 9), (0, 5), (0, 0)]
    """
    found: list[list[tuple[int, int]]] = []
    for b in range(min(batch, 4)):
        shown = np.arange(length) if real is None else np.flatnonzero(real[b])
        n = len(shown)
        wanted = dict.fromkeys(at for at in (n - 1, n // 2, 0, 1, n // 4, 3 * n // 4, n - 2, 2) if 0 <= at < n)
        found.append([(b, int(shown[at])) for at in wanted])
    ends = [row.pop(0) for row in found[1:] if row]
    first = found[0] if found else []
    mixed = [one for pair in zip(first[: len(ends)], ends, strict=False) for one in pair]
    rest = [one for row in (first[len(ends) :], *found[1:]) for one in row]
    return [*mixed, *ends[len(first) :], *rest][:TOKENS]


def pair_of(a: Fingerprint, b: Fingerprint, name: str) -> tuple[Tensor, Tensor] | None:
    """Both sketches of a place as [1, T, …] in float64, cut to the tokens and numbers that both have."""
    x, y = (one.tensors[name].astype(np.float64) for one in (a, b))
    rows = [[len(entry["rows"]) for entry in one.facts["tokens"]] for one in (a, b)]
    if rows[0] != rows[1] and len(rows[0]) == len(rows[1]) == 1:
        count = min(len(x), len(y))
        x, y = x[:count], y[:count]
    if x.shape[:-1] != y.shape[:-1] and x.ndim == y.ndim == 3 and name.rpartition(".")[2] in ("k", "v"):
        heads = max(x.shape[1], y.shape[1])
        if heads % x.shape[1] == 0 and heads % y.shape[1] == 0:
            x, y = (np.repeat(z, heads // z.shape[1], 1) for z in (x, y))
    if x.shape[:-1] == y.shape[:-1] and x.shape[-1] != y.shape[-1]:  # sketches of another width begin alike
        count = min(x.shape[-1], y.shape[-1]) - 1
        x, y = x[..., :count], y[..., :count]
    if x.shape != y.shape or not x.size:
        return None
    return torch.from_numpy(x)[None], torch.from_numpy(y)[None]


def centred(x: Tensor) -> Tensor:
    """Statistics of logits that a constant per row leaves alone: max − mean, deviation, log-sum-exp − mean."""
    return torch.stack([x[..., 0] - x[..., 1], x[..., 2], x[..., 3] - x[..., 1]], -1)


def budget_of(a: Fingerprint, b: Fingerprint, name: str) -> float:
    """How far rounding may bring both apart: the larger of what was measured, with four roundings at least."""
    known = [one.facts["budgets"].get(name) for one in (a, b)]
    sizes = [float(one.facts["rounding"]) for one in (a, b)]
    measured = [float(x) for x in known if x is not None]
    if len(measured) == 2:
        return max(measured)
    depth = max(len(a.layers), len(b.layers), 1)
    without = SAFETY * max(sizes) * math.sqrt(2.0 * depth)  # nothing was measured: roundings of all layers add up
    coarser = max(sizes) / min(sizes) if measured and min(sizes) > 0 else 1.0
    return max([without, *(x * coarser for x in measured)])


def split(name: str) -> tuple[int | None, str]:
    """(layer, part) of a tensor's name; the part of a module is "at." and its name in the layer."""
    parts = name.split(".")
    if parts[0] != "layers" or len(parts) < 3 or not parts[1].isdigit():
        return None, name
    return int(parts[1]), ".".join(parts[2:])
