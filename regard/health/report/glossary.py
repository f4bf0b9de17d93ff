"""Every word that a report uses, in one sentence each, and its links in a page; docs/glossary.md has the same words."""

import re

from regard.health import checks
from regard.health.report.page.document import escape
from regard.statistics.definitions import DEFINITIONS

WORDS = {
    "layer": "One attention module of the model; layers count from 0 in the order in which they run.",
    "head": "One of the attention patterns that a layer computes side by side; written layer·head, such as 3·5.",
    "query": "The token that looks; each query has one row of weights over the keys.",
    "key": "A token that can be looked at.",
    "row": "The weights of one query over all keys that it may look at; they usually sum to 1.",
    "weight": "How much of its attention a query gives to a key, from 0 to 1.",
    "logit": "The number that becomes a weight: scale times query times key, with bias and mask, before the softmax.",
    "score": "Scale times query times key: a logit before soft cap, bias and temperature.",
    "scale": "The number that query times key is multiplied by; 1/√d is usual, d being the width of a head.",
    "mask": "What hides keys from queries: later tokens, padding, other documents.",
    "padding": "Tokens without meaning that fill short texts up to a common length.",
    "normaliser": "The function that turns a row of logits into weights; usually softmax.",
    "temperature": "A number that logits are divided by: above 1 flattens the weights, below 1 sharpens them.",
    "soft cap": "A smooth limit on the size of scores, c·tanh(score/c).",
    "QK-norm": "Queries and keys are divided by their size before they are multiplied, which bounds the logits.",
    "sink": "A learned number in the softmax's denominator that takes weight away from all keys.",
    "output gate": "A learned number between 0 and 1 that a head's output is multiplied by.",
    "attention sink": "A token, mostly the first, on which heads put weight that they do not need.",
    "what-if": "A change of the scores that was tried on the same queries and keys, without training.",
    "loss": "How badly the model predicts the text, in nats per token; smaller is better.",
    "ablation": "How much the loss rises if a head is switched off; near 0 means that the head does not matter here.",
    "largest logit": "The largest logit of all rows of a head, a layer or the model; published runs keep it below 100.",
    "finding": "Something that a check noticed, with its evidence, threshold and remedy.",
    "cause": "A finding that explains others: mend it first.",
    "symptom": "A finding that follows from a cause.",
    "critical": "Training is failing, or will fail.",
    "warning": "Probably a mistake.",
    "note": "A fact worth knowing, often by design.",
    "threshold": "The number from which on a check reports a finding.",
    "quantile": "q05 is the value below which 5 % of the rows lie; q50 is the median, q95 leaves 5 % above.",
    "gradient": "What training changes weights by; if it is lost in the softmax, a head stops learning.",
}
RATIOS = {
    "entropy_ratio": "How evenly a row spreads its weight: 1 is evenly over all keys, 0 is all on one key. It is the "
    "entropy divided by its largest possible value, ln(visible keys).",
    "gain_ratio": "How much gradient passes through the softmax, compared with a row of equal weights: near 0, the "
    "head can no longer learn.",
}
FIRST = (  # in the order in which reports list statistics; the others follow
    "entropy_ratio", "entropy", "effective_keys", "participation", "max_weight", "first_key_mass", "distance",
    "gain_ratio", "gradient_gain",
)  # fmt: skip
_MEANINGS = RATIOS | {name: one.words for name, one in DEFINITIONS.items()}
STATISTICS = {name: _MEANINGS[name] for name in dict.fromkeys((*FIRST, *DEFINITIONS))}
KINDS_OF_HEADS = {
    "previous token": "It looks at the token before the query.",
    "next token": "It looks at the token after the query.",
    "same token": "It looks at tokens equal to the query's, itself included.",
    "first key": "It looks at the first token of the text, where heads often rest.",
    "delimiter": "It looks at punctuation, spaces and special tokens.",
    "induction": "It finds an earlier copy of the query's token and looks at the token after it.",
    "mixed": "No single pattern takes 0.4 of its weight or more.",
}
FINDINGS = {
    "causal at the wrong end": "With cached keys, the causal mask begins at the wrong key and hides tokens in use.",
    "collapsed": "Nearly every query puts all its weight on one key.",
    "dead": "The head's output does not depend on where it looks, or nothing reads its output.",
    "diffuse": "The head spreads its weight evenly over all keys: it does not choose.",
    "documents mixed": "One document of a packed row changes the output of another.",
    "dropout in evaluation": "Weights are dropped at random although the model is in evaluation mode.",
    "duplicate heads": "Two heads of a layer do the same, row by row.",
    "duplicate layers": "Two layers hold the same weights.",
    "dying gradient": "Hardly any gradient passes through the softmax, so the queries and keys stop learning.",
    "encoder ignored": "The decoder's output does not depend on the encoder's text.",
    "exploding logits": "Logits are so large that rounding decides, or training diverges.",
    "heads in another order": "Key or value heads belong to other query heads than the model uses.",
    "heads mixed with time": "A reshape mixes heads with tokens.",
    "mask hides nothing": "A mask of ones and zeros is added to the scores, where it hides nothing.",
    "mask inverted": "The mask shows what it should hide.",
    "mask off by one": "The causal mask shows one token too many, or one too few.",
    "not finite": "The output holds NaN or infinity.",
    "padding moves the text": "Padding changes the output of the text beside it.",
    "positional": "The head looks at one fixed distance, whatever the text says.",
    "q and k are strangers": "Queries and keys do not belong together: another head's keys, or an untrained layer.",
    "q and k exchanged": "Queries and keys are used in each other's place.",
    "random in evaluation": "Two equal runs in evaluation mode differ.",
    "rank collapse": "All tokens become alike from layer to layer.",
    "rotary positions off": "Rotary positions are applied to one side only, or at other positions.",
    "rows that see no key": "Some tokens may not look at any key.",
    "rows that see one key": "Some tokens may look at one key only.",
    "scale off": "Logits are far larger or smaller than the scale 1/√d would make them.",
    "sees padding": "Tokens of the text look at padding.",
    "sees the future": "Later tokens change the output of earlier ones, although the model predicts the next token.",
    "sequences mixed": "One text of a batch changes the output of another.",
    "shut gate": "The head's output is multiplied by a gate that is near 0, so the head does almost nothing.",
    "sink-dormant": "The head puts all its weight on the first key or a sink, so it does nothing on this text.",
    "softmax over another axis": "The softmax runs over queries, heads or the batch, where the keys are meant.",
    "untrained or broken": "The model predicts the text worse than the text's own frequencies do.",
    "weights do not add up to 1": "Weights were changed after the softmax, so that a query's do not add up to 1.",
}


