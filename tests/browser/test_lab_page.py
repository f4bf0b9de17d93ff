"""lab.html in a browser: complete, quiet, readable on a phone."""

import pytest
import regard_lab as lab
from regard_lab import page
from regard_lab.mathml import formula_line
from regard_lab.run import claims

from regard.health.report import files

OPEN = "for (const part of document.querySelectorAll('details')) part.open = true"
CLAIMS = ("jacobian", "gradient-norm", "scaled-example", "causal-and-padding", "online-softmax")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "lab.html"
    files.write(path, page.page([lab.run(name) for name in CLAIMS]))
    return path.as_uri()


@pytest.mark.parametrize("width", [1200, 360])
def test_it_is_quiet_and_fits(browser, address, width):
    browser.open(address, width)
    assert browser.errors() == []
    assert browser.overflow() <= 0
    assert browser.asked() == [] or all(name.startswith("data:") for name in browser.asked())
    small = browser.run(
        "return [...document.querySelectorAll('p, td, li, h2')]"
        ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 14).map(e => e.textContent)"
    )
    assert small == []


@pytest.mark.parametrize("width", [1200, 360])
def test_figures_are_drawn_and_told(browser, address, width):
    browser.open(address, width)
    browser.run(OPEN)
    figures = browser.run(
        "return [...document.images]"
        ".map(i => [i.complete && i.naturalWidth > 0, i.alt, i.getBoundingClientRect().width])"
    )
    assert len(figures) == len(CLAIMS)
    for drawn, alt, across in figures:
        assert drawn and len(alt) > 20 and 200 < across <= width


def test_mathematics_is_typeset_by_the_browser(browser, address):
    browser.open(address)
    browser.run(OPEN)
    lines = "return [...document.querySelectorAll('.formula')].map(p => [...p.querySelectorAll('math')]"
    heights = browser.run(f"{lines}.map(m => m.getBoundingClientRect().height))")
    assert len(heights) >= len(CLAIMS) and min(map(max, heights)) > 8
    fraction = browser.run("return document.querySelectorAll('msub, mfrac').length")
    assert fraction > 5


@pytest.mark.parametrize("width", [1280, 390])
def test_no_derivation_runs_out_of_its_column(browser, tmp_path, width):
    path = tmp_path / "derivations.html"
    sections = "".join(
        f'<section id="{name}"><div>{"".join(map(formula_line, claim.derivation))}</div>'
        '<figure style="width: 390px"></figure></section>'
        for name, claim in claims().items()
    )
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<style>{page.STYLE}</style>{sections}",
        encoding="utf-8",
    )
    browser.open(path.as_uri(), width)
    over = browser.run(
        "return [...document.querySelectorAll('.formula')].filter(p => p.scrollWidth > p.clientWidth)"
        ".map(p => p.closest('section').id)"
    )
    assert over == []


def test_wrong_claims_come_first_and_a_link_leads_to_any(browser, address):
    browser.open(address)
    order = browser.run("return [...document.querySelectorAll('.verdict')].map(e => e.classList[1])")
    assert order == sorted(order, key=["wrong", "holds_if", "holds"].index) and {*order} == {"wrong", "holds_if"}
    shown = browser.run("return [...document.images].filter(i => i.checkVisibility()).map(i => i.closest('[id]').id)")
    assert shown == [name for name in CLAIMS if lab.run(name).verdict == "wrong"]
    browser.open(f"{address}#jacobian")
    assert 0 <= browser.run("return document.getElementById('jacobian').getBoundingClientRect().top") < 900
    browser.run(OPEN)
    text = browser.run("return document.getElementById('scaled-example').innerText")
    assert "wrong" in text and "0.829" in text and "predicted" in text and "note 001" in text


@pytest.mark.parametrize(("width", "most"), [(1400, 8000), (420, 13000)])
def test_the_whole_page_is_short(browser, tmp_path, width, most):
    """Every claim with the words of one that is there: the lengths are near, and no model is trained here."""
    path = tmp_path / "all.html"
    wrong, others = ([lab.run(name) for name in names] for names in (("scaled-example", "gradient-norm"), CLAIMS[:1]))
    path.write_text(page.page([*wrong * 6, *others * 42]), encoding="utf-8")
    browser.open(path.as_uri(), width)
    assert 2000 < browser.run("return document.documentElement.scrollHeight") < most


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_dark_where_the_screen_is(browser, address, scheme):
    features = [dict(name="prefers-color-scheme", value=scheme)]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=features))
    browser.open(address)
    paper, ink, figure = browser.run(
        "const style = (e) => getComputedStyle(document.querySelector(e));"
        "return [style('body').backgroundColor, style('body').color, style('.figure').filter]"
    )
    light = [sum(map(int, colour[4:-1].split(","))) > 380 for colour in (paper, ink)]
    assert light == [scheme == "light", scheme == "dark"]
    assert ("invert" in figure) == (scheme == "dark")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[]))
