r"""LaTeX to MathML, which browsers draw by themselves: no script, no font, no network.

>>> from regard.lab.mathematics import line, mathml, pieces
>>> mathml("a^k").startswith("<math")
True
>>> pieces(r"w_1 + w_2 = \frac{a}{b = c}, \quad \text{if } b > 0")
['w_1 + w_2', '= \\frac{a}{b = c},', '\\quad', '\\text{if }', 'b > 0']
"""

from __future__ import annotations

import re
from html import escape

BARE = re.compile(r"(\\(?:log|ln|tanh|max|lse))\s+(?=[a-zA-Z0-9\\])")  # a function and its argument, no brackets
BEFORE_SIGN = r"\[|&#x(?:0003D|00028|0002C|0003C|0003E|02248|02192|021D2|02264|02265);"  # [ = ( , < > ≈ → ⇒ ≤ ≥
SIGN = re.compile(rf"(<mo[^>]*>(?:{BEFORE_SIGN})</mo>)<mo>&#x02212;")  # the minus of −1, no difference
KINDS = {  # what latex2mathml takes for another kind of symbol, and so for another space around it
    "<mi>&#x0007E;</mi>": '<mo form="infix">&#x0223C;</mo>',  # ∼, also where a piece begins with it
    "<mi>&#x000B1;</mi>": "<mo>&#x000B1;</mo>",  # ±
    "<mo>&#x0221E;</mo>": "<mi>&#x0221E;</mi>",  # ∞
    "<mi>&#x027FA;</mi>": "<mo>&#x027FA;</mo>",  # ⟺
}
TOKEN = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|.")
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\approx", r"\sim", r"\to", r"\Rightarrow")
SPACES = (r"\quad", r"\qquad", r"\;")
SHORT = 8  # characters of LaTeX that stay with the relation after them
OPENING, CLOSING = ("{", "(", "[", r"\{", r"\left"), ("}", ")", "]", r"\}", r"\right")


def mathml(latex: str, block: bool = False) -> str:
    """One formula; `block` puts it on a line of its own."""
    from latex2mathml.converter import convert

    made = convert(BARE.sub(r"\1\,", latex), display="block" if block else "inline")
    for wrong, meant in KINDS.items():
        made = made.replace(wrong, meant)
    return SIGN.sub(r'\1<mo form="prefix">&#x02212;', made)


def line(latex: str) -> str:
    """A line of a derivation that a narrow window may break: before a relation, at a wide space, in words."""
    made = []
    for piece in pieces(latex):
        if piece in SPACES:
            made.append("&emsp; ")
        elif piece.startswith(r"\text{") and piece.endswith("}"):
            made.append(escape(piece[len(r"\text{") : -1]))
        else:
            made.append("<wbr>" + mathml(piece).replace("<math ", '<math displaystyle="true" ', 1))
    return f'<p class="formula">{"".join(made)}</p>'


def pieces(latex: str) -> list[str]:
    """The formula cut before relations and around wide spaces and words, never inside brackets."""
    made, depth = [""], 0
    for token in TOKEN.findall(latex):
        depth += (token in OPENING) - (token in CLOSING)
        alone = token in SPACES or token.startswith(r"\text{")
        if depth == 0 and (alone or (token in RELATIONS and len(made[-1].strip()) > SHORT)):
            made.append(token)
        else:
            made[-1] += token
        if depth == 0 and alone:
            made.append("")
    return [piece if piece.startswith(r"\text{") else piece.strip() for piece in made if piece.strip()]
