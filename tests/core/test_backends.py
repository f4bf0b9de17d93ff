"""Reference, CPU and GPU kernels (here in Triton's interpreter) answer every call of one list alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backend_calls import CALLS, answer, distance

pytest.importorskip("numba")
pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes both sides of a choice
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = Path(__file__).parents[2] / "docs" / "records" / "backends.md"


@pytest.mark.parametrize("name", CALLS)
def test_the_same_answer_or_the_same_refusal(name):
    truth, refusal = answer(name, "reference")
    assert (refusal is not None) == name.startswith("refused")
    for backend, device in (("cpu", "cpu"), ("triton", DEVICE)):
        found, said = answer(name, backend, device)
        assert said == refusal
        assert truth is None or distance(found, truth) < 2e-4


def test_the_page_lists_every_call():
    lines = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(("| rows", "| att", "| ref"))
    ]
    assert [line.split("|")[1].strip() for line in lines] == list(CALLS)
    assert not any("differs" in line for line in lines)
