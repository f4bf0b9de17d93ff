"""The page of a `Look`: kinds of heads, and for each head its tokens, top keys, received mass and map; no script."""

from regard.health.report.page.document import escape, make_document
from regard.health.tokens.view import HeadLook, Look, QueryTop, describe_kind

DRAWN = 16  # heads in full; the others are in the table of kinds
ROWS = 256  # rows of a head's table
CELL = 5  # map units per weight
FAINT = 0.01  # weights below are not drawn
STYLE = """
.heads { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); }
.heads h2 { margin: 1.4rem 0 .3rem; } .heads .pair { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
.heads > section { min-width: 0; } .heads .pair table { margin: 0; }
.heads .pair th { overflow-wrap: anywhere; white-space: normal; }
"""


def render(look: Look) -> str:
    shown = sorted(look.heads, key=lambda head: -head.score)[:DRAWN]
    note = ""
    if len(look.heads) > DRAWN:
        note = f'<p class="meaning">The {DRAWN} heads with the highest scores; choose others with layer= and head=.</p>'
    gaps = "".join(f"<p>Not read: {escape(layer)}: {escape(reason)}</p>" for layer, reason in look.unmeasured)
    passage = " ".join(f'<span class="token">{escape(token)}</span>' for token in look.tokens[:ROWS])
    header = f"""<header><p class="brand">regard · what heads look at</p>
<h1>{escape(look.title)}</h1>{gaps}
<p class="passage">{passage}</p></header>"""
    heads = f'<div class="heads">{"".join(map(_head, shown))}</div>'
    body = [header, _kinds(look) if len(look.heads) > 1 else "", note, heads]
    return make_document(title=f"{look.title}: what heads look at", body="\n".join(body), style=STYLE)


def _kinds(look: Look) -> str:
    rows = "".join(
        f"<tr><th>{escape(kind)}</th><td>{len(heads)}</td>"
        f"<td>{escape(' '.join(f'{head.index}·{head.head} ({head.score:.2f})' for head in heads[:24]))}</td></tr>"
        for kind, heads in look.by_kind().items()
    )
    return f"""<section><h2>Kinds of heads</h2><div class="scroll"><table class="text">
<thead><tr><th>kind</th><th>heads</th><th>layer·head (score)</th></tr></thead><tbody>{rows}</tbody></table></div>
</section>"""


def _head(head: HeadLook) -> str:
    received = "".join(
        f"<tr><th>{key.index} {escape(key.token)}</th><td>{key.weight:.0%}</td></tr>" for key in head.most_received()
    )
    rows = "".join(
        f"<tr><th>{row.query} {escape(row.token)}</th><td>{_list_keys(row)}</td></tr>" for row in head.top[:ROWS]
    )
    return f"""<section id="layer-{head.index}-head-{head.head}"><h2>Layer {head.index}, head {head.head}</h2>
<p class="meaning">{escape(head.layer)}: {escape(describe_kind(head))}</p>
<div class="pair"><figure><figcaption>weights: a row per query, a column per key</figcaption>{draw_map(head)}</figure>
<figure><figcaption>keys that receive most of the weight</figcaption><table>{received}</table></figure></div>
<details><summary>Top keys of each token</summary>
<div class="scroll"><table class="text">{rows}</table></div></details></section>"""


def _list_keys(row: QueryTop) -> str:
    return " ".join(
        f'<span class="token">{key.index} {escape(key.token)} <b>{key.weight:.2f}</b></span>' for key in row.keys
    )


def draw_map(head: HeadLook) -> str:
    """The weights as an SVG, from light (0) to dark (1)."""
    if head.map is None:
        return f'<p class="none">No map: the text has {len(head.tokens)} tokens, the map takes 128.</p>'
    queries, keys = head.map.shape
    cells = "".join(
        f'<rect x="{key * CELL}" y="{row * CELL}" width="{CELL}" height="{CELL}" fill-opacity="{weight:.2f}">'
        f"<title>{escape(f'{head.tokens[row]} → {head.key_tokens[key]}: {weight:.2f}')}</title></rect>"
        for row, weights in enumerate(head.map.tolist())
        for key, weight in enumerate(weights)
        if weight >= FAINT
    )
    return (
        f'<svg class="weights" viewBox="0 0 {keys * CELL} {queries * CELL}" role="img" '
        f'aria-label="weights of {escape(head.layer)}, head {head.head}">{cells}</svg>'
    )
