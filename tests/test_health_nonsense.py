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
from regard.health import files, page, terminal
from regard.health.heads import HeadReading
from regard.health.loading import load
from regard.health.page import packed, render
from regard.health.readings import LayerReading
from regard.health.report import WhatIfReading

transformers = pytest.importorskip("transformers")
from saved_models import SIZE, bert, save  # noqa: E402

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


def refused(capsys, *arguments, words, code=1):
    """Run a command line that must fail: nothing on standard output, one line on the other, no report."""
    assert main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert words in captured.err
    assert "\x1b" not in captured.err


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
    refused(capsys, "examine", "./nowhere", words="there is no folder './nowhere'")
    mute = copied(folder, tmp_path / "mute", leave=lambda name: "tok" in name or "vocab" in name)
    refused(capsys, "examine", mute, words="unknown tokens alone")
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
        refused(capsys, "examine", folder, *arguments, words=words, code=2)
    refused(capsys, "examine", folder, "--length", 2, words="no room beside the tokenizer's 2 special tokens")
    refused(capsys, "demo", "--out", "folder.html", words="is a folder", code=2)
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
        ("def make(): return model, [torch.randn(2, 9, 5)]\n", "'odd:make' raised"),
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


def test_nothing_measured_is_said_and_drawn_nowhere(tmp_path, monkeypatch, capsys):
    code = "model.self_attn.in_proj_weight.data.fill_(torch.nan)\ndef make(): return model, [torch.randn(2, 9, 16)]\n"
    here(tmp_path, monkeypatch, "sick", code)
    assert main(["examine", "sick:make", "--png", "maps.png", "--json", "r.json"]) == 1
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert "nothing could be measured" in captured.err
    assert "there is no 'maps.png'" in captured.err
    assert not (tmp_path / "maps.png").exists()
    assert "No head passed" not in captured.out
    html = (tmp_path / "report.html").read_text()
    assert "in trouble" in html
    assert "healthy" not in html.split("<main>")[1].split("<script")[0]
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
    assert "No head passed a threshold." in report.summary()
    assert ">healthy<" in render(report)
    part = replace(report, **{gap: [("other", "by hand")] if gap == "unmeasured" else "KeyboardInterrupt"})
    assert "No head that was measured passed a threshold." in part.summary()
    assert ">healthy<" not in render(part)
    nothing = replace(part, heads=[])
    assert nothing.summary()[0] == "Nothing was measured."
    assert not any("threshold" in line for line in nothing.summary())
    assert ">not measured<" in render(nothing)


def test_too_few_rows_to_judge_is_no_clean_bill():
    report = examined(rows=4)
    assert report.findings == []
    assert any("rows and keys enough to be judged" in line for line in report.summary())
    assert ">too little to judge by<" in render(report)
    mixed = replace(report, heads=[*report.heads, *examined(rows=24).heads])
    assert "No head passed a threshold. 2 heads had too few rows or keys to be judged." in mixed.summary()
    assert ">healthy where measured<" in render(mixed)


def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    here(tmp_path, monkeypatch, "full", "def make(): return model, [torch.randn(2, 9, 16)]\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert main(["examine", "full:make"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "regard examine: 'report.html' could not be written: No space left on device\n"
    assert "report.html" not in captured.out
    assert not [path for path in tmp_path.iterdir() if "report" in path.name]


def test_a_closed_pipe_leaves_the_report(tmp_path, monkeypatch):
    here(tmp_path, monkeypatch, "piped", "def make(): return model, [torch.randn(2, 9, 16)]\n")

    def closed(report, file=None):
        raise BrokenPipeError

    monkeypatch.setattr(terminal, "show", closed)
    monkeypatch.setattr("regard.cli.os.dup2", lambda *_: None)
    assert main(["examine", "piped:make"]) == 0
    assert (tmp_path / "report.html").exists()


def test_clip_is_examined_on_text_and_images(tmp_path, capsys):
    text = {**SIZE, "eos_token_id": 3}
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4
    )
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    folder = save(model, tmp_path / "clip")
    assert main(["examine", str(folder), "--length", "16", "--limit", "1", "--out", "r.json"]) == 0
    told = json.loads((tmp_path / "r.json").read_text())
    assert {head["layer"].split(".")[0] for head in told["heads"]} == {"text_model", "vision_model"}
    assert "synthetic pixel_values" in told["how"]["input"]
    capsys.readouterr()
    refused(capsys, "examine", folder, "--length", 65, words="more than the model's 64 positions")


