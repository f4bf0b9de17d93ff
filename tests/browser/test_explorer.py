"""The explorer in a browser: a knob moves, and the numbers become what the library says."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from regard.lab.explorer.views import Online, Setting

PATIENCE = 120  # seconds: the first answer compiles kernels


@contextmanager
def served():
    """A running `regard explore`: the process, and where its page is."""
    command = [sys.executable, "-m", "regard", "explore", "--no-browser"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        try:
            line = server.stderr.readline()
            assert line.startswith("explore at http://127.0.0.1:"), line
            yield server, line.split()[-1]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def address(browser):
    with served() as (_, where):
        yield where


@pytest.fixture
def explorer(browser, address):
    browser.open(address)
    wait_for(browser, "entropy", Setting().numbers()["entropy"])
    return browser


FIND = """
const deep = (root, selector) => [...root.querySelectorAll(selector),
  ...[...root.querySelectorAll('*')].flatMap(e => e.shadowRoot ? deep(e.shadowRoot, selector) : [])];
"""


def number(browser, name):
    return browser.run(f"{FIND} const e = deep(document, `[data-number='{name}']`)[0]; return e ? e.textContent : null")


def wait_for(browser, name, value):
    """Until the page shows what the library says."""
    deadline, shown = time.monotonic() + PATIENCE, None
    while time.monotonic() < deadline:
        shown = number(browser, name)
        if shown == f"{value:.4f}":
            return
        time.sleep(0.2)
    raise AssertionError(f"{name} shows {shown}, the library says {value:.4f}")


def press(browser, label, key):
    """Press a key on the slider with this label, as a hand on the keyboard would."""
    from selenium.webdriver.common.keys import Keys

    thumb = browser.run(
        f"{FIND} const s = deep(document, 'marimo-slider').find(e => (e.dataset.label || '').includes(arguments[0]));"
        "return deep(s.shadowRoot || s, '[role=slider]')[0]",
        label,
    )
    thumb.send_keys(getattr(Keys, key))


def choose(browser, label, value):
    """Choose in the dropdown with this label."""
    from selenium.webdriver.support.select import Select

    field = browser.run(
        f"{FIND} const d = deep(document, 'marimo-dropdown').find(e => (e.dataset.label || '').includes(arguments[0]));"
        "return deep(d.shadowRoot || d, 'select')[0]",
        label,
    )
    Select(field).select_by_visible_text(value)


def test_a_slider_moves_the_numbers_as_the_library_says(explorer):
    before = Setting().numbers()["entropy"]
    for d_k in (32, 16):
        press(explorer, "d_k", "ARROW_LEFT")
        numbers = Setting(d_k=d_k).numbers()
        assert f"{numbers['entropy']:.4f}" != f"{before:.4f}"
        for name, value in numbers.items():
            wait_for(explorer, name, value)
        before = numbers["entropy"]
    assert explorer.errors() == []


def test_scale_and_normaliser(explorer):
    choose(explorer, "scale", "none")
    wait_for(explorer, "gradient_gain", Setting(scale="none").numbers()["gradient_gain"])
    choose(explorer, "normaliser", "sparsemax")
    wait_for(explorer, "support", Setting(scale="none", normalizer="sparsemax").numbers()["support"])
    assert explorer.errors() == []


def test_online_softmax_is_stepped_to_the_whole(explorer):
    wait_for(explorer, "online_sum", Online(Setting(), 4, 1).numbers()["online_sum"])
    for blocks in (2, 3):
        press(explorer, "blocks seen", "ARROW_RIGHT")
        wait_for(explorer, "online_logsumexp", Online(Setting(), 4, blocks).numbers()["online_logsumexp"])
    assert number(explorer, "online_logsumexp") == number(explorer, "whole_logsumexp")


def test_figures_have_words_and_it_fits_a_phone(browser, address):
    browser.open(address, width=360)
    wait_for(browser, "free_energy", Setting().mechanics()["free_energy"])  # the last cell
    figures = browser.run(
        f"{FIND} return deep(document, 'img.figure')"
        ".map(i => [i.naturalWidth > 0, i.alt, i.getBoundingClientRect().right])"
    )
    assert len(figures) >= 8
    for drawn, alt, right in figures:
        assert drawn and len(alt) > 20 and right <= 360
    assert browser.overflow() <= 0
    assert browser.errors() == []


def test_nothing_comes_from_elsewhere(explorer, address):
    here = urlsplit(address).netloc
    assert all(name.startswith(("data:", "blob:")) or urlsplit(name).netloc == here for name in explorer.asked())


def test_one_ctrl_c_ends_it_while_a_page_is_open(browser):
    with served() as (server, where):
        browser.open(where)
        wait_for(browser, "entropy", Setting().numbers()["entropy"])
        server.send_signal(signal.SIGINT)
        _, told = server.communicate(timeout=20)
    assert server.returncode == 130
    assert told.split("\n")[-2:] == ["interrupted", ""] and "Traceback" not in told
