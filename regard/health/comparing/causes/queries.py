"""Why q, k or v of a call differ: rotary positions, norms, heads in another order, stacked matrices read otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.health.comparing.causes import rotary
from regard.health.comparing.causes.generic import explain_generally, explain_shapes
from regard.health.comparing.causes.guesses import Pair, match_heads
from regard.health.comparing.causes.trial import EXACT, Cause, Trial
from regard.health.comparing.difference import change
from regard.health.comparing.record import Key, Run
from regard.health.comparing.scores import Kept, spread, with_equal_heads
from regard.health.report.writer import fold_numbers


def explain_inputs(pair: Pair, parts: list[str], run: Run, key: Key) -> tuple[Cause | None, list[str]]:
    """(the cause or None, what was tried) of a difference in these of q, k and v; `run` is A's, `key` the call's."""
    crossed = _find_exchange(pair)
    if crossed:
        return Cause(crossed, frozenset({"exchange"})), []
    causes: dict[str, tuple[Cause, list[str]]] = {}
    tried: list[str] = []
    for part in parts:
        trial = explain_part(pair, part, run, key)
        tried += [name for name in trial.tried if name not in tried]
        if trial.best is None:
            return None, tried
        causes.setdefault(trial.best.text, (trial.best, []))[1].append(part)
    found = [one for one, _ in causes.values()]
    text = "; ".join(f"{' and '.join(named)}: {text.rstrip('.')}" for text, (_, named) in causes.items())
    kinds = frozenset().union(*(one.kinds for one in found))
    return Cause(f"{text}.", kinds, any(one.is_vague for one in found)), tried


def explain_part(pair: Pair, part: str, run: Run, key: Key) -> Trial:
    """Try what may have happened to q, k or v."""
    a, b = (getattr(one, part) for one in (pair.a, pair.b))
    a, b = with_equal_heads(a, b)
    trial = Trial(a, b, pair.budget, part, pair.real)
    if a.shape != b.shape:
        explain_shapes(trial)
        return trial
    order = match_heads(a, b)
    if order is not None:
        trial.explains("heads in another order", a[:, order], (
            f"its heads are A's in the order {order}: weights sharded, stacked or repeated otherwise."
        ))  # fmt: skip
    own, other = (getattr(one, part).double() for one in (pair.a, pair.b))
    if 1 < (few := min(own.shape[1], other.shape[1])) < (many := max(own.shape[1], other.shape[1])):
        said = ("whole groups of heads", "each head") if own.shape[1] == few else ("each head", "whole groups")
        tiled = (own if own.shape[1] == few else other).repeat(1, many // few, 1, 1)
        candidate = tiled if own.shape[1] == few else b if change(a, tiled, part, pair.real) <= pair.budget else None
        trial.explains("order of grouped heads", candidate, (
            f"B repeats {said[0]} where A repeats {said[1]} (repeat, repeat_interleave)."
        ))  # fmt: skip
    if part == "v":
        _try_values(trial, a, b)
    else:
        _try_rotations(trial, a, b, run, key)
    if part != "v" and a.ndim == 4 and not trial.found:
        each = (a * b).double().sum((0, 1, 3)) / a.double().square().sum((0, 1, 3)).clamp_min(1e-30)
        if float(each.max() - each.min()) > 1e-3 * float(each.abs().max()):
            candidate = each[:, None] * a.double()
            trial.explains("a factor by position", candidate, (
                f"B's are A's times a number by position, {float(each.min()):.4g} to {float(each.max()):.4g}: a "
                "temperature or scale that follows the position."
            ))  # fmt: skip
    if part != "q" and not trial.found:
        _try_other_calls(trial, part, run, key)
        _try_cache(trial, part, pair, run, key)
    if not trial.found:
        explain_generally(trial)
    return trial


def _try_rotations(trial: Trial, a: Tensor, b: Tensor, run: Run, key: Key) -> None:
    """Recover the rotation of both from what A had before it; apply B's to that."""
    tolerance = max(rotary.FITS, trial.tolerance)
    trial.tried.append("rotary positions")
    for before in before_rotation(run, key, a):
        own = rotary.recover(before, a, tolerance)
        if own is None:
            continue
        for source in (before, *_before_norm(run, key, a)):
            other = rotary.recover(source, b, tolerance)
            if other is None and change(source, b, "q", trial.real) <= trial.tolerance:
                trial.explains("rotary missing", source, "B leaves out rotary positions.")
                return
            if other is not None:
                name, sentence = rotary.explain_rotation(own, other)
                if source is not before:
                    sentence = "B leaves out the norm of queries and keys (QK-norm)." if not name else (
                        f"B leaves out the norm of queries and keys (QK-norm), and {sentence}"
                    )  # fmt: skip
                if sentence and trial.explains(name or "QK-norm", rotary.rotate(source, other), sentence):
                    return
        by_head = rotary.rotate(before.transpose(1, 2), own).transpose(1, 2)
        trial.explains("rotary positions by head", by_head, "B turns it by the head's number, not the token's.")
        for sentence, mixed in rotary.mix_layouts(before, own):
            trial.explains("layout of the angles", mixed, sentence)
        for what, rounded in rotary.round_rotations(before, own):
            trial.explains("rounded angles", rounded, f"B rounds {what}.")
        for name, source in _normed(before):
            normed = rotary.rotate(source, own)
            trial.explains("QK-norm added", normed, f"B norms queries and keys ({name}) where A does not.")
    for name, source in _normed(a):
        trial.explains("QK-norm after rotary", source, f"B norms queries and keys ({name}) after rotary positions.")
    if run.earlier(key):
        _try_step(trial, a, b, run, key)
    if trial.found:
        return
    _try_angles(trial, a, b, tolerance)


