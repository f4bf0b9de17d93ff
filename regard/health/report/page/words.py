"""Words of the glossary inside a page: explained on hover, linked to the page's own glossary."""

from __future__ import annotations

import re

from regard.health.report.glossary import FINDINGS, STATISTICS, anchor, words
from regard.health.report.page.document import escape

PLAIN = ("logit", "scale", "soft cap", "QK-norm", "temperature", "normaliser", "attention sink", "what-if", "gradient",
         "ablation", "padding", "loss")  # fmt: skip
LINKED = sorted({*PLAIN, *(name.replace("_", " ") for name in STATISTICS), *FINDINGS}, key=len, reverse=True)
PATTERN = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, LINKED))})(?=s?(?![\w=-]))", re.IGNORECASE)


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
        return text
    return f'<a class="word" href="#{anchor(word)}" title="{escape(meaning)}">{text}</a>'


def make_glossary() -> str:
    """The section that the links lead to."""
    entries = "".join(
        f'<dt id="{anchor(word)}">{escape(word)}</dt><dd>{escape(meaning)}</dd>'
        for word, meaning in sorted(words().items(), key=lambda pair: pair[0].lower())
    )
    return f"""<section id="glossary"><h2>Words on this page</h2>
<details><summary>What each word means</summary><dl>{entries}</dl></details></section>"""
