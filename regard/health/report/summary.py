"""The sentences at the top of a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from regard.health import checks
from regard.health.checks.finding import MODEL
from regard.health.checks.predictions import LEAST_TOKENS
from regard.health.report.writer import fold_numbers
from regard.table import count_noun, format_number

if TYPE_CHECKING:
    from regard.health.measure.heads import HeadReading
    from regard.health.report.report import Report

ROOT = "the model itself"  # the root module's name is empty
NAMED = 8  # heads of a finding; of more the number
COMPARED = ("entropy_ratio", "max_weight", "first_key_mass", "distance", "max_logit", "logit_variance")
UNUSUAL = 6  # heads that differ most from the others
LEAST_HEADS = 4  # to compare


def summarize(report: Report) -> list[str]:
    """The report in a few sentences."""
    causes, loss = count_causes(report), describe_loss(report)
    lines = [*describe_mixers(report), f"{causes[:1].upper()}{causes[1:]}." if causes else describe_no_findings(report)]
    lines += [*([f"{loss[:1].upper()}{loss[1:]}."] if loss else []), describe_extent(report)]
    if report.unmeasured:
        lines.append(f"{count_noun(len(report.unmeasured), 'layer')} could not be measured; the reasons are listed.")
    if report.interrupted:
        lines.append(f"The examination did not finish: {report.interrupted}.")
    return lines


def describe_mixers(report: Report) -> list[str]:
    """How much of a hybrid is attention, and what was read of the rest; nothing for a model of attention alone."""
    if report.mixers is None:
        return []
    attention, others = report.mixers["attention"], report.mixers["others"]
    counts = Counter(one["kind"] for one in others)
    listed = _join([f"{count} {kind}" for kind, count in counts.items()])
    verb = "is" if attention == 1 else "are"
    was = "was" if len(others) == 1 else "were"
    line = f"{attention} of {attention + len(others)} token mixers {verb} softmax attention; "
    line += f"{listed} {was} not measured as heads"
    read = [one for one in others if one["failure"] is None and one["numbers"]]
    memories = [one["numbers"]["memory_median"] for one in read if one["numbers"].get("memory_median") is not None]
    if memories:
        line += f": memory of {min(memories):.3g} to {max(memories):.3g} tokens"
    return [f"{line}." if len(read) == len(others) else f"{line}, {len(others) - len(read)} not at all."]


def count_causes(report: Report) -> str:
    """`scale off since layer 0`, `3 causes, the gravest: dead since layer 8`, empty if there is none but notes."""
    grave = [cause for cause in report.diagnosis if cause.severity != "note"]
    if not grave:
        return ""
    layers = [index for index, _ in grave[0].finding.places] if grave[0].scope != MODEL else []
    first = f"{grave[0].kind}{f' since layer {min(layers)}' if layers else ', the whole model'}"
    return first if len(grave) == 1 else f"{len(grave)} causes, the gravest: {first}"


def describe_loss(report: Report) -> str:
    """`loss 6.06 ± 0.04 (next token, 16 sequences); guessing by frequency: 5.73`, empty if there is none.

    The guess is the one to beat next: frequencies first, then the token before; or an even one, if that is better.
    """
    loss = report.loss
    if loss is None:
        return ""
    half, size = (loss.high - loss.low) / 2, math.log10(max(abs(loss.mean), 1e-9))
    spread = f" ± {round(half, 2 - math.floor(size)) or half:.2g}" if math.isfinite(half) else ""
    text = f"loss {loss.mean:.3g}{spread} ({loss.kind}, {count_noun(loss.sequences, 'sequence')})"
    if loss.unigram is None or loss.bigram is None:
        return text
    if loss.tokens and loss.tokens < LEAST_TOKENS:
        return f"{text}; {loss.tokens} tokens are too few to judge it"
    by, guess = ("frequency", loss.unigram) if loss.mean >= loss.unigram else ("the token before", loss.bigram)
    if loss.uniform is not None and loss.uniform < guess:
        by, guess = "an even chance", loss.uniform
    return f"{text}; guessing by {by}: {guess:.3g}"


def describe_extent(report: Report) -> str:
    """How many heads were measured, on how many rows."""
    if not report.heads:
        return "Nothing was measured."
    layers = {head.index for head in report.heads}
    extent = f"{count_noun(len(report.heads), 'head')} in {count_noun(len(layers), 'attention layer')}"
    rows = {head.rows for head in report.heads if head.rows is not None}
    least = f"{min(rows):,} to " if len(rows) > 1 else ""
    return f"{extent}, measured on {least}{count_noun(max(rows), 'row')} each."


def describe_no_findings(report: Report) -> str:
    """What the absence of findings means: the checks found nothing, which does not prove the model healthy."""
    if not report.heads:
        return "Nothing was measured, so nothing was judged."
    few = sum(not head.can_be_judged for head in report.heads)
    if few == len(report.heads):
        return "Too few rows or keys to judge any head; examine more or longer text."
    part = " of the measured heads" if report.unmeasured or report.interrupted else ""
    rest = f" {count_noun(few, 'head')} had too few rows or keys to be judged." if few else ""
    done = [] if report.checks is None else report.checks.done
    looked_for = report.how.get("looked_for", checks.kinds(runs=False))
    noted = list(dict.fromkeys(one.kind for one in report.findings if one.scope == MODEL))
    also = f" Noted: {_join(noted)}." if noted else ""
    return f"No problem found in these {len(looked_for) + len(done)} checks{part}.{rest}{also}"


def count_kinds(found: Iterable[tuple[str, int]]) -> list[str]:
    """Each kind with its number of heads; several findings of one kind (too large, too small) are added.

    >>> from regard.health.report.summary import count_kinds
    >>> count_kinds([("scale off", 12), ("dying gradient", 9), ("scale off", 4)])
    ['scale off (16)', 'dying gradient (9)']
    """
    total: Counter = Counter()
    for kind, heads in found:
        total[kind] += heads
    return [f"{kind} ({heads})" for kind, heads in total.items()]


def name_places(places: Sequence[tuple[int, int]], measured: Sequence[tuple[int, int]] = ()) -> str:
    """(layer, head) pairs in words, where all measured heads of their layers are known as such.

    >>> from regard.health.report.summary import name_places
    >>> name_places([(1, 0), (2, 0)]), name_places([(0, 0), (0, 1)], [(0, 0), (0, 1), (1, 0)])
    ('layers 1–2, head 0', 'layer 0, all heads')
    """
    layers, heads = (sorted({place[side] for place in places}) for side in (0, 1))
    where = f"layer{'s' * (len(layers) > 1)} {fold_numbers(layers)}"
    if measured and {place for place in measured if place[0] in layers} <= set(places):
        return f"{where}, all heads"
    if len(heads) * len(layers) != len(places) or len(heads) > NAMED:
        return f"{where}, {len(places)} heads"
    return f"{where}, head{'s' * (len(heads) > 1)} {fold_numbers(heads)}"


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


class Unusual(NamedTuple):
    """A head, the statistic in which it differs most, its mean there and that of the middle head."""

    head: HeadReading
    statistic: str
    value: float
    usual: float

    def __str__(self) -> str:
        value, usual = format_number(self.value), format_number(self.usual)
        return f"{self.statistic.replace('_', ' ')} {value}, where the middle head has {usual}"


def find_unusual(heads: Sequence[HeadReading], count: int = UNUSUAL) -> list[Unusual]:
    """The heads farthest from the middle one, measured in the distance of a usual head from it."""
    if len(heads) < LEAST_HEADS:
        return []
    best: dict[int, tuple[float, Unusual]] = {}
    for name in COMPARED:
        means = [(at, mean) for at, head in enumerate(heads) if (mean := head.statistics.mean(name)) == mean]
        if not means:
            continue
        middle = median(mean for _, mean in means)
        spread = median(abs(mean - middle) for _, mean in means)
        for at, mean in means:
            far = abs(mean - middle) / (spread + 0.05 * abs(middle) + 1e-9)
            if at not in best or far > best[at][0]:
                best[at] = far, Unusual(heads[at], name, mean, middle)
    ranked = sorted(best.values(), key=lambda pair: -pair[0])
    return [unusual for _, unusual in ranked[:count]]
