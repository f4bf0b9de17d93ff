"""LaTeX to MathML, which browsers draw by themselves: no script, no font, no network.

>>> from regard.lab.mathematics import mathml
>>> mathml("a^k").startswith("<math")
True
"""

from __future__ import annotations

import re

BARE = re.compile(r"(\\(?:log|ln|tanh|max|lse))\s+(?=[a-zA-Z\\])")  # a function before its argument, without brackets


def mathml(latex: str, block: bool = False) -> str:
    """One formula; `block` puts it on a line of its own."""
    from latex2mathml.converter import convert

    return convert(BARE.sub(r"\1\,", latex), display="block" if block else "inline")
