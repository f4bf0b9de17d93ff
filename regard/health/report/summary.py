"""The sentences at the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from regard.health import checks
from regard.health.checks.finding import MODEL
from regard.health.checks.predictions import LEAST_TOKENS
from regard.table import format_number

if TYPE_CHECKING:
    from regard.health.contract.run import LossReading
    from regard.health.measure.heads import HeadReading
    from regard.health.report.report import Report

ROOT = "the model itself"  # the root module's name is empty
LISTED = 8  # layers
COMPARED = ("entropy_ratio", "max_weight", "first_key_mass", "distance", "max_logit", "logit_variance")
UNUSUAL = 6  # heads that differ most from the others
LEAST_HEADS = 4  # to compare


def summarize(report: Report) -> list[str]:
    """The report in a few sentences."""
    lines = [*describe_mixers(report), *_describe_predictions(report), describe_extent(report)]
    if report.findings:
        lines.append(_describe_findings(report))
    elif report.heads:
        lines.append(describe_no_findings(report))
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


def _describe_predictions(report: Report) -> list[str]:
    """Whether the model works at all, before anything about its heads; nothing if its loss is not known."""
    loss = report.loss
    if loss is None:
        return []
    if loss.unigram is None or loss.bigram is None:
        return [f"Loss {loss.mean:.3g} ({loss.kind})."]
    numbers = f"loss {loss.mean:.3g} nats per token; the text's unigrams reach {loss.unigram:.3g}"
    numbers += f", its bigrams {loss.bigram:.3g}"
    kinds = {finding.kind for finding in report.findings}
    if "untrained or broken" in kinds:
        return [f"Untrained or broken: the model predicts this text worse than the text's own frequencies ({numbers})."]
    if "sees the future" in kinds:
        return [f"The loss says little, because the model sees the tokens that it predicts ({numbers})."]
    if loss.tokens and loss.tokens < LEAST_TOKENS:
        return [f"{loss.tokens} tokens are too few to judge the loss ({numbers})."]
    return [f"The model predicts this text {_compare(loss)} ({numbers})."]


def _compare(loss: LossReading) -> str:
    """The loss in words beside the text's unigrams and bigrams; a short text's bigrams may be worse than its unigrams.

    >>> from regard.health.contract.run import LossReading
    >>> from regard.health.report.summary import _compare
    >>> _compare(LossReading("next token", 2.6, 2.5, 2.7, 4, unigram=3.0, bigram=2.5))
    'better than its unigrams and worse than its bigrams'
    >>> _compare(LossReading("next token", 6.2, 6.1, 6.3, 4, unigram=6.4, bigram=6.3, uniform=6.1))
    'no better than a uniform guess, 6.1'
    """
    assert loss.unigram is not None and loss.bigram is not None
    if loss.uniform is not None and loss.mean >= loss.uniform:  # few tokens of a large vocabulary say little of it
        return f"no better than a uniform guess, {loss.uniform:.3g}"
    if loss.uniform is not None and min(loss.unigram, loss.bigram) >= loss.uniform:
        return "better than a uniform guess; its own frequencies say nothing, because the text is too short"
    better = [name for name in ("unigram", "bigram") if loss.mean < getattr(loss, name)]
    if len(better) == 2:
        return "better than its unigrams and its bigrams"
    if not better:
        return "no better than its unigrams"
    worse = "unigrams" if better == ["bigram"] else "bigrams"
    return f"better than its {better[0]}s and worse than its {worse}"


def describe_extent(report: Report) -> str:
    """How many heads were measured, on how many rows."""
    if not report.heads:
        return "Nothing was measured."
    layers = {head.index for head in report.heads}
    extent = f"{count_noun(len(report.heads), 'head')} in {count_noun(len(layers), 'attention layer')}"
    rows = {head.rows for head in report.heads if head.rows is not None}
    least = f"{min(rows):,} to " if len(rows) > 1 else ""
    return f"{extent}, measured on {least}{count_noun(max(rows), 'row')} each."


def _describe_findings(report: Report) -> str:
    flagged = {place for finding in report.findings if finding.scope != MODEL for place in finding.places}
    layers = sorted({head.index for head in report.heads})
    affected = sorted({index for index, _ in flagged})
    listed = [str(layer) for layer in affected[:LISTED]] + ["…"] * (len(affected) > LISTED)
    where = "" if len(layers) == 1 or not affected else " in every layer" if affected == layers else " in layers "
    where += _join(listed) if where == " in layers " else ""
    where = where.replace("layers", "layer") if len(affected) == 1 else where
    measured = {(head.index, head.head) for head in report.heads}
    total = f"{len(flagged)} of {count_noun(len(measured), 'head')}"
    heads = total if flagged <= measured else count_noun(len(flagged), "head")
    verb = "has" if len(flagged) == 1 else "have"
    whole = [finding.kind for finding in report.findings if finding.scope == MODEL]
    kinds = count_kinds((one.kind, len(one.heads)) for one in report.findings if one.scope != MODEL)
    said = [f"The whole model: {_join(list(dict.fromkeys(whole)))}."] if whole else []
    return " ".join([*said, *([f"{heads} {verb} findings{where}: {_join(kinds)}."] if kinds else [])])


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
    return f"No problem found in these {len(looked_for) + len(done)} checks{part}.{rest}"


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


def count_noun(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
