"""Attention does not compute what it is given: softmax(q kᵀ) v of the call's own q, k, v and mask is another output.

Other readings of the same call are tried, and the one that gives the output is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.capture.call import Call, output_and_weights
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import CapturedCall, relative_change
from regard.health.probe.trial import TOLERANCE, Trial

Reading = tuple[str, Callable[[], Tensor | None]]
LEAST = 1e-3  # relative difference of the outputs, at least
RULES = (
    Rule(
        "RG420", "attention computes something else",
        "attention computes what it is given", "critical", "attention calls",
        "the layer's output is not softmax(q kᵀ)·v of what its attention function was given; the sentence names the "
        "reading of the same q, k and v that gives the output, if one does",
        "The attention function ignores one of its arguments or applies it in another way.",
        "Use the library's own attention function, or mend what the evidence names.",
        ("transformers#46634", "transformers#40414"), explains=("RG1", "RG2", "RG3", "RG8"),
    ),
)  # fmt: skip


def check(trial: Trial) -> list:
    judged, wrong, ours = 0, [], []
    for key, one in trial.captured[1].items():
        if one.output.shape[-2] != one.q.shape[2] or one.call.dropout:
            continue
        own = rebuild(one.call)
        if own is None or own.shape != one.output.shape:
            continue
        judged += 1
        limit = max(LEAST, 10 * TOLERANCE.get(one.q.dtype, 3e-2))
        off = difference(own, one)
        if off > limit:
            if difference(compute_by_hand(one.call), one) > limit:
                wrong.append((key, off, name_reading(one, limit)))
            else:
                ours.append((key, off))
    if not judged:
        raise NotApplicable("no attention call could be computed again")
    if ours and not wrong:
        (name, _), off = ours[0]
        raise NotApplicable(
            f"regard's own kernel differs by {off:.2g} from plain torch in {len(ours)} of {judged} layers (first "
            f"{name or 'the model itself'}), and the model does not; please report that"
        )
    if not wrong:
        return []
    key, off, reading = wrong[0]
    meaning = reading or "None of the readings that were tried gives its output"
    return trial.find(
        RULES[0], "critical", [key for key, *_ in wrong],
        f"{meaning}: the output of {key[0] or 'the model'} ({one_kind(trial, key)}) differs by {off:.2g} of its size "
        f"from softmax(q kᵀ)·v of what it was given, in {len(wrong)} of {judged} layers.",
        f"relative difference > {LEAST:g}",
    )  # fmt: skip


def one_kind(trial: Trial, key) -> str:
    return f"attention by {trial.captured[1][key].call.kind!r}"


def rebuild(call: Call) -> Tensor | None:
    """The output of regard.attention for a call; None where the call is refused."""
    try:
        return call.changed(compute=None, weights=None, dropout=0.0).run()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        return None


def compute_by_hand(call: Call) -> Tensor:
    """The output of plain torch for a call that `rebuild` took: where it is the model's, our kernel is at fault."""
    return output_and_weights(call.changed(compute=None, weights=None, dropout=0.0))[0]


def difference(output: Tensor, one: CapturedCall) -> float:
    """The relative difference over rows that see a key."""
    rows = one.visible.any(-1).expand(*one.output.shape[:3])
    return relative_change(one.output[rows], output[rows])


def name_reading(one: CapturedCall, limit: float) -> str:
    """What the attention function does instead, if one reading gives its output."""
    for meaning, read in list_readings(one):
        try:
            output = read()
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            continue
        if output is not None and output.shape == one.output.shape and difference(output, one) < limit:
            return meaning
    return ""