def _try_angles(trial: Trial, a: Tensor, b: Tensor, tolerance: float) -> None:
    """Other angles than A's, where none of its own are known: by one law, or one for each token and pair."""
    turned = rotary.recover(a, b, tolerance)
    if turned is not None and (turned.offset or float(turned.omega.abs().max()) > 1e-4):
        steady = float(turned.omega.abs().max()) < 1e-4
        why = "begin at another place" if steady else "of another base, scaling, pairing or none"
        said = f"B turns it by other angles than A: rotary positions {why}."
        trial.explains("other angles", rotary.rotate(a, turned), said, True)
    for style in rotary.STYLES if not trial.found and a.ndim == 4 else ():
        angle = rotary.recover_angles(a, b, style, trial.tolerance)
        if angle is not None:
            apart = angle.abs() > 1e-3
            tokens, pairs = (apart.any(dim=dim).any(0).nonzero().flatten().tolist() for dim in (-1, -2))
            trial.explains("angles of some tokens", rotary.turn_by(a, angle, style), (
                f"B turns pairs {fold_numbers(pairs)} of tokens {fold_numbers(tokens)} by other angles: rotary "
                "positions of other axes (sections of M-RoPE, rows and columns), or of these tokens."
            ), True)  # fmt: skip


def _try_values(trial: Trial, a: Tensor, b: Tensor) -> None:
    turned = rotary.recover(a, b, max(rotary.FITS, trial.tolerance))
    if turned is not None and float(turned.omega.abs().max()) > 1e-3:
        trial.explains("rotary positions of values", rotary.rotate(a, turned), (
            "B rotates the values by their positions; rotary positions belong to queries and keys alone."
        ))  # fmt: skip


def explain_turned(trial: Trial) -> None:
    """Try whether rotary positions turned a tensor before this place in one model alone, as with norms after them."""
    a, b = trial.a, trial.b
    for x, y in ((a, b), (a.transpose(1, 2), b.transpose(1, 2))) if a.ndim == 4 and a.shape == b.shape else ():
        turned = rotary.recover(x, y, max(rotary.FITS, trial.tolerance))
        if turned is not None and float(turned.omega.abs().max()) > 1e-3:
            first, second = "BA" if float(turned.omega.median()) > 0 else "AB"
            out = rotary.rotate(x, turned)
            trial.explains("rotary positions before the norm", out if x is a else out.transpose(1, 2), (
                f"{first} has turned it by rotary positions when it comes here, {second} not yet."
            ))  # fmt: skip
            return


def _try_step(trial: Trial, a: Tensor, b: Tensor, run: Run, key: Key) -> None:
    """A decoding step: cached keys that are rotated again, or new vectors some positions on, by the prompt's angles."""
    first, new = run.earlier(key)[0], run.points[key._replace(part="q")].shape[-2]
    for part in ("q", "k"):
        prompt = run.points.get(first._replace(part=part))
        if prompt is None or prompt.shape[-2] < 3:
            continue
        for before in before_rotation(run, first, prompt):
            own = rotary.recover(before, prompt)
            if own is None:
                continue
            again = torch.cat([rotary.rotate(a[..., :-new, :], own), a[..., -new:, :].double()], -2)
            if trial.explains("cached keys rotated again", again, (
                "B rotates the keys in the cache again at each step: they are kept rotated, and rotated when read."
            )):  # fmt: skip
                return
            for by in range(-64, 65):
                turn = rotary.Rotary(own.style, own.width, own.omega, float(by), 1.0, torch.zeros(a.shape[-2]))
                turned, old = rotary.rotate(a, turn), torch.arange(a.shape[-2])[:, None] < a.shape[-2] - new
                said = f"rotary positions are {abs(by)} too {'large' if by > 0 else 'small'} in B"
                for where, what in ((~old, "at this step"), (old, "in the cache, of an earlier chunk")):
                    candidate = torch.where(where, turned, a.double())
                    if by and change(b, candidate, "q") <= trial.tolerance:
                        said = f"{said} {what}: positions do not go on from the cache."
                        trial.explains("rotary offset", candidate, said)
                        return


def _try_other_calls(trial: Trial, part: str, run: Run, key: Key) -> None:
    """Are B's keys or values those of another call in A, as where layers share them?"""
    for at, other in run.calls.items():
        x = getattr(other, part)
        if at != key and x.shape == trial.b.shape and run.forward_of(at) == run.forward_of(key):
            name = f"the call number {list(run.calls).index(at)}" if at.module == key.module else at.module
            said = f"B takes those of {name}, which A does not: layers that share keys and values."
            if trial.explains("those of another layer", x, said):
                return
            new = other.shape[2]
            cached = torch.cat([x[:, :, :-new], trial.a[:, :, -new:]], 2) if run.forward_of(at) else None
            if trial.explains("the cache of another layer", cached, f"B reads the cache of {name}, A its own."):
                return


