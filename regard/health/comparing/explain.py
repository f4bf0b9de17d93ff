"""The cause of a difference at one place: which explanations are tried there, and what is said if none holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.weight_repairs import MOST_WEIGHTS, find_roles, list_inner_repairs
from regard.health.comparing.causes.attention import explain_attention
from regard.health.comparing.causes.dependence import explain_dependence, explain_run
from regard.health.comparing.causes.generic import SHAPES, explain_generally, explain_numbers, explain_shapes
from regard.health.comparing.causes.glue import explain_glue
from regard.health.comparing.causes.guesses import Pair
from regard.health.comparing.causes.losses import explain_loss
from regard.health.comparing.causes.modules import explain_module, is_same
from regard.health.comparing.causes.queries import explain_inputs, explain_turned
from regard.health.comparing.causes.trial import EXACT, Cause, Trial
from regard.health.comparing.difference import Pairing, align, change
from regard.health.comparing.record import LOSS, Key, Mode, Run, read_field, run_batch
from regard.health.measure.batches import is_function
from regard.health.models.loading import describe_error
from regard.health.tokens.text import as_batch

LAST = (
    "The layers agree; the difference is after the last attention: its output projection, the last MLP, the final norm "
    "or the output layer."
)
ORDERS = {
    "exchange",
    "features in another order",
    "heads in another order",
    "numbers in other places",
    "order of grouped heads",
    "tokens in another order",
    "weights of heads in another order",
}  # kinds of causes that tell what a projection's difference means for heads
FACTS = SHAPES | {"mask"}  # kinds of causes that are seen in both runs
NUMBERS = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale",
    "query_pre_attn_scalar", "scale_emb", "scale_depth", "hidden_size", "final_logit_softcapping",
)  # fmt: skip


@dataclass
class Case:
    """Two models, A's run, B's run on A's inputs, and what differs."""

    models: tuple[nn.Module, nn.Module]
    a: Run
    b: Run
    pairing: Pairing
    changes: dict[Key, float]
    budgets: dict[Key, float]
    size: float
    own: Run  # B on its own inputs
    batch: Any
    mode: Mode = "evaluation"

    def numbers(self) -> dict[str, float]:
        """Factors that the configurations may bring in, by name."""
        found: dict[str, float] = {}
        for name, model in zip("AB", self.models, strict=True):
            config = getattr(model, "config", None)
            config = getattr(config, "text_config", None) or config
            for field in NUMBERS:
                value = read_field(config, field)
                if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                    found |= {f"{field} of {name}": float(value), f"1/{field} of {name}": 1.0 / value}
                    found |= {f"√{field} of {name}": value**0.5, f"1/√{field} of {name}": value**-0.5}
        return found

    def tensors(self, key: Key) -> tuple[Tensor, Tensor]:
        return self.a.points[key], self.b.points[self.pairing.places[key]]

    def budget(self, key: Key) -> float:
        return self.budgets.get(key, 0.0)

    def mirrored(self) -> Case:
        """The same with A and B exchanged."""
        there = self.pairing.counterpart
        changes, budgets = ({there(key): x for key, x in one.items()} for one in (self.changes, self.budgets))
        pairing = self.pairing.mirrored()
        return replace(
            self, models=self.models[::-1], a=self.b, b=self.a, pairing=pairing, changes=changes, budgets=budgets
        )


