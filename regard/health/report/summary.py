"""The sentences at the top of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """`scale off since blocks.0.attn`, `3 causes, the gravest: dead since h.8.attn`, empty if all are notes."""
    grave = [cause for cause in report.diagnosis if cause.severity != "note"]
    if not grave:
        return ""
    finding, where = grave[0].finding, "" if grave[0].scope == MODEL else grave[0].finding.layer
    if grave[0].scope != MODEL and finding.places:
        where = name_layers([min(index for index, _ in finding.places)], list_names(report))
    first = f"{grave[0].kind}{f' since {where}' if where else ', the whole model'}"
    return first if len(grave) == 1 else f"{len(grave)} causes, the gravest: {first}"


def describe_loss(report: Report) -> str:
    """`loss 6.06 ± 0.04 (next token, 16 sequences); guessing by frequency: 5.73`, empty if there is none.

    The guess is the one to beat next: frequencies first, then the token before; or an even one, if that is better.
    """
    loss = report.loss
    if loss is None:
        return ""
    text = f"loss {loss.describe()} ({loss.kind}, {count_noun(loss.sequences, 'sequence')})"
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


def count_made(report: Report) -> int:
    """How many checks were made: those of the heads' numbers, and those that run the model."""
    return len(list_looked_for(report)) + (0 if report.checks is None else len(report.checks.done))


def list_looked_for(report: Report) -> list[str]:
    """The kinds of findings that were looked for in the heads' numbers."""
    return report.how.get("looked_for", checks.kinds(runs=False)) if report.heads else []


def was_checked(report: Report, kind: str) -> bool:
    """True if a finding of this kind, or of one that no check has any more, would be in the report."""
    done = () if report.checks is None else report.checks.done
    return kind in list_looked_for(report) or kind in checks.kinds_of(done) or kind not in checks.kinds()


def list_late(report: Report) -> list[str]:
    """The checks that ran out of time."""
    skipped = [] if report.checks is None else report.checks.skipped
    return [name for name, reason in skipped if reason.startswith("out of time")]


def describe_no_findings(report: Report) -> str:
    """What the absence of findings means: the checks found nothing, which does not prove the model healthy."""
    if not report.heads:
        return "Nothing was measured, so nothing was judged."
    few = sum(not head.can_be_judged for head in report.heads)
    if few == len(report.heads):
        return "Too few rows or keys to judge any head; examine more or longer text."
    part = " of the measured heads" if report.unmeasured or report.interrupted else ""
    rest = f" {count_noun(few, 'head')} had too few rows or keys to be judged." if few else ""
    many = len(list_late(report))
    late = f" ({count_noun(many, 'check')} ran out of time)" if many else ""
    noted = list(dict.fromkeys(one.kind for one in report.findings if one.scope == MODEL))
    also = f" Noted: {_join(noted)}." if noted else ""
    return f"No problem found in these {count_made(report)} checks{late}{part}.{rest}{also}"


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


def list_names(*reports: Report) -> dict[int, str]:
    """Layer index -> name of its module, "att#2" for a second use; of several reports the first counts."""
    known: dict[int, str] = {}
    for report in reversed(reports):  # a finding may name layers of which nothing could be measured
        known |= {
            at: name for one in report.findings for (name, _), (at, _) in zip(one.heads, one.places, strict=False)
        }
        known |= {head.index: head.layer for head in report.heads}
    names = {index: name or ROOT for index, name in sorted(known.items())}
    uses: Counter = Counter()
    for index, name in names.items():
        uses[name] += 1
        names[index] = name if uses[name] == 1 else f"{name}#{uses[name]}"
    return names


def number_layers(names: Mapping[int, str]) -> dict[int, int]:
    """Each layer's number in the model's own names; its index, where the names do not differ in one number alone.

    >>> from regard.health.report.summary import number_layers
    >>> number_layers({0: "model.layers.3.attn", 1: "model.layers.7.attn"}), number_layers({0: "text.0", 1: "image.0"})
    ({0: 3, 1: 7}, {0: 0, 1: 1})
    """
    folded = _fold_names(list(names.values()))
    if len(folded) > 1 or len(set(names.values())) < len(names) or not next(iter(folded.values()), None):
        return {index: index for index in names}
    return dict(zip(names, *folded.values(), strict=True))


def name_layers(indices: Sequence[int], names: Mapping[int, str]) -> str:
    """Layers by the model's own names, and by their order where there is none.

    >>> from regard.health.report.summary import name_layers
    >>> names = {0: "model.layers.3.attn", 1: "model.layers.4.attn", 2: "vision.attn"}
    >>> name_layers([0, 1], names), name_layers([0, 2], names), name_layers([4, 5], {})
    ('model.layers.3–4.attn', 'model.layers.3.attn, vision.attn', 'layers 4–5')
    """
    if any(index not in names for index in indices):
        return f"layer{'s' * (len(indices) > 1)} {fold_numbers(indices)}"
    folded = _fold_names(list(dict.fromkeys(names[index] for index in indices)))
    listed = [f"{a}{fold_numbers(sorted(numbers))}{b}" for (a, b), numbers in folded.items()]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def _fold_names(names: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    """(text before, text after) of the one number by which names are folded into the fewest -> its values."""
    found = [list(re.finditer(r"(?<![^.])\d+(?![^.])", name)) for name in names]
    ways = []
    for at in range(max([1, *map(len, found)])):
        way: dict[tuple[str, str], list[int]] = {}
        for name, numbers in zip(names, found, strict=True):
            if numbers:
                number = numbers[min(at, len(numbers) - 1)]
                way.setdefault((name[: number.start()], name[number.end() :]), []).append(int(number[0]))
            else:
                way[name, ""] = []
        ways.append(way)
    return min(ways, key=len)


def name_places(
    places: Sequence[tuple[int, int]], names: Mapping[int, str], measured: Sequence[tuple[int, int]] = ()
) -> str:
    """(layer, head) pairs in words, where all measured heads of their layers are known as such.

    >>> from regard.health.report.summary import name_places
    >>> names = {0: "h.0.attn", 1: "h.1.attn", 2: "h.2.attn"}
    >>> name_places([(1, 0), (2, 0)], names), name_places([(0, 0), (0, 1)], names, [(0, 0), (0, 1), (1, 0)])
    ('h.1–2.attn, head 0', 'h.0.attn, all heads')
    """
    layers, heads = (sorted({place[side] for place in places}) for side in (0, 1))
    where = name_layers(layers, names)
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
