"""Why a module gives another output for the same input: its weights, its constants, or its formula."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.health.comparing.causes.generic import explain_generally
from regard.health.comparing.causes.orders import say_order
from regard.health.comparing.causes.trial import Trial, exchange_letters, fit_factor

ACTIVATIONS = {
    "GELU": F.gelu, "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"), "SiLU": F.silu, "ReLU": F.relu,
    "GELU by sigmoid (quick)": lambda x: x * torch.sigmoid(1.702 * x), "ReLU squared": lambda x: F.relu(x).square(),
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "no activation": lambda x: x, "softplus": F.softplus,
    "leaky ReLU": F.leaky_relu, "ELU": F.elu,
}  # fmt: skip
EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
Others = tuple[dict[str, nn.Module], ...]  # of A and of B, modules of the same class by name
CONSTANTS = (bool, int, float, str)


def explain_module(trial: Trial, x: Tensor, a: nn.Module, b: nn.Module, others: Others) -> None:
    """Try why B's module gives `trial.b` for the input x, where A's gives `trial.a`.

    `others` hold the modules whose weights it may have instead, those beside it first.
    """
    _try_weights(trial, x, a, b, others)
    if trial.found:
        return
    _try_constants(trial, x, a, b)
    _try_formulas(trial, x, a)
    _try_axes(trial, x)
    if not trial.found:
        explain_generally(trial)


def _try_weights(trial: Trial, x: Tensor, a: nn.Module, b: nn.Module, others: Others) -> None:
    own, given = (dict(one.named_parameters()) | dict(one.named_buffers()) for one in (a, b))
    missing = [name for name in own if name not in given]
    if missing and set(given) <= set(own):
        changed = {name: torch.zeros_like(own[name]) for name in missing if name.endswith("bias")}
        trial.explains(
            "a bias left out", _run(a, x, changed) if changed else None, f"B leaves out {', '.join(missing)}."
        )
    elif set(given) - set(own) and set(own) <= set(given):
        more = ", ".join(sorted(set(given) - set(own)))
        trial.explains("a bias added", _run(b, x, {}), f"B has {more}, which A has not.")
    differs = [name for name in own if name in given and not is_same(own[name], given[name])]
    if not differs:
        return
    trial.tried.append("weights")
    if any(own[name].shape != given[name].shape for name in differs):
        name = next(name for name in differs if own[name].shape != given[name].shape)
        shapes = f"{list(own[name].shape)} in A, {list(given[name].shape)} in B"
        trial.explains("weights", _run(b, x, {}), f"{name} has other shapes: {shapes}.")
        return
    related = [_relate(name, (own[name], given[name]), others) for name in differs[:3]]
    said, is_vague = "; ".join(text for text, _ in related), not all(is_told for _, is_told in related)
    result = _run(a, x, {name: given[name] for name in differs})
    if trial.explains("weights", result, f"B's weights are other ones: {said}.", is_vague):
        return
    said = f"B's weights are other ones ({said}), and its code as well."
    trial.explains("weights and code", _run(b, x, {}), said, is_vague)


def is_same(a: Tensor, b: Tensor) -> bool:
    """True for weights that are equal within the rounding of the coarser dtype."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a.cpu(), b.cpu())
    dtype = min((a.dtype, b.dtype), key=lambda one: -torch.finfo(one).eps)
    return torch.allclose(a.to(dtype).double().cpu(), b.to(dtype).double().cpu(), rtol=2 * torch.finfo(dtype).eps)


def _relate(name: str, pair: tuple[Tensor, Tensor], others: tuple[dict[str, nn.Module], ...]) -> tuple[str, bool]:
    """How B's weight follows from A's, or A's from B's, and is that known? `others` are the modules of each."""
    for one, other in ((0, 1), (1, 0)):
        held = next((at for at, module in others[one].items() if getattr(module, name, None) is pair[one]), None)
        if held in others[other] and getattr(others[other][held], name, None) is not pair[other]:
            return f"{name} is tied to {held} in {'AB'[one]}, and is a tensor apart in {'AB'[other]}", True
    a, b = (x.detach().double().cpu() for x in pair)
    if (found := _follow(name, a, b, others[0])) is not None:
        return found, True
    if (found := _follow(name, b, a, others[1])) is not None:
        return exchange_letters(found), True
    if a.ndim == 2 and 32 <= min(a.shape) <= 4096:
        sizes = torch.linalg.svdvals(b - a)
        rank = int((sizes > 1e-3 * sizes[0]).sum())
        if rank <= min(a.shape) // 4:
            said = "an adapter (LoRA) is merged into one of them, or into both at another scale"
            return f"{name} differs by a matrix of rank {rank}: {said}", True
    rows = (a - b).reshape(len(a), -1).norm(dim=1) > 1e-3 * a.reshape(len(a), -1).norm(dim=1) if a.ndim else None
    part = "" if rows is None or bool(rows.all()) else f" in {int(rows.sum())} of {len(rows)} rows"
    return f"{name} differs{part} by {float((a - b).norm()) / float(a.norm().clamp_min(1e-30)):.2g} of its size", False


