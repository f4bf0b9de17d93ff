"""One HTML file that needs nothing else: words escaped, numbers packed, one script and one style, no network.

The content security policy names this script and this style by their hashes; nothing else may run or be loaded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from functools import cache
from importlib import resources


def document(title: str, script: str, body: str, numbers: str) -> str:
    """The file: `body` is HTML, `script` names a file of this folder, `numbers` is what `packed` gave."""
    code, style = _file("draw.js") + _file(script), _file("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/octet-stream" id="numbers">{numbers}</script>
<script>{code}</script>
</body>
</html>
"""


def escaped(value) -> str:
    return html.escape(str(value), quote=True)


def packed(numbers: dict) -> str:
    """JSON, compressed, as text that draw.js unpacks."""
    plain = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(plain.encode(), 9, mtime=0)).decode()


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
