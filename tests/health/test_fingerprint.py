"""Fingerprints: what they keep, that they find what differs, that a file is read without running anything."""

import copy
import json
import pickle
import struct
import time

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.health.comparing.fingerprint import read_tensors, write_tensors
from regard.health.comparing.sketches import sketch
from regard.health.models.tiny import TinyLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TinyLM(layers=3, heads=4, width=32, length=64).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 90, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def taken(model, ids):
    return regard.fingerprint(model, [ids])


def test_a_file_holds_what_was_taken(taken, ids, tmp_path):
    path = taken.save(tmp_path / "model.regard")
    again = regard.Fingerprint.load(path)
    assert again.to_bytes() == taken.to_bytes() == path.read_bytes()
    assert path.stat().st_size < 200_000 and again.layers[1]["scale"] == pytest.approx(8**-0.5)
    assert again.layers[0]["mask"] == "causal order" and again.layers[0]["heads"] == 4
    assert torch.equal(again.batches[0], ids)
    started = time.monotonic()
    assert regard.compare(again, path).same and time.monotonic() - started < 60


def test_the_same_run_gives_the_same_bytes(model, ids, taken):
    assert regard.fingerprint(model, [ids]).to_bytes() == taken.to_bytes()


def _scale(model):
    model.blocks[1].attention.scale *= 1.4159


def _heads(model):
    weight = model.blocks[2].attention.qkv.weight.data
    weight[:96] = weight.reshape(3, 4, 8, 32).roll(1, 1).reshape(96, 32)


def _mlp(model):
    model.blocks[0].mlp[2].weight.data *= 1.5


def _embedding(model):
    model.token.weight.data *= 2.0
    model.position.weight.data *= 2.0


def _head(model):
    model.head.weight.data *= 3.0


@pytest.mark.parametrize(
    ("change", "index", "words"),
    [
        (_scale, 1, "logits × 1.4159 = 0.1·ln 64 + 1"),
        (_heads, 2, "order [3, 0, 1, 2]"),
        (_mlp, 0, "mlp.2"),
        (_embedding, 0, "2 times A's"),
        (_head, None, "3 times A's"),
    ],
)
def test_what_differs_is_found(model, ids, taken, change, index, words):
    other = copy.deepcopy(model)
    change(other)
    found = regard.compare(taken, other)
    assert not found.same and (found.first is None) == (index is None)
    assert index is None or found.first.index == index
    assert words in found.line, found.line


def test_heads_in_another_order_that_the_output_projection_knows(model, ids, taken):
    other = copy.deepcopy(model)
    attention = other.blocks[1].attention
    rows = torch.arange(96).reshape(3, 4, 8)[:, [2, 0, 3, 1]].flatten()
    attention.qkv.weight.data = attention.qkv.weight.data[rows]
    attention.out.weight.data = attention.out.weight.data[:, rows[:32]]
    assert regard.compare(taken, other).same


def test_rounding_is_no_difference(model, ids, taken):
    found = regard.compare(taken, copy.deepcopy(model).bfloat16())
    assert found.same and "dtype: float32 in A, bfloat16 in B." in found.notes


def test_dropout_that_is_left_on(model, ids, taken):
    other = copy.deepcopy(model)
    other.blocks[1].mlp[1].forward = lambda x: torch.nn.functional.dropout(torch.nn.functional.gelu(x), 0.1)
    assert "dropout" in regard.compare(taken, other).cause


def test_other_tokens_and_other_depths(model, ids, taken):
    with pytest.raises(ValueError, match="other token ids"):
        regard.compare(taken, regard.fingerprint(model, [ids.flip(1)]))
    other = TinyLM(layers=2, heads=4, width=32, length=64)
    assert "3 and 2 layers" in regard.compare(taken, regard.fingerprint(other, [ids])).cause
    with pytest.raises(TypeError, match="a function has no token ids"):
        regard.fingerprint(model, lambda m: m(ids))


