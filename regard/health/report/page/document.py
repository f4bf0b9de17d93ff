"""A self-contained HTML file: one script, one style, compressed numbers, no network.

The content security policy names the script and the style by their hashes, so nothing else can run or be loaded.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any


def make_document(title: str, body: str, scripts: Sequence[str] = (), numbers: str = "", style: str = "") -> str:
    """The file's text: `body` is HTML, `scripts` files of this folder, `numbers` the result of `pack`, `style` CSS."""
    code, style = "".join(map(_read, ("draw.js", *scripts))) if scripts else "", _read("page.css") + style
    allowed = _hash(code) if code else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    tail = f"""<script type="application/octet-stream" id="numbers">{numbers}</script>
<script>{code}</script>
"""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
{tail if code else ""}</body>
</html>
"""


def embed(page: str, height: int = 720) -> str:
    """The page in a sandboxed frame, for notebooks: its script runs, but cannot reach the notebook."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(page)}" width="100%" height="{height}" '
        'title="regard report" style="border:0"></iframe>'
    )


def escape(value: Any) -> str:
    """`value` as text inside HTML."""
    return html.escape(str(value), quote=True)


def pack(numbers: dict[str, Any]) -> str:
    """Compressed JSON as text, which draw.js unpacks."""
    plain = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(plain.encode(), 9, mtime=0)).decode()


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
