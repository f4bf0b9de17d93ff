"""The explorer in a browser: quiet, readable on a phone, and a control changes the numbers."""

import pytest
from regard_lab.explorer.command import render


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    path.write_text(render(), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("width", [1200, 360])
def test_it_is_quiet_and_fits(browser, address, width):
    browser.open(address, width)
    assert browser.errors() == [] and browser.asked() == []
    assert browser.overflow() <= 0


def test_a_control_changes_the_numbers(browser, address):
    browser.open(address)
    read = "return +document.querySelector('[data-number=entropy]').textContent"
    before = browser.run(read)
    browser.run("const c = document.getElementById('temperature'); c.value = 6; c.dispatchEvent(new Event('input'))")
    assert browser.run(read) > before
