"""The table of row kernels, without a GPU: who takes which rows, and the docs' table."""

from pathlib import Path

import pytest

from regard._backends.gpu.rows.plan import FORWARD, Rows, choose, document_kernels

DOCS = Path(__file__).parents[3] / "docs" / "developers" / "kernels-rows.md"


def _rows(kind, length, size=2, count=200, direction="forward"):
    return Rows(direction, kind, count, length, size, 132)


@pytest.mark.parametrize(("rows", "name"), [
    (_rows("threshold", 8192), "forward_threshold"),
    (_rows("threshold", 131088), "forward_threshold"),
    (_rows("threshold", 65536, size=8), "forward_threshold"),
    (_rows("threshold", 1024), "forward_threshold_short"),
    (_rows("softmax", 65536), "forward_ratio"),
    (_rows("proportional", 65536, size=4), "forward_ratio"),
    (_rows("softmax", 8192, size=4), "forward_exact"),
    (_rows("pointwise", 65536), "forward_pointwise"),
    (_rows("pointwise", 16384), "forward_ratio"),
    (_rows("threshold", 65536, direction="from weights"), "backward_threshold"),
    (_rows("softmax", 300, size=4, direction="from weights"), "backward_exact"),
    (_rows("pointwise", 65536, direction="from weights"), "backward_ratio"),
])  # fmt: skip
def test_the_first_kernel_that_supports_the_rows_takes_them(rows, name):
    assert choose(rows)[0].name == name


def test_every_kernel_says_why_it_was_passed_over():
    rows = _rows("softmax", 50257)
    reasons = {kernel.name: kernel.supports(rows) for kernel in FORWARD}
    assert reasons["forward_exact"] == "takes only float32 softmax and softmax1"
    assert FORWARD[-1].supports(rows) is None


def test_the_documented_table_is_current():
    assert "\n".join(document_kernels()) in DOCS.read_text(), f"paste document_kernels() into {DOCS}"
