"""The recipes of docs/how-to/train.md, run as they are written."""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "train.md"
LENGTHS = [6, 4, 9, 5, 7, 8, 4, 6]


def recipe(heading):
    section = PAGE.read_text().partition(f"## {heading}")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)


def run(heading, **given):
    """Runs a recipe, and returns its names."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0)
    data = []
    for length in LENGTHS:
        ids = torch.randint(3, 60, (length,)).tolist()
        data.append(dict(input_ids=ids, labels=ids))
    names = dict(config=config, data=data, __name__="recipe", **given)
    exec(compile(recipe(heading), f"{PAGE.name}: {heading}", "exec"), names)
    return names


def was_trained(model):
    return all(p.isfinite().all() for p in model.parameters()) and model.training


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of the trainers
def test_trainer(folder):
    pytest.importorskip("accelerate")
    text = recipe("Trainer")
    names = run("Trainer")
    assert names["model"].config._attn_implementation == "regard:entmax15" and "entmax15" in text
    assert "attention/layer_01/max_logit" in (folder / "attention.jsonl").read_text()


@pytest.mark.filterwarnings("ignore")
def test_packed_documents():
    pytest.importorskip("accelerate")
    names = run("Packed documents, as TRL packs them")
    model, collator = names["model"].eval(), names["collator"]
    batch = collator(names["data"][:3])
    with torch.no_grad():
        packed = model(**batch).logits[0]
        alone = [model(torch.tensor([x["input_ids"]])).logits[0] for x in names["data"][:3]]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_accelerate(capsys):
    pytest.importorskip("accelerate")
    names = run("Accelerate")
    assert was_trained(names["model"]) and "entropy" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_lightning(folder):
    pytest.importorskip("lightning")
    names = run("Lightning")
    assert was_trained(names["language"].model.train()) and (folder / "attention.jsonl").stat().st_size


@pytest.mark.filterwarnings("ignore")
def test_trl():
    pytest.importorskip("trl", reason="trl is not installed: its recipe did NOT run")
    names = run("TRL", tokenizer=make_tokenizer())
    assert was_trained(names["model"])
    batch = next(iter(names["trainer"].get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1 and (batch["position_ids"] == 0).sum() > 1  # several documents in a row
    packed, alone = compare_with_documents_alone(names["model"].eval(), batch)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def make_tokenizer():
    """A tokenizer of 60 words, as TRL asks for one."""
    from tokenizers import Tokenizer, models

    words = {f"w{index}": index for index in range(60)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w1")


def compare_with_documents_alone(model, batch):
    """Returns the logits of a packed row, and those of its documents one at a time."""
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    with torch.no_grad():
        packed = model(input_ids=ids[None], position_ids=positions[None]).logits[0]
        alone = [
            model(ids[None, low:high]).logits[0] for low, high in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]
    return packed, torch.cat(alone)
