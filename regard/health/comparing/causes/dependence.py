"""Causes that no formula on A's tensors gives: what one model ignores, and what a place depends on in one alone.

A is run again without an argument, or with parameters of B, and must then give what B gives. Or part of the batch is
changed, both models run again, and the place is looked at where nothing was changed: later tokens, padding, other rows
or documents, a text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.health.comparing.causes.modules import is_same
from regard.health.comparing.causes.trial import EXACT, Trial
from regard.health.comparing.difference import as_rows, change
from regard.health.comparing.record import Key, Mode, Run, record
from regard.health.tokens.forms import is_ids
from regard.health.tokens.text import TokenBatch


class Probe(NamedTuple):
    """One change of the batch, and where a tensor [B, N, …] must not follow it."""

    name: str
    sentence: str  # {one} depends on it, {other} does not
    batch: TokenBatch
    pick: Callable[[Tensor], Tensor | None]  # the unchanged part; None for a tensor of another form
    back: Callable[[Tensor], Tensor] = lambda x: x  # from the changed run's rows to the first run's


def explain_run(
    models: tuple[nn.Module, nn.Module], runs: tuple[Run, Run], keys: tuple[Key, Key], given: TokenBatch, budget: float,
    mode: Mode,
) -> Trial | None:  # fmt: skip
    """Try A without each argument of the batch, and with B's parameters of the modules around; None without a place."""
    a, b = (run.points.get(key) for run, key in zip(runs, keys, strict=True))
    if a is None or b is None or a.shape != b.shape or not a.is_floating_point():
        return None
    trial = Trial(a, b, budget, keys[0].part, runs[0].real)

    def again(batch: TokenBatch, values: Mapping[str, Tensor] | None = None) -> Tensor | None:
        try:
            with _replaced(models[0], values or {}):
                return record(models[0], batch, mode=mode).points.get(keys[0])
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return None  # the model takes no such batch

    text = (given.key, given.decoder)
    for name, x in given.named.items():
        if isinstance(x, Tensor) and name not in text and x is not given.labels:
            said = f"B ignores {name}: it gives what A gives without it."
            trial.explains(f"A without {name}", partial(again, given.without(name)), said)
    own, other = ({n: p for n, p in one.named_parameters() if _is_around(n, keys[0], one)} for one in models)
    differs = {n: x for n, x in other.items() if n in own and not is_same(own[n], x)}
    if differs:
        shapes = [f"{n} {list(own[n].shape)} in A and {list(x.shape)} in B" for n, x in differs.items()]
        said = f"B's parameters are other ones: {', '.join(shapes)}."
        trial.explains("parameters of the modules around", lambda: again(given, differs), said)
    return trial


def _is_around(name: str, key: Key, model: nn.Module) -> bool:
    """True for a parameter that a module around a place holds itself."""
    holder = name.rpartition(".")[0]
    inside = not holder or key.module == holder or key.module.startswith(f"{holder}.")
    return inside and any(True for _ in model.get_submodule(holder).children())


@contextlib.contextmanager
def _replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other parameters, perhaps of other shapes."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], x) for name, x in values.items()]
    before: list[nn.Parameter | None] = [module._parameters[name] for module, name, _ in places]
    try:
        for module, name, x in places:
            module._parameters[name] = nn.Parameter(x.detach(), requires_grad=False)
        yield
    finally:
        for (module, name, _), own in zip(places, before, strict=True):
            module._parameters[name] = own


def explain_dependence(
    models: tuple[nn.Module, nn.Module], runs: tuple[Run, Run], keys: tuple[Key, Key], given: TokenBatch, budget: float,
    mode: Mode,
) -> tuple[str | None, list[str]]:  # fmt: skip
    """(what one model's place depends on and the other's does not, or None; what was tried)."""
    tried = []
    for probe in make_probes(given, runs[0].real):
        follows = [_follows(*one, probe, budget, mode) for one in zip(models, runs, keys, strict=True)]
        if None in follows:
            continue
        tried.append(probe.name)
        if follows[0] != follows[1]:
            one, other = "AB" if follows[0] else "BA"
            return probe.sentence.format(one=one, other=other), tried
    return None, tried


