"""One list of calls, answered by every backend: the same numbers, or the same refusal.

`python tests/support/backend_calls.py FILE` writes the table of the docs from it; tests/core/test_backends.py holds
each line. On a machine with a GPU, `FILE 0 3` writes every third line of its column: three processes share the work.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import score_functions

import regard
from regard import normalizers

BACKENDS = ("reference", "cpu", "triton")
FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]


def rows(**options):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5, 37, generator=generator) * torch.tensor([[0.01], [1.0], [1.0], [10.0], [1.0]])
    z[1, 3], z[4] = -math.inf, z[4].round()

    def call(backend, device="cpu"):
        placed = {name: x.to(device) if torch.is_tensor(x) else x for name, x in options.items()}
        p = regard.normalize(z.to(device), **placed, backend=backend)
        return {"weights": p}

    return call


def attention(lq=9, lk=13, heads=2, groups=None, **options):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, lq, 16, generator=generator)
    k, v = (torch.randn(2, groups or heads, lk, 16, generator=generator) for _ in range(2))

    def call(backend, device="cpu"):
        placed = {name: x.to(device) if torch.is_tensor(x) else x for name, x in options.items()}
        inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
        asked = {} if options.get("dropout_p") else {"return_stats": True}
        found = regard.attention(*inputs, **{**asked, **placed}, backend=backend)
        out, stats = found if asked else (found, {})
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        return {"out": out, **stats, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    return call


def _mask(shape, seed=2):
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    shown[..., 0, :] = False  # a row that sees nothing
    return shown


TEMPERATURE = torch.linspace(0.5, 2.0, 9).reshape(1, 1, 9, 1)
CALLS = {
    **{f"rows: {name}": rows(normalizer=name) for name in FUSED},
    "rows: temperature 0.5": rows(temperature=0.5),
    "rows: temperature 0": rows(temperature=0.0),
    "rows: mask": rows(mask=_mask((5, 37)), normalizer="entmax15"),
    "rows: dim 0": rows(dim=0, normalizer="sparsemax"),
    **{f"attention: {name}": attention(normalizer=name) for name in FUSED},
    **{f"attention: {name}, causal": attention(normalizer=name, is_causal=True) for name in FUSED},
    "attention: causal, more queries than keys": attention(13, 9, is_causal=True),
    "attention: bool mask": attention(attn_mask=_mask((2, 1, 9, 13))),
    "attention: bias": attention(attn_mask=torch.randn(2, 9, 13, generator=torch.Generator().manual_seed(3))),
    "attention: bool mask, causal": attention(attn_mask=_mask((9, 13)), is_causal=True),
    "attention: grouped queries": attention(heads=4, groups=2, enable_gqa=True, normalizer="entmax15"),
    "attention: window": attention(window=(3, 1), normalizer="sparsemax"),
    "attention: key lengths": attention(key_lengths=torch.tensor([5, 0])),
    "attention: soft cap": attention(softcap=1.5),
    "attention: score function": attention(score_mod=score_functions.CLAMP, normalizer="entmax15"),
    "attention: temperature per query": attention(temperature=TEMPERATURE),
    "attention: sink": attention(sink=torch.tensor([-2.0, 5.0])),
    "attention: gate per head": attention(gate=torch.linspace(-4.0, 4.0, 9).expand(2, 2, 9)),
    "attention: gate per element": attention(gate=torch.linspace(-4.0, 4.0, 16).expand(2, 2, 9, 16), normalizer="relu"),
    "attention: scale inverse": attention(scale="inverse"),
    "attention: policy SSMax": attention(temperature=regard.temperature.SSMax()),
    "attention: no keys": attention(lk=0),
    "attention: one key": attention(lk=1, normalizer="entmax15"),
    "refused: unknown normaliser": rows(normalizer="softmaxx"),
    "refused: alpha out of range": rows(normalizer="entmax(alpha=0.5)"),
    "refused: dim": rows(dim=2),
    "refused: negative temperature": rows(temperature=-1.0),
    "refused: mask's shape": rows(mask=torch.ones(4, 37, dtype=torch.bool)),
    "refused: integer mask": rows(mask=torch.ones(5, 37, dtype=torch.int64)),
    "refused: attn_mask's shape": attention(attn_mask=torch.ones(3, 13, dtype=torch.bool)),
    "refused: sink of sparsemax": attention(sink=torch.zeros(2), normalizer="sparsemax"),
    "refused: gate's shape": attention(gate=torch.ones(2, 2, 8)),
    "refused: heads that do not divide": attention(heads=4, groups=3, enable_gqa=True),
    "refused: temperature 0 in attention": attention(temperature=0.0),
    "refused: negative window": attention(window=(-1, 0)),
    "refused: key lengths too long": attention(key_lengths=[14, 1]),
    "refused: unknown statistic": attention(return_stats=("entropie",)),
    "refused: dropout with statistics": attention(dropout_p=1.5),
}


def answer(name: str, backend: str, device: str = "cpu"):
    """(numbers, None) or (None, refusal)."""
    try:
        return CALLS[name](backend, device), None
    except (TypeError, ValueError) as refusal:
        return None, f"{type(refusal).__name__}: {refusal}"


def distance(found: dict, truth: dict) -> float:
    """The largest relative error, entry by entry, beside the scale of the tensor."""
    worst = 0.0
    for name, right in truth.items():
        ours, right = found[name].detach().double().cpu(), right.detach().double().cpu()
        odd = ~right.isfinite()
        if ours.shape != right.shape or not torch.equal(ours[odd], right[odd]):
            return math.inf
        error = ((ours - right).abs() / (right.abs() + 0.1))[~odd]
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    return worst


def table(
    columns: dict[str, tuple[str, str]], calls=tuple(CALLS), told=lambda lines: None
) -> dict[str, dict[str, str]]:
    """{call: {column: "1e-07" | "refused" | "differs"}} for each column's (backend, device); `told` sees it grow."""
    lines = {}
    for name in calls:
        truth, refusal = answer(name, "reference")
        cells = {}
        for column, (backend, device) in columns.items():
            found, said = answer(name, backend, device)
            if refusal is not None:
                cells[column] = "refused" if said == refusal else "differs"
            elif found is None:
                cells[column] = "differs"
            else:
                cells[column] = f"{distance(found, truth):.0e}"
        lines[name] = cells
        told(lines)
    return lines


