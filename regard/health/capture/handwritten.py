"""Attention written in plain torch, softmax(c·q kᵀ + mask)·v, followed from the first product to the second.

    s = q kᵀ              a `Product`: q […, M, D] and k [… , N, D]
    s·c, s + mask, …      the same product; c is followed where it is a number
    p = softmax(s)        `Weights`: the product, its logits and p
    p·v                   a `Call` with the bias logits − c·q kᵀ, which holds mask, bias and soft cap alike

The bias makes every reading that of the model's own logits, whatever was done to them. Weights whose scores are no
product of queries and keys are reported with the line that multiplies them by values. Products may be written as
`torch.einsum`: "bhid,bhjd->bhij" for scores, "bhij,bhjd->bhid" for outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.health.capture.call import HIDES_ALWAYS, HIDES_AMONG_ZEROS, Call
from regard.health.capture.forwards import find_caller, running_module
from regard.health.capture.guard import guarded, say
from regard.health.capture.interception import interceptions_of, is_swapped, route, route_result

PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
OPERANDS: dict[str, tuple[str, ...]] = {
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "bmm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}
TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
OVER = {"div", "div_", "__truediv__", "__itruediv__", "divide", "true_divide"}
DROPPING = {"dropout", "dropout_"}
TRANSPOSING = {"transpose", "swapaxes", "swapdims", "permute"}
MT = torch.Tensor.mT.__get__  # type: ignore[attr-defined]
LOST: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # modules -> the line of a softmax that led nowhere
ORDINARY: set[Any] = set()  # torch functions with which no attention begins: neither products nor softmax
AXES = {-2: "queries", -3: "heads", -4: "batch"}
RUNS_OVER = "its softmax runs over the"  # … queries, where the keys are meant
CHANGED = "its weights were changed after the softmax"
ROWS = 0.02  # by which a row of weights may miss a sum of 1
EXACT, ROUNDED = 2e-6, 4.0  # a bias below EXACT·max|s| + ROUNDED·eps·|s| is rounding


@dataclass
class Product:
    """q kᵀ before or after it was scaled, masked and shaped: q [*, M, D], k [*, N, D], and the factor so far."""

    q: Tensor
    k: Tensor
    shape: tuple[int, int]  # M, N
    numel: int
    scale: float = 1.0


@dataclass
class Weights:
    """softmax(logits), perhaps after dropout; `product` is None where the logits are no product."""

    p: Tensor
    logits: Tensor
    product: Product | None
    dropout: float = 0.0
    transposed: bool = False
    axis: int = -1  # over which the softmax ran; another than −1 where the scores are a product
    gain: Tensor | None = None  # a learned number that multiplied p afterwards, as the gate of an adapter does
    is_part: bool = False  # some of the rows or columns alone


class Follower:
    """Follows the tensors of one thread from product to product; what is known of a tensor lives as long as it."""

    def __init__(self) -> None:
        self.known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.saw_softmax = False

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a torch function, and follows what it returns or captures it if it multiplies weights by values."""
        name = getattr(func, "__name__", "")
        if name in PRODUCTS:
            return guarded(partial(self._multiply, name, args, kwargs), partial(func, *args, **kwargs))
        if name != "softmax":
            ORDINARY.add(func)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (self.known.data or name == "softmax"):
            try:
                self._follow(name, func, args, kwargs, result)
            except Exception as error:
                say(error)
        return result

    def _follow(self, name: str, func: Callable, args: tuple, kwargs: dict, result: Tensor) -> None:
        inputs = [x for x in (*args[:3], kwargs.get("input"), kwargs.get("other")) if isinstance(x, Tensor)]
        known = next((self.known[x] for x in inputs if x in self.known), None)
        if name == "softmax":
            self.saw_softmax = True
            self._follow_softmax(known, args, kwargs, result)
        elif isinstance(known, Product) and result.numel() == known.numel and result.shape[-2:] == known.shape:
            self.known[result] = replace(known, scale=known.scale * _factor(name, args))
        elif isinstance(known, Weights) and name == "__getitem__" and result.numel() < known.p.numel():
            self.known[result] = replace(known, product=None, is_part=True)
        elif isinstance(known, Weights) and result.numel() == known.p.numel():
            if name in DROPPING:
                training = args[2] if len(args) > 2 else kwargs.get("training", True)
                rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
                known = replace(known, dropout=rate if training else known.dropout)
            gain = next((x for x in inputs if isinstance(x, nn.Parameter) and x.numel() == 1), None)
            if gain is not None and name in TIMES:
                known = replace(known, gain=gain if known.gain is None else known.gain * gain)
            if name in TRANSPOSING or func == MT:
                known = _transpose(known, func, args, kwargs)
            if sorted(result.shape[-2:]) == sorted(known.logits.shape[-2:]):
                self.known[result] = known

    def _follow_softmax(self, known: Any, args: tuple, kwargs: dict, result: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or isinstance(known, Weights) or logits.ndim < 2:
            return
        axis = dim if dim < 0 else dim - logits.ndim
        module = running_module()
        if known is None and logits.ndim > 2 and module is not None and module not in LOST:
            LOST[module] = _line()
        if axis == -1:
            self.known[result] = Weights(result, logits, known)
        elif isinstance(known, Product):
            self.known[result] = Weights(result, logits, None, axis=axis)

    def _multiply(self, name: str, args: tuple, kwargs: dict, run: Callable) -> Any:
        module = running_module()
        if module is None or not interceptions_of(module):
            return run()
        names = OPERANDS.get(name, ())
        args = (*args, *(kwargs[one] for one in names[len(args) :] if one in kwargs))
        if name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], *args[1])
        tensors = [x for x in args if isinstance(x, Tensor)]
        weights = next((self.known[x] for x in tensors if isinstance(self.known.get(x), Weights)), None)
        if weights is not None and name != "baddbmm" and len(tensors) == 2:
            return self._weigh(module, name, weights, args, tensors, run)
        result = run()
        if not isinstance(result, Tensor) or any(isinstance(x, nn.Parameter) for x in tensors):
            return result
        operands = _scores_of(name, args)
        if operands is not None:
            q, k = operands
            alpha = kwargs.get("alpha", 1.0) if name == "baddbmm" else 1.0
            rows, keys = result.shape[-2:]
            self.known[result] = Product(q, k, (rows, keys), result.numel(), float(alpha))
        return result

    def _weigh(self, module: nn.Module, name: str, weights: Weights, args: tuple, tensors: list, run: Callable) -> Any:
        """Captures p·v, or reports that it cannot be measured."""
        used, values = tensors if tensors[0] in self.known else tensors[::-1]
        if isinstance(values, nn.Parameter) or values.ndim < 3 or weights.logits.ndim < 3:
            return run()  # a lookup in a table, or a mixture of a few tensors
        fault = None
        gain = weights.gain
        if gain is not None and not bool(gain.any()):
            fault = "a learned number, which is 0, multiplies its weights"
        elif (
            not weights.dropout
            and gain is None
            and not weights.is_part
            and (name != "einsum" or _sums_over_last(args, used))
        ):
            weights, fault = _judge_rows(weights, used)
        layout = _values_of(name, args, weights, values)
        if layout is not None and gain is not None:
            layout = ((layout[0] * gain).to(values.dtype), *layout[1:])
        split = None if layout is None or fault is not None else _split_heads(weights, layout[0])
        if layout is None or split is None:
            if fault is None and weights.axis != -1:
                return run()  # keys in the place of queries, as kᵀq has them
            weighed = "a part of its softmax weights" if weights.is_part else "softmax weights"
            reason = f"{_line()} multiplies {weighed} by values, but their scores could not be followed to q·kᵀ"
            reason = reason if fault is None else f"{fault} ({_line()})"
            call = Call(module, weights.p, values, values, own=lambda rows: run(), kind="by hand", obstacle=reason)
            return route(call, run, swaps=False)
        return _capture(module, weights, used.shape[:-2], split, layout, run)


