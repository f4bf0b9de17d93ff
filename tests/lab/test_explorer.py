"""The explorer: one file without network, whose JavaScript agrees with the library, and its server."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import pytest
import torch
from regard_lab.explorer.command import read_part, render

import regard
from regard.cli import main

ROWS = [[-2.0, 0.1, 0.5, 3.0], [0.3, 0.2, 0.1, -0.1], [30.0, -20.0, 29.5, 1.0], [-1.0, -2.0, -0.5, -4.0]]
STATISTICS = ("entropy", "effective_keys", "max_weight", "support", "mass", "logit_variance", "gradient_gain")


def test_the_command_writes_one_file_without_addresses(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["explore", "--export", str(path)]) == 0
    page = path.read_text("utf-8")
    assert str(path) in capsys.readouterr().out
    assert "http:" not in page and "https:" not in page and "src=" not in page
    assert main(["explore", "--export", str(tmp_path / "page.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


def evaluate(expression):
    """The value of an expression of the page's functions over ROWS, as `rows`."""
    if shutil.which("node") is None:
        pytest.skip("no node to run the page's JavaScript")
    script = (
        read_part("normalizers.js")
        + f"const rows = JSON.parse(process.argv[1]); console.log(JSON.stringify({expression}))"
    )
    done = subprocess.run(
        ["node", "-e", script, json.dumps(ROWS)], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_the_javascript_agrees_with_the_library():
    found = dict(evaluate("Object.keys(NORMALIZERS).map((n) => [n, rows.map((r) => measure(r, n))])"))
    unordered = [name for name in regard.normalizers.names() if not regard.normalizers.get(name).ordered]
    assert sorted(found) == sorted("entmax(alpha=1.25)" if name == "entmax" else name for name in unordered)
    scores = torch.tensor(ROWS, dtype=torch.float64)
    for name, measured in found.items():
        weights = regard.normalize(scores, name, backend="reference")
        torch.testing.assert_close(
            torch.tensor([one["weights"] for one in measured]).double(), weights, atol=1e-6, rtol=0
        )
        exact = regard.statistics.of_scores(scores, normalizer=name)
        for statistic in STATISTICS:
            numbers = torch.tensor([one[statistic] for one in measured], dtype=torch.float64)
            torch.testing.assert_close(
                numbers, exact[statistic], atol=1e-5, rtol=1e-5, msg=lambda m: f"{name} {statistic} {m}"
            )


def test_masked_weights_are_the_library_s():
    weights = evaluate("rows.map((r, i) => weighVisible(r, r.map((_, j) => MASKS.causal(i, j)), 'entmax15'))")
    exact = regard.normalize(torch.tensor(ROWS).double(), "entmax15", mask=regard.masks.causal(4))
    torch.testing.assert_close(torch.tensor(weights).double(), exact, atol=1e-6, rtol=0)


def test_online_softmax_ends_at_the_whole_row():
    for row, online, whole in zip(
        ROWS,
        evaluate("rows.map((r) => runOnline(r, 2, 1))"),
        evaluate("rows.map((r) => runOnline(r, 3, 2))"),
        strict=True,
    ):
        state = regard.OnlineSoftmax().update(torch.tensor(row[:2]).double())
        assert online["online_sum"] == pytest.approx(float(state.sum))
        assert whole["online_logsumexp"] == pytest.approx(float(regard.logsumexp(torch.tensor(row).double())))


def test_free_energy_is_energy_minus_temperature_times_entropy():
    for row, found in zip(ROWS, evaluate("rows.map((r) => runMechanics(r, 2))"), strict=True):
        z = torch.tensor(row).double()
        assert found["free_energy"] == pytest.approx(-2.0 * float(regard.logsumexp(z, temperature=2.0)))
        assert found["entropy"] == pytest.approx(float(regard.statistics.of_scores(z[None] / 2.0).entropy))


def test_the_page_is_served_until_ctrl_c():
    command = [sys.executable, "-m", "regard", "explore", "--no-browser"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs inherit that it is ignored
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as server:
        try:
            address = server.stderr.readline().split()[-1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=20) as answer:
                assert answer.read().decode() == render()
            server.send_signal(signal.SIGINT)
            _, told = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode == 130
    assert told.endswith("interrupted\n") and "Traceback" not in told


def test_a_port_in_use_is_refused(capsys):
    assert main(["explore", "--port", "99999999"]) == 2
    assert "--port 99999999 cannot be used" in capsys.readouterr().err
