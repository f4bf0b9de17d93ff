"""`regard timeline`: the page of a monitor's file, and what it says about a file that is none."""

import json
import re
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.cli import main
from regard.health import AttentionWarning
from regard.health.report.page.timeline import read_log, render


@pytest.fixture
def log(tmp_path):
    torch.manual_seed(0)
    make = nn.TransformerEncoderLayer
    model = nn.Sequential(*(make(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)))
    path = tmp_path / "run.jsonl"
    with regard.Monitor(model, every=1, log=path, budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(6):
            model(torch.randn(2, 24, 16))
            if step == 2:
                with torch.no_grad():
                    model[1].self_attn.in_proj_weight[:32] *= 300
    return path


def test_the_page_shows_alarms_curves_and_layers(log, capsys):
    assert main(["timeline", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "step 5, critical: scores too large: 1.self_attn, head" in printed and "6 samples, 1 incident:" in printed
    page = log.with_suffix(".html").read_text()
    assert "First incident at step 5: 1.self_attn, head" in page and '<td data-name="resolved">open</td>' in page
    assert "what to do" in page and "regard.qk_clip(model, 50)" in page
    assert page.count("<polyline") == 8 and "layer_02, step 6: " in page
    assert "<script" not in page and not re.search(r"https?://", page)
    assert page.count('class="hot"') >= 3  # logits beyond 100 in the second layer


def test_names_in_a_log_are_no_markup(log):
    text = log.read_text().replace("1.self_attn", "<img src=x>")
    log.write_text(text)
    assert "<img" not in render({"<b>": read_log(log)}, "<b>")


def test_runs_are_drawn_over_each_other(log, capsys, tmp_path):
    other, out = tmp_path / "other.jsonl", tmp_path / "both.html"
    lines = [{"step": step, "attention/max_logit": 2.0, "attention/loss": 1.0} for step in (1, 9)]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["timeline", str(log), str(other), "--out", str(out)]) == 0
    page = out.read_text()
    assert "run: First incident at step 5" in page and "other: No incident." in page
    assert page.count('class="line run1"') > 5 and "Loss, as the training passed it in" in page
    assert "other: 2 samples, 0 incidents" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "no json\n", '{"loss": 3}\n', '{"step": 1, "loss": 3}\n'])
def test_a_file_that_no_monitor_wrote_is_refused_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    assert main(["timeline", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no file" in capsys.readouterr().err