def _sums_over_last(args: tuple, used: Tensor) -> bool:
    """True if an einsum of two tensors sums over the last axis of `used`."""
    if not isinstance(args[0], str) or "->" not in args[0]:
        return False
    inputs, output = args[0].replace(" ", "").split("->")
    own = inputs.split(",")[0 if args[1] is used else 1]
    return bool(own) and own[-1] not in output


def _judge_rows(weights: Weights, used: Tensor) -> tuple[Weights, str | None]:
    """(weights, what is wrong): rows of the weights that multiply the values add up to 1, whatever was done to them.

    Weights that were changed and whose rows still do become the softmax of their own logarithm.
    """
    used = used.detach().float()
    sums = used.sum(-2 if weights.transposed else -1)
    low, high = (float(x) for x in torch.aminmax(sums)) if sums.numel() else (1.0, 1.0)
    if weights.axis != -1:
        is_right = weights.transposed and weights.axis == -2
        if is_right or (abs(low - 1.0) < ROWS and abs(high - 1.0) < ROWS):
            return weights, None
        return weights, f"{RUNS_OVER} {AXES.get(weights.axis, f'axis {weights.axis}')}, not over the keys"
    own = weights.p.detach().float()
    own = own.transpose(-1, -2) if weights.transposed else own
    is_same = used.shape == own.shape and bool((used - own).abs().amax() < ROWS) if used.numel() else True
    off = (sums - 1.0).abs()
    if bool(((off < ROWS) | (sums.abs() < 1e-6) | ~torch.isfinite(sums)).all()):  # rows of 0: no key was visible
        if is_same or used.shape != own.shape:
            return weights, None
        p = used.transpose(-1, -2) if weights.transposed else used
        return replace(weights, p=p.to(weights.p.dtype), logits=p.log().to(weights.logits.dtype)), None
    return weights, f"{CHANGED}: its rows add up to {low:.2g} to {high:.2g}"


