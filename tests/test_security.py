"""No pickle, no eval, no network unasked, no header believed: what SECURITY.md promises."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "regard"
RUNS_TEXT = {  # text that they wrote themselves, and the script that `regard check SCRIPT.py:NAME` names
    "_backends/cpu/jit/compile.py", "_backends/gpu/tape.py", "health/models/targets.py",
}  # fmt: skip


def calls(tree: ast.AST):
    """(name, line) of everything called: eval, torch.load, pickle.loads, …"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_text_or_pickles(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "marshal", "shelve", "dill", "joblib"} & {name.split(".")[0] for name in names}, place
    for name, node in calls(tree):
        assert name != "eval" and not name.startswith("pickle."), place
        assert name != "exec" or place in RUNS_TEXT, place
        assert name not in ("os.system", "os.popen"), place
        options = {word.arg: word.value for word in node.keywords}
        if name == "torch.load":
            safe = options.get("weights_only")
            assert isinstance(safe, ast.Constant) and safe.value is True, place
        if "trust_remote_code" in options:
            assert isinstance(options["trust_remote_code"], ast.Constant) and not options["trust_remote_code"].value, (
                place
            )
        if name.startswith("subprocess."):
            assert "shell" not in options, place


HERE = """
import torch

def make():
    return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [torch.randn(2, 9, 16)]
"""


def tiny_model(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=300
    )
    target = folder / "model"
    BertModel(config).save_pretrained(target)
    return target


def lying(kind: str, path: Path) -> None:
    """A safetensors file whose header promises more than the file holds."""
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    length = None
    if kind == "a header of an exabyte":
        length = 1 << 60
    elif kind == "a tensor of a terabyte":
        header["x"] = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * 16)


OFFLINE = """
import resource, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked")

socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
from regard.cli import main
for command in ("list", "lab range", "examine here:make --out here.json"):
    assert main(command.split()) == 0, command
resource.setrlimit(resource.RLIMIT_AS, (12 << 30,) * 2)
for folder in sys.argv[1:]:
    try:
        code = main(["examine", folder, "--limit", "1"])
    except SystemExit as end:
        code = end.code
    assert code, folder
print("refused both")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_nothing_asks_the_network_and_a_header_that_lies_is_refused_before_anything_is_allocated(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "here.py").write_text(HERE, encoding="utf-8")
    folder = tiny_model(tmp_path)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    lying("a header of an exabyte", folder / "model.safetensors")
    lying("a tensor of a terabyte", other / "model.safetensors")
    command = [sys.executable, "-c", OFFLINE, str(folder), str(other)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert "the network was asked" not in run.stderr
    assert run.stdout.endswith("refused both\n"), run.stderr[-1500:]
    assert "Traceback" not in run.stderr and "emory" not in run.stderr, run.stderr[-1500:]
    assert not list(tmp_path.glob("*.html"))


def test_pages_carry_a_policy_that_lets_nothing_in():
    from regard_lab import page

    assert "default-src 'none'" in page.POLICY and "connect-src" not in page.POLICY


def test_the_kernel_folder_is_its_owner_s_alone(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    from regard._backends.cpu.jit import compile

    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compile.cache_folder()
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others"):
        compile.cache_folder()


def test_a_planted_kernel_is_not_run(tmp_path, monkeypatch):
    """What lies in the cache folder under a kernel's name is compared with what regard wrote, not believed."""
    pytest.importorskip("numba")
    from regard._backends.cpu.jit import compile

    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = compile._store_source("regard_kernel_x", "right = 1\n")
    path.write_text("wrong = 1\n", encoding="utf-8")
    assert compile._store_source("regard_kernel_x", "right = 1\n").read_text(encoding="utf-8") == "right = 1\n"
