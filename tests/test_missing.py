"""Without one of the packages regard can use, the rest works, and what cannot work says in one line what to install."""

from __future__ import annotations

import json
import subprocess
import sys

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
for name in regard.normalizers.names() if {backend!r} else ("softmax", "entmax15"):
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
TRITON = "import os; os.environ['TRITON_INTERPRET'] = '1'; regard.normalize(z, backend='triton')"
SAVE = "regard.examine(model, [torch.randn(2, 9, 16)], checks=False).save('report.{}')"


def run(missing: list[str], texts: list[str], folder, backend: str | None = None) -> list[tuple]:
    """(exit code or what an ImportError says, stdout, stderr) of each text, a command of regard's or Python."""
    text = SCRIPT.format(missing=missing, texts=texts, backend=backend)
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240, cwd=folder)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads((folder / "told.json").read_text())


def check_calls(told: list[tuple], wanted: list[str]) -> None:
    for (said, out, _), words in zip(told, wanted, strict=True):
        assert words in said and "\n" not in said and not out


WITHOUT_NUMBA = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x = torch.randn(1, 2, 700, 8, requires_grad=True)
    for normalizer in ("entmax15", "sigmoid"):
        out, stats = regard.attention(x, x, x, is_causal=True, normalizer=normalizer, return_stats=True)
        exact = regard.reference.attention(x.double(), x.double(), x.double(), is_causal=True, normalizer=normalizer)[0]
        assert torch.allclose(out.double(), exact, atol=1e-6) and stats.entropy.shape == (1, 2, 700)
        out.square().sum().backward()
    p = regard.entmax15(torch.tensor([-2.0, 0.0, 0.5]))
    assert torch.allclose(p, torch.tensor([0.0, 0.3260, 0.6740]), atol=1e-4)
    logits = torch.randn(3, 5, requires_grad=True)
    regard.losses.fenchel_young_loss(logits, torch.tensor([0, 1, 2]), "entmax15").sum().backward()
assert not said, said  # the first call of this process said it
assert "numba" in str(regard.attention_path(x, x, x, normalizer="relu"))
try:
    regard.attention(x, x, x, backend="cpu", normalizer="relu")
except ValueError as error:
    raise ImportError(str(error))
"""


def test_without_numba_the_reference_serves_and_a_backend_asked_for_by_name_is_refused(tmp_path):
    ((code, _, _),) = run(["numba", "llvmlite"], [WITHOUT_NUMBA], tmp_path)
    assert "pip install" in code and "backend 'cpu' cannot compute" in code, code


def test_the_rest_works_without_triton_transformers_and_altair_and_each_is_named(tmp_path):
    missing = ["triton", "transformers", "tokenizers", "safetensors", "altair"]
    commands = ["demo", "lab range --html lab.html", "explore --export page.html", "examine nowhere"]
    told = run(missing, [*commands, TRITON], tmp_path)
    *done, (code, _, said) = told[: len(commands)]
    assert all(one[0] == 0 for one in done), done
    assert code and "regard[hf]" in said and len(said.strip().splitlines()) == 1, said
    check_calls(told[len(commands) :], ["pip install triton"])


def test_the_rest_works_without_pictures_tables_or_weights_and_a_report_says_so(tmp_path):
    kinds = ("json", "html", "png")
    lacking = {
        "import regard_lab; regard_lab.names()": "regard[lab]",
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
