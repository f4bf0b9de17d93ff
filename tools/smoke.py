"""An installed regard does its work: `python tools/smoke.py`, from any folder, in any environment that has it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path

import torch

import regard
from regard.cli import main


def rows() -> None:
    z = torch.randn(4, 50, requires_grad=True)
    for name in regard.normalizers.names():
        p, exact = regard.normalize(z, name), regard.normalize(z.double(), name, backend="reference")
        torch.testing.assert_close(p.double(), exact, rtol=1e-4, atol=1e-6)
        p.sum().backward()


def attention() -> None:
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    for name in regard.normalizers.names():
        out, stats = regard.attention(q, k, v, is_causal=True, normalizer=name, return_stats=True)
        exact, _ = regard.reference.attention(q, k, v, is_causal=True, normalizer=name)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-4)
        assert len(stats) == 14 and all(x.isfinite().all() for x in stats.values())


def commands(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["list"]) == 0 and "entmax15" in said.getvalue()
    if importlib.util.find_spec("safetensors"):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["demo", "--out", str(folder / "ill.html")]) == 0
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    report = regard.examine(model, [torch.randn(2, 17, 32)])
    report.save(folder / "report.json")
    assert len(report.heads) == 8 and (folder / "report.json").stat().st_size > 0


if __name__ == "__main__":
    rows()
    attention()
    with tempfile.TemporaryDirectory() as folder:
        commands(Path(folder))
    print(f"regard {regard.__version__} works: Python {sys.version.split()[0]}, torch {torch.__version__}")
