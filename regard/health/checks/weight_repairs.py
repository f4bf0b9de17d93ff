"""Weights read another way: a change of the weights after which the model predicts its text names the mistake.

Each repair undoes one mistake of a conversion in every layer: a matrix transposed, fused q, k, v in another order,
rotary pairs for halves, a norm's weight kept as w − 1, positions shifted. They are tried where the loss is bad.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.health.checks.repairs import CURED, is_cured, loss_without_attention, require_honest_loss, shorten
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.trial import Trial
from regard.health.progress import Budget

BAD = 0.8  # of the unigrams' loss: a model below it is not repaired
SECONDS, FEW_SECONDS = 10.0, 3.0  # for all repairs together, where the loss is bad and where it is not
MOST_WEIGHTS = 300_000_000
NUMBER, LAYER = re.compile(r"\d+"), re.compile(r"\D*\d+")  # the second: "decoder.layers.3", not of an encoder
QUERIES = re.compile(r"(^|[._])(q|query|q_proj|q_lin|to_q|wq|query_proj)\.weight$")
KEYS = re.compile(r"(^|[._])(k|key|k_proj|k_lin|to_k|wk|key_proj)\.weight$")
VALUES = re.compile(r"(^|[._])(v|value|v_proj|v_lin|to_v|wv|value_proj)\.weight$")
POSITIONS = re.compile(r"pos|wpe", re.IGNORECASE)
NORMS = re.compile(r"norm|ln_|\.ln", re.IGNORECASE)
RULES = (
    Rule(
        "RG621", "weights read another way", "no other reading of the weights makes the loss sound", "warning",
        "a loss", "with the weights changed so in every layer, the model predicts this text; with its own it does not",
        "The conversion transposed, split, permuted or exchanged weights in another way than the model reads them.",
        "Mend the conversion as the evidence says.", ("transformers#25104",),
        explains=("RG3", "RG401", "RG402", "RG403", "RG404", "RG405", "RG720", "RG8"),
    ),
)  # fmt: skip
Change = Callable[[Tensor], Tensor]


class WeightRepair(NamedTuple):
    """What is wrong if it helps, and the new value of each parameter that it changes."""

    meaning: str
    values: Callable[[], dict[str, Tensor]]


def check(trial: Trial) -> list:
    task, reading = trial.task, trial.loss_reading
    if task is None or reading is None:
        raise NotApplicable("the model has no loss on this text; pass loss=, or labels in the batches")
    is_bad = reading.unigram is None or reading.mean >= BAD * reading.unigram
    if sum(p.numel() for p in trial.part.parameters()) > MOST_WEIGHTS:
        raise NotApplicable(f"the model has more than {MOST_WEIGHTS:,} parameters")
    require_honest_loss(trial)
    task = shorten(task)
    own, silent = task.losses(), loss_without_attention(trial, task)
    best: tuple[float, str] | None = None
    tried, count, budget = 0, 0, Budget(SECONDS if is_bad else FEW_SECONDS)
    for repairs in (list_repairs if is_bad else list_position_repairs, list_repairs_of_one_layer):
        waiting = list(repairs(trial)) if best is None else []
        count += len(waiting)
        for repair in waiting:
            if budget.is_spent:
                break
            tried += 1
            with replaced(trial.part, repair.values()):
                changed = task.losses()
            loss = float(changed.mean())
            if is_cured(trial, task, own, changed, silent) and (best is None or loss < best[0]):
                best = loss, repair.meaning
    if best is None and tried < count:
        raise NotApplicable(
            f"{tried} of {count} other readings of the weights were tried in {budget.seconds:g} s; none helps"
        )
    if best is None:
        return []
    loss, meaning = best
    text = f"{meaning}. With that undone, the loss falls from {float(own.mean()):.3g} to {loss:.3g}."
    return trial.find(RULES[0], "warning", [], text, CURED)


@contextmanager
def replaced(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Some parameters have other values inside the block."""
    known = dict(model.named_parameters())
    kept = {name: known[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, x in values.items():
                known[name].copy_(x)
        yield
    finally:
        with torch.no_grad():
            for name, x in kept.items():
                known[name].copy_(x)


def list_repairs(trial: Trial) -> Iterator[WeightRepair]:
    """The repairs of every layer alike that fit the shapes of the model's weights."""
    roles = find_roles(trial.part)
    inner = {role: members for role, members in roles.items() if "#" in role}
    yield from list_inner_repairs(inner, sizes_of(trial))
    yield from list_position_repairs(trial)


def list_position_repairs(trial: Trial) -> Iterator[WeightRepair]:
    """Tables of positions that are read some rows off, or multiplied."""
    for role, members in find_roles(trial.part).items():
        if POSITIONS.search(role) and members[0][1].ndim == 2 and min(members[0][1].shape) > 1:
            for step in (1, -1, 2, -2):
                way = "late" if step < 0 else "early"
                yield on_all(
                    f"The rows of {role} are {abs(step)} too {way}", members, partial(torch.roll, shifts=step, dims=0)
                )
            for factor in (2.0, 0.5):
                yield on_all(
                    f"{role} is {1 / factor:g} times what it should be", members, partial(operator.mul, factor)
                )


def find_roles(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    """The parameters of one name but for the layer's number, "layers.#.attn.q.weight"."""
    roles: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.is_floating_point() and not p.is_meta:
            roles[NUMBER.sub("#", name)].append((name, p))
    return roles


def sizes_of(trial: Trial) -> tuple[int, int, int] | None:
    """Heads, key-value heads and the width of a head, by the first attention call."""
    one = next(iter(trial.captured[1].values()), None)
    return None if one is None else (one.q.shape[1], one.k.shape[1], one.q.shape[-1])


def list_inner_repairs(
    inner: dict[str, list[tuple[str, Tensor]]], sizes: tuple[int, int, int] | None
) -> Iterator[WeightRepair]:
    """The repairs of these weights of layers; `sizes` are of its heads."""
    for role, members in inner.items():
        w = members[0][1]
        if w.ndim == 2 and w.shape[0] == w.shape[1]:
            yield on_all(f"{role} is transposed", members, lambda x: x.T)
    yield from list_exchanges(inner)
    yield from list_norms(inner)
    if sizes is not None:
        heads, groups, d = sizes
        yield from list_orders(inner, heads, d)
        yield from list_groupings(inner, heads, groups)
        yield from list_pairings(inner, heads, d)


def list_repairs_of_one_layer(trial: Trial) -> Iterator[WeightRepair]:
    """The repairs of one layer alone: the first of every layer, then the second, …"""
    layers: dict[str, dict[str, list]] = defaultdict(dict)
    for role, members in find_roles(trial.part).items():
        for name, p in members if "#" in role else ():
            layers[LAYER.match(name)[0]].setdefault(role, []).append((name, p))  # type: ignore[index]
    if len(layers) < 2:
        return
    listed = [list(list_inner_repairs(inner, sizes_of(trial))) for inner in layers.values()]
    for repairs in zip_longest(*listed):
        for layer, repair in zip(layers, repairs, strict=True):
            if repair is not None:
                yield WeightRepair(f"{repair.meaning}, in {layer} alone", repair.values)


def on_all(meaning: str, members: list[tuple[str, Tensor]], change: Change) -> WeightRepair:
    return WeightRepair(meaning, lambda: {name: change(p.detach()).contiguous() for name, p in members})


def list_exchanges(inner: dict[str, list[tuple[str, Tensor]]]) -> Iterator[WeightRepair]:
    """Two of q, k and v, or the two norms of a layer, exchanged, with their biases."""
    names = list(inner)
    for words, first, second in (("q and k", QUERIES, KEYS), ("k and v", KEYS, VALUES), ("q and v", QUERIES, VALUES)):
        pairs = [(a, b) for a in names if first.search(a) for b in names if second.search(b)]
        pairs = [(a, b) for a, b in pairs if name_parent(a) == name_parent(b)]
        if pairs and all(fits(inner, a, b) for a, b in pairs):
            yield WeightRepair(f"The weights of {words} are exchanged", partial(exchange, inner, pairs))
    norms = [role for role in names if NORMS.search(role) and role.endswith(".weight") and inner[role][0][1].ndim == 1]
    for at, a in enumerate(norms):
        for b in norms[at + 1 :]:
            if fits(inner, a, b):
                yield WeightRepair(f"{a} and {b} are exchanged", partial(exchange, inner, [(a, b)]))


def name_parent(role: str) -> str:
    """The name of the module that holds a parameter's module."""
    return role.rpartition(".")[0].rpartition(".")[0]


def fits(inner: dict[str, list[tuple[str, Tensor]]], a: str, b: str) -> bool:
    pairs = zip(inner[a], inner[b], strict=False)
    return len(inner[a]) == len(inner[b]) and all(x.shape == y.shape for (_, x), (_, y) in pairs)


def exchange(inner: dict[str, list[tuple[str, Tensor]]], pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """The weights, and biases if there are some, of two roles in each other's place."""
    found: dict[str, Tensor] = {}
    for a, b in pairs:
        for suffix in ("weight", "bias"):
            first, second = (inner.get(role.removesuffix("weight") + suffix) for role in (a, b))
            if first is not None and second is not None:
                for (name, x), (other, y) in zip(first, second, strict=True):
                    found[name], found[other] = y.detach().clone(), x.detach().clone()
    return found


def is_projection(role: str) -> bool:
    """True for the weight or bias of a projection to q, k or v."""
    name = role.replace(".bias", ".weight")
    return any(part.search(name) for part in (QUERIES, KEYS, VALUES))


def interleave(shape: tuple[int, int], x: Tensor) -> Tensor:
    """x [a·b, …] with its rows laid out as (a, b) laid out as (b, a)."""
    return x.unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2)


def list_norms(inner: dict[str, list[tuple[str, Tensor]]]) -> Iterator[WeightRepair]:
    """Norms that multiply by w where the weights were kept as w − 1, and the other way round."""
    norms = [
        pair for role, members in inner.items() if NORMS.search(role) and role.endswith("weight") for pair in members
    ]
    if norms:
        yield on_all("The weights of norms are 1 too small (kept as w − 1)", norms, lambda x: x + 1)
        yield on_all("The weights of norms are 1 too large (kept as w, applied as 1 + w)", norms, lambda x: x - 1)


def list_orders(inner: dict[str, list[tuple[str, Tensor]]], heads: int, d: int) -> Iterator[WeightRepair]:
    """A stacked q, k, v matrix whose thirds stand in another order, or head by head."""
    for role, members in inner.items():
        w, width = members[0][1], 3 * heads * d
        if not role.endswith("weight") or w.ndim != 2 or width not in w.shape:
            continue
        dim = w.shape.index(width)
        both = members + inner.get(role.removesuffix("weight") + "bias", [])

        for order in list(permutations(range(3)))[1:]:
            text = f"{role} holds q, k and v as {', '.join('qkv'[at] for at in order)}"
            yield on_all(text, both, partial(reorder, dim, order))
        for text, shape in (
            (f"{role} holds q, k and v head by head", (heads, 3, d)),
            (f"{role} holds all of q, then k and v, and is read head by head", (3, heads, d)),
        ):
            yield on_all(text, both, partial(regroup, dim, shape))


def list_groupings(inner: dict[str, list[tuple[str, Tensor]]], heads: int, groups: int) -> Iterator[WeightRepair]:
    """Separate q, k and v that were cut out of a fused matrix in the wrong way."""
    for role in [role for role in inner if QUERIES.search(role)]:
        place = name_parent(role)
        parts = [
            next((inner[other] for other in inner if part.search(other) and name_parent(other) == place), [])
            for part in (QUERIES, KEYS, VALUES)
        ]
        width = parts[0][0][1].shape[0] // heads
        rows = [len(members[0][1]) if members else 0 for members in parts]
        if groups < 2 or rows != [heads * width, groups * width, groups * width]:
            continue
        sizes = (heads // groups * width, width, width)
        for text, is_grouped in ((READ_GROUPED, True), (READ_WHOLE, False)):
            yield WeightRepair(text, partial(cut_again, parts, sizes, groups, is_grouped))


READ_GROUPED = "q, k and v stand one after another in the fused matrix, and were read group by group"
READ_WHOLE = "q, k and v of each group stand together in the fused matrix, and were read one after another"


def cut_again(
    parts: list[list[tuple[str, Tensor]]], sizes: tuple[int, ...], groups: int, is_grouped: bool
) -> dict[str, Tensor]:
    """q, k and v cut out of the fused matrix [(q k v)…, …] in the other way than they were."""
    found: dict[str, Tensor] = {}
    for members in zip(*parts, strict=True):
        values = [x.detach() for _, x in members]
        if is_grouped:
            fused = torch.cat([x.unflatten(0, (groups, -1)) for x in values], 1).flatten(0, 1)
            cut = fused.split([len(x) for x in values])
        else:
            fused = torch.cat(values).unflatten(0, (groups, -1))
            cut = tuple(x.flatten(0, 1) for x in fused.split(sizes, 1))
        found |= {name: x.contiguous() for (name, _), x in zip(members, cut, strict=True)}
    return found


def reorder(dim: int, order: tuple[int, ...], x: Tensor) -> Tensor:
    """x with the thirds of one axis, which stand in this order, as 0, 1, 2."""
    dim = dim if x.ndim == 2 else 0
    parts = x.chunk(3, dim)
    return torch.cat([parts[order.index(at)] for at in range(3)], dim)


def regroup(dim: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
    """x with the numbers of one axis, laid out as (a, b, d), laid out as (b, a, d)."""
    dim = dim if x.ndim == 2 else 0
    return x.movedim(dim, 0).unflatten(0, shape).transpose(0, 1).flatten(0, 2).movedim(0, dim)


def list_pairings(inner: dict[str, list[tuple[str, Tensor]]], heads: int, d: int) -> Iterator[WeightRepair]:
    """Rows of q, k and v that stand number by number, and those of q and k in rotary pairs for halves; and back."""
    for words, shape in (("number by number", (d, heads)), ("head by head", (heads, d))):
        whole = [pair for role, members in inner.items() if is_projection(role) for pair in members]
        if whole and all(len(p) % (heads * d) == 0 for _, p in whole):
            text = f"The rows of q, k and v stand {words}, and are read the other way"
            yield on_all(text, whole, partial(interleave, shape))
    rows = [
        pair
        for role, members in inner.items()
        if QUERIES.search(role) or KEYS.search(role) or QUERIES.search(role.replace(".bias", ".weight"))
        or KEYS.search(role.replace(".bias", ".weight"))
        for pair in members
    ]  # fmt: skip
    if not rows or d % 2 or any(p.shape[0] % d for _, p in rows):
        return
    yield on_all(
        "The rows of q and k stand in pairs, where the rotation takes halves", rows,
        lambda x: x.unflatten(0, (-1, d // 2, 2)).transpose(1, 2).flatten(0, 2),
    )  # fmt: skip
    yield on_all(
        "The rows of q and k stand in halves, where the rotation takes pairs", rows,
        lambda x: x.unflatten(0, (-1, 2, d // 2)).transpose(1, 2).flatten(0, 2),
    )  # fmt: skip