def _transpose(weights: Weights, func: Callable, args: tuple, kwargs: dict) -> Weights:
    """Returns weights after a function that may exchange their last two dims; any other order is not followed."""
    probe = torch.empty(*range(args[0].ndim), device="meta")  # every size tells its dim
    order = list(func(probe, *args[1:], **kwargs).shape)
    before, (m, n) = list(range(probe.ndim - 2)), (probe.ndim - 2, probe.ndim - 1)
    if order == [*before, n, m]:
        return replace(weights, transposed=not weights.transposed)
    return weights if order == [*before, m, n] else replace(weights, product=None)


def _factor(name: str, args: tuple) -> float:
    """Returns the number that a function multiplies its scores by; 1 where it does something else."""
    if len(args) < 2 or not (name in TIMES or name in OVER):
        return 1.0
    number = next((x for x in args[:2] if isinstance(x, (int, float))), None)
    if number is None:
        single = next((x for x in args[:2] if isinstance(x, Tensor) and x.numel() == 1 and x.ndim < 2), None)
        number = None if single is None else float(single)
    if not number:
        return 1.0
    return 1.0 / number if name in OVER else float(number)


def _scores_of(name: str, args: tuple) -> tuple[Tensor, Tensor] | None:
    """Returns (q […, M, D], k […, N, D]) of a product that may be scores; None for any other."""
    if name == "einsum":
        return _find_scores(args)
    operands = args[1:3] if name == "baddbmm" else args[:2]
    first, second = operands if len(operands) == 2 else (None, None)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or min(first.ndim, second.ndim) < 3:
        return None
    return first, second.transpose(-1, -2)


def _values_of(name: str, args: tuple, weights: Weights, values: Tensor) -> tuple[Tensor, Callable, Callable] | None:
    """Returns (v […, N, E], the product's own layout → […, M, E], and back)."""
    if name == "einsum":
        return None if weights.transposed else _find_values(args, weights.p)
    if weights.transposed:  # vᵀ pᵀ = (p v)ᵀ
        flip = partial(torch.transpose, dim0=-1, dim1=-2)
        return (flip(values), flip, flip) if args[0] is values else None
    return None if args[0] is values else (values, lambda x: x, lambda x: x)


def _split_heads(weights: Weights, values: Tensor) -> list[Tensor] | None:
    """Returns q, k and v as [B, H or G, …, …]; None if they lack the heads and sequences of the logits."""
    product, logits = weights.product, weights.logits
    if product is None or logits.numel() != product.numel or logits.shape[-2:] != product.shape:
        return None
    batch, heads = _lead(logits)
    split = [_as_heads(x, batch, heads) for x in (product.q, product.k, values)]
    found = [x for x in split if x is not None]
    return found if len(found) == 3 and found[0].shape[1] == heads else None


def _lead(logits: Tensor) -> tuple[int, int]:
    """Returns (B, H) of logits […, M, N]: three dims are a batch of single heads."""
    lead = logits.shape[:-2]
    return (math.prod(lead), 1) if len(lead) == 1 else (math.prod(lead[:-1]), lead[-1])


def _as_heads(x: Tensor, batch: int, heads: int) -> Tensor | None:
    """Views […, L, D] as [B, H, L, D], or [B, G, L, D] where heads share it; None if it is neither."""
    lead, rest = x.shape[:-2], x.shape[-2:]
    number = math.prod(lead)
    if number == batch * heads:
        return x.reshape(batch, heads, *rest)
    if x.ndim == 4 and lead[0] == batch and heads % lead[1] == 0:
        return x
    if number == batch:
        return x.reshape(batch, 1, *rest)
    return x.reshape(1, 1, *rest).expand(batch, 1, *rest) if number == 1 else None