def explain_place(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    """(the cause or None, what was tried) of the first difference, at `key`.

    What takes A's tensors to B's is tried first, then what takes B's to A's.
    """
    cause, tried = _try_causes(case, key)
    if cause is None or cause.is_vague:
        other, more = _try_causes(case.mirrored(), case.pairing.counterpart(key))
        tried += [name for name in more if name not in tried]
        if other is not None and (cause is None or not other.is_vague):
            cause = other.mirrored()
    if (cause is None or cause.is_vague) and not is_function(case.batch) and key.part != LOSS:
        found, more = _rerun(case, key)
        tried += more
        if found is not None:  # of shapes or masks that differ, a dependence says why
            is_fact = cause is not None and cause.kinds & FACTS
            cause = replace(cause, text=f"{found.text} {cause.text}") if cause is not None and is_fact else found
    return cause, tried


def _try_causes(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    try:
        return _find_cause(case, key)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # where it differs is known
        return None, [f"an explanation that failed ({describe_error(error)})"]


def _rerun(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    """What runs of the models on other batches tell: what one ignores; or what it depends on, which proves no cause."""
    own = key._replace(part="attention") if key.part in ("mask", "scores") else key
    there = case.pairing.counterpart(own)
    device = next((p.device for p in case.models[0].parameters()), torch.device("cpu"))
    given = as_batch(case.batch, device, case.models[0])
    said, tried = explain_dependence(case.models, (case.a, case.own), (own, there), given, case.budget(own), case.mode)
    tried = [f"dependence on {name}" for name in tried]
    for one in (case, case.mirrored()):
        keys, runs = ((own, there), (case.a, case.own)) if one is case else ((there, own), (case.own, case.a))
        trial = explain_run(one.models, runs, keys, given, case.budget(own), case.mode)
        tried += [] if trial is None else trial.tried
        if trial is not None and trial.best is not None:
            best = trial.best if one is case else trial.best.mirrored()
            return best if said is None else replace(best, text=f"{best.text} {said[0].upper()}{said[1:]}"), tried
    return None if said is None else Cause(said, reproduces=False), tried


def _find_cause(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    """What is tried depends on the place: the loss, a call's part, a module that makes q, k or v, angles, any other."""
    if key.part == LOSS:
        device = next((p.device for p in case.models[0].parameters()), torch.device("cpu"))
        given = as_batch(case.batch, device, case.models[0])
        return explain_loss(case.models, lambda model: run_batch(model, case.batch, case.mode)[0], given)
    if key.part in ("q", "k", "v", "mask", "scores", "attention"):
        return _explain_call(case, key)
    if (turned := _find_turned(case, key)) is not None:
        return _explain_call(case, turned)
    if key.part.startswith("out") and (call := _find_call(case, key)) is not None:
        return _explain_projection(case, key, call)
    return _explain_point(case, key)


def _find_call(case: Case, key: Key) -> Key | None:
    """The attention call whose q, k or v this module makes, where they differ as well."""
    for one, x in case.changes.items():
        if one.part in ("q", "k", "v") and one.use == key.use and x > case.budget(one):
            if key.module.startswith(f"{one.module}.") or one.module.startswith(f"{key.module.rpartition('.')[0]}."):
                return one
    return None


def _explain_projection(case: Case, key: Key, call: Key) -> tuple[Cause | None, list[str]]:
    """What the module does otherwise; and what that means for heads, where they are in another order or exchanged."""
    cause, tried = _explain_point(case, key)
    meant, more = _explain_call(case, call)
    if meant is None or not meant.kinds & ORDERS:
        return cause, tried
    if cause is not None:
        vague = meant.is_vague or cause.is_vague
        meant = Cause(f"{meant.text} {cause.text}", meant.kinds | cause.kinds, vague)
    return meant, [*tried, *more]


def _find_turned(case: Case, key: Key) -> Key | None:
    """The first queries or keys that differ, where `key` is what makes the angles of rotary positions."""
    if not any(word in key.module.lower() for word in ("rotary", "rope")):
        return None
    return next((one for one, x in case.changes.items() if one.part in ("q", "k") and x > case.budget(one)), None)


def _explain_call(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    at = key._replace(part="attention")
    pair = Pair(case.a.calls[at], case.b.calls[case.pairing.places[at]], 0.0, case.a.real, case.numbers())
    inputs = [
        part
        for part in ("q", "k", "v")
        if case.changes.get(key._replace(part=part), 0.0) > case.budget(key._replace(part=part))
    ]
    if key.part in inputs:
        pair.budget = max(case.budget(key._replace(part=part)) for part in inputs)
        return explain_inputs(pair, inputs, case.a, at)
    pair.budget = case.budget(at)
    if pair.a.output.shape != pair.b.output.shape:
        said = f"{list(pair.a.output.shape)} in A, {list(pair.b.output.shape)} in B"
        said = f"the attention's outputs have other shapes: {said}."
        return Cause(said, SHAPES, is_vague=True, reproduces=False), ["shapes"]
    trial = explain_attention(pair)
    return trial.best, trial.tried


def _explain_point(case: Case, key: Key) -> tuple[Cause | None, list[str]]:
    a, b = align(*case.tensors(key))
    if a.shape != b.shape and (a.numel() != b.numel() or a.ndim == b.ndim):
        trial = Trial(a, b, case.budget(key))
        explain_shapes(trial)
        return trial.best, trial.tried
    found, tried = _explain_hidden(case, key, a, b)
    found = found if found is not None or not case.pairing.same_code else _find_repair(case, key)
    if found is not None:
        return found, tried
    units = "patches" if _is_of_image(case, key) else "heads"
    trial = Trial(a, b.reshape(a.shape), case.budget(key), "", case.a.real, tried, units=units)
    if not a.is_floating_point():
        explain_numbers(trial)
    elif key.part.startswith("out"):
        modules = [
            model.get_submodule(name)
            for model, name in zip(case.models, (key.module, case.pairing.places[key].module), strict=True)
        ]
        x = case.a.points.get(key._replace(part="in"))
        if x is not None and key.part == "out" and key.module and case.pairing.same_code:
            others = tuple(_list_others(model, one) for model, one in zip(case.models, modules, strict=True))
            explain_module(trial, x, modules[0], modules[1], others)
        elif key.module:
            explain_generally(trial, case.numbers())
        if trial.best is None:
            explain_glue(trial, key, case.a, case.numbers())
    else:
        explain_turned(trial)
        explain_glue(trial, key, case.a, case.numbers())
    return trial.best, trial.tried


def _is_of_image(case: Case, key: Key) -> bool:
    """True before the first attention of a model that is given images."""
    given, order = case.a.points.get(Key("in", "")), list(case.a.points)
    if given is None or given.ndim != 4 or key not in order:
        return False
    return not any(one.part == "attention" for one in order[: order.index(key)])


def _explain_hidden(case: Case, key: Key, a: Tensor, b: Tensor) -> tuple[Cause | None, list[str]]:
    """What an attention does otherwise that was seen in A alone: B's own stands behind it, with its heads merged."""
    for place, kept in case.a.calls.items():
        batch, heads, rows, _ = kept.shape
        if place.use != key.use or kept.output.numel() != a.numel() or place in case.changes:
            continue
        apart = [x.reshape(batch, rows, heads, -1).transpose(1, 2) for x in (a, b)]
        if change(kept.output, apart[0], "attention") <= max(case.budget(key), EXACT):
            hidden = kept.change(output=apart[1], obstacle="it was not seen as an attention")
            trial = explain_attention(Pair(kept, hidden, case.budget(key), case.a.real, case.numbers()))
            return trial.best, trial.tried
    return None, []


def _find_repair(case: Case, key: Key) -> Cause | None:
    """A mistake of a conversion that `regard.check` knows, which takes the weights of one model to the other's."""
    models: list[dict[str, Tensor]] = [dict(one.named_parameters()) for one in case.models]
    blamed = {name for name in models[0] if name.rpartition(".")[0] == key.module}
    if not any(name in models[1] and not is_same(models[0][name], models[1][name]) for name in blamed):
        return None
    call = next(iter(case.a.calls.values()), None)
    sizes = None if call is None else (call.q.shape[1], call.k.shape[1], call.q.shape[-1])
    for model, other, a, b in ((*case.models, "A", "B"), (*case.models[::-1], "B", "A")):
        if sum(p.numel() for p in model.parameters()) > MOST_WEIGHTS:
            return None
        inner = {role: members for role, members in find_roles(model).items() if "#" in role}
        there = dict(other.named_parameters())
        for repair in list_inner_repairs(inner, sizes):
            values = repair.values()
            if blamed & values.keys() and all(n in there and is_same(x, there[n]) for n, x in values.items()):
                said = f"Held to {b}'s weights, in {a} {repair.meaning[0].lower()}{repair.meaning[1:]}"
                return Cause(f"{said}: with that undone both are equal.", frozenset({"weights"}))
    return None


def _list_others(model: nn.Module, one: nn.Module) -> dict[str, nn.Module]:
    """The other modules of a module's class, or with a weight of its shape, by name; those beside it first."""
    shape = getattr(getattr(one, "weight", None), "shape", ())
    named = {
        name: other for name, other in model.named_modules()
        if type(other) is type(one) or (shape and getattr(getattr(other, "weight", None), "shape", None) == shape)
    }  # fmt: skip
    beside = next(name for name, other in named.items() if other is one).rpartition(".")[0]
    ordered = sorted(named.items(), key=lambda pair: pair[0].rpartition(".")[0] != beside)
    return {name: other for name, other in ordered if other is not one}


def say_unknown(case: Case, key: Key, tried: list[str]) -> str:
    """What is known where no explanation holds."""
    after = case.pairing.blocks[0] and case.pairing.block_of(key) is None and key.part.startswith("out")
    where = f"{LAST} " if after and not key.module else ""
    listed = ", ".join(dict.fromkeys(tried)) or "nothing"
    return f"{where}It differs by {_size(case.changes[key])}. None of what was tried explains it: {listed}."


def _size(x: float) -> str:
    return f"{x:.2g} of its size" if x < 1e6 else "more than its size or shape"
