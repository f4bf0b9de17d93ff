"""A griffe extension: doctest examples in docstrings become code blocks; mkdocstrings would quote them as prose."""

from __future__ import annotations

import re

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*\n).*)*", re.MULTILINE)  # from >>> to the next empty line


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(self.fenced, obj.docstring.value)

    def fenced(self, match: re.Match[str]) -> str:
        return f"{match[1]}```python\n{match[0]}\n{match[1]}```"