def _try_cache(trial: Trial, part: str, pair: Pair, run: Run, key: Key) -> None:
    """A decoding step: which tokens' keys each cache holds, by those that A computed in this forward and before."""
    known = []
    for at in run.earlier(key) if not trial.found else ():
        if at not in run.calls:
            return
        known.append(getattr(run.calls[at], part)[:, :, -run.calls[at].shape[2] :])
    if not known:
        return
    pool, held = torch.cat(known, 2).double(), []
    for x in (trial.a.double(), trial.b.double()):
        pool = spread(pool, x.shape[1]) if x.shape[1] % pool.shape[1] == 0 else pool
        if pool.shape[:2] != x.shape[:2] or pool.shape[-1] != x.shape[-1]:
            return
        flat, wanted = (y.transpose(1, 2).flatten(2) for y in (pool, x))
        held.append(torch.cdist(wanted, flat).argmin(-1)[0])
        if change(x, pool[:, :, held[-1]], part, trial.real) > max(trial.tolerance, 1e-3):
            return
    said = [fold_numbers(sorted(one.tolist())) for one in held]
    trial.explains("tokens in the cache", pool[:, :, held[1]], (
        f"the cache holds tokens {said[0]} in A and {said[1]} in B."
    ))  # fmt: skip


def before_rotation(run: Run, key: Key, like: Tensor) -> Iterator[Tensor]:
    """Tensors that A had before its call and that may be `like` [B, H, N, D] before rotation, the last ones first."""
    batch, heads, length, width = like.shape
    earlier = []
    for place, x in run.points.items():
        if place.part == "q" and place.module == key.module and place.use == key.use:
            break
        if place.part.startswith("out") and place.use in (key.use, run.forward_of(key)) and x.is_floating_point():
            earlier.append(x)
    for x in reversed(earlier[-24:]):
        yield from _views(x, batch, heads, length, width)


def _views(x: Tensor, batch: int, heads: int, length: int, width: int) -> Iterator[Tensor]:
    """Ways in which x, perhaps a stack of q, k and v, holds [B, H, N, D]."""
    size = heads * width
    if x.shape == (batch, heads, length, width):
        yield x
    if x.shape == (batch, length, heads, width):
        yield x.transpose(1, 2)
    if x.ndim == 2 and x.shape[0] == batch * length:
        x = x.reshape(batch, length, -1)
    if x.ndim != 3 or x.shape[:2] != (batch, length) or x.shape[-1] % width or x.shape[-1] < size:
        return
    total = x.shape[-1] // width
    for at in range(0, total - heads + 1, heads if total % heads == 0 else 1):
        yield x[..., at * width : at * width + size].reshape(batch, length, heads, width).transpose(1, 2)
    if total == 3 * heads:
        stacked = x.reshape(batch, length, heads, 3, width)
        yield from (stacked[..., at, :].transpose(1, 2) for at in range(3))


def _before_norm(run: Run, key: Key, like: Tensor) -> Iterator[Tensor]:
    """What entered norms of queries or keys in this attention."""
    batch, heads, length, width = like.shape
    for place, x in run.points.items():
        if place.part == "in" and "norm" in place.module.rpartition(".")[2] and place.use == key.use:
            if place.module.startswith(key.module) and x.is_floating_point():
                yield from itertools.islice(_views(x, batch, heads, length, width), 1)


def _normed(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    x = x.double()
    yield "RMS", x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    yield "to length 1", x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    yield "LayerNorm", torch.nn.functional.layer_norm(x, x.shape[-1:])


def _find_exchange(pair: Pair) -> str:
    """Which of q, k and v are in each other's places."""
    for x, y in itertools.combinations("qkv", 2):
        pairs = (getattr(pair.a, x), getattr(pair.b, y)), (getattr(pair.a, y), getattr(pair.b, x))
        if all(p.shape == r.shape and change(p, r, "q", pair.real) <= max(pair.budget, EXACT) for p, r in pairs):
            return f"{x} and {y} are exchanged: a stacked matrix was read in another order."
    return ""


def recover_call(kept: Kept, run: Run, key: Key) -> dict[str, rotary.Rotary] | None:
    """The rotary positions of a call's q and k, by what the model had before; None where that does not tell."""
    found: dict[str, rotary.Rotary] = {}
    for part in ("q", "k"):
        x = getattr(kept, part)
        tolerance = max(rotary.FITS, 4.0 * torch.finfo(x.dtype).eps) if x.is_floating_point() else rotary.FITS
        for before in before_rotation(run, key, x):
            if torch.equal(before, x):
                break  # nothing turns it
            one = rotary.recover(before, x, tolerance)
            if one is not None and float(one.omega.abs().max()) > 1e-3:
                found[part] = one
                break
        else:
            return None
    return found
