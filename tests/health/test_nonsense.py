"""regard examine, demo and compare on nonsense: one clear line, a non-zero exit, nothing half-written."""

import copy
import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import regard
from regard.cli import main
from regard.health.measure.heads import HeadReading
from regard.health.measure.layer_reading import LayerReading, spreads_of
from regard.health.report import files, screen
from regard.health.report.page import report_page as page
from regard.health.report.page.document import pack
from regard.health.report.page.report_page import render
from regard.health.report.report import WhatIfReading

transformers = pytest.importorskip("transformers")
from saved_models import SIZE, bert, refused, save  # noqa: E402

ENCODER = "import torch\nfrom torch import nn\nmodel = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return save(bert(), tmp_path_factory.mktemp("model"))


def copied(folder, path, leave=lambda name: False):
    path.mkdir()
    for one in folder.iterdir():
        if not leave(one.name):
            (path / one.name).write_bytes(one.read_bytes())
    return path


def here(tmp_path, monkeypatch, name, code):
    """A module of this name in the working folder."""
    (tmp_path / f"{name}.py").write_text(ENCODER + code)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_weights_that_are_not_in_the_files_are_not_examined_in_silence(folder, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    renamed, partial = (copied(folder, tmp_path / name) for name in ("renamed", "partial"))
    save_file({f"foo.{name}": x for name, x in weights.items()}, renamed / "model.safetensors", {"format": "pt"})
    lost = "encoder.layer.1.attention.self.query.weight"
    kept = {name: x for name, x in weights.items() if name != lost}
    save_file(kept, partial / "model.safetensors", {"format": "pt"})
    refused(capsys, "examine", renamed, words="weights are not in its files and would be random")
    refused(capsys, "examine", partial, words=lost)
    quick = ["--length", "16", "--limit", "1", "--json", "r.json"]
    assert main(["examine", str(partial), "--allow-missing", *quick]) == 0
    assert lost in capsys.readouterr().err
    assert lost in json.loads((tmp_path / "r.json").read_text())["how"]["random_weights"]
    assert lost in (tmp_path / "report.html").read_text()


def test_a_pooler_that_is_not_there_is_no_obstacle(folder, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    plain = copied(folder, tmp_path / "plain")
    kept = {name: x for name, x in weights.items() if "pooler" not in name}
    save_file(kept, plain / "model.safetensors", {"format": "pt"})
    assert len(kept) < len(weights)
    assert main(["examine", str(plain), "--length", "16", "--limit", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_folders_that_hold_no_whole_model(folder, tmp_path, capsys):
    cut = copied(folder, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(capsys, "examine", cut, words="could not be loaded: SafetensorError")
    broken = copied(folder, tmp_path / "broken")
    (broken / "config.json").write_text("{nope")
    refused(capsys, "examine", broken, words="not a valid JSON file")
    (broken / "config.json").write_text("[]")
    refused(capsys, "examine", broken, words="could not be loaded")
    large = copied(folder, tmp_path / "large")
    config = (large / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')
    (large / "config.json").write_text(config)
    refused(capsys, "examine", large, words="has shape [32] in its files, but config.json asks for [64]")
    refused(capsys, "examine", ":", words="write module:function")
    refused(capsys, "examine", "./nowhere", words="there is no folder './nowhere'")
    mute = copied(folder, tmp_path / "mute", leave=lambda name: "tok" in name or "vocab" in name)
    refused(capsys, "examine", mute, words="the tokenizer knows only special tokens: its files are missing")
    size = dict(vocab_size=512, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    t5 = save(transformers.T5Model(transformers.T5Config(**size)), tmp_path / "t5", tokenizer=False)
    refused(capsys, "examine", t5, words="50 % of the text's tokens are unknown to the tokenizer")  # ▁, unknown, ▁, …
    (tmp_path / "greek.txt").write_text("γράμματα και λέξεις, a " * 9)
    refused(capsys, "examine", folder, "--text", tmp_path / "greek.txt", words="or the text is not in its language")
    small = save(transformers.BertModel(transformers.BertConfig(**{**SIZE, "vocab_size": 9})), tmp_path / "small")
    refused(capsys, "examine", small, words="but the model has 9: they do not belong together")
    assert not (tmp_path / "report.html").exists()


def test_a_command_line_of_nonsense_is_refused_before_any_work(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder.html").mkdir()
    for arguments, words in (
        (["--out", "folder.html"], "is a folder"),
        (["--json", "r.html"], "must end in .json"),
        (["--png", "r.json"], "must end in .png"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--device", "cuda:99"], "--device cuda:99: "),
        (["--device", "meta"], "--device meta: "),
    ):
        refused(capsys, "examine", folder, *arguments, words=words)
    refused(capsys, "examine", folder, "--length", 2, words="no room for text beside the tokenizer's 2 special tokens")
    refused(capsys, "demo", "--out", "folder.html", words="is a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_standard_input_must_be_text(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors="surrogateescape"))
    refused(capsys, "examine", folder, "--text", "-", words="standard input is not UTF-8 text")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    refused(capsys, "examine", folder, "--text", "-", words="standard input is not UTF-8 text")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def make(): return {}['weights']\n", "the function raised KeyError: 'weights'"),
        ("def make(): assert False, 'no\\x1b[31m red'\n", r"AssertionError: no\x1b[31m red"),
        ("def make(): raise SystemExit(0)\n", "the function raised SystemExit"),
        ("raise OSError('not today')\n", "importing odd raised OSError: not today"),
        ("import no_such_package\n", "no_such_package"),
        ("make = 7\n", "has no function 'make'"),
        ("def make(): return model, 7\n", "batches must be an iterable of batches, got int"),
        ("def make(): return model, (1 / 0 for _ in range(2))\n", "ZeroDivisionError"),
        ("def make(): return model, []\n", "batches is empty"),
        ("def make(): return model, [torch.randn(2, 9, 5)]\n", "failed on the batches of odd:make: "),
        ("model.forward = lambda x: x.no_such\ndef make(): return model, [torch.ones(1)]\n", "no attribute 'no_such'"),
    ],
)  # fmt: skip
def test_functions_may_raise_anything(code, words, tmp_path, capsys, monkeypatch):
    here(tmp_path, monkeypatch, "odd", code)
    refused(capsys, "examine", "odd:make", words=words)
    assert not (tmp_path / "report.html").exists()


def test_batches_without_end_are_cut_at_the_limit(tmp_path, monkeypatch, capsys):
    code = "def endless():\n    while True: yield torch.randn(1, 8, 16)\ndef make(): return model, endless()\n"
    here(tmp_path, monkeypatch, "long", code)
    assert main(["examine", "long:make", "--limit", "3", "--out", "r.json"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["how"]["batches"] == 3


def test_batches_are_made_as_they_are_asked_for(tmp_path, monkeypatch, capsys):
    """Ctrl-C in a slow loader leaves a report of what was measured; without checks no more than a batch is held."""
    code = (
        "import weakref\nmade = []\n"
        "def slow():\n"
        "    for at in range(9):\n"
        "        if at == 2:\n"
        "            alive.append(made[0]() is not None)\n"
        "            raise KeyboardInterrupt\n"
        "        x = torch.randn(1, 8, 16)\n        made.append(weakref.ref(x))\n        yield x\n"
        "alive = []\ndef make(): return model, slow()\n"
    )
    here(tmp_path, monkeypatch, "slow", code)
    assert main(["examine", "slow:make", "--no-checks", "--out", "r.json"]) == 130
    assert "(after 2 whole batches)" in json.loads((tmp_path / "r.json").read_text())["interrupted"]
    assert sys.modules["slow"].alive == [False]


def test_nothing_measured_is_said_and_drawn_nowhere(tmp_path, monkeypatch, capsys):
    code = "model.self_attn.in_proj_weight.data.fill_(torch.nan)\ndef make(): return model, [torch.randn(2, 9, 16)]\n"
    here(tmp_path, monkeypatch, "sick", code)
    assert main(["examine", "sick:make", "--png", "maps.png", "--json", "r.json"]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert "nothing could be measured" in captured.err
    assert "there is no 'maps.png'" in captured.err
    assert not (tmp_path / "maps.png").exists()
    assert "No problem found" not in captured.out
    html = (tmp_path / "report.html").read_text()
    assert "critical findings" in html
    assert "no problem found" not in html.split("<main>")[1].split("<script")[0]
    assert json.loads((tmp_path / "r.json").read_text())["findings"][0]["kind"] == "not finite"


def examined(rows):
    """A layer that is neither diffuse nor sharp."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_weight[:32] *= 2.0
    return regard.examine(model, [torch.randn(2, rows, 16)])


@pytest.mark.parametrize("gap", ["unmeasured", "interrupted"])
def test_no_findings_on_a_part_is_no_clean_bill(gap):
    report = examined(rows=24)
    assert report.findings == []
    assert any(line.startswith("No problem found in these") for line in report.summary())
    assert ">no problem found<" in render(report)
    part = replace(report, **{gap: [("other", "by hand")] if gap == "unmeasured" else "KeyboardInterrupt"})
    assert any(line.endswith("checks of the measured heads.") for line in part.summary())
    assert ">no problem found<" not in render(part)
    nothing = replace(part, heads=[])
    assert nothing.summary()[0] == "Nothing was measured, so nothing was judged."
    assert not any("No problem" in line for line in nothing.summary())
    assert ">not measured<" in render(nothing)


def test_too_few_rows_to_judge_is_no_clean_bill():
    report = examined(rows=4)
    assert report.findings == []
    assert any(line.startswith("Too few rows or keys to judge any head") for line in report.summary())
    assert ">too little data to judge<" in render(report)
    mixed = replace(report, heads=[*report.heads, *examined(rows=24).heads])
    assert any(line.endswith("checks. 2 heads had too few rows or keys to be judged.") for line in mixed.summary())
    assert ">no problem found where measured<" in render(mixed)


def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    here(tmp_path, monkeypatch, "full", "def make(): return model, [torch.randn(2, 9, 16)]\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert main(["examine", "full:make"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "regard examine: 'report.html' could not be written: No space left on device\n"
    assert "report.html" not in captured.out
    assert not [path for path in tmp_path.iterdir() if "report" in path.name]


def test_a_closed_pipe_leaves_the_report(tmp_path, monkeypatch):
    here(tmp_path, monkeypatch, "piped", "def make(): return model, [torch.randn(2, 9, 16)]\n")

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(screen, "show_screen", closed)
    monkeypatch.setattr("regard.cli.os.dup2", lambda *_: None)
    assert main(["examine", "piped:make"]) == 0
    assert (tmp_path / "report.html").exists()


def test_many_heads_with_what_ifs_make_a_small_page(monkeypatch):
    layers, heads, changes = 4, 32, 6  # a fortieth of a large model, in a fortieth of its room
    monkeypatch.setattr(page, "LIMIT", page.LIMIT // 40)
    tried = []
    monkeypatch.setattr(page, "pack", lambda numbers: tried.append(pack(numbers)) or tried[-1])
    torch.manual_seed(0)

    def readings():
        _, stats = regard.attention(*torch.randn(3, 1, heads, 24, 8), return_stats=True)
        first = LayerReading(heads).update(stats)
        for index in range(layers):
            other = copy.copy(first)  # the histogram shared, the sums its own
            other.flat = first.flat * (1.0 + 0.1 * torch.rand_like(first.flat))
            for head, spreads in enumerate(spreads_of([other])[0]):
                yield HeadReading(f"layers.{index}.attention", index, head, spreads, other)

    measured = replace(examined(rows=4), unmeasured=[(f"layer {index}", "reason " * 40) for index in range(9999)])
    report = replace(
        measured,
        heads=list(readings()),
        what_if={str(at): WhatIfReading(list(readings()), []) for at in range(changes)},
    )
    html = render(report)
    assert tried[-1] in html and len(tried[-1]) <= page.LIMIT
    assert max(map(len, tried)) < 1.5 * page.LIMIT  # what cannot fit is not tried
    assert len(html.encode()) - len(tried[-1]) < 500_000  # all that is not numbers
    assert "Left out, for size: distributions and curves by position, all numbers but the means." in html
    assert "9799 more layers" in html


def hostile():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("red\x1b[31m\u202e\udc80", nn.TransformerEncoderLayer(16, 4, 32, batch_first=True))

        def forward(self, x):
            (layer,) = self.children()
            layer(x)
            raise RuntimeError("stop\x1b[2J")

    return regard.examine(Named(), [30.0 * torch.randn(2, 40, 16)], title="title\x1b]0;x\x07\udc80")


def test_names_cannot_command_the_terminal_nor_break_a_file(tmp_path, capsys):
    report = hostile()
    assert report.interrupted
    report.show(full=True)
    out = capsys.readouterr().out
    assert r"red\x1b[31m\u202e\udc80" in out
    for character in "\x1b\x07\u202e\udc80":
        assert character not in out
    data = json.loads(report.save(tmp_path / "r.json").read_text(encoding="utf-8"))
    assert data["title"] == report.title
    assert r"\udc80" in report.save(tmp_path / "r.html").read_text(encoding="utf-8")
    assert main(["compare", "r.json", "r.json"]) == 2  # they were not finished
    assert "\x1b" not in capsys.readouterr().out
