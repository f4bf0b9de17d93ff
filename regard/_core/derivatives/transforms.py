"""Fused attention as functions that torch.func and forward mode can transform, to any order.

    Attention   x ↦ (o, row state)          kernels
    Tangent     (x, x′) ↦ o′                kernels for tangents of q, k and v; blocks of the reference for the others
    Gradient    (do, x) ↦ dx                kernels

The tangent of Attention is Tangent and its backward is Gradient; the derivatives of these two, which forward over
reverse and second derivatives need, come from the reference, block by block. x are the tensors that the call has, in
the order of `problem.TENSORS`, options not expanded: torch.func handles every argument at every level, also None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from regard._call.problem import Along, Forward, Problem
from regard._core.derivatives.autograd import LEARNED, compute_gradients, places_of, spread
from regard._core.derivatives.blocked import Derivatives
from regard._core.ops.backends import ATTENTION, backend_module, default_device

Maybe = Tensor | None


@dataclass(frozen=True, eq=False)
class Setting:
    """What a call is beside its tensors; `places` are those of its tensors in `TENSORS`."""

    options: Problem
    backend: str
    places: tuple[int, ...]

    def spread(self, tensors: Sequence[Maybe]) -> list[Maybe]:
        """The tensors in the order of `TENSORS`, None where the call has none."""
        return spread(tensors, self.places)

    def gather(self, found: Sequence[Maybe]) -> list[Maybe]:
        """Those of the call's tensors, of one entry for each of `TENSORS`."""
        return [found[at] for at in self.places]

    def derivatives(self, tensors: Sequence[Maybe]) -> Derivatives:
        """The derivatives of the call by the reference."""
        return Derivatives(self.options, self.spread(tensors))


def attend(options: Problem, backend: str, tensors: Sequence[Maybe]) -> Tensor:
    """o of a problem, as a function of its tensors in the order of `TENSORS`."""
    places = tuple(at for at, x in enumerate(tensors) if x is not None)
    setting, given = Setting(options, backend, places), [tensors[at] for at in places]
    duals = split_duals(given)
    return Attention.apply(setting, *given)[0] if duals is None else attend_duals(setting, duals)


class Duals(NamedTuple):
    """The tensors of a call that a single level of forward mode acts on, taken apart."""

    primals: list[Any]  # tensors or None, as they were given
    tangents: list[Maybe]
    level: int | None  # of torch.func; None for `torch.autograd.forward_ad` alone

    def outside(self) -> contextlib.AbstractContextManager:
        """A context in which that level does not see what is computed."""
        return contextlib.nullcontext() if self.level is None else temporarily_pop_interpreter_stack()


def split_duals(given: Sequence[Maybe]) -> Duals | None:
    """Take dual tensors apart; None if anything but a single level of forward mode acts on them."""
    stack = functorch.peek_interpreter_stack()
    if forward_ad._current_level < 0 or (stack is not None and (stack.level() > 1 or "Jvp" not in str(stack.key()))):
        return None
    parts = [forward_ad.unpack_dual(x) for x in given]
    inner = [functorch.get_unwrapped(x) if is_wrapped(x) else x for part in parts for x in part]
    if any(x is not None and (x.requires_grad or is_wrapped(x)) for x in inner):
        return None
    return Duals(inner[::2], inner[1::2], None if stack is None else stack.level())


def attend_duals(setting: Setting, duals: Duals) -> Tensor:
    """(o, o′) as one dual tensor, computed outside of its level: torch.func takes milliseconds to carry functions."""
    with duals.outside():
        state = Attention.forward(setting, *duals.primals)
        o, tangent = state[0], Tangent.forward(setting, *state, *duals.primals, *duals.tangents)
    if duals.level is not None:
        o, tangent = (functorch._wrap_for_grad(x, duals.level) for x in (o, tangent))
    return forward_ad.make_dual(o, tangent)


def is_wrapped(x: Maybe) -> bool:
    """True for a tensor of torch.func."""
    return x is not None and functorch.is_functorch_wrapped_tensor(x)


