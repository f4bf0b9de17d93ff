"""What a model is run on: both sides of an encoder-decoder, images beside text, positions that padding leaves."""

import json
from types import SimpleNamespace

import pytest
import torch

import regard
from regard.cli import main
from regard.health.models.inputs import make_signals
from regard.health.models.loading import load

transformers = pytest.importorskip("transformers")
from saved_models import SIZE, refused, save  # noqa: E402


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_clip_is_examined_on_text_and_images(tmp_path, capsys):
    text = {**SIZE, "eos_token_id": 3}
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4
    )
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    folder = save(model, tmp_path / "clip")
    assert main(["examine", str(folder), "--length", "16", "--limit", "1", "--out", "r.json"]) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert {head["layer"].split(".")[0] for head in data["heads"]} == {"text_model", "vision_model"}
    assert "synthetic pixel_values" in data["how"]["input"]
    capsys.readouterr()
    refused(capsys, "examine", folder, "--length", 65, words="more than the model's 64 positions")


def test_positions_kept_for_padding_are_not_offered(tmp_path, capsys):
    config = transformers.RobertaConfig(**SIZE, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    folder = save(transformers.RobertaModel(config), tmp_path / "roberta")
    (tmp_path / "text.txt").write_text("a quiet line of words " * 20)
    refused(capsys, "examine", folder, "--length", 63, words="more than the model's 62 positions")
    assert main(["examine", str(folder), "--text", "text.txt", "--limit", "1", "--out", "r.json"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["interrupted"] is None


def test_spectrograms_films_and_oblong_images_have_their_shapes():
    def made(name, **config):
        model = SimpleNamespace(config=SimpleNamespace(**config), dtype=torch.float32, forward=lambda **_: None)
        return tuple(make_signals(model, name, 2)[name].shape)

    assert made("pixel_values", image_size=[32, 48]) == (2, 3, 32, 48)
    assert made("pixel_values", image_size=16, num_frames=5, num_channels=1) == (2, 5, 1, 16, 16)
    assert made("input_values", num_mel_bins=12, max_length=64) == (2, 64, 12)
    assert made("input_values") == (2, 16000)
    assert made("input_features", num_mel_bins=8, max_source_positions=20, vocab_size=60) == (2, 8, 40)


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
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["unmeasured"] == []
    assert data["how"]["input"] == "synthetic input_features"
    assert "too little to judge it" in data["how"]["caution"]