def list_readings(one: CapturedCall) -> Iterator[Reading]:
    """(meaning, how to compute it) of other readings of a call, the simplest first."""
    call, q, k = one.call, one.q, one.k
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    visible = one.visible
    d, scale = q.shape[-1], resolve_scale(call.options.get("scale"), q.shape[-1])

    def masked(mask: Tensor | None, **more) -> Callable[[], Tensor | None]:
        options = {name: x for name, x in call.options.items() if name not in ("window", "key_lengths")}
        return lambda: rebuild(call.changed(mask=mask, causal=False, options={**options, **more}))

    def changed(name: str, value: float | None) -> Tensor | None:
        return rebuild(call.with_options(**{name: value}))

    def turned(name: str) -> Tensor | None:
        parts: dict[str, Any] = {name: getattr(one, name).flip(1)}
        return rebuild(call.changed(**parts))

    yield "It ignores the mask: every query sees every key", masked(None)
    yield "It ignores the mask and is only causal", masked(causal)
    four = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
    keys = four.any(-2, keepdim=True)
    yield "It hides padding and nothing else: the causal order is lost", masked(keys)
    yield "It applies the first sequence's mask to every sequence", masked(four[:1])
    yield "It applies the causal order from the first key on", masked(torch.ones_like(causal).tril())
    yield "It adds a bool mask's numbers to the scores, where it hides nothing", masked(four.to(q.dtype))
    yield "It reads the mask the other way round", masked(~four)
    if call.mask is not None and call.mask.dtype != torch.bool:
        yield "It ignores the bias and keeps what the mask hides", masked(visible)
    for step in (1, -1):
        shifted = shift_window(visible, step)
        if shifted is not None:
            word = "more" if step > 0 else "fewer"
            yield f"Its window is one key {word} than it is given", masked(shifted)
    yield "It ignores the window", masked(causal & keys)
    if call.options.get("softcap") is not None:
        yield (
            "It applies the soft cap after the mask, so that hidden keys keep a weight",
            lambda: capped_late(one, visible),
        )
    for name in ("softcap", "sink", "score_mod"):
        if call.options.get(name) is not None:
            meaning = dict(softcap="the soft cap", sink="the sinks", score_mod="the change of scores")[name]
            yield f"It ignores {meaning}", partial(changed, name, None)
    if not isinstance(scale, Tensor):
        others = {"1/√d": d**-0.5, "1": 1.0, "1/d": 1 / d, "√d": d**0.5}
        for word, other in others.items():
            yield f"It ignores the scale and uses {word}", partial(changed, "scale", other)
        for factor in (2.0, 0.5, float(scale), d**0.5, d**-0.5):
            meaning = f"It multiplies the scores by {factor:.3g} times the scale"
            yield meaning, partial(changed, "scale", float(scale) * factor)
    if 1 < (groups := k.shape[1]) < q.shape[1]:
        each = q.shape[1] // groups

        def tiled() -> Tensor | None:
            return rebuild(call.changed(k=k.repeat(1, each, 1, 1), v=one.v.repeat(1, each, 1, 1)))

        yield "It repeats key-value heads as a, b, a, b (repeat for repeat_interleave)", tiled
        first = (k[:, :1].expand(-1, groups, -1, -1), one.v[:, :1].expand(-1, groups, -1, -1))
        yield "It uses the first key-value head for all", lambda: rebuild(call.changed(k=first[0], v=first[1]))
    if k.shape == one.v.shape:
        yield "It multiplies the weights by the keys", lambda: rebuild(call.changed(v=k))
        yield "It exchanges keys and values", lambda: rebuild(call.changed(k=one.v, v=k))
    yield "It runs the softmax over the queries", lambda: over_queries(one, visible)
    yield "It has no softmax", lambda: without_softmax(one, visible)
    yield "It masks the weights after the softmax, so that rows do not add up to 1", lambda: masked_late(one, visible)
    if q.shape[1] == k.shape[1]:
        for words, x in (("key", "k"), ("value", "v")):
            yield f"Its {words} heads are in reverse order", partial(turned, x)


def shift_window(visible: Tensor, step: int) -> Tensor | None:
    """The visible keys with one more (1) or one fewer (−1) at the far end of each row's window."""
    if visible.shape[-2] != visible.shape[-1]:
        return None
    before = torch.zeros_like(visible)
    before[..., :-1] = visible[..., 1:]  # the key before a visible one
    if step > 0:
        return visible | before
    after = torch.zeros_like(visible)
    after[..., 1:] = visible[..., :-1]
    return visible & (after | (torch.arange(visible.shape[-1], device=visible.device) == 0))


def scores(one: CapturedCall) -> tuple[Tensor, Tensor]:
    """(scale·q kᵀ, v) in float32, with heads repeated."""
    each = one.q.shape[1] // one.k.shape[1]
    k, v = (x.float().repeat_interleave(each, 1) for x in (one.k, one.v))
    return resolve_scale(one.call.options.get("scale"), one.q.shape[-1]) * one.q.float() @ k.transpose(-1, -2), v


def over_queries(one: CapturedCall, visible: Tensor) -> Tensor:
    s, v = scores(one)
    return (s.masked_fill(~visible, -torch.inf).softmax(-2).nan_to_num(0.0) @ v).to(one.output.dtype)


def without_softmax(one: CapturedCall, visible: Tensor) -> Tensor:
    s, v = scores(one)
    return (s.masked_fill(~visible, 0.0) @ v).to(one.output.dtype)


def capped_late(one: CapturedCall, visible: Tensor) -> Tensor:
    s, v = scores(one)
    cap = float(one.call.options["softcap"])
    s = cap * (s / cap).tanh()
    return (s.masked_fill(~visible, -cap).softmax(-1) @ v).to(one.output.dtype)


def masked_late(one: CapturedCall, visible: Tensor) -> Tensor:
    s, v = scores(one)
    return (s.softmax(-1).masked_fill(~visible, 0.0) @ v).to(one.output.dtype)