class Attention(torch.autograd.Function):
    """(o, shift, z) of a problem."""

    @staticmethod
    def forward(setting: Setting, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with default_device(setting.backend):
            problem = setting.options.with_tensors(setting.spread(tensors))
            result = backend_module(ATTENTION, setting.backend).forward(problem)
        return result.o, result.shift, result.z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.setting, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Maybe, *_: Maybe) -> tuple:  # type: ignore[override]
        setting = ctx.setting
        if do is None:
            return None, *(None for _ in setting.places)
        kept, count = ctx.saved_tensors, len(setting.places)  # once: checkpointing recomputes at each look
        needs = setting.spread(ctx.needs_input_grad[1:])
        wants = [name for name, place in LEARNED.items() if needs[place]]
        grads = Gradient.apply(setting, ",".join(wants), do, *kept[count:], *kept[:count])
        return None, *setting.gather(spread(grads, places_of(wants)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple:
        kept, count = ctx.saved_tensors, len(tangents)
        if all(x is None for x in tangents):
            return None, None, None
        given = *kept[count:], *kept[:count], *tangents
        return Tangent.apply(ctx.setting, *given), None, None


class Tangent(torch.autograd.Function):
    """o′ of a problem whose tensors have tangents; its row state is the forward's."""

    @staticmethod
    def forward(setting: Setting, o: Tensor, shift: Tensor, z: Tensor, *given: Maybe) -> Tensor:
        tensors, tangents = (setting.spread(x) for x in halves(given))
        if setting.options.dropout_p or any(x is not None for x in tangents[3:]):
            return Derivatives(setting.options, tensors).tangent(tangents).to(o.dtype)
        saved = Forward(o, shift, z, o.new_empty(0))
        with default_device(setting.backend):
            return backend_module(ATTENTION, setting.backend).tangent(
                setting.options.with_tensors(tensors), saved, Along(*tangents[:3])
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.setting, _, _, _, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Maybe) -> tuple:  # type: ignore[override]
        setting = ctx.setting
        if upstream is None:
            return (None,) * (4 + 2 * len(setting.places))
        tensors, tangents = halves(ctx.saved_tensors)
        found, moved = setting.derivatives(tensors).tangent_vjp(setting.spread(tangents), upstream)
        moved = [None if t is None else x for x, t in zip(setting.gather(moved), tangents, strict=True)]
        return None, None, None, None, *setting.gather(found), *moved

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Tensor:
        setting, (tensors, tangents) = ctx.setting, halves(ctx.saved_tensors)
        change = (setting.spread(x) for x in halves(moved[4:]))
        return setting.derivatives(tensors).tangent_jvp(setting.spread(tangents), *change).to(tensors[0].dtype)


def halves(given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors and their tangents, which follow them."""
    return given[: len(given) // 2], given[len(given) // 2 :]


class Gradient(torch.autograd.Function):
    """(dq, dk, dv, and those of `wants`, joined by commas) of a problem; o, shift and z are its forward's."""

    @staticmethod
    def forward(
        setting: Setting, wants: str, do: Tensor, o: Tensor, shift: Tensor, z: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = setting.spread(given)
        problem, saved = setting.options.with_tensors(tensors), Forward(o, shift, z, o.new_empty(0))
        with default_device(setting.backend):
            module = backend_module(ATTENTION, setting.backend)
            return tuple(compute_gradients(module, problem, saved, do, None, tensors, wants.split(",")))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.setting, ctx.wants, do, _, _, _, *tensors = inputs
        ctx.save_for_backward(do, *tensors)
        ctx.save_for_forward(do, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Maybe) -> tuple:  # type: ignore[override]
        do, *tensors = ctx.saved_tensors
        given = spread(upstream, places_of(ctx.wants.split(",")))
        d_do, found = ctx.setting.derivatives(tensors).gradient_vjp(do, given)
        return None, None, d_do, None, None, None, *ctx.setting.gather(found)

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> tuple[Maybe, ...]:
        do, *tensors = ctx.saved_tensors
        found = ctx.setting.derivatives(tensors).gradient_jvp(do, moved[2], ctx.setting.spread(moved[6:]))
        return tuple(found[at] for at in places_of(ctx.wants.split(",")))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *given: Any) -> tuple:
        """One call per entry: torch.func.jacrev maps over `do` alone, and kernels cannot be mapped."""

        def take(i: int) -> list:
            return [x if dim is None else x.select(dim, i) for x, dim in zip(given, in_dims, strict=True)]

        grads = [Gradient.apply(*take(i)) for i in range(info.batch_size)]
        found = tuple(torch.stack(x) for x in zip(*grads, strict=True))
        return found, (0,) * len(found)
