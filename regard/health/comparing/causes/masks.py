"""What two masks show, in words: one is the other with a window, an order or padding more or less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.health.report.writer import fold_numbers

OTHER = "a mask of another form"


def describe_mask(seen: Tensor, real: Tensor | None = None) -> str:
    """A mask [B, H, M, N] in a few words: "causal", "window of 4 keys", "all keys", … (after padding is left out)."""
    queries, keys = seen.shape[-2:]
    rows = torch.arange(queries)[:, None] + (keys - queries if keys > queries else 0)
    distance = rows - torch.arange(keys)
    shown = seen & _both_real(seen, real)
    allowed = _both_real(seen, real).expand(seen.shape)
    if bool((shown == allowed).all()):
        return "all keys"
    if keys != queries and bool((shown == (allowed & (torch.arange(queries)[:, None] >= torch.arange(keys)))).all()):
        return "causal order aligned at the first key, as without a cache"
    reach = distance.expand(seen.shape)[shown]
    if not reach.numel():
        return "no key"
    least, most = int(reach.min()), int(reach.max())
    band = allowed & (distance >= least) & (distance <= most)
    if bool((shown == band).all()):
        whole = most >= int(distance.max()) or most >= int(distance.expand(seen.shape)[allowed].max())
        if least == 0:
            return "causal order" if whole else f"causal order and a window of {most + 1} keys"
        if least > 0:
            return f"only keys {least} or more before the query" + ("" if whole else f", {most} at most")
        ahead = f"{-least} key{'s' if least < -1 else ''} ahead"
        return f"{ahead} and all before" if whole else f"{most} keys before and {-least} after the query"
    return _describe_documents(shown, allowed, distance) or OTHER


def _describe_documents(shown: Tensor, allowed: Tensor, distance: Tensor) -> str:
    """Sequences cut into documents that do not see one another; empty if the mask is no such thing."""
    if shown.shape[-2] != shown.shape[-1]:
        return ""
    causal = not bool((shown & (distance < 0)).any())
    joined = shown | shown.transpose(-1, -2)
    cuts = ~joined.diagonal(1, -2, -1)  # [B, H, N − 1]: neighbours that do not see each other
    number = torch.nn.functional.pad(cuts.long().cumsum(-1), (1, 0))
    same = number[..., :, None] == number[..., None, :]
    if not bool(cuts.any()) or not bool(
        (shown == (allowed & same & (distance >= 0) if causal else allowed & same)).all()
    ):
        return ""
    most = int(number.max()) + 1
    return f"{'causal order within' if causal else 'all keys of'} documents, up to {most} in a sequence"


def _say_starts(a: Tensor, b: Tensor, real: Tensor | None) -> str | None:
    """Where documents or chunks begin, of two masks of documents that begin at other places."""
    if a.shape[-2] != a.shape[-1] or not all("documents" in describe_mask(x, real) for x in (a, b)):
        return None
    cuts = [~(x | x.transpose(-1, -2)).diagonal(1, -2, -1).any(1) for x in (a, b)]  # [B, N − 1]
    row = int((cuts[0] != cuts[1]).any(-1).int().argmax())
    places = [", ".join(str(at + 1) for at in x[row].nonzero().flatten().tolist()[:8]) for x in cuts]
    return f"documents or chunks begin at tokens {places[0]} of sequence {row} in A, at {places[1]} in B"


def _say_hidden(a: Tensor, b: Tensor) -> str | None:
    """Which keys each mask hides from every query, where that is all that differs."""
    if a.shape[-2] != a.shape[-1]:
        return None
    hidden = [~x.any(-2, keepdim=True) for x in (a, b)]  # [B, H, 1, N]
    either = hidden[0] | hidden[1]
    own = torch.eye(a.shape[-1], dtype=torch.bool)  # a query may always see itself
    if torch.equal(hidden[0], hidden[1]) or not torch.equal(a & ~either & ~own, b & ~either & ~own):
        return None
    row, head, *_ = (hidden[0] != hidden[1]).nonzero()[0].tolist()
    keys = [fold_numbers(x[row, head, 0].nonzero().flatten().tolist()) or "none" for x in hidden]
    by_head = any(not torch.equal(x, x[:, :1].expand_as(x)) for x in hidden)
    where = f"sequence {row}, head {head}" if by_head else f"sequence {row}"
    why = "heads take the padding of other sequences" if by_head else "the padding of another text, or moved"
    return f"of {where} keys {keys[0]} are hidden in A and keys {keys[1]} in B: {why}"


def _both_real(seen: Tensor, real: Tensor | None) -> Tensor:
    queries, keys = seen.shape[-2:]
    every = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if real is None or real.shape[0] != seen.shape[0] or keys != real.shape[1] or queries != keys:
        return every
    return real[:, None, :, None] & real[:, None, None, :]


def explain_masks(a: Tensor, b: Tensor, real: Tensor | None) -> tuple[str, bool]:
    """What B shows that A does not, and the other way round; is it more than a count of pairs?"""
    rows = (
        None if real is None or (real.shape[0], real.shape[1]) != (a.shape[0], a.shape[2]) else real[:, None, :, None]
    )
    differs = a != b if rows is None else (a != b) & rows
    if real is not None and a.shape[-1] == real.shape[1]:
        padding = ~real[:, None, None, :].expand(a.shape)
        if bool((differs <= padding).all()):
            return f"padding is hidden in {'A' if bool((b & differs).any()) else 'B'} only", True
    if not bool((a == b).any()):
        return "B's is A's inverted: each shows what the other hides", True
    texts = [describe_mask(x, real) for x in (a, b)]
    if (starts := _say_starts(a, b, real)) is not None:
        return starts, True
    if texts[0] != texts[1] and OTHER not in texts:
        return f"A's queries see {texts[0]}, B's {texts[1]}", True
    heads = differs.flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    where = "" if len(heads) == a.shape[1] else f" in heads {', '.join(map(str, heads[:8]))}"
    every = torch.ones_like(differs) if rows is None else rows.expand(a.shape)
    if bool((differs == every).all()):
        return f"each shows what the other hides{where}", True
    by_key = bool((a == a[..., :1, :]).all())
    if a.shape[-2] == a.shape[-1]:
        if torch.equal(a, b.transpose(-1, -2)):
            return f"A's is B's with queries and keys exchanged{where}", True
        if near := _describe_distances(a, b, differs):
            return near + where, True
    for by in (1, -1):
        if _is_moved(a, b, by):
            what = "padding mask is A's, moved" if by_key else "mask is A's with its keys moved"
            return f"B's {what} one place {'on' if by > 0 else 'back'}{where}", True
    if (keys := _say_hidden(a, b)) is not None:
        return keys, True
    if texts[0] != texts[1] and where == "":
        return f"A's queries see {texts[0]}, B's {texts[1]}", True
    more, fewer = int((b & ~a & differs).sum()), int((a & ~b & differs).sum())
    return f"B shows {more} pairs of query and key{where} that A hides, and hides {fewer} that it shows", False


def _is_moved(a: Tensor, b: Tensor, by: int) -> bool:
    """Is b the mask a with its keys some places on? What comes in at the end is left aside."""
    inner = slice(1, None) if by > 0 else slice(None, -1)
    return a.shape[-1] > 2 and torch.equal(a.roll(by, -1)[..., inner], b[..., inner])


def _describe_distances(a: Tensor, b: Tensor, differs: Tensor) -> str:
    """Where one mask hides later keys, each query's own or one near it, which the other shows."""
    at = torch.arange(a.shape[-1])
    distances = (at[:, None] - at).expand(a.shape)[differs].unique()
    added = bool((b & differs).any())
    if not len(distances) or added == bool((a & differs).any()):
        return ""
    hides, shows = "AB" if added else "BA"
    d = int(distances[0])
    if len(distances) == 1:
        which = "each query's own key" if d == 0 else f"the key {abs(d)} {'ahead' if d < 0 else 'before'}"
    elif int(distances[-1]) < 0:
        which = "keys later than the query (the causal order)"
    else:
        return ""
    return f"{hides} hides {which}, which {shows} shows"


