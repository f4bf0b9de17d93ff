"""What happens between modules: something added twice or left out, a multiplier, an order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from regard.health.comparing.causes.generic import explain_generally
from regard.health.comparing.causes.modules import ACTIVATIONS
from regard.health.comparing.causes.orders import say_order
from regard.health.comparing.causes.trial import Trial, fit_factor, name_factor
from regard.health.comparing.difference import change
from regard.health.comparing.record import Key, Run

FACTORS = {"a factor", "a weight per feature"}  # which a multiplier of the residual stream would fit as well
NEAR, NEAREST = 40, 12  # places before the difference that may be added or left out, or one for another


def explain_glue(trial: Trial, key: Key, run: Run, numbers: dict[str, float]) -> None:
    """Try how B's tensor at a place follows from what A had there and a little before."""
    explain_generally(trial, numbers)
    a, b = trial.a.double(), trial.b.double()
    if a.shape != b.shape or a.ndim < 2 or any(one.kinds & FACTORS for one in trial.found):
        return
    if a.ndim == 2:
        _try_pooling(trial, key, run)
    _try_products(trial, key, run)
    if trial.found:
        return
    gap, before = b - a, _before(run, key, a)
    for place, x in before:
        c = fit_factor(x, gap)
        if abs(c) > 1e-6:
            trial.explains("what is added", a + c * x, _say_added(place, c))
    if trial.found:
        return
    for place, x in before:
        trial.explains("another input", x, f"B passes on {_name(place)} as it is, which A changes.", is_vague=True)
    _try_tokens(trial, run, key)
    for (place, x), (other, y) in itertools.permutations(before[:NEAREST], 2):
        trial.explains("another summand", a + x - y, f"B adds {_name(place)} where A adds {_name(other)}.")


def _try_pooling(trial: Trial, key: Key, run: Run) -> None:
    """Is a vector per sequence [B, C] another token, or another mean, of hidden states [B, N, C] before it?"""
    for place, x in list(run.points.items())[: list(run.points).index(key)][: -NEAR - 1 : -1]:
        if x.ndim != 3 or not x.is_floating_point() or x.shape[::2] != trial.a.shape or x.shape[1] < 2:
            continue
        x, real = x.double(), run.real
        if float((trial.a.double().norm(dim=-1) - 1).abs().max()) < 1e-3:
            x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # as embeddings are
        if real is None or real.shape != x.shape[:2]:
            real = torch.ones(x.shape[:2], dtype=torch.bool)
        shown = real[..., None]
        made = {
            "the mean of all tokens": x.mean(1), "the mean without padding": (x * shown).sum(1) / shown.sum(1),
            "the largest of each feature": x.amax(1), "the sum of all tokens": x.sum(1),
            "the largest without padding": x.masked_fill(~shown, -torch.inf).amax(1),
        }  # fmt: skip
        for one in (trial.a, trial.b):
            at = (x - one[:, None].double()).norm(dim=-1).argmin(1)
            padding = int((~real.gather(1, at[:, None])).sum())
            of = f" ({padding} of them padding)" if padding else ""
            made[f"tokens {', '.join(map(str, at.tolist()))} of its sequences{of}"] = x[torch.arange(len(x)), at]
        own = next((what for what, y in made.items() if change(trial.a, y) <= trial.tolerance), None)
        for what, y in made.items() if own is not None else ():
            trial.explains("another pooling", y, f"A takes {own} from {_name(place)}, B {what}.")
        if trial.found:
            return


def _try_tokens(trial: Trial, run: Run, key: Key) -> None:
    """Is what is added to an earlier place the same, in another order of the tokens, as position embeddings are?"""
    if trial.a.ndim != 3:
        return
    for place, x in list(run.points.items())[: list(run.points).index(key)][: -NEAR - 1 : -1]:
        x = x.expand(len(trial.a), *x.shape[-2:]) if x.ndim == 2 or (x.ndim == 3 and len(x) == 1) else x
        first = trial.a.shape[1] - x.shape[1] if x.ndim == 3 and x.is_floating_point() else -1
        if not 0 <= first <= 2 or x.shape[::2] != trial.a.shape[::2] or x.shape[1] < 3:
            continue
        own, other = (one[:, first:].double() - x.double() for one in (trial.a, trial.b))
        order = torch.cdist(other.mean(0), own.mean(0)).argmin(1)
        if len(order.unique()) == len(order) and not torch.equal(order, torch.arange(len(order))):
            moved = torch.cat([trial.b[:, :first].double(), x.double() + own[:, order]], 1)
            trial.explains("tokens in another order", moved, (
                f"B adds to {_name(place)} what A adds to other tokens, as position embeddings in another "
                f"order{say_order(order, tokens=True)}."
            ))  # fmt: skip


def _try_products(trial: Trial, key: Key, run: Run) -> None:
    """f(x)·y and f(x) of what left the last modules, as MLPs do: another activation, gate and up exchanged."""
    if key.part != "in":
        return
    parts: list[tuple[str, Tensor]] = []
    for place, x in reversed(list(run.points.items())[: list(run.points).index(key)]):
        name = place.module.rpartition(".")[2]
        if place.part == "out" and x.is_floating_point() and x.shape[:-1] == trial.a.shape[:-1]:
            if x.shape == trial.a.shape:
                parts.append((name, x.double()))
            elif x.shape[-1] == 2 * trial.a.shape[-1]:
                halves = zip(("first", "second"), x.double().chunk(2, -1), strict=True)
                parts += [(f"{word} half of {name}", half) for word, half in halves]
        if len(parts) > 2:
            break
    made = [
        (f"{f}({x})" + (f"·{y}" if y else ""), ACTIVATIONS[f](one) * (1.0 if other is None else other))
        for f in ACTIVATIONS for x, one in parts for y, other in (("", None), *parts) if x != y
    ]  # fmt: skip
    own = min(made, key=lambda pair: float((pair[1] - trial.a.double()).norm()), default=None)
    if own is None or change(trial.a, own[1]) > max(trial.budget, 1e-4):
        return
    for what, product in made:
        trial.explains("activations and products", product, f"B computes {what} where A computes {own[0]}.")


def _before(run: Run, key: Key, like: Tensor) -> list[tuple[Key, Tensor]]:
    found: list[tuple[Key, Tensor]] = []
    for place, x in run.points.items():
        if place == key:
            break
        if place.part in ("in", "out") and x.shape == like.shape and x.is_floating_point():
            found.append((place, x.double()))
    return found[: -NEAR - 1 : -1]


def _say_added(place: Key, c: float) -> str:
    if abs(c + 1) < 2e-3:
        return f"B leaves out {_name(place)}, which A adds."
    if abs(c - 1) < 2e-3:
        return f"B adds {_name(place)} once more than A."
    return f"B adds {c:.4g} × {_name(place)} more than A{name_factor(1 + c)}: a multiplier of the residual stream."


def _name(place: Key) -> str:
    return f"the {'input' if place.part == 'in' else 'output'} of {place.module or 'the model'}"
