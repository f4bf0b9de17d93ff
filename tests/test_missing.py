"""Without one of the packages regard can use, the rest works, and what cannot work says in one line what to install."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, importlib.abc, io, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import torch, regard
from regard.cli import main

z, q = torch.randn(3, 8), torch.randn(1, 2, 5, 8)
for name in regard.normalizers.names():
    assert regard.normalize(z, name, backend={backend!r}).shape == z.shape
out, stats = regard.attention(q, q, q, return_stats=True, backend={backend!r})
assert stats["entropy"].isfinite().all()
regard.jacobian(z), regard.OnlineSoftmax().update(z)
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

def told(text):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = exec(text) if "(" in text else main(text.split())
        except (ImportError, SystemExit) as end:
            code = str(end) if isinstance(end, ImportError) else end.code
    return code, out.getvalue(), err.getvalue()

assert told("list")[0] == 0
with open("told.json", "w") as file:
    json.dump([told(text) for text in {texts!r}], file)
"""
ROWS = "from regard import normalizers; from regard._backends.gpu.rows import launch as rows; "
SAVE = "regard.examine(model, [torch.randn(2, 9, 16)]).save('report.{}')"


def run(missing: list[str], texts: list[str], folder, backend: str | None = None) -> list[tuple]:
    """(exit code or what an ImportError says, stdout, stderr) of each text, a command of regard's or Python."""
    text = SCRIPT.format(missing=missing, texts=texts, backend=backend)
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240, cwd=folder)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize(
    ("missing", "backend", "calls"),
    [
        (["numba", "llvmlite"], "reference", {
            "regard.sparsemax(torch.zeros(2))": "pip install numba",
            "regard.attention(q, q, q, normalizer='sparsemax')": "pip install numba",
        }),
        (["triton"], None, {
            "import os; os.environ['TRITON_INTERPRET'] = '1'; regard.normalize(z, backend='triton')":
                "pip install triton",
            ROWS + "rows.forward(z, normalizers.get('softmax'))":
                "the Triton kernels need the package triton: pip install triton",
        }),
    ],
    ids=["numba", "triton"],
)  # fmt: skip
def test_the_rest_works_and_a_call_names_what_it_lacks(missing, backend, calls, tmp_path):
    for (said, out, _), wanted in zip(run(missing, list(calls), tmp_path, backend), calls.values(), strict=True):
        assert wanted in said and "\n" not in said and not out


def test_the_rest_works_without_transformers_and_an_extra_is_named(tmp_path):
    missing = ["transformers", "tokenizers", "safetensors"]
    examine, explore, demo = run(missing, ["examine nowhere", "explore --export page.html", "demo"], tmp_path)
    assert examine[0] and "regard[hf]" in examine[2] and len(examine[2].strip().splitlines()) == 1, examine
    assert explore[0] == 0 and demo[0] == 0, (explore, demo)


def test_the_lab_draws_without_altair(tmp_path):
    ((code, _, said),) = run(["altair"], ["lab range --html lab.html"], tmp_path)
    assert code == 0, said


def test_the_rest_works_without_pictures_tables_or_weights_and_a_report_says_so(tmp_path):
    kinds = ("json", "html", "png")
    lacking = {
        "from regard import lab; lab.names()": "regard[lab]",
        "lab range": "needs scipy; pip install 'regard[lab]'",
    }
    missing = ["altair", "vl_convert", "matplotlib", "rich", "safetensors", "scipy"]
    told = run(missing, [*map(SAVE.format, kinds), *lacking], tmp_path)
    for kind, (said, _, _) in zip(kinds, told, strict=False):
        assert (tmp_path / f"report.{kind}").is_file() if said is None else "regard[report]" in said, (kind, said)
    assert told[0][0] is None
    for (said, _, error), wanted in zip(told[len(kinds) :], lacking.values(), strict=True):
        text = said if isinstance(said, str) else error.strip()
        assert wanted in text and "\n" not in text, text