PLAIN = ("logit", "scale", "soft cap", "QK-norm", "temperature", "normaliser", "attention sink", "what-if", "gradient",
         "ablation", "padding", "loss")  # fmt: skip
LINKED = sorted({*PLAIN, *(name.replace("_", " ") for name in STATISTICS), *FINDINGS}, key=len, reverse=True)
PATTERN = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, LINKED))})(?=s?(?![\w=-]))", re.IGNORECASE)


def words() -> dict[str, str]:
    """Every word of a report with its meaning; statistics are written without underscores."""
    statistics = {name.replace("_", " "): meaning for name, meaning in STATISTICS.items()}
    heads = {f"{kind} head": meaning for kind, meaning in KINDS_OF_HEADS.items()}
    return {**WORDS, **statistics, **heads, **FINDINGS}


def anchor(word: str) -> str:
    """The id of a word's entry in the page's glossary.

    >>> from regard.health.report.glossary import anchor
    >>> anchor("QK-norm"), anchor("first key head")
    ('word-qk-norm', 'word-first-key-head')
    """
    return "word-" + "".join(c if c.isalnum() else "-" for c in word.lower())


def link_words(text: str) -> str:
    """The text as HTML, with the first use of each word of the glossary linked."""
    known, used, parts, end = {word.lower(): word for word in LINKED}, set(), [], 0
    for found in PATTERN.finditer(text):
        word = known[found[1].lower()]
        if word not in used:
            used.add(word)
            parts += [escape(text[end : found.start()]), link(word, found[1])]
            end = found.end()
    return "".join([*parts, escape(text[end:])])


def link(word: str, shown: str | None = None) -> str:
    """A word of the glossary as a link with its meaning on hover; a word that it lacks as text."""
    meaning = words().get(word)
    text = escape(word if shown is None else shown)
    if meaning is None:
        described = describe_kind(word)
        return f'<span class="word" title="{escape(described)}">{text}</span>' if described else text
    return f'<a class="word" href="#{anchor(word)}" title="{escape(meaning)}">{text}</a>'


def describe_kind(kind: str) -> str:
    """What a kind of finding means in one sentence: the glossary's, or what its rule says does not hold."""
    if kind in FINDINGS:
        return FINDINGS[kind]
    title = next((rule.title for rule in checks.rules().values() if rule.kind == kind), None)
    return "" if title is None else f"It does not hold that {title}."


def make_glossary() -> str:
    """The section that the links lead to."""
    entries = "".join(
        f'<dt id="{anchor(word)}">{escape(word)}</dt><dd>{escape(meaning)}</dd>'
        for word, meaning in sorted(words().items(), key=lambda pair: pair[0].lower())
    )
    return f"""<section id="glossary"><h2>Words on this page</h2>
<details><summary>What each word means</summary><dl>{entries}</dl></details></section>"""
