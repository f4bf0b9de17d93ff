"""Folders of tensors that other programs write: each layout made here, read, and compared with its model."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.health.comparing.dumps import read_dump
from regard.health.models.tiny import TinyLM

TAP = Path(__file__).parents[2] / "examples" / "regard_tap.py"
IDS = torch.arange(12)[None] * 7 % 90


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TinyLM(layers=2, heads=4, width=64, length=32).eval()


@pytest.fixture(scope="module")
def taken(model):
    return regard.fingerprint(model, [IDS])


def points(model, names):
    """The outputs of modules by name, as [tokens, width], the way an engine holds one sequence."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if name in names:
            hooks.append(module.register_forward_hook(lambda m, i, o, name=name: found.update({name: o[0].detach()})))
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    return found


NAMES = [f"blocks.{i}{part}" for i in range(2) for part in ("", ".attention.out", ".before_mlp", ".mlp.0")] + ["head"]


def sglang_passes(folder, tensors):
    root = folder / "TP0_PP0_Rank0_pid7"
    root.mkdir(parents=True)
    torch.save({**tensors, "model.forward_batch_info.input_ids": IDS[0]}, root / "Pass00000.pt")


def sglang_dumper(folder, tensors):
    folder.mkdir()
    for number, (name, x) in enumerate(tensors.items()):
        said = f"step=0___rank=0___dump_index={number}___name={name}.pt"
        torch.save({"value": x, "meta": {"rank": 0}}, folder / said)
    torch.save({"value": IDS[0], "meta": {}}, folder / "step=0___rank=0___dump_index=99___name=input_ids.pt")


def vllm(folder, tensors):
    for name, x in tensors.items():
        (folder / "run" / "step_0" / name).mkdir(parents=True)
        torch.save(x, folder / "run" / "step_0" / name / "outputs_cuda_0.pt")
    (folder / "run" / "step_0" / "embed_tokens").mkdir()
    torch.save(IDS[0], folder / "run" / "step_0" / "embed_tokens" / "inputs_0_cuda_0.pt")


def msprobe(folder, tensors):
    root = folder / "step0" / "rank0" / "dump_tensor_data"
    root.mkdir(parents=True)
    for name, x in tensors.items():
        torch.save(x, root / f"Module.{name}.Linear.forward.0.output.0.pt")
    torch.save(IDS[0], root / "Module.embed_tokens.Embedding.forward.0.input.0.pt")


@pytest.mark.parametrize("write", [sglang_passes, sglang_dumper, vllm, msprobe])
def test_a_dump_is_held_to_its_model(write, model, taken, tmp_path):
    write(tmp_path / "good", points(model, NAMES))
    assert np.array_equal(read_dump(tmp_path / "good").tensors["ids.0"], IDS.numpy())
    assert regard.compare(tmp_path / "good", taken).same
    other = copy.deepcopy(model)
    for parameter in other.blocks[1].mlp[0].parameters():
        parameter.data *= 1.25
    write(tmp_path / "bad", points(other, NAMES))
    found = regard.compare(taken, tmp_path / "bad")
    assert not found.same and found.first.index == 1 and "mlp.0" in found.where and "1.25 times" in found.cause


def test_ranks_keep_what_all_have_alike(model, tmp_path):
    tensors = points(model, NAMES)
    for rank in range(2):
        root = tmp_path / f"TP{rank}_PP0_Rank{rank}_pid{rank}"
        root.mkdir()
        split = {name: x.chunk(2, -1)[rank] if name.endswith("mlp.0") else x for name, x in tensors.items()}
        torch.save(split, root / "Pass00000.pt")
    places = read_dump(tmp_path).tensors
    assert "layers.1.output" in places and "layers.1.at.mlp.0" not in places


WRITER = """
import sys
sys.modules["torch"] = None
sys.path.insert(0, sys.argv[1])
import numpy as np
from regard_tap import Tap
saved = dict(np.load(sys.argv[2]))
tap = Tap(sys.argv[3], tokens=saved.pop("ids"), model="a port", heads=4, groups=4)
for place, x in saved.items():
    assert tap(place, x) is x
tap.layer(1, scale=0.25)
tap.close()
assert "torch" not in [name for name, module in sys.modules.items() if module is not None]
"""


def test_the_tap_needs_numpy_alone(model, taken, tmp_path):
    assert len(TAP.read_text().splitlines()) <= 60
    found = points(model, [f"blocks.{i}" for i in range(2)] + ["head"])
    arrays = {"ids": IDS.numpy(), "final": found["head"][None].numpy()}
    arrays |= {f"layers.{i}.output": found[f"blocks.{i}"][None].numpy() for i in range(2)}
    np.savez(tmp_path / "saved.npz", **arrays)
    command = [sys.executable, "-c", WRITER, str(TAP.parent), str(tmp_path / "saved.npz"), str(tmp_path / "taps")]
    subprocess.run(command, check=True, capture_output=True)
    assert regard.compare(taken, tmp_path / "taps").same
    x = np.load(tmp_path / "taps" / "layers.1.output.npy")
    np.save(tmp_path / "taps" / "layers.1.output.npy", 1.5 * x)
    found = regard.compare(taken, tmp_path / "taps")
    assert found.first.index == 1 and "1.5 times" in found.cause


def test_a_mapping_file(model, taken, tmp_path):
    for at in range(2):
        np.save(tmp_path / f"block{at}.npy", points(model, [f"blocks.{at}"])[f"blocks.{at}"].numpy())
    mapping = dict(tensors={"layers.{i}.output": "block{i}.npy"}, tokens=IDS.tolist(), layers=[{}, {}])
    (tmp_path / "regard.json").write_text(json.dumps(mapping))
    assert regard.compare(tmp_path, taken).same


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('a dump ran code')",)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (dict(tensors={"layers.0.output": "evil.pt"}), "without running code"),
        (dict(tensors={"layers.0.output": "../x.npy"}), "leaves the folder"),
        (dict(tensors={"layers.0.output": "none.npy"}), "there is no file"),
        (dict(tensors={"layers.99999999.output": "good.npy"}), "beyond 4,096"),
        (dict(tensors={"layers.0.output": 3}), "must map places to files"),
        (dict(tensors={"layers.0.output": "nan.npy"}), "not finite"),
        (dict(tensors={"layers.0.output": "good.npy"}, dtype="int3"), "dtype 'int3' is unknown"),
        (dict(tensors={"layers.0.output": "good.npy"}, tokens="x"), "token ids|cannot be read"),
        ([], "no JSON object"),
        (None, "no tensors in a layout"),
    ],
)
def test_folders_that_are_none_are_refused_in_a_line(mapping, words, tmp_path):
    torch.save(Evil(), tmp_path / "evil.pt")
    np.save(tmp_path / "good.npy", np.ones((3, 4)))
    np.save(tmp_path / "nan.npy", np.full((3, 4), np.nan))
    if mapping is not None:
        (tmp_path / "regard.json").write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=words) as error:
        read_dump(tmp_path)
    assert "\n" not in str(error.value)