def _capture(
    module: nn.Module, weights: Weights, lead: torch.Size, split: list[Tensor], layout: tuple, run: Callable
) -> Tensor:
    """Routes p·v; `lead` are the dims of the weights as they are multiplied, before [M, N]."""
    (q, k, v), (values, forth, back) = split, layout
    rounded = None
    if not q.dtype == k.dtype == v.dtype:  # scores in bfloat16 beside values in float32
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        rounded = min((x.dtype for x in (q, k, v)), key=lambda dtype: torch.finfo(dtype).bits)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    batch, heads = _lead(weights.logits)
    scale = 1.0 if weights.product is None else weights.product.scale
    rows, width = weights.logits.shape[-2], values.shape[-1]

    def own(_: Tensor | None) -> Tensor:
        p = weights.p.reshape(batch, heads, rows, -1)
        return p.to(v.dtype) @ v.repeat_interleave(heads // v.shape[1], 1)

    with torch.set_grad_enabled(is_swapped(module) and torch.is_grad_enabled()):
        mask = _mask_of(weights.logits.reshape(batch, heads, rows, -1), q, k, scale)
    call = Call(
        module, q, k, v, own=own, kind="by hand", mask=mask, options=dict(scale=scale),
        dropout=weights.dropout, sliceable=False, rounded=rounded, three_dims=weights.logits.ndim == 3,
    )  # fmt: skip
    return route_result(
        call,
        run,
        lambda result: forth(result).reshape(batch, heads, rows, width),
        lambda output: back(output.reshape(*lead, rows, width)).to(values.dtype),
    )


def _mask_of(logits: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """Returns what was done to c·q kᵀ: None, a bool mask, or an additive one."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q.to(wide) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2))
    bias = logits.to(wide) - scores
    visible = bias > HIDES_AMONG_ZEROS
    size = scores.abs()
    rounding = EXACT * size.amax() + ROUNDED * max(torch.finfo(x.dtype).eps for x in (logits, q)) * size
    if not bias.requires_grad and bool(((bias.abs() <= rounding) | ~visible).all()):
        return None if bool(visible.all()) else visible
    return bias.masked_fill(bias <= max(HIDES_ALWAYS, torch.finfo(logits.dtype).min / 2), -math.inf)


def _line() -> str:
    """Returns file and line of the innermost code that is neither torch's nor regard's."""
    frame, _ = find_caller()
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _terms(args: tuple) -> tuple[str, str, str] | None:
    """Returns the letters of both operands and of the result; None for what is no product of two tensors."""
    equation = args[0] if args else None
    if not isinstance(equation, str) or len(args) != 3 or "->" not in equation or "." in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    return first, second, result


def _find_scores(args: tuple) -> tuple[Tensor, Tensor] | None:
    """Returns q [batch …, M, D] and k [batch …, N, D] of an equation with one contracted letter, in the result's order.

    The result ends in the query and the key letter; k has size 1 where it lacks a letter of the batch.
    """
    terms = _terms(args)
    if terms is None or len(terms[2]) < 3:
        return None
    first, second, result = terms
    batch, m, n = result[:-2], result[-2], result[-1]
    (q_letters, q), (k_letters, k) = sorted(zip(terms, args[1:], strict=False), key=lambda term: m not in term[0])
    contracted = set(first) & set(second) - set(result)
    if len(contracted) != 1 or n not in k_letters:
        return None
    d = contracted.pop()
    if set(q_letters) != {*batch, m, d} or not set(k_letters) <= {*batch, n, d}:
        return None
    return _arrange(q_letters, q, batch + m + d), _arrange(k_letters, k, batch + n + d)


def _arrange(letters: str, x: Tensor, order: str) -> Tensor:
    """Permutes x to the order, with size 1 for letters that it lacks."""
    x = x.permute(*(letters.index(one) for one in order if one in letters))
    for at, one in enumerate(order):
        if one not in letters:
            x = x.unsqueeze(at)
    return x


def _find_values(args: tuple, p: Tensor) -> tuple[Tensor, Callable, Callable] | None:
    """Returns (v [batch …, N, E], result's layout → [batch …, M, E], and back) of weights times values."""
    terms = _terms(args)
    if terms is None:
        return None
    at = 0 if args[1].shape == p.shape and len(terms[0]) == p.ndim else 1
    weights, values, result = terms[at], terms[1 - at], terms[2]
    batch, m, n = weights[:-2], weights[-2], weights[-1]
    width = set(values) & set(result) - set(weights)
    if n not in values or n in result or m in values or len(width) != 1:
        return None
    e = width.pop()
    if set(result) != {*batch, m, e} or not set(values) <= {*batch, n, e}:
        return None
    order = [result.index(one) for one in batch + m + e]
    back = [order.index(place) for place in range(len(order))]
    v = _arrange(values, args[2 - at], batch + n + e)
    return v, partial(torch.permute, dims=order), partial(torch.permute, dims=back)