def _follow(name: str, a: Tensor, b: Tensor, others: dict[str, nn.Module]) -> str | None:
    size = float(a.norm()) + 1e-30
    if not bool(b.any()):
        return f"{name} is all zero in B"
    if a.ndim == 2 and a.shape[0] == a.shape[1] and float((a.T - b).norm()) < 1e-3 * size:
        return f"{name} is transposed in B"
    f = fit_factor(a, b)
    if float((b - f * a).norm()) < 1e-3 * float(b.norm()):
        return f"{name} is {f:.4g} times A's in B"
    if float((b - a - 1).norm()) < 1e-3 * size or float((b - a + 1).norm()) < 1e-3 * size:
        sign = "plus" if float((b - a).mean()) > 0 else "minus"
        return f"{name} is A's {sign} 1 in B (some norms store their weight less 1)"
    for other, module in others.items():
        weight = getattr(module, name, None)
        if isinstance(weight, Tensor) and weight.shape == b.shape and is_same(weight.cpu(), b):
            return f"{name} in B is that of A's {other}"
    for what, x, y in (("rows", a, b), ("columns", a.T, b.T))[: a.ndim]:
        if 1 < len(x) <= 8192 and (order := _match_rows(x, y)) is not None:
            return f"{name} has A's {what} in another order{say_order(order)}"
    return _find_rows(name, a, b, others)


def _match_rows(a: Tensor, b: Tensor) -> Tensor | None:
    order = torch.cdist(b.reshape(len(b), -1), a.reshape(len(a), -1)).argmin(1)
    alike = len(set(order.tolist())) == len(a) and float((a[order] - b).norm()) < 1e-3 * float(a.norm())
    return order if alike else None


def _find_rows(name: str, a: Tensor, b: Tensor, others: dict[str, nn.Module]) -> str | None:
    """Are b's rows those of A's modules beside this one?"""
    pool = {"own": a} | {other: getattr(module, name, None) for other, module in others.items()}
    given = {
        other: x.detach().double().cpu() for other, x in pool.items()
        if isinstance(x, Tensor) and x.ndim == b.ndim and 0 < b.ndim <= 2 and x.shape[1:] == b.shape[1:]
    }  # fmt: skip
    if not given or sum(map(len, given.values())) > 2 * 8192:
        return None
    rows, wanted = (x.reshape(len(x), -1) for x in (torch.cat(list(given.values())), b))
    nearest = torch.cdist(wanted, rows).argmin(1)
    if float((rows[nearest] - wanted).norm()) > 1e-3 * float(wanted.norm()):
        return None
    owners = [other for other, x in given.items() for _ in range(len(x))]
    listed = ", ".join(dict.fromkeys(owners[at] for at in nearest.tolist() if owners[at] != "own"))
    return f"{name} has rows of A's {listed}: a stacked matrix was taken apart in another order"


