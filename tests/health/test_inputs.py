"""What a model is run on: both sides of an encoder-decoder, positions that padding leaves."""

import json

import pytest
import torch

import regard
from regard.cli import main
from regard.health.models.loading import load
from regard.health.tokens.text import as_batch

transformers = pytest.importorskip("transformers")
from saved_models import SIZE, refused, save  # noqa: E402


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_model_of_images_is_refused_with_the_way_to_pass_them(tmp_path, capsys):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4
    )
    folder = save(transformers.ViTModel(config), tmp_path / "vit", tokenizer=False)
    capsys.readouterr()
    refused(capsys, "examine", folder, words="pass module:function")


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


class Continues(torch.nn.Module):
    """Reads ids alone: labels of a loader are not for it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, ids):
        n = ids.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return self.head(self.layer(self.embedding(ids), src_mask=hidden, is_causal=True))


@pytest.mark.parametrize("named", [False, True])
def test_labels_that_forward_does_not_take_are_held_apart(named):
    ids = torch.randint(16, (2, 13))
    x, y = ids[:, :-1], ids[:, 1:]
    model, batch = Continues(), {"ids": x, "labels": y} if named else (x, y)
    assert regard.check(model, [batch], select="RG1,RG8").loss is not None
    assert len(regard.examine(model, [batch], checks=False).heads) == 2
    assert regard.compare(model, model, [batch]).same


def test_labels_behind_the_two_sides_of_a_decoder_are_held_apart():
    ids = torch.randint(32, (2, 9))

    class Translates(torch.nn.Module):
        def forward(self, src, tgt):
            raise NotImplementedError

    made = as_batch((ids, ids + 1, ids + 2), torch.device("cpu"), Translates())
    assert len(made.args) == 2 and made.decoder == 1
    assert made.labels is not None and torch.equal(made.labels, ids + 2)


def test_cut_batches_can_be_viewed_and_empty_ones_are_refused():
    from regard.health.tokens.text import as_token_batch

    ids = torch.arange(40).view(4, 10)
    short = as_token_batch(dict(input_ids=ids, labels=ids), torch.device("cpu")).cut(2, 5)
    assert short.ids.view(-1).tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14] and short.named["labels"].is_contiguous()
    model = torch.nn.Sequential(
        torch.nn.Embedding(40, 16), torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    )
    with pytest.raises(ValueError, match="the batches have no sequences"):
        regard.check(model, torch.zeros(0, 10, dtype=torch.long))
