"""regard lab train: what it prints and writes, how it goes on, how it fails."""

import json
import resource
from dataclasses import replace

import pytest
from regard_lab.training import experiment, results, timing

from regard.cli import main


@pytest.fixture
def tiny(monkeypatch, one_thread):
    """The scale experiment, made so small that a run takes less than a second."""
    known = experiment.experiments()
    sizes = {"layers": 1, "width": 256, "length": 8, "batch": 2, "validation": 64}
    small = replace(known["scale"].presets["small"], steps=2, every=1, sizes=sizes)
    monkeypatch.setitem(known, "scale", replace(known["scale"], presets={"small": small, "full": small}))


def test_without_a_name_the_experiments_are_listed(capsys):
    assert main(["lab", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["experiment", "variants", "question"]
    assert {line.split()[0] for line in lines[1:]} >= {"scale", "additive", "normalizers", "translation"}


def test_a_run_writes_records_result_and_figures(tiny, tmp_path, capsys):
    out = tmp_path / "runs"
    chosen = ["--only", "none-d16", "sqrt-d64", "--out", str(out)]
    assert main(["lab", "train", "scale", *chosen]) == 0
    told = capsys.readouterr()
    assert told.err.count("\n") == 6  # a line for each run
    lines = told.out.splitlines()
    assert lines[0].split()[:3] == ["variant", "loss", "[95%]"]
    assert lines[1].startswith("none-d16") and lines[1].endswith("0 of 3")
    folder = out / "scale" / "small"
    result = json.loads((folder / "result.json").read_text())
    assert result["how"]["command"] == "regard lab train scale --preset small --only none-d16 sqrt-d64"
    assert result["how"]["data"] == ["built-in"]
    estimate = result["summary"]["sqrt-d64"]["loss"]
    values = list(results.final_values(result, "sqrt-d64").values())
    assert estimate["n"] == 3 and estimate["low"] < min(values) < estimate["mean"] < max(values) < estimate["high"]
    assert sorted(p.name for p in folder.glob("*.svg")) == [
        "scale-entropy.svg",
        "scale-gradient-gain.svg",
        "scale-loss.svg",
    ]
    modes = {path.stat().st_mode for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    assert len(modes) == 1  # as the umask says
    before = (folder / "none-d16-seed0.safetensors").stat().st_mtime_ns
    assert main(["lab", "train", "scale", *chosen, "--json"]) == 0  # over already: read, not trained
    (again,) = json.loads(capsys.readouterr().out)
    assert again["records"] == result["records"]
    assert (folder / "none-d16-seed0.safetensors").stat().st_mtime_ns == before


def test_a_checkpoint_that_finds_no_room_is_told_in_one_line(tiny, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        status = main(["lab", "train", "scale", "--only", "none-d16", "--out", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err.splitlines()
    assert status == 2 and len(told) == 1
    assert "File too large" in told[0] and "none-d16-seed0.safetensors" in told[0]
    assert not list((tmp_path / "scale" / "small").iterdir())


def test_text_of_ones_own_and_chosen_variants(tiny, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("so it goes, and so it went. " * 200)
    argv = ["lab", "train", "scale", "--data", str(path), "--only", "sqrt-d16", "--out", str(tmp_path / "runs")]
    assert main(argv) == 0
    result = json.loads((tmp_path / "runs" / "scale" / "small" / "result.json").read_text())
    assert list(result["summary"]) == ["sqrt-d16"]
    assert result["how"]["data"][0].startswith("mine.txt ") and str(tmp_path) not in json.dumps(result)
    assert main(["lab", "train", "scale", "--only", "sqrt-d16", "--out", str(tmp_path / "runs")]) == 2
    assert "is of another run: its data is 'mine.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["scales"], "experiment 'scales' is unknown"),
        (["scale", "--seeds", "2"], "--seeds must be at least 3"),
        (["scale", "--only", "cubic"], "--only 'cubic': scale has the variants none-d16"),
        (["scale", "--workers", "0"], "--workers must be at least 1"),
        (["scale", "--data", "no/such.txt"], "--data no/such.txt does not exist"),
        (["scale", "--data", "FOLDER"], "is a folder; scale reads a text file"),
        (["translation", "--data", "FILE"], "is a file; translation reads a folder of sentence pairs"),
        (["retrieval", "--data", "FILE"], "retrieval makes its own rows and reads no file; leave it out"),
        (["scale", "--data", "FILE"], "data.bin is not text: its byte 2 is not UTF-8"),
        (["scale", "--data", "FILE", "--time"], "data.bin is not text: its byte 2 is not UTF-8"),
        (["scale", "--device", "tpu"], "--device must be cpu or cuda"),
        (["scale", "--preset", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_bad_command_lines_train_nothing(argv, message, capsys, tmp_path, monkeypatch):
    given = tmp_path / "given"
    given.mkdir()
    (given / "data.bin").write_bytes(b"ab\xff\xfe" * 2000)
    places = {"FOLDER": str(given), "FILE": str(given / "data.bin")}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["lab", "train", *(places.get(word, word) for word in argv)]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.out == ""
    assert not list((tmp_path / "here").iterdir())


def test_the_lab_is_still_the_lab(capsys):
    assert main(["lab", "e24"]) == 0
    assert "e24" in capsys.readouterr().out


def test_a_step_of_each_variant_is_timed(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "WARM", 1)
    monkeypatch.setattr(timing, "ROUND", 1)
    assert main(["lab", "train", "scale", "--time", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["scale"]
    assert list(told) == list(experiment.experiments()["scale"].variants)
    assert all(0 < t["low"] <= t["median"] <= t["high"] for t in told.values())
    assert json.loads((tmp_path / "scale" / "small" / "times.json").read_text())["times"] == told
