"""regard examine and regard demo: what they print, what they write, how they fail."""

import json
import re

import pytest
import torch

from regard.cli import main
from regard.health.models import tiny
from regard.health.models.inputs import sample_text

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with a word-piece tokenizer of its own, saved as people save them."""
    from saved_models import bert, save

    torch.manual_seed(0)
    return save(bert(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_examine_a_folder(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a cat sat on a mat and looked at the door for a long time " * 20)
    code = main(
        [
            "examine",
            str(folder),
            "--text",
            "text.txt",
            "--length",
            "32",
            "--json",
            "r.json",
            "--what-if",
            "temperature=2",
        ]
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "2 layers × 4 heads" in out and "page      report.html" in out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    data = json.loads((tmp_path / "r.json").read_text())
    assert len(data["heads"]) == 8
    assert data["title"] == folder.name
    assert data["how"]["batches"] > 1
    assert list(data["what_if"]) == ["temperature=2"]


def test_examine_the_sample_and_standard_input(folder, tmp_path, capsys, monkeypatch):
    import io

    assert main(["examine", str(folder), "--length", "64", "--limit", "1", "--out", "a.json"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat on the mat " * 10))
    assert main(["examine", str(folder), "--length", "64", "--text", "-", "--out", "b.json"]) == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["heads"] != b["heads"]


def test_examine_a_function(tmp_path, capsys):
    (tmp_path / "here.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [torch.randn(2, 9, 16)]\n"
        "def wrong():\n"
        "    return 7, []\n"
    )
    assert main(["examine", "here:make"]) == 0
    assert "1 layer × 2 heads" in capsys.readouterr().out
    for spec, words in (
        ("here:none", "has no function 'none'"),
        ("here:wrong", "must return (model, batches), a torch.nn.Module first, got (int, list)"),
        ("nowhere:make", "no module"),
        ("here:make --text here.py", "brings its own model and batches; leave out --text"),
        ("here:make --length 9", "leave out --length"),
    ):
        assert main(["examine", *spec.split()]) == 2
        assert words in capsys.readouterr().err


def refused(capsys, *arguments, words):
    capsys.readouterr()  # what making the model said
    code = main(["examine", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    return code


def test_what_cannot_be_examined_is_told_in_a_line(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("  \n ")
    refused(capsys, tmp_path / "empty", words="no config.json")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused(capsys, tmp_path / "empty", words="only an adapter; merge it")
    refused(capsys, folder, "--text", "blank.txt", words="tokenises to nothing")
    refused(capsys, folder, "--text", "none.txt", words="cannot be read")
    refused(capsys, folder, "--length", 65, words="more than the model's 64 positions")
    refused(capsys, folder, "--what-if", "warmth=2", words="not understood")
    refused(capsys, folder, "--what-if", "normalizer=max", words="normalizer 'max' is unknown")
    refused(capsys, folder, "--out", "report.pdf", words=".html, .json or .png")
    refused(capsys, folder, "--out", "none/report.html", words="there is no folder")
    refused(capsys, folder, "--batch", 0, words="--batch must be at least 1")
    for seconds in (-5, "nan", 1e10):
        refused(capsys, folder, "--timeout", seconds, words="--timeout must be between 0 and 1e9 seconds")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.txt", "empty"]


def test_pickled_weights_are_refused_unless_asked_for(folder, tmp_path, capsys):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (pickled / path.name).write_bytes(path.read_bytes())
    model = transformers.AutoModel.from_pretrained(folder)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    refused(capsys, pickled, words="pickled weights, which can run any code")
    assert main(["examine", str(pickled), "--allow-pickle", "--length", "64", "--limit", "1"]) == 0


def test_a_model_that_fails_midway_gives_what_it_has_and_says_so(tmp_path, capsys):
    (tmp_path / "half.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "    return layer, [torch.randn(2, 9, 16), torch.randn(2, 9, 5)]\n"
        "def stopped():\n"
        "    def batches(model):\n"
        "        model(torch.randn(2, 9, 16))\n"
        "        raise KeyboardInterrupt\n"
        "    return make()[0], [batches]\n"
    )
    assert main(["examine", "half:make"]) == 2
    assert "not finished" in capsys.readouterr().err
    assert "Incomplete:" in (tmp_path / "report.html").read_text()
    assert main(["examine", "half:stopped", "--out", "stopped.json"]) == 130
    assert json.loads((tmp_path / "stopped.json").read_text())["interrupted"].startswith("KeyboardInterrupt")


def test_the_demo_tells_the_two_models_apart(tmp_path, capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny-unscaled") and len(out.splitlines()) <= 23  # the prompt fits below it into 24
    assert (
        "✗ CRITICAL  scale off since blocks.0.attention\n" in out
        and "1 scale off  blocks.0–3.attention, all heads" in out
    )
    assert "so        exploding logits, dying gradient, collapsed\n" in out
    assert "its twin, trained with 1/√d: no cause found" in out and "regard examine ./my-model" in out
    assert "page      report.html\n" in out
    gain = re.search(r"Then train anew: [^)]+\)", " ".join(out.split()))[0]  # on the page too
    assert re.search(r"gains 0\.[1-9]\d \(loss 2\.\d\d → [12]\.\d\d\)", gain)
    assert gain.partition(" (")[0] in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_checkpoints_load_and_know_their_options():
    for name, scale in (("tiny-scaled", "sqrt"), ("tiny-unscaled", "none")):
        model, notes = tiny.checkpoint(name)
        assert model.options["scale"] == scale
        ids = tiny.batches(sample_text(), 128, 4)[0]
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert loss < 3.6  # far better than chance, 4.57, on text that it never saw
        assert float(notes["validation_loss"]) < 3.0
        assert "python examples/train_tiny.py" in notes["command"]
    with pytest.raises(ValueError, match="129 characters, but the model has 128 positions"):
        model(torch.zeros(1, 129, dtype=torch.long))


def test_look_at_a_folder(folder, tmp_path, capsys):
    assert main(["look", str(folder), "--text", "a cat sat on a mat", "--layer", "1", "--head", "2", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "layer.1.attention.self, head 2" in out and "[CLS]" in out and "→" in out
    assert main(["look", str(folder), "--text", "a cat sat", "--out", "look.html"]) == 0
    assert "8 heads on" in capsys.readouterr().out
    (tmp_path / "cat.txt").write_text("a cat sat on a mat")
    assert main(["look", str(folder), "--text", "a cat sat on a mat"]) == 0
    spelled = capsys.readouterr().out
    assert main(["look", str(folder), "--text", str(tmp_path / "cat.txt")]) == 0
    assert capsys.readouterr().out == spelled
    assert main(["look", str(folder), "--layer", "9"]) == 2
    assert capsys.readouterr().err.startswith("regard look: layer: the model has 2 attention layers, got 9")
    assert main(["look", str(folder), "--device", "nonsense"]) == 2
    assert "--device nonsense: no such kind of device; use cpu" in capsys.readouterr().err
    assert main(["look", str(folder), "--rows", "x"]) == 2
    assert "--rows must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("own_look:make", "'own_look:make': the function must return (model, batches)"),
        ("./nothing", "there is no folder './nothing'"),
    ],
)
def test_look_says_what_is_wrong_with_a_model(spec, said, tmp_path, capsys):
    (tmp_path / "own_look.py").write_text("def make():\n    return 3\n")
    assert main(["look", spec]) == 2
    assert capsys.readouterr().err.startswith(f"regard look: {said}")


def test_check_a_folder(folder, capsys):
    assert main(["check", str(folder), "--select", "RG101,RG201", "--length", "32"]) == 0
    assert f"{folder.name}: 0 failures, 0 notes, 1 passed, 1 not checked" in capsys.readouterr().out
