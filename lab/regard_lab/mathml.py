r"""LaTeX to MathML, which browsers draw without script, font or network.

>>> from regard_lab.mathml import formula_line, mathml, split_formula
>>> mathml("a^k").startswith("<math")
True
>>> split_formula(r"w_1 + w_2 = \frac{a}{b = c}, \quad \text{if } b > 0")
['w_1 + w_2', '= \\frac{a}{b = c},', '\\quad', '\\text{if }', 'b > 0']
"""

from __future__ import annotations

import re
from html import escape

BARE = re.compile(r"(\\(?:log|ln|tanh|max|lse))\s+(?=[a-zA-Z0-9\\])")  # a function and its argument without brackets
BEFORE_SIGN = r"\[|&#x(?:0003D|00028|0002C|0003C|0003E|02248|02192|021D2|02264|02265);"  # [ = ( , < > ≈ → ⇒ ≤ ≥
SIGN = re.compile(rf"(<mo[^>]*>(?:{BEFORE_SIGN})</mo>)<mo>&#x02212;")  # a sign, not a difference
KINDS = {  # symbols whose kind, and so spacing, latex2mathml gets wrong
    "<mi>&#x0007E;</mi>": '<mo form="infix">&#x0223C;</mo>',  # ∼, also where a piece begins with it
    "<mi>&#x000B1;</mi>": "<mo>&#x000B1;</mo>",  # ±
    "<mo>&#x0221E;</mo>": "<mi>&#x0221E;</mi>",  # ∞
    "<mi>&#x027FA;</mi>": "<mo>&#x027FA;</mo>",  # ⟺
}
TOKEN = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|.")
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\approx", r"\sim", r"\to", r"\Rightarrow")
SPACES = (r"\quad", r"\qquad", r"\;")
SHORT = 8  # characters of LaTeX before a relation that are not split off
OPENING, CLOSING = ("{", "(", "[", r"\{", r"\left"), ("}", ")", "]", r"\}", r"\right")


def mathml(latex: str, block: bool = False) -> str:
    """Convert one formula; `block` puts it on a line of its own."""
    from latex2mathml.converter import convert

    made = convert(BARE.sub(r"\1\,", latex), display="block" if block else "inline")
    for wrong, right in KINDS.items():
        made = made.replace(wrong, right)
    return SIGN.sub(r'\1<mo form="prefix">&#x02212;', made)


def formula_line(latex: str) -> str:
    """Convert a line of a derivation, with line breaks allowed before relations, at wide spaces and in words."""
    made = []
    for piece in split_formula(latex):
        if piece in SPACES:
            made.append("&emsp; ")
        elif piece.startswith(r"\text{") and piece.endswith("}"):
            made.append(escape(piece[len(r"\text{") : -1]))
        else:
            made.append("<wbr>" + mathml(piece).replace("<math ", '<math displaystyle="true" ', 1))
    return f'<p class="formula">{"".join(made)}</p>'


def split_formula(latex: str) -> list[str]:
    """Split a formula before relations and around wide spaces and words, never inside brackets."""
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