def _follows(model: nn.Module, run: Run, key: Key, probe: Probe, budget: float, mode: Mode) -> bool | None:
    """Does a place change with what the probe changes elsewhere? None if it cannot be told."""
    before = run.points.get(key)
    if before is None:
        return None
    try:
        after = record(model, probe.batch, mode=mode).points.get(key)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None  # the model takes no such batch
    if after is None or not before.is_floating_point():
        return None
    if after.shape != before.shape:
        return True
    x, y = probe.pick(as_rows(before, key.part)), probe.pick(probe.back(as_rows(after, key.part)))
    if x is None or y is None or not x.numel():
        return None
    return not change(x, y) <= max(budget, EXACT)


def make_probes(given: TokenBatch, real: Tensor | None) -> Iterator[Probe]:
    """The changes that a batch allows."""
    ids = given.targets if is_ids(given.targets) else None
    rows = given.count
    if ids is not None and len(ids.unique()) > 1:
        at = ids.shape[1] // 2 | 1  # odd, so that no chunk ends here
        later = (torch.arange(ids.shape[1]) >= at).expand(ids.shape)
        yield Probe(
            "later tokens", "a token depends on later tokens in {one} and does not in {other}: {one} sees the future.",
            given.with_targets(_exchange(ids, later)), lambda x: _tokens(x, ids.shape, ~later),
        )  # fmt: skip
        if (document := _documents(given)) is not None and document.shape == ids.shape:
            first = document == 0
            yield Probe(
                "other documents",
                "a packed document depends on the one before it in {one} and does not in {other}.",
                given.with_targets(_exchange(ids, first)), lambda x: _tokens(x, ids.shape, ~first),
            )  # fmt: skip
    if real is not None and is_ids(given.ids) and real.shape == given.ids.shape and not bool(real.all()):
        yield Probe(
            "padding", "it depends on the padding in {one} and does not in {other}: padding is read, or counted.",
            given.with_ids(_exchange(given.ids, ~real)),
            lambda x: _tokens(x, real.shape, real) if x.shape[:2] == real.shape else x if len(x) == rows else None,
        )  # fmt: skip
    if given.has_decoder and is_ids(given.ids):
        everything = torch.ones_like(given.ids, dtype=torch.bool).cpu()
        yield Probe(
            "the source", "it depends on the source in {one} and does not in {other}: the other text is read instead.",
            given.with_ids(_exchange(given.ids, everything)), lambda x: x if len(x) == rows else None,
        )  # fmt: skip
    if rows > 1:
        if ids is not None:
            changed = given.with_targets(_exchange(ids, (torch.arange(rows) > 0)[:, None].expand(ids.shape)))
        else:
            changed = given.map(lambda x: torch.cat([x[:1], x[1:].flip(-1)]) if _is_batched(x, rows) else x)
        yield Probe(
            "other rows of the batch", "a row depends on other rows of the batch in {one} and does not in {other}.",
            changed, lambda x: x[:1] if len(x) == rows else None,
        )  # fmt: skip
        yield Probe(
            "the row's place", "a row's output depends on its place in the batch in {one} and does not in {other}.",
            given.map(lambda x: x.flip(0) if _is_batched(x, rows) else x),
            lambda x: x if len(x) == rows else None, lambda x: x.flip(0),
        )  # fmt: skip


def _exchange(ids: Tensor, where: Tensor) -> Tensor:
    """Other ids of the batch in some places."""
    known, number = ids.unique(return_inverse=True)
    return torch.where(where.to(ids.device), known[(number + 1) % len(known)], ids)


def _documents(given: TokenBatch) -> Tensor | None:
    """The number of each token's document, where positions begin anew; None if they do not."""
    places = given.named.get("position_ids")
    if not isinstance(places, Tensor) or places.ndim != 2:
        return None
    number = ((places == 0).cumsum(-1) - 1).cpu().expand(given.targets.shape[0], -1)
    return number if int(number.max()) > 0 and int(number.min()) == 0 else None


def _is_batched(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == rows


def _tokens(x: Tensor, shape: Any, kept: Tensor) -> Tensor | None:
    """x [B, N, …] or [B·N, …] at some tokens."""
    if x.shape[:2] == shape:
        return x[kept]
    return x[kept.flatten()] if x.ndim == 2 and len(x) == kept.numel() else None
