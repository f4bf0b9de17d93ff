"""What B may do otherwise with the q, k and v of A, where its own facts do not tell: each guess is A's call, changed.

The simplest come first, those that fit most last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard import normalizers
from regard.health.comparing.causes.masks import explain_masks, other_masks
from regard.health.comparing.causes.trial import CAPS, EXACT, fit_factor, name_factor, round_through
from regard.health.comparing.difference import change
from regard.health.comparing.scores import Kept

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GROUPS = "it repeats whole groups where A repeats each head (repeat, repeat_interleave)."
Guess = tuple[str, Tensor | None, str] | tuple[str, Tensor | None, str, bool]  # tried, output, sentence, is it vague?


@dataclass
class Pair:
    """The same attention call in A and B, and what is known around it."""

    a: Kept
    b: Kept
    budget: float
    real: Tensor | None = None
    numbers: dict[str, float] = field(default_factory=dict)  # of the configurations, that factors may come from
    width: int | None = None  # of a head, where q is none


def guess_outputs(pair: Pair) -> Iterator[Guess]:
    """Every guess in order; those that compute A's call anew only if that gives A's own output."""
    a, target = pair.a, pair.b.output.double()
    yield from _orders_of_output(a.output.double(), target)
    s = a.scores()
    if change(a.output, a.weigh(s) @ a.values(), "attention", pair.real) > max(pair.budget, EXACT):
        yield "what follows from the call", None, ""
        yield from _factors(a, target)
        return
    yield from _orders(pair, s, target)
    yield from _scales(pair, s, target)
    yield from _caps(a, s, target)
    yield from _sinks(a, target)
    yield from _masks(pair, s, target)
    yield from _biases(a)
    yield from _normalizers(a, s)
    yield from _dtypes(a, s)
    yield from _temperatures(a, s, target)
    yield from _splits(a, s, target)
    yield from _factors(a, target)


def _orders_of_output(o: Tensor, target: Tensor) -> Iterator[Guess]:
    order = match_heads(o, target)
    if order is not None:
        yield "heads in another order", o[:, order], f"its heads are A's in the order {order}."
    b, h, m, e = o.shape
    said = "B merges the heads without bringing them behind the tokens first: numbers of heads and times are mixed."
    yield "heads merged without a transpose", o.reshape(b, m, h, e).transpose(1, 2), said


def _orders(pair: Pair, s: Tensor, target: Tensor) -> Iterator[Guess]:
    a = pair.a
    if pair.b.is_readable and pair.b.shape == a.shape:
        order = match_heads(a.weigh(s), pair.b.weigh())
        if order is not None:
            said = f"the weights of B's heads are A's in the order {order}, and its values are not."
            yield "weights of heads in another order", a.weigh(s[:, order]) @ a.values(), said
    if a.k.shape == a.v.shape:
        k, v = a.k.double(), a.v.double()
        yield "keys for values", a.change(v=k).compute(), "B multiplies the weights by the keys, not the values."
        yield "keys and values exchanged", a.change(k=v, v=k).compute(), "k and v are exchanged in B."
    if a.k.shape[1] > 1:
        one = a.change(k=a.k[:, :1], v=a.v[:, :1]).compute()
        yield "one head for all", one, "B takes the first head of keys and values for all queries."
        back = a.change(k=a.k.flip(1)).compute()
        yield "key heads in reverse", back, "B pairs queries with the heads of keys in reverse order."
    group = a.q.shape[1] // a.k.shape[1]
    if group > 1:
        k, v = a.k.double().repeat(1, group, 1, 1), a.v.double().repeat(1, group, 1, 1)
        tiled = a.change(k=k).scores()
        what = "order of grouped heads"
        yield what, a.weigh(s) @ v, f"B pairs heads with values in another order: {GROUPS}"
        yield what, a.weigh(tiled) @ v, f"B pairs heads with keys and values in another order: {GROUPS}"
        yield what, a.weigh(tiled) @ a.values(), f"B pairs heads with keys in another order: {GROUPS}"


def _scales(pair: Pair, s: Tensor, target: Tensor) -> Iterator[Guess]:
    a, v = pair.a, pair.a.values()
    f = fit_scalar(lambda f: a.weigh(f * s) @ v, target)
    said = f"logits × {f:.4f}{name_factor(f, pair.width or a.q.shape[-1], pair.numbers)} in B: the scale is another."
    yield "logits × a factor", a.weigh(f * s) @ v, said
    yield "equal weights", a.weigh(0.0 * s) @ v, "B weighs all visible keys alike: its logits are lost, or all equal."


def _caps(a: Kept, s: Tensor, target: Tensor) -> Iterator[Guess]:
    own = "none" if a.softcap is None else f"{a.softcap:g}"
    if a.softcap is not None:
        said = f"The soft caps of the logits differ: {own} in A, none in B."
        yield "soft cap", a.change(softcap=None).compute(), said
    fitted = fit_scalar(lambda c: a.change(softcap=c).compute(), target, max(float(s.abs().max()), 1e-3))
    for cap in (*CAPS, fitted):
        said = f"The soft caps of the logits differ: {own} in A, {cap:.4g} in B."
        yield "soft cap", a.change(softcap=cap).compute(), said
    if a.softcap is not None:
        late = s.masked_fill(~a.seen(), -a.softcap)
        said = f"B caps the logits after the mask was added: hidden keys get −{a.softcap:g} and keep a weight."
        yield "soft cap after the mask", a.weigh(late, torch.ones_like(a.seen())) @ a.values(), said
    if a.softcap is not None and a.bias is not None:
        late = a.softcap * torch.tanh(a.change(softcap=None).scores() / a.softcap)
        said = "B caps the logits after the bias or mask was added, A before."
        yield "soft cap after the bias", a.weigh(late) @ a.values(), said


def _sinks(a: Kept, target: Tensor) -> Iterator[Guess]:
    if a.sink is None:
        zero = torch.zeros((1, 1, 1, 1))
        yield "a sink of 0", a.change(sink=zero).compute(), "B adds 1 to the softmax's denominator (softmax1)."
        return
    said = "B leaves out A's sinks: a logit per head in the softmax's denominator."
    yield "sink", a.change(sink=None).compute(), said
    yield "sink", a.change(sink=-a.sink).compute(), "The sinks have the other sign in B."
    c = fit_scalar(lambda c: a.change(sink=c * a.sink).compute(), target)
    known = {} if isinstance(a.scale, Tensor) else {"the scale of the scores": a.scale}
    said = f"The sinks are {c:.4g} times A's in B{name_factor(c, None, known)}."
    yield "sink", a.change(sink=c * a.sink).compute(), said


def _masks(pair: Pair, s: Tensor, target: Tensor) -> Iterator[Guess]:
    a, v = pair.a, pair.a.values()
    seen = a.seen()
    for name, shown in other_masks(seen, pair.real, a.positions, _first_rows(pair, target)):
        if bool((shown == seen).all()) or float(shown.any(-1).double().mean()) < 0.5:
            continue
        o = torch.where(shown.any(-1, keepdim=True), a.weigh(s, shown) @ v, target)  # empty rows tell nothing
        yield "mask", o, f"The masks differ: {_say_mask(pair, seen, shown, name)}."
    p = a.weigh(s, torch.ones_like(seen)).masked_fill(~seen, 0.0)
    yield "mask after the softmax", p @ v, "B masks the weights after the softmax, so that rows no longer sum to 1."
    every, size = torch.ones_like(seen), -float(s.abs().max())
    put: Callable = lambda c: a.weigh(torch.where(seen, s, c), every) @ v  # noqa: E731
    added: Callable = lambda c: a.weigh(s + c * ~seen, every) @ v  # noqa: E731
    for c in (0.0, fit_scalar(put, target, size)):
        yield "finite masks", put(c), f"B gives hidden keys {c:.4g} in the place of −∞: they keep a weight."
    for c in (1.0, -1.0, -1e3, -1e4, -1e9, fit_scalar(added, target, size)):
        said = f"B's mask is finite, {c:.4g} added to the logits of hidden keys in the place of −∞: they keep a weight."
        if c == -1.0:
            said = "B adds the mask as numbers, 1 at visible keys and 0 at hidden ones: later and padded keys are seen."
        yield "finite masks", added(c), said


def _say_mask(pair: Pair, seen: Tensor, shown: Tensor, name: str) -> str:
    said, is_told = explain_masks(seen, shown, pair.real)
    return said if is_told and pair.a.positions is None else f"B's output is that of {name}"


def _first_rows(pair: Pair, target: Tensor) -> list[int]:
    """The first query that differs: rows before the width of a window are as without one."""
    if pair.a.positions is not None:  # of a few rows: it may be any between them
        return []
    o = pair.a.output.double()
    wrong = (o - target).norm(dim=-1) > pair.budget * o.norm(dim=-1).clamp_min(1e-6)
    if pair.real is not None and pair.real.shape == (o.shape[0], o.shape[2]):
        wrong &= pair.real[:, None]
    return (wrong.any(1).nonzero()[:, 1].unique()[:1] + pair.a.shape[3] - pair.a.shape[2]).tolist()


def _biases(a: Kept) -> Iterator[Guess]:
    if a.bias is None:
        return
    changed = {"leaves out": None, "subtracts": -a.bias, "doubles": 2 * a.bias, "halves": a.bias / 2}
    if a.bias.ndim == 4 and a.bias.shape[1] > 1:
        changed["reverses the heads of"] = a.bias.flip(1)
    if not isinstance(a.scale, Tensor):
        changed["multiplies by the scale as well"] = a.bias * a.scale
        changed["divides by the scale"] = a.bias / a.scale if a.scale else None
    for name, bias in changed.items():
        yield "bias", a.change(bias=bias).compute(), f"B {name} the bias on the scores."


def _normalizers(a: Kept, s: Tensor) -> Iterator[Guess]:
    for name in normalizers.names():
        if a.choice is None or name != a.choice.name:
            plain = a.change(choice=normalizers.get(name), sink=None)
            yield "normaliser", plain.compute(), f"B's output is that of the normaliser {name}."
    v, seen = a.values(), a.seen()
    yield "no softmax", s.masked_fill(~seen, 0.0) @ v, "B multiplies values by the logits: it has no softmax."
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        for dim, said in ((-2, "queries"), (1, "heads"), (0, "sequences")):
            p = torch.softmax(s.masked_fill(~seen, hidden), dim).nan_to_num()
            yield "axis of the softmax", p @ v, f"B takes the softmax over the {said}, not the keys."


def _dtypes(a: Kept, s: Tensor) -> Iterator[Guess]:
    if a.q.dtype in LOW.values():
        return
    hidden, v, what = s.masked_fill(~a.seen(), -torch.inf), a.values(), "dtype of the softmax"
    for name, dtype in LOW.items():
        yield what, a.weigh(round_through(s, dtype)) @ v, f"B rounds the logits to {name} before the softmax."
        p = torch.softmax(hidden.to(dtype), -1).double().nan_to_num()
        yield what, p @ v, f"B computes the softmax in {name}."
        yield what, round_through(a.weigh(s), dtype) @ v, f"B rounds the weights to {name}."


def _temperatures(a: Kept, s: Tensor, target: Tensor) -> Iterator[Guess]:
    """A factor per query, the same for all heads and sequences, with a law of the position if it has one."""
    v = a.values()
    if s.shape[-2] < 2:
        return
    f = fit_scalar(lambda f: a.weigh(f * s) @ v, target, rows=True)
    i = torch.arange(s.shape[-2]).double() if a.positions is None else a.positions.double()
    several = (a.seen().sum(-1).amax((0, 1)) > 1) & (i > 0)  # a row of one key tells nothing
    for name, law in (("ln(i + 1)", (i + 1).log()), ("ln(i + 2)", (i + 2).log()), ("√(i + 1)", (i + 1).sqrt())):
        c = float((f.flatten() / law)[several].median()) if bool(several.any()) else 0.0
        said = f"B multiplies the logits of query i by {c:.4g}·{name}: a temperature that follows the position."
        yield "a temperature by position", a.weigh(c * law[:, None] * s) @ v, said
    rising = f.flatten()[several].diff()
    if len(rising) > 2 and (bool((rising > -1e-3).all()) or bool((rising < 1e-3).all())):
        said = f"from {float(f[several][0]):.3g} to {float(f[several][-1]):.3g}: a temperature by position."
        said = f"B multiplies each query's logits by a number of its own, {said}"
        yield "a factor per query", a.weigh(f * s) @ v, said


def _splits(a: Kept, s: Tensor, target: Tensor) -> Iterator[Guess]:
    """Equal splits of the keys, each with its own softmax, merged by other weights than their sums: fitted per row."""
    keys, v = s.shape[-1], a.values()
    for count in (2, 4, 8):
        if 4 * count > min(keys, v.shape[-1]):
            return  # so few keys or numbers that shares would explain any weights
        parts = []
        for at in torch.arange(keys).chunk(count):
            seen = a.seen() & torch.isin(torch.arange(keys), at)
            parts.append(a.weigh(s, seen) @ v)
        basis = torch.stack(parts, -1)  # [B, H, M, E, splits]
        shares = torch.linalg.pinv(basis, rcond=1e-9) @ target[..., None]
        if float((shares.sum(-2) - 1).abs().max()) > 1e-2 or float(shares.min()) < -1e-2:
            continue  # no merge: it would explain what is done to the output
        said = f"B merges {count} splits of the keys with other weights than their sums: a wrong log-sum-exp."
        yield "splits of the keys", (basis @ shares)[..., 0], said


def _factors(a: Kept, target: Tensor) -> Iterator[Guess]:
    """Factors that the output may carry, one for all or one for each row: tried last, because they fit much."""
    o = a.output.double()
    f = fit_factor(o, target)
    yield "the output × a factor", f * o, f"B's output of attention is {f:.4g} times A's{name_factor(f)}."
    each = (o * target).sum(-1, keepdim=True) / o.square().sum(-1, keepdim=True).clamp_min(1e-30)
    said = "B's rows are A's times a factor per query and head: its weights do not sum to 1"
    said = f"{said} (a gate, a sink, weights dropped or not normalised)."
    yield "rows that no longer sum to 1", each * o, said, True


def fit_scalar(output: Callable, target: Tensor, start: float = 1.0, rows: bool = False):
    """The number from start/32 to 32·start whose output is nearest to the target: a grid, then golden sections.

    With `rows` one number for each query, as a tensor [M, 1].
    """
    count = target.shape[-2] if rows else 1

    def left(x: Tensor) -> Tensor:
        gap = (output(start * 2.0**x) - target).square()
        return gap.sum((0, 1, 3))[:, None] if rows else gap.sum().reshape(1, 1)

    grid = [torch.full((count, 1), 0.5 * step, dtype=torch.float64) for step in range(-10, 11)]
    best = torch.stack([left(x) for x in grid]).argmin(0).double() * 0.5 - 5.0
    low, high, ratio = best - 0.5, best + 0.5, (5**0.5 - 1) / 2
    for _ in range(36):
        inner = high - ratio * (high - low), low + ratio * (high - low)
        nearer = left(inner[0]) < left(inner[1])
        low, high = torch.where(nearer, low, inner[0]), torch.where(nearer, inner[1], high)
    found = start * 2.0 ** (0.5 * (low + high))
    return found if rows else float(found)


def match_heads(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> list[int] | None:
    """order such that head h of b [B, H, …] is head order[h] of a; None without one, or if it is the identity."""
    heads = b.shape[1]
    if a.shape[1] != heads or heads < 2:
        return None
    flat_a, flat_b = (x.double().transpose(0, 1).flatten(1) for x in (a, b))
    order = torch.cdist(flat_b, flat_a).argmin(1)
    left = (flat_b - flat_a[order]).norm(dim=1) / flat_b.norm(dim=1).clamp_min(1e-30)
    found = order.tolist()
    if float(left.max()) > tolerance or found == list(range(heads)) or len(set(found)) < heads:
        return None
    return found