def test_positions_kept_for_padding_are_not_offered(tmp_path, capsys):
    config = transformers.RobertaConfig(**SIZE, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    folder = save(transformers.RobertaModel(config), tmp_path / "roberta")
    (tmp_path / "text.txt").write_text("a quiet line of words " * 20)
    refused(capsys, "examine", folder, "--length", 63, words="more than the model's 62 positions")
    assert main(["examine", str(folder), "--text", "text.txt", "--limit", "1", "--out", "r.json"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["interrupted"] is None


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_padding_is_counted_on_neither_side_of_an_encoder_decoder(kind, tmp_path):
    size = dict(vocab_size=SIZE["vocab_size"], d_model=32, decoder_start_token_id=2, pad_token_id=0)
    if kind == "T5":
        size.update(d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    else:
        sides = ("encoder", "decoder")
        size.update({f"{side}_{name}": n for side in sides for name, n in (("layers", 1), ("attention_heads", 4))})
        size.update(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**size))
    folder = save(model, tmp_path / "both")
    text = "abc de fgh i jk " * 3
    subject = load(str(folder), text, length=24, batch=4, limit=9, device="cpu", dtype=None, pickle=False)
    (batch,) = subject.batches
    real = int(batch["attention_mask"].sum())
    assert real < batch["input_ids"].numel()  # there is padding
    report = regard.examine(subject.model, subject.batches)
    assert {head.statistics["visible_keys"].count for head in report.heads} == {real}
    assert len({head.index for head in report.heads}) == 3  # encoder, decoder, cross


def test_a_whisper_with_few_positions_is_run_whole(tmp_path):
    sides = ("encoder", "decoder")
    parts = (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=32, num_mel_bins=8, max_source_positions=20, max_target_positions=30, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        **{f"{side}_{name}": n for side in sides for name, n in parts},
    )  # fmt: skip
    folder = save(transformers.WhisperModel(config), tmp_path / "whisper", tokenizer=False)
    assert main(["examine", str(folder), "--out", "r.json"]) == 0
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["unmeasured"] == []
    assert "too little to judge it finely" in told["how"]["input"]


def test_many_heads_with_what_ifs_make_a_small_page(monkeypatch):
    layers, heads, changes = 4, 32, 6  # a fortieth of a large model, in a fortieth of its room
    monkeypatch.setattr(page, "LIMIT", page.LIMIT // 40)
    tried = []
    monkeypatch.setattr(page, "packed", lambda numbers: tried.append(packed(numbers)) or tried[-1])
    torch.manual_seed(0)

    def readings():
        _, stats = regard.attention(*torch.randn(3, 1, heads, 24, 8), return_stats=True)
        first = LayerReading(heads).update(stats)
        for index in range(layers):
            other = copy.copy(first)  # the histogram shared, the sums its own
            other.flat = first.flat * (1.0 + 0.1 * torch.rand_like(first.flat))
            for head, spreads in enumerate(other.spreads()):
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
    assert "Left out for so many heads: distributions and curves by position, all numbers but the means." in html
    assert "9799 layers more" in html


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
    report.show()
    out = capsys.readouterr().out
    assert r"red\x1b[31m\u202e\udc80" in out
    for character in "\x1b\x07\u202e\udc80":
        assert character not in out
    told = json.loads(report.save(tmp_path / "r.json").read_text(encoding="utf-8"))
    assert told["title"] == report.title
    assert r"\udc80" in report.save(tmp_path / "r.html").read_text(encoding="utf-8")
    assert main(["compare", "r.json", "r.json"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def told():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return regard.examine(model, [torch.randn(2, 24, 16)]).to_json()


def written(path, report):
    path.write_text(json.dumps(report))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "it holds a int"),
        ('{"heads": [], "findings": []}', "it has no title"),
        ('{"title": "x", "heads": {}, "findings": []}', "no list of heads"),
        ('{"title": "x", "heads": [1], "findings": []}', "heads[0] is not one"),
        ('{"title": "x", "heads": [], "findings": [{"kind": "diffuse", "heads": 3}]}', "findings[0] is not one"),
        ('{"title": "x", "heads": [], "findings": [], "unmeasured": 7}', "unmeasured is no list"),
    ],
)
def test_files_that_are_no_reports_are_not_compared(text, words, tmp_path, capsys, told):
    good = written(tmp_path / "good.json", told)
    (tmp_path / "bad.json").write_text(text)
    refused(capsys, "compare", good, "bad.json", "--out", "both.html", words=words)
    assert not (tmp_path / "both.html").exists()


@pytest.mark.parametrize("value", ["0.5", float("nan"), 10**400, [1], True])
def test_a_statistic_that_is_no_number_is_no_reading(value, tmp_path, capsys, told):
    bad = json.loads(json.dumps(told))
    bad["heads"][1]["statistics"]["max_logit"]["mean"] = value
    refused(capsys, "compare", written(tmp_path / "bad.json", bad), "bad.json", words="heads[1] is not one")


def test_what_compare_cannot_read_or_write_is_told_in_a_line(tmp_path, capsys, told, monkeypatch):
    good = written(tmp_path / "good.json", told)
    (tmp_path / "folder").mkdir()
    refused(capsys, "compare", good, "nowhere.json", words="there is no file")
    refused(capsys, "compare", good, "folder", words="cannot be read: Is a directory")
    refused(capsys, "compare", good, good, "--out", "both.pdf", words="must end in .html", code=2)
    refused(capsys, "compare", good, good, "--heads", "-1", words="--heads must be at least 0", code=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    refused(capsys, "compare", good, good, "--out", "both.html", words="No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "good.json"]


def test_findings_of_one_kind_are_added_and_gaps_are_told(tmp_path, capsys, told):
    one = dict(kind="scale off", severity="warning", evidence="", threshold="", remedy="", measured=[], indices=[])
    two = dict(told, findings=[dict(one, heads=[["a", 0]] * 12), dict(one, heads=[["a", 1]])], unmeasured=[["b", "?"]])
    nothing = dict(told, heads=[], findings=[], interrupted="KeyboardInterrupt\x1b[2J")
    a, b = written(tmp_path / "a.json", two), written(tmp_path / "b.json", nothing)
    assert main(["compare", str(a), str(b), "--out", "both.html"]) == 0
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if line.startswith("scale off")).split() == [
        "scale",
        "off",
        "13",
        "0",
    ]
    assert "(layers not measured: 1)" in out
    assert r"(nothing was measured; not finished: KeyboardInterrupt\x1b[2J)" in out
    assert "(nothing was measured; not finished: KeyboardInterrupt" in (tmp_path / "both.html").read_text()
