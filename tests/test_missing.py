"""Without one of the packages regard can use, the rest works, and what cannot work says in one line what to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BLOCK = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(missing: list[str], script: str, folder) -> subprocess.CompletedProcess:
    text = BLOCK.format(missing=missing) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240, cwd=folder)


REST = """
import torch, regard
z = torch.randn(3, 8)
for name in regard.normalizers.names():
    assert regard.normalize(z, name, backend={backend!r}).shape == z.shape
q = torch.randn(1, 2, 5, 8)
out, stats = regard.attention(q, q, q, return_stats=True, backend={backend!r})
assert stats["entropy"].isfinite().all()
regard.jacobian(z), regard.OnlineSoftmax().update(z)
from regard.cli import main
assert main(["list"]) == 0
print("works")
"""


@pytest.mark.parametrize(
    ("missing", "backend"),
    [
        (["triton"], None),
        (["numba", "llvmlite"], "reference"),
        (["transformers", "tokenizers", "safetensors"], None),
        (["altair", "vl_convert", "matplotlib"], None),
        (["rich"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_the_rest_works(missing, backend, tmp_path):
    found = run(missing, REST.format(backend=backend), tmp_path)
    assert found.stdout.endswith("works\n"), found.stderr[-2000:]


@pytest.mark.parametrize(
    ("missing", "call", "says"),
    [
        ("numba", "regard.softmax(torch.zeros(2))", "pip install numba"),
        ("numba", "regard.attention(q, q, q, normalizer='sparsemax')", "pip install numba"),
        ("triton", "import os; os.environ['TRITON_INTERPRET'] = '1'; regard.softmax(torch.zeros(2, 2)); "
         "regard.normalize(torch.zeros(2), backend='triton')", "pip install triton"),
    ],
)  # fmt: skip
def test_a_call_names_what_it_lacks(missing, call, says, tmp_path):
    script = f"""
import torch, regard
q = torch.zeros(1, 1, 2, 4)
try:
    {call}
except ImportError as error:
    print(error)
"""
    found = run([missing, "llvmlite"] if missing == "numba" else [missing], script, tmp_path)
    assert says in found.stdout and found.stdout.count("\n") == 1, (found.stdout, found.stderr[-1500:])


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("transformers", ["examine", "nowhere"], "regard[hf]"),
        ("marimo", ["explore"], "regard[lab]"),
    ],
)
def test_a_command_names_the_extra_that_brings_it(missing, command, extra, tmp_path):
    found = run([missing], f"from regard.cli import main; sys.exit(main({command!r}))", tmp_path)
    assert found.returncode != 0
    assert extra in found.stderr and "Traceback" not in found.stderr, found.stderr[-1500:]
    assert len(found.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("missing", "command"), [("transformers", ["demo"]), ("altair", ["lab", "range", "--html", "lab.html"])]
)
def test_commands_that_need_less_than_they_might(missing, command, tmp_path):
    found = run([missing], f"from regard.cli import main; sys.exit(main({command!r}))", tmp_path)
    assert found.returncode == 0, found.stderr[-1500:]


def test_a_report_without_altair_or_matplotlib_says_so(tmp_path):
    script = """
    import torch, regard
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    report = regard.examine(model, [torch.randn(2, 9, 16)])
    report.save("report.json")
    for name in ("report.html", "report.png"):
        try:
            report.save(name)
            print("saved")
        except ImportError as error:
            print(error)
    """
    found = run(["altair", "vl_convert", "matplotlib"], script, tmp_path)
    lines = found.stdout.strip().splitlines()
    assert (tmp_path / "report.json").is_file() and len(lines) == 2, found.stderr[-1500:]
    assert all(line == "saved" or "regard[report]" in line for line in lines), lines
