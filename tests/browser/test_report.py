"""The report in a real browser: it draws, a head can be chosen, its numbers are the JSON's, nothing is fetched."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from regard import compare
from regard.health import examine

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
AXE = importlib.util.find_spec("axe_core_python")  # its wheel holds axe.min.js


@pytest.fixture(scope="module")
def browser(browser):
    driver = browser.driver
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.set_window_size(1200, 1000)
    return driver


def open_page(browser, path, fragment=""):
    browser.get("about:blank")  # another hash of the same file would not load it again
    browser.get(path.as_uri() + fragment)
    WebDriverWait(browser, 20).until(
        lambda driver: driver.find_element(By.TAG_NAME, "body").get_attribute("data-ready")
    )


def choose_scores(page, name):
    page.find_element(By.XPATH, f"//fieldset[@id='treatment']/label[text()='{name}']").click()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3, enable_nested_tensor=False
    )
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[:32] *= 40.0
    report = examine(model, [torch.randn(2, 24, 16)], what_if=["temperature=3"], title="<b>bold</b> & fine")
    folder = tmp_path_factory.mktemp("report")
    report.save(folder / "report.json")
    return report.save(folder / "report.html"), json.loads((folder / "report.json").read_text())


@pytest.fixture
def page(browser, saved):
    open_page(browser, saved[0])
    browser.find_element(By.CSS_SELECTOR, "#numbers-of-head summary").click()
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def shown(page, statistic):
    row = page.find_element(By.CSS_SELECTOR, f'tr[data-statistic="{statistic}"]')
    return {cell.get_attribute("data-key"): cell.text for cell in row.find_elements(By.TAG_NAME, "td")}


def head_of(told, index, head):
    return next(one for one in told["heads"] if (one["index"], one["head"]) == (index, head))


def assert_numbers(page, expected):
    for statistic in ("entropy", "entropy_ratio", "max_weight", "max_logit", "distance"):
        for key, text in shown(page, statistic).items():
            value = expected["statistics"][statistic][key]
            if text.startswith("< "):  # in the first bin, which reaches to 0
                assert key.startswith("q") and value < float(text[2:]) < 2e-10, (statistic, key)
            else:
                rel = 6e-3 if key.startswith("q") else 2e-3
                assert float(text) == pytest.approx(value, rel=rel, abs=1e-9), (statistic, key)


def test_a_click_on_the_map_shows_that_head(page, saved):
    page.find_element(By.CSS_SELECTOR, 'rect[data-layer="2"][data-head="3"]').click()
    assert page.find_element(By.ID, "chosen").text == "Layer 2, head 3 · layers.2.self_attn"
    assert_numbers(page, head_of(saved[1], 2, 3))
    assert page.find_elements(By.CSS_SELECTOR, "#histogram rect")
    assert page.find_elements(By.CSS_SELECTOR, "#curve polyline")


def test_lists_and_findings_choose_heads_too(page, saved):
    Select(page.find_element(By.ID, "layer")).select_by_index(0)
    Select(page.find_element(By.ID, "head")).select_by_index(2)
    assert_numbers(page, head_of(saved[1], 0, 2))
    chip = page.find_element(By.CSS_SELECTOR, "#causes .chip")
    chip.click()
    where = int(chip.get_attribute("data-layer")), int(chip.get_attribute("data-head"))
    assert where[0] == 1  # the unhealthy layer
    assert_numbers(page, head_of(saved[1], *where))
    cell = page.find_element(By.CSS_SELECTOR, "rect.cell.chosen")
    assert (int(cell.get_attribute("data-layer")), int(cell.get_attribute("data-head"))) == where


def test_arrow_keys_choose_heads_and_stop_at_the_edges(page):
    page.find_element(By.CSS_SELECTOR, 'rect[data-layer="0"][data-head="0"]').click()
    svg = page.find_element(By.CSS_SELECTOR, "#map svg")
    for keys, where in (("UUL", (0, 0)), ("DRR", (1, 2)), ("DDDRRRR", (2, 3)), ("LU", (1, 2))):
        for key in keys:
            svg.send_keys({"U": Keys.UP, "D": Keys.DOWN, "L": Keys.LEFT, "R": Keys.RIGHT}[key])
        cell = page.find_element(By.CSS_SELECTOR, "rect.cell.chosen")
        assert (int(cell.get_attribute("data-layer")), int(cell.get_attribute("data-head"))) == where, keys


def test_what_if_shows_the_heads_as_they_would_be(page, saved):
    choose_scores(page, "if temperature=3")
    page.find_element(By.CSS_SELECTOR, 'rect[data-layer="1"][data-head="0"]').click()
    assert_numbers(page, head_of(saved[1]["what_if"]["temperature=3"], 1, 0))
    assert page.find_elements(By.CSS_SELECTOR, "#curve .before")


def test_another_statistic(page):
    Select(page.find_element(By.ID, "statistic")).select_by_visible_text("max weight")
    assert "largest weight" in page.find_element(By.ID, "meaning").text
    assert page.find_element(By.CSS_SELECTOR, "tr.now").get_attribute("data-statistic") == "max_weight"


def test_ticks_are_numbers_that_people_choose(page):
    for name in ("entropy ratio", "max logit", "distance", "logit variance"):
        Select(page.find_element(By.ID, "statistic")).select_by_visible_text(name)
        marks = page.find_elements(By.CSS_SELECTOR, "#histogram text")[:-1]  # the last tells how high the bars are
        texts = [mark.text for mark in marks]
        assert len(texts) >= 3 and all(float(text) == float(f"{float(text):.2g}") for text in texts), (name, texts)
        places = sorted((mark.rect["x"], mark.rect["x"] + mark.rect["width"]) for mark in marks)
        assert all(a[1] < b[0] for a, b in pairwise(places)), (name, texts)


def test_text_stays_text(page):
    assert page.find_element(By.TAG_NAME, "h1").text.startswith("<b>bold</b> & fine")


def test_it_fits_a_phone(page):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", dict(width=390, height=844, deviceScaleFactor=1, mobile=True)
    )
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        small = page.execute_script(
            "return [...document.querySelectorAll('p, td, th, dd, label')].filter(e => e.offsetParent && "
            "parseFloat(getComputedStyle(e).fontSize) < 12).length"
        )
        assert small == 0
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_figures_are_told_in_words(page):
    for figure in page.find_elements(By.CSS_SELECTOR, "figure svg"):
        assert figure.get_attribute("role") == "img"
        assert figure.get_attribute("aria-label")


def test_two_reports_side_by_side(browser, saved, tmp_path):
    from regard.cli import main

    one, other = tmp_path / "a.json", tmp_path / "b.json"
    told = saved[1]
    one.write_text(json.dumps(told))
    shifted = json.loads(json.dumps(told))
    head_of(shifted, 1, 2)["statistics"]["entropy_ratio"]["mean"] = 0.125
    head_of(shifted, 1, 2)["statistics"]["entropy_ratio"]["q05"] = 1e-12
    other.write_text(json.dumps(shifted))
    assert main(["compare", str(one), str(other), "--out", str(tmp_path / "both.html")]) == 1
    open_page(browser, tmp_path / "both.html")
    browser.find_element(By.CSS_SELECTOR, "#numbers-of-head summary").click()
    browser.find_element(By.CSS_SELECTOR, '#map-change rect[data-layer="1"][data-head="2"]').click()
    assert browser.find_element(By.ID, "chosen").text == "Layer 1, head 2 · layers.1.self_attn"
    row = {
        cell.get_attribute("data-key"): cell.text if "<" in cell.text else float(cell.text)
        for cell in browser.find_elements(By.CSS_SELECTOR, 'tr[data-statistic="entropy_ratio"] td')
    }
    assert row["q05 b"] == "< 1.1e-10"  # where the report's own page has no digits either
    assert row["q95 a"] == pytest.approx(head_of(told, 1, 2)["statistics"]["entropy_ratio"]["q95"], rel=2e-2)
    cut = "return [...document.querySelectorAll('.scroll')].map(part => part.scrollWidth - part.clientWidth)"
    assert set(browser.execute_script(cut)) == {0}
    for letter in ("a", "b", "change"):  # each map above its own colours
        across, ruler = (browser.find_element(By.ID, f"{what}-{letter}").rect["x"] for what in ("map", "scale"))
        assert across == ruler
    assert row["mean b"] == 0.125
    assert row["mean a"] == pytest.approx(head_of(told, 1, 2)["statistics"]["entropy_ratio"]["mean"], rel=2e-3)
    painted = browser.find_element(By.CSS_SELECTOR, '#map-change rect[data-layer="0"][data-head="0"]')
    assert painted.get_attribute("fill") == "rgb(222 222 218)"  # where nothing changed
    assert len(browser.find_elements(By.CSS_SELECTOR, "rect.cell.chosen")) == 3
    browser.find_element(By.CSS_SELECTOR, "#map-b svg").send_keys(Keys.RIGHT)
    assert browser.find_element(By.ID, "chosen").text.startswith("Layer 1, head 3 ")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_map_beyond_one_has_its_own_range_and_marks_that_can_be_seen(browser, tmp_path):
    torch.manual_seed(0)
    report = examine(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        [0.01 * torch.randn(2, 24, 16)],
        what_if=["normalizer=entmax15"],
    )
    assert (report.findings[0].kind, len(report.findings[0].heads)) == ("diffuse", 4)
    open_page(browser, report.save(tmp_path / "report.html"))
    rings = browser.find_elements(By.CSS_SELECTOR, "circle.ring")
    assert {ring.value_of_css_property("stroke") for ring in rings} == {"rgb(31, 31, 78)"}  # on light cells
    assert browser.find_element(By.CSS_SELECTOR, "#histogram text:last-child").text == "100 %"
    Select(browser.find_element(By.ID, "statistic")).select_by_visible_text("gain ratio")
    most = max(head.statistics["gain_ratio"].mean for head in report.what_if["normalizer=entmax15"].heads)
    assert most > 3
    for treatment, top in (("as measured", 1.0), ("if normalizer=entmax15", most)):
        choose_scores(browser, treatment)
        ends = browser.find_elements(By.CSS_SELECTOR, "#scale span")
        assert [float(end.text) for end in ends[:2]] == pytest.approx([0.0, top], rel=1e-3)


@pytest.fixture(scope="module")
def tokens_saved(tmp_path_factory):
    from regard.health.models.tiny import CHARACTERS, TinyLM, encode

    torch.manual_seed(0)
    model = TinyLM(layers=48, heads=4, width=32, length=64)
    with torch.no_grad():
        model.blocks[40].attention.qkv.weight[:64] *= 40.0
    ids = encode("the cat sat on the mat and the dog sat on the log, for the old cat ")[None, :64]
    report = examine(model, [ids], what_if=["qk_norm"], tokenizer=CHARACTERS.__getitem__, title="deep")
    assert {index for index, _ in report.findings[0].places} == {40}
    return report.save(tmp_path_factory.mktemp("tokens") / "report.html"), report


def test_the_head_to_look_at_first_is_open_and_links_choose_another(browser, tokens_saved):
    path, report = tokens_saved
    open_page(browser, path)
    first = min(report.findings[0].places)
    chosen = browser.find_element(By.ID, "chosen")
    assert chosen.text.startswith(f"Layer {first[0]}, head {first[1]} ")
    assert chosen.get_attribute("href").endswith(f"#layer-{first[0]}-head-{first[1]}")
    open_page(browser, path, "#layer-7-head-2")
    assert browser.find_element(By.ID, "chosen").text.startswith("Layer 7, head 2 ")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_token_shows_its_top_keys(browser, tokens_saved):
    path, report = tokens_saved
    open_page(browser, path, "#layer-40-head-1")
    head = next(one for one in report.tokens["heads"] if (one["index"], one["head"]) == (40, 1))
    assert head["kind"] in browser.find_element(By.ID, "head-kind").text
    token = browser.find_elements(By.CSS_SELECTOR, "#passage .token")[20]
    browser.execute_script("arguments[0].click()", token)
    text = browser.find_element(By.ID, "top-keys").text
    assert text.startswith("Token 20,")
    for key, weight in zip(head["keys"][20], head["weights"][20], strict=True):
        assert f"({key}) {weight:.2f}" in text
    tops = browser.find_elements(By.CSS_SELECTOR, "#passage .token.top")
    assert len(tops) == len(head["keys"][20])


def test_marks_follow_the_what_if_and_all_layers_fit(browser, tokens_saved):
    path, report = tokens_saved
    open_page(browser, path)
    shown = "return document.querySelectorAll('circle.ring:not(.none)').length"
    assert browser.execute_script(shown) == len({place for one in report.findings for place in one.places})
    choose_scores(browser, "if qk_norm")
    changed = report.what_if["qk_norm"].findings
    assert browser.execute_script(shown) == len({place for one in changed for place in one.places})
    assert browser.execute_script("return document.querySelector('#map svg').getBoundingClientRect().height") < 700


def test_a_cause_alone_can_be_marked_and_by_the_keyboard(browser, tokens_saved):
    path, report = tokens_saved
    open_page(browser, path)
    numbers = "return [...document.querySelectorAll('circle.ring:not(.none)')].length"
    everything = browser.execute_script(numbers)
    button = browser.find_element(By.CSS_SELECTOR, "#causes .place")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "true"
    own = {place for one in report.findings if one.kind == button.get_attribute("data-kind") for place in one.places}
    assert browser.execute_script(numbers) == len(own) and own
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "false" and browser.execute_script(numbers) == everything


@pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (420, "dark")])
def test_axe_finds_no_violation(browser, saved, tokens_saved, tmp_path, width, theme):
    axe = (Path(AXE.submodule_search_locations[0]) / "axe.min.js").read_text()
    comparison = compare(tokens_saved[1], tokens_saved[1]).save(tmp_path / "both.html")
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [dict(name="prefers-color-scheme", value=theme)]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=features))
    try:
        for path in (saved[0], tokens_saved[0], comparison):
            open_page(browser, path)
            browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
            browser.execute_script(f"{axe}; window.axe = axe")
            found = browser.execute_async_script(
                "const done = arguments[0]; axe.run().then(({ passes, violations }) => done([passes.length, "
                "violations.map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 120))])]))"
            )
            assert found[0] > 15 and found[1] == [], path.name
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[]))


def test_the_chart_follows_the_statistic(browser, tokens_saved):
    open_page(browser, tokens_saved[0])
    for name, has_curve in (("distance", True), ("entropy ratio", True), ("max logit", False)):
        Select(browser.find_element(By.ID, "statistic")).select_by_visible_text(name)
        assert browser.find_element(By.ID, "curve-title").text.startswith(name)
        assert bool(browser.find_elements(By.CSS_SELECTOR, "#curve polyline")) == has_curve


def test_a_word_leads_to_its_meaning(browser, tokens_saved):
    open_page(browser, tokens_saved[0])
    link = browser.find_element(By.CSS_SELECTOR, "#causes a.word")
    assert link.get_attribute("title")
    browser.execute_script("arguments[0].click()", link)
    entry = browser.find_element(By.ID, link.get_attribute("href").partition("#")[2])
    assert entry.is_displayed()


def test_the_first_screen_has_verdict_cause_step_map_and_tokens(browser, tokens_saved):
    browser.set_window_size(1400, 1040)  # 900 of them for the page
    open_page(browser, tokens_saved[0])
    high = browser.execute_script("return innerHeight")
    for selector in ("h1", "#causes li", "#copy", "#map svg", "#scale", "#passage", "#top-keys", "a[href='#checked']"):
        box = browser.find_element(By.CSS_SELECTOR, selector).rect
        assert box["y"] + box["height"] <= high, selector
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_tokens_say_that_they_are_as_measured_under_a_change(browser, tokens_saved):
    open_page(browser, tokens_saved[0])
    note = browser.find_element(By.ID, "tokens-note")
    assert not note.is_displayed()
    choose_scores(browser, "if qk_norm")
    assert note.is_displayed()