def other_masks(
    seen: Tensor, real: Tensor | None, positions: Tensor | None = None, widths: Sequence[int] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Masks that a port may have made instead of this one, [B, H, M, N], each with its name.

    `positions` are those of the queries among the keys, if they are not the last ones; `widths` are tried as windows.
    """
    queries, keys = seen.shape[-2:]
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    top = rows - columns
    bottom = rows + (keys - queries) - columns if positions is None else positions[:, None] - columns
    allowed = _both_real(seen, real)
    every = torch.ones_like(seen)
    yield "no mask", every
    if real is not None:
        yield "no order, padding hidden", every & allowed
    yield "causal order alone", every & (bottom >= 0)
    yield "causal order and padding", every & allowed & (bottom >= 0)
    if keys != queries and positions is None:
        yield "causal order aligned at the first key", every & (top >= 0)
    yield "strictly earlier keys", every & (bottom > 0)
    yield "one key ahead", seen | (every & (bottom == -1))
    before, after = (torch.roll(seen, by, -1) for by in (-1, 1))
    before[..., -1], after[..., 0] = False, True
    yield "a window of one key more", seen | before
    yield "a window of one key fewer", seen & after
    yield "the mask inverted", ~seen
    if len(seen) > 1:
        yield "the first sequence's mask", seen[:1].expand_as(seen)
    if queries == keys:
        yield "the mask transposed", seen.transpose(-1, -2)
    reach = bottom.expand(seen.shape)[seen]
    most = int(reach.max()) if reach.numel() else 0
    shown = every & allowed & (bottom >= 0)
    for width in dict.fromkeys((most, most + 2, (most + 1) // 2, 2 * (most + 1), *widths)):
        if 0 < width <= keys:
            yield f"a window of {width} keys, where A has {most + 1}", shown & (bottom < width)
    for size in widths:
        if size > 0 and positions is None:
            yield f"chunks of {size} keys", shown & (rows // size == columns // size)
