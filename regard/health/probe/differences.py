"""Two runs of one model that should agree: how much of a difference rounding explains, and which call differs first.

Rounding is measured on the model itself, not guessed: every module's output is multiplied by 1 + ε·n, n normal and ε
the spacing of its dtype. The change of the model's output covers its depth, its widths, and what amplifies (norms,
experts that are chosen by a narrow vote).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.checks.rule import NotApplicable
from regard.health.probe.probe import CapturedCall, Key, relative_change

MARGIN = 16.0  # the budget over the measured change: a module rounds several times, and not at random
FLOOR = 16.0  # spacings of the dtype that any two evaluations of one expression may differ by


@contextmanager
def rounding_noise(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Multiplies the floating-point outputs of every module by 1 + ε·n inside the block."""
    generator = torch.Generator().manual_seed(seed)

    def shake(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta:
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            return (
                (x.float() * (1 + torch.finfo(x.dtype).eps * noise)).to(x.dtype)
                if x.dtype.itemsize < 4
                else (x * (1 + torch.finfo(x.dtype).eps * noise.to(x.dtype)))
            )
        if type(x) in (tuple, list):
            return type(x)(shake(part) for part in x)
        return x

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return shake(output)

    hooks = [module.register_forward_hook(hook) for module in model.modules() if not isinstance(module, CONTAINERS)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def row_changes(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_i‖ over the root mean square of the rows' norms ‖a_i‖, for tensors [B, N, …]: [B, N] in float64.

    >>> from regard.health.probe.differences import row_changes
    >>> row_changes(torch.ones(1, 3, 2), torch.tensor([[[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]]])).round(decimals=2)
    tensor([[0.0000, 0.0000, 0.7100]], dtype=torch.float64)
    """
    a, b = (x.detach().to("cpu", torch.float64).flatten(2) for x in (a, b))
    finite = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1)
    size = a[torch.isfinite(a).all(-1)].square().sum(-1).mean().sqrt().clamp_min(1e-30)
    change = (a - b).norm(dim=-1) / size
    return change.where(finite | (a == b).all(-1), torch.inf).where(~(a == b).all(-1), 0.0)


def largest_change(a: Tensor, b: Tensor, text: Tensor | None = None) -> float:
    """The largest of `row_changes`, 0 for no rows; inf for other shapes. Of [B, C] every row is one.

    Rows where `text` [B, N] is False, which are padding, do not count.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.ndim < 3:
        a, b = (x[:, None] if x.ndim == 2 else x.reshape(1, 1, -1) for x in (a, b))
    changes = row_changes(a, b)
    if text is not None and text.shape == changes.shape:
        changes = changes.masked_fill(~text.cpu(), 0.0)
    return float(changes.max()) if changes.numel() else 0.0


def alone_in_batch(output: Tensor, alone: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """(a row of a batch's output, the same with what the row gives alone), to be compared.

    Of [B, B], as CLIP's logits of texts and images, one place is of the row alone.

    >>> from regard.health.probe.differences import alone_in_batch
    >>> alone_in_batch(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0]]), 1)
    (tensor([[3., 4.]]), tensor([[3., 5.]]))

    Raises:
        NotApplicable: Those logits went through a softmax over the batch, as VideoPRISM's do.
    """
    one = output[row : row + 1]
    if alone.shape != (1, 1) or output.ndim != 2 or output.shape[0] != output.shape[1]:
        return one, alone
    if any(bool((output >= 0).all()) and torch.allclose(output.sum(axis), output.new_ones(())) for axis in (0, 1)):
        raise NotApplicable("the output is a share of each sequence of the batch")
    changed = one.clone()
    changed[0, row] = alone[0, 0]
    return one, changed


def budget(change: float, dtype: torch.dtype) -> float:
    """The change that rounding explains where `rounding_noise` made one of `change`."""
    return max(MARGIN * change, FLOOR * torch.finfo(dtype).eps)


Calls = Mapping[Key, CapturedCall]

INPUTS, POSITIONS, TWICE, LOST, SEEN, STORED, KERNEL = (
    "inputs", "positions", "rotated again", "keys lost", "keys seen", "keys stored", "kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why a step of decoding differs from the full forward: the first call that does, what of it, and how."""

    what: str  # one of the names above
    key: Key
    text: str


def explain_step(full: Calls, step: Calls, begin: int, end: int, budget: float) -> Cause | None:
    """Compares the calls of tokens begin … end − 1 behind a cache with those of a forward over all tokens."""
    before = ""
    for key, one in full.items():
        other = step.get(key)
        if other is None or one.call.is_cross(key[0]) or other.q.shape[2] != end - begin or one.q.shape[2] < end:
            continue
        found = _explain_call(one, other, begin, end, budget)
        if found is not None:
            what, text = found
            where = f"in the attention of {key[0] or 'the model itself'}"
            if what == INPUTS and before:
                where = f"between {before} and {key[0]}"
            return Cause(what, key, f"{text} (first {where})")
        before = key[0]
    return None


def explain_mode(own: Calls, other: Calls, budget: float) -> Cause | None:
    """The first attention call that differs between two forwards of one batch, and what of it."""
    before = ""
    for key, one in own.items():
        two = other.get(key)
        where = f"in the attention of {key[0] or 'the model itself'}"
        if two is None:
            return Cause(KERNEL, key, f"nothing was captured {where} there")
        parts = [name for name in "qkv" if _differ(getattr(one, name), getattr(two, name), budget)]
        if len(parts) == 3 and before:
            return Cause(INPUTS, key, f"its input differs, so the difference is between {before} and {key[0]}")
        if parts:
            return Cause(INPUTS, key, f"{' and '.join(parts)} differ first {where}")
        if _differ(one.output, two.output, budget):
            return Cause(KERNEL, key, f"{_explain_output(one, two)} (first {where})")
        before = key[0]
    return None


def _explain_output(one: CapturedCall, two: CapturedCall) -> str:
    """Why two calls with the same q, k and v have other outputs."""
    shape = *one.q.shape[:3], one.k.shape[2]
    seen, other = (int(call.visible.expand(shape)[0, 0].sum()) for call in (one, two))
    if seen != other:
        return f"the same q, k and v, but {seen} visible keys and {other}: the mask differs"
    width = one.q.shape[-1] ** -0.5
    a, b = (call.call.options.get("scale") for call in (one, two))
    a, b = (width if scale is None else scale for scale in (a, b))
    if isinstance(a, float) and isinstance(b, float) and abs(a / b - 1) > 1e-3:
        return f"the same q, k and v, but the scale {a:.4g} and {b:.4g}"
    options = one.call.options, two.call.options
    names = {name for name in {*options[0], *options[1]} if len([1 for one in options if one.get(name) is None]) == 1}
    if names - {"scale"}:
        return f"the same q, k and v, but {' and '.join(sorted(names))} in one of them only"
    return "the same q, k, v, scale and visible keys, but another output: soft cap, sinks, bias or dropout differ"


def _explain_call(
    one: CapturedCall, other: CapturedCall, begin: int, end: int, budget: float
) -> tuple[str, str] | None:
    """(what differs, a sentence) of one layer; None if nothing does."""
    rows, new = slice(begin, end), end - begin
    budget = max(budget, 1e-6)
    is_long = other.v.shape[2] >= new and _has_new_at_end(one, other, end, budget)
    if is_long and _differ(one.v[:, :, rows], other.v[:, :, -new:], budget):
        return INPUTS, "q, k and v of the new tokens differ: the layer's input does"
    q_full, q_step = one.q[:, :, rows], other.q
    if _differ(q_full, q_step, budget):
        if not _differ(q_full.norm(dim=-1), q_step.norm(dim=-1), budget):
            return POSITIONS, "the new queries have equal norms and other angles: they stand at other positions"
        return INPUTS, "the new queries differ, the values do not: a norm or scale of the queries differs"
    seen_full, seen_step = _visible_keys(one, end - 1), _visible_keys(other, -1)
    many, few = len(seen_full), len(seen_step)
    if few != many:
        if few <= end - begin < many:
            return LOST, f"the last query sees {few} keys in decoding and {many} in one forward: keys are not kept"
        return SEEN, f"the last query sees {few} keys in decoding and {many} in one forward"
    k_full, k_step = one.k[:, :, seen_full], other.k[:, :, seen_step]
    if _differ(k_full, k_step, budget):
        old = many - (end - begin)
        new_differ = _differ(k_full[:, :, old:], k_step[:, :, old:], budget)
        old_differ = old > 0 and _differ(k_full[:, :, :old], k_step[:, :, :old], budget)
        if _differ(k_full.norm(dim=-1), k_step.norm(dim=-1), budget):
            return STORED, "the keys of the cache differ from those of one forward, and their norms do too"
        if old_differ and not new_differ:
            return (
                TWICE,
                "the cached keys have equal norms and other angles and the new ones agree: rotated again",
            )
        return POSITIONS, "the keys have equal norms and other angles: they stand at other positions"
    if _differ(one.v[:, :, seen_full], other.v[:, :, seen_step], budget):
        return STORED, "the values of the cache differ from those of one forward"
    if _differ(one.output[:, :, rows], other.output, budget):
        bias, step_bias = _bias_of(one, end - 1)[:, seen_full], _bias_of(other, -1)[:, seen_step]
        if _differ(bias, step_bias, budget):
            return POSITIONS, "the bias on the scores of the last query is another one: it stands at another position"
        return (
            KERNEL,
            "q, k, v and the visible keys agree, the output does not: scale, soft cap, sinks or bias differ",
        )
    return None


def _has_new_at_end(one: CapturedCall, other: CapturedCall, end: int, budget: float) -> bool:
    """True unless the new value stands elsewhere in the cache, as in one of fixed length."""
    seen = _visible_keys(other, -1)
    return not len(seen) or _differ(one.v[:, :, end - 1 : end], other.v[:, :, seen[-1:]], budget)


def _visible_keys(one: CapturedCall, row: int) -> Tensor:
    """Indices of the keys that a query of the first sequence's first head sees."""
    shape = *one.q.shape[:3], one.k.shape[2]
    return one.visible.expand(shape)[0, 0, row].nonzero().flatten()


def _bias_of(one: CapturedCall, row: int) -> Tensor:
    """What is added to a query's scores in the first sequence [H, N]; zeros where nothing is."""
    mask, shape = one.call.mask, (*one.q.shape[:3], one.k.shape[2])
    if mask is None or mask.dtype == torch.bool:
        return one.q.new_zeros(shape[1], shape[3])
    return mask.expand(shape)[0, :, row]


def _differ(a: Tensor, b: Tensor, budget: float) -> bool:
    return a.shape != b.shape or relative_change(a, b) > budget