def main(path: str, part: int = 0, parts: int = 1) -> None:
    """Write the table; on a machine with a GPU only its column, or a part of it, as JSON, which the other merges."""
    saved = Path(__file__).parents[2] / "benchmarks" / "results" / "backends-h200.json"
    if torch.cuda.is_available():

        def write(lines):
            Path(path).write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

        table({"GPU": ("triton", "cuda")}, list(CALLS)[part::parts], write)
        return
    lines = table({"reference": ("reference", "cpu"), "CPU": ("cpu", "cpu"), "interpreter": ("triton", "cpu")})
    gpu = json.loads(saved.read_text()) if saved.is_file() else {}
    text = [HEAD, "| call | reference | CPU | interpreter | GPU |", "| --- | --- | --- | --- | --- |"]
    for name, cells in lines.items():
        text.append(f"| {name} | {' | '.join(cells.values())} | {gpu.get(name, {}).get('GPU', 'not run')} |")
    Path(path).write_text("\n".join(text) + "\n", encoding="utf-8")


HEAD = """# One call, every backend

The same call gives the same answer on every backend, or the same error in the same words. Each line is a test
(`tests/core/test_backends.py`); `python tests/support/backend_calls.py docs/records/backends.md` writes this table.
A number is the largest relative difference to the float64 reference over weights or output, all statistics and
gradients, in float32; `refused` means a `ValueError` or `TypeError` with the reference's own message. "interpreter"
runs the GPU kernels on the CPU. The GPU's column comes from a run of the same list on an H200.
"""

if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