def _run(module: nn.Module, x: Tensor, changed: dict[str, Tensor]) -> Tensor | None:
    """module(x) with some parameters exchanged; None if it takes more than x."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    values = {name: value.detach().to(device) for name, value in changed.items()}
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    given = x.to(device) if like is None or not x.is_floating_point() else x.to(like)
    training = module.training
    try:
        module.training = False
        with torch.no_grad():
            result = torch.func.functional_call(module, values, (given,))
    except Exception:  # a module of many inputs: what cannot be run is not tried
        return None
    finally:
        module.training = training
    return result.detach().cpu() if isinstance(result, Tensor) else None


def _try_constants(trial: Trial, x: Tensor, a: nn.Module, b: nn.Module) -> None:
    """A's module with the constants of B's, one after another."""
    for name, value in vars(b).items():
        if name.startswith("_") or not isinstance(value, CONSTANTS) or name == "training":
            continue
        own = getattr(a, name, None)
        if own == value or not isinstance(own, CONSTANTS):
            continue
        with _with_attribute(a, name, value):
            trial.explains(name, _run(a, x, {}), f"{name} is {own!r} in A and {value!r} in B.")


@contextlib.contextmanager
def _with_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    try:
        setattr(module, name, value)
        yield
    finally:
        setattr(module, name, before)


def _try_formulas(trial: Trial, x: Tensor, a: nn.Module) -> None:
    """Activations and norms that B may compute instead."""
    if not x.is_floating_point() or x.shape != trial.b.shape:
        return
    x = x.double()
    vectors = [p for p in a.parameters(recurse=False) if p.shape == x.shape[-1:]]
    weight, bias = (*vectors, None, None)[:2]
    if weight is None and not any(True for _ in a.parameters()):
        away = {name: float((f(x) - trial.a.double()).norm()) for name, f in ACTIVATIONS.items()}
        own = min(away, key=lambda name: away[name])
        own = own if _near(ACTIVATIONS[own](x), trial.a) else "another formula"
        for name, f in ACTIVATIONS.items():
            trial.explains("activation", f(x), f"the activation is {own} in A and {name} in B.")
    if weight is not None:
        _try_norms(trial, x, weight.detach().double().cpu(), bias, _epsilon_of(a))


def _try_axes(trial: Trial, x: Tensor) -> None:
    """What is added to x [B, N, C] by the row of the batch in one model, by the position in the other."""
    n = min(x.shape[:2]) if x.ndim == 3 and x.shape == trial.a.shape and x.is_floating_point() else 0
    if n > 1:
        candidate = trial.b.double().clone()
        candidate[:n, :n] = x[:n, :n].double() + (trial.a - x)[:n, :n].double().transpose(0, 1)
        trial.explains("another axis", candidate, (
            "what it adds to its input follows the row of the batch in one model and the position in the other."
        ))  # fmt: skip


def _try_norms(trial: Trial, x: Tensor, weight: Tensor, bias: Tensor | None, own: float | None) -> None:
    made = list(_list_norms(x, weight, bias, own))
    said = next((what for what, y in made if _near(y, trial.a)), "another formula")
    for what, y in made:
        trial.explains("formula of the norm", y, f"B computes {what} where A computes {said}.")
    trial.explains("norm left out", x, "B leaves out this norm.")
    trial.explains("norm left out", x * weight, "B multiplies by the norm's weight without norming.")


def _list_norms(x: Tensor, weight: Tensor, bias: Tensor | None, own: float | None) -> Iterator[tuple[str, Tensor]]:
    """(what it is, the output) of every norm that the module may be; `own` is its ε."""
    weights = {"its weight": weight, "1 + its weight": 1 + weight, "no weight": torch.ones_like(weight)}
    first = EPSILONS[3] if own is None else own
    cases: list[tuple[float, Any, str]] = [(first, -1, ""), *((one, -1, "") for one in EPSILONS if one != own)]
    if x.ndim == 3:
        cases += [(first, 1, " over the tokens"), (first, 0, " over the batch"), (first, (0, 1), " over all tokens")]
    for epsilon, dim, over in cases:
        of = "" if epsilon == own else f", ε = {epsilon:g}"
        for kind, y in (("an RMS norm", x), ("a LayerNorm", x - x.mean(dim, keepdim=True))):
            size = y.square().mean(dim, keepdim=True)
            scales = {"": (size + epsilon).rsqrt()}
            if epsilon == first:
                scales |= {", ε beside the deviation": 1 / (size.sqrt() + epsilon)}
                scales |= {", of the unbiased deviation": 1 / (x.std(dim, keepdim=True) + epsilon)}
            for (how, scale), (name, value) in itertools.product(scales.items(), weights.items()):
                normed, what = y * scale * value, f"{kind}{over} with {name}{how}{of}"
                if bias is not None:
                    yield what, normed + bias.detach().double().cpu()
                yield what + (" and no bias" if bias is not None else ""), normed


def _epsilon_of(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon", "layer_norm_eps"))
    return next((float(x) for x in found if isinstance(x, (int, float))), None)


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b.double()).norm()) <= 1e-3 * float(b.double().norm())