def _with_header(header, body=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + body


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('a fingerprint ran code')",)


NAN = np.full((1, 4), np.nan, np.float32)
GOOD = {"format": "regard-fingerprint/1"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too short"),
        (pickle.dumps(Evil()), "header claims"),
        (struct.pack("<Q", 2**62) + b"{}" * 8, "header claims"),
        (_with_header(b"[" * 100_000), "nested too deep|not JSON"),
        (_with_header(b"\xff" * 64), "not UTF-8"),
        (_with_header([1, 2]), "no JSON object"),
        (_with_header({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}), "does not fit"),
        (_with_header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "no shape"),
        (_with_header({"x": {"dtype": "O", "shape": [], "data_offsets": [0, 0]}}), "no dtype"),
        (_with_header({"x": 3}), "no dtype"),
        (_with_header({"__metadata__": {"format": 3}}), "metadata is not text"),
        (write_tensors({}, {}), "is no fingerprint"),
        (write_tensors({}, {"format": "regard-fingerprint/99"}), "of the schema"),
        (write_tensors({}, {**GOOD, "fingerprint": "{}"}), "lack 'model'"),
        (write_tensors({}, {**GOOD, "fingerprint": '{"model": NaN}'}), "holds NaN"),
        (write_tensors({}, {**GOOD, "fingerprint": "[]"}), "no JSON object"),
        (b"\x00" * (2**20 + 1), "more than the"),
    ],
)  # fmt: skip
def test_files_that_are_none_are_refused_in_a_line(content, words, tmp_path, capsys):
    path = tmp_path / "bad.regard"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        regard.Fingerprint.load(path)
    assert "\n" not in str(error.value)
    assert main(["compare", str(path), str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts["layers"][0].update(bias=[]), "bias in layer 0 is no truth value"),
        (lambda facts: facts["layers"][0].update(scale=10**400), "scale in layer 0 is no number"),
        (lambda facts: facts["layers"][0]["sample"].update(rows=[{}]), "rows in sample of layer 0"),
        (lambda facts: facts["tokens"][0].update(rows=[[-1, 0]]), "no list of pairs of places"),
        (lambda facts: facts.update(config=3), "config in its facts is no object"),
    ],
)
def test_facts_that_are_not_of_the_schema_are_refused(change, words, taken, tmp_path):
    facts = copy.deepcopy(taken.facts)
    change(facts)
    with pytest.raises(ValueError, match=words):
        regard.Fingerprint.load(regard.Fingerprint(facts, taken.tensors).save(tmp_path / "bad.regard"))


def test_truncated_files_and_values_that_are_not_finite(taken, tmp_path):
    content, path = taken.to_bytes(), tmp_path / "cut.regard"
    for size in (9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut\.regard"):
            regard.Fingerprint.load(path)
    broken = regard.Fingerprint(taken.facts, {**taken.tensors, "final": NAN})
    with pytest.raises(ValueError, match="not finite"):
        regard.Fingerprint.load(broken.save(path))
    with pytest.raises(ValueError, match="there is no file"):
        regard.Fingerprint.load(tmp_path / "nowhere.regard")


def test_a_model_with_values_that_are_not_finite(model, ids):
    other = copy.deepcopy(model)
    other.blocks[1].mlp[0].weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        regard.fingerprint(other, [ids])


def test_the_format_is_that_of_safetensors(taken, tmp_path):
    reader = pytest.importorskip("safetensors.numpy")
    path = taken.save(tmp_path / "model.regard")
    for name, x in reader.load_file(path).items():
        assert np.array_equal(x, taken.tensors[name])
    reader.save_file({"a": np.arange(3, dtype=np.float32)}, tmp_path / "x.safetensors")
    assert read_tensors(tmp_path / "x.safetensors")[0]["a"].tolist() == [0, 1, 2]


def test_sketches_are_linear_but_for_the_norm():
    x, y = np.random.default_rng(0).standard_normal((2, 3, 64))
    assert np.allclose(sketch(2 * x + y, 8)[:, :8], 2 * sketch(x, 8)[:, :8] + sketch(y, 8)[:, :8], atol=1e-5)
    assert np.array_equal(sketch(x[:, :4], 8), x[:, :4].astype(np.float32))


def test_commands(tmp_path, monkeypatch, capsys, model, ids):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert main(["fingerprint", "hf-tiny:llama", "-o", "llama.regard"]) == 0
    assert main(["compare", "llama.regard", "hf-tiny:llama"]) == 0
    assert "the same" in capsys.readouterr().out
    assert main(["fingerprint", "hf-tiny:llama", "-o", "llama.txt"]) == 2
    source = (
        "import torch, copy\nfrom regard.health.models.tiny import TinyLM\ntorch.manual_seed(0)\n"
        "A = TinyLM(layers=2, heads=4, width=32, length=64)\nB = copy.deepcopy(A)\nB.blocks[1].attention.scale *= 2\n"
        "def a(): return A, [torch.arange(12)[None]]\ndef b(): return B, [torch.arange(12)[None]]\n"
    )
    (tmp_path / "pair.py").write_text(source)
    assert main(["fingerprint", "pair:a", "-o", "a.regard"]) == 0
    capsys.readouterr()
    assert main(["compare", "a.regard", "pair:b"]) == 1
    assert "✗ B differs from A at blocks.1.attention, the scores: logits × 2.0000" in capsys.readouterr().out
    assert main(["compare", "pair:a", "pair:b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"] == 1
    assert main(["compare", "a.regard", "missing:b"]) == 2
    assert main(["compare", "a.regard", "llama.regard"]) == 2
    assert "other token ids" in capsys.readouterr().err
