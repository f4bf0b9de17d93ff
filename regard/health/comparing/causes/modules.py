"""Why a module gives another output for the same input: its weights, its constants, or its formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.health.comparing.causes.generic import explain_generally
from regard.health.comparing.causes.trial import Trial

ACTIVATIONS = {
    "GELU": F.gelu, "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"), "SiLU": F.silu, "ReLU": F.relu,
    "GELU by sigmoid (quick)": lambda x: x * torch.sigmoid(1.702 * x), "ReLU squared": lambda x: F.relu(x).square(),
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "no activation": lambda x: x, "softplus": F.softplus,
    "leaky ReLU": F.leaky_relu, "ELU": F.elu,
}  # fmt: skip
EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
CONSTANTS = (bool, int, float, str)


def explain_module(trial: Trial, x: Tensor, a: nn.Module, b: nn.Module, others: dict[str, nn.Module]) -> None:
    """Try why B's module gives `trial.b` for the input x, where A's gives `trial.a`.

    `others` are A's modules of the same class, by name: B's weights may be those of another layer.
    """
    _try_weights(trial, x, a, b, others)
    if trial.found:
        return
    _try_constants(trial, x, a, b)
    _try_formulas(trial, x, a)
    if not trial.found:
        explain_generally(trial)


def _try_weights(trial: Trial, x: Tensor, a: nn.Module, b: nn.Module, others: dict[str, nn.Module]) -> None:
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
    differs = [name for name in own if name in given and not _same(own[name], given[name])]
    if not differs:
        return
    trial.tried.append("weights")
    if any(own[name].shape != given[name].shape for name in differs):
        name = next(name for name in differs if own[name].shape != given[name].shape)
        shapes = f"{list(own[name].shape)} in A, {list(given[name].shape)} in B"
        trial.explains("weights", _run(b, x, {}), f"{name} has other shapes: {shapes}.")
        return
    said = "; ".join(_relate(name, own[name], given[name], others) for name in differs[:3])
    result = _run(a, x, {name: given[name] for name in differs})
    if trial.explains("weights", result, f"B's weights are other ones: {said}."):
        return
    trial.explains("weights and code", _run(b, x, {}), f"B's weights are other ones ({said}), and its code as well.")


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a.cpu(), b.cpu())
    dtype = min((a.dtype, b.dtype), key=lambda one: -torch.finfo(one).eps)
    return torch.allclose(a.to(dtype).double().cpu(), b.to(dtype).double().cpu(), rtol=2 * torch.finfo(dtype).eps)


def _relate(name: str, a: Tensor, b: Tensor, others: dict[str, nn.Module]) -> str:
    """How B's weight follows from A's."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    size = float(a.norm()) + 1e-30
    if not bool(b.any()):
        return f"{name} is all zero in B"
    if a.ndim == 2 and a.shape[0] == a.shape[1] and float((a.T - b).norm()) < 1e-3 * size:
        return f"{name} is transposed in B"
    f = float((a * b).sum()) / size**2
    if float((b - f * a).norm()) < 1e-3 * float(b.norm()):
        return f"{name} is {f:.4g} times A's in B"
    if float((b - a - 1).norm()) < 1e-3 * size or float((b - a + 1).norm()) < 1e-3 * size:
        sign = "plus" if float((b - a).mean()) > 0 else "minus"
        return f"{name} is A's {sign} 1 in B (some norms store their weight less 1)"
    for other, module in others.items():
        weight = getattr(module, name, None)
        if isinstance(weight, Tensor) and weight.shape == b.shape and _same(weight, b):
            return f"{name} is that of A's {other}"
    if a.ndim >= 1 and 1 < len(a) <= 8192:
        order = torch.cdist(b.reshape(len(b), -1), a.reshape(len(a), -1)).argmin(1)
        if len(set(order.tolist())) == len(a) and float((a[order] - b).norm()) < 1e-3 * size:
            moved = (order != torch.arange(len(a))).nonzero().flatten()
            return f"{name} has A's rows in another order (from row {int(moved[0])} on)"
    if a.ndim == 2 and 1 < a.shape[1] <= 8192:
        order = torch.cdist(b.T.contiguous(), a.T.contiguous()).argmin(1)
        if len(set(order.tolist())) == a.shape[1] and float((a[:, order] - b).norm()) < 1e-3 * size:
            return f"{name} has A's columns in another order"
    rows = (a - b).reshape(len(a), -1).norm(dim=1) > 1e-3 * a.reshape(len(a), -1).norm(dim=1) if a.ndim else None
    part = "" if rows is None or bool(rows.all()) else f" in {int(rows.sum())} of {len(rows)} rows"
    return f"{name} differs{part} by {float((a - b).norm()) / size:.2g} of its size"


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
    weight, bias = (getattr(a, name, None) for name in ("weight", "bias"))
    if weight is None and not any(True for _ in a.parameters()):
        away = {name: float((f(x) - trial.a.double()).norm()) for name, f in ACTIVATIONS.items()}
        own = min(away, key=lambda name: away[name])
        own = own if _near(ACTIVATIONS[own](x), trial.a) else "another formula"
        for name, f in ACTIVATIONS.items():
            trial.explains("activation", f(x), f"the activation is {own} in A and {name} in B.")
    if isinstance(weight, Tensor) and weight.shape == x.shape[-1:]:
        _try_norms(trial, x, weight.detach().double().cpu(), bias, _epsilon_of(a))


def _try_norms(trial: Trial, x: Tensor, weight: Tensor, bias: Tensor | None, own: float | None) -> None:
    offset = torch.zeros(()) if bias is None else bias.detach().double().cpu()
    centred = x - x.mean(-1, keepdim=True)
    for epsilon in (own, *EPSILONS):
        if epsilon is None:
            continue
        for kind, y in (("RMS norm", x), ("LayerNorm", centred)):
            y = y * (y.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            for how, value in (
                ("its weight", weight),
                ("1 + its weight", 1 + weight),
                ("no weight", torch.ones_like(weight)),
            ):
                of = "" if epsilon == own else f", ε = {epsilon:g} where A has {own if own is None else f'{own:g}'}"
                sentence = f"B computes a {kind} with {how}{of}."
                trial.explains("formula of the norm", y * value + offset, sentence)
                if bias is not None:
                    trial.explains("formula of the norm", y * value, sentence[:-1] + " and no bias.")
    trial.explains("norm left out", x, "B leaves out this norm.")
    trial.explains("norm left out", x * weight, "B multiplies by the norm's weight without norming.")


def _epsilon_of(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon", "layer_norm_eps"))
    return next((float(x) for x in found if isinstance(x, (int, float))), None)


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b.double()).norm()) <= 1e-3 * float(b.double().norm())
