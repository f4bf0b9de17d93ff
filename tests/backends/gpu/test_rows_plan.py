"""The table of row kernels, without a GPU: who takes which rows, that resident rows fit, and the docs' table."""

from pathlib import Path

import pytest

from regard._backends.gpu.rows.plan import (
    FORWARD,
    MOST_BYTES,
    OTHERS,
    OTHERS_BACKWARD,
    Cut,
    ResidentCut,
    Rows,
    choose,
    document_kernels,
)

SHARED_MEMORY, RESERVED = 233472, 1024  # bytes of an SM, and what each of its programs leaves unused
DOCS = Path(__file__).parents[3] / "docs" / "developers" / "kernels-rows.md"


def _rows(kind, length, size=2, count=200, direction="forward", not_copyable=None):
    return Rows(direction, kind, count, length, size, 132, not_copyable)


@pytest.mark.parametrize(("rows", "name"), [
    (_rows("threshold", 8192), "forward_resident_threshold"),
    (_rows("threshold", 8192, not_copyable="a mask"), "forward_threshold"),
    (_rows("threshold", 8192, count=66), "forward_threshold"),
    (_rows("threshold", 4096), "forward_threshold"),
    (_rows("threshold", 131088), "forward_threshold"),
    (_rows("threshold", 65536, size=8), "forward_threshold"),
    (_rows("threshold", 1024), "forward_threshold_short"),
    (_rows("softmax", 65536), "forward_ring"),
    (_rows("softmax", 50257, not_copyable="odd length"), "forward_thread_shift"),
    (_rows("ratio", 65552), "forward_resident_ratio"),
    (_rows("proportional", 65536, size=4), "forward_ratio"),
    (_rows("softmax", 8192, size=4), "forward_fast_exact"),
    (_rows("softmax", 8192, size=4, count=3), "forward_exact"),
    (_rows("pointwise", 65536), "forward_pointwise"),
    (_rows("pointwise", 16384), "forward_ratio"),
    (_rows("softmax", 65536, direction="from weights"), "backward_resident"),
    (_rows("threshold", 65536, direction="from weights", not_copyable="not Hopper"), "backward_threshold"),
    (_rows("softmax", 300, size=4, direction="from weights"), "backward_exact"),
    (_rows("pointwise", 65536, direction="from weights"), "backward_ratio"),
])  # fmt: skip
def test_the_first_kernel_that_supports_the_rows_takes_them(rows, name):
    kernel, cut = choose(rows)
    assert kernel.name == name and isinstance(cut, ResidentCut if kernel.module.startswith("resident") else Cut)


def test_every_kernel_says_why_it_was_passed_over():
    rows = _rows("softmax", 50257, not_copyable="rows that 16-byte copies cannot read")
    reasons = {kernel.name: kernel.supports(rows) for kernel in FORWARD}
    assert reasons["forward_ring"] == "rows that 16-byte copies cannot read"
    assert reasons["forward_exact"] == "takes only float32 softmax and softmax1"
    assert reasons["forward_thread_shift"] is None and FORWARD[-1].supports(rows) is None


CASES = [("forward", *key, others) for key, others in OTHERS.items()]
CASES += [("from weights", *key, others) for key, others in OTHERS_BACKWARD.items()]


@pytest.mark.parametrize(("direction", "kind", "size", "others"), CASES, ids=str)
def test_a_resident_row_fits_an_sm(direction, kind, size, others):
    """A chunk or more is held, a quarter is whole vectors of all threads, and the programs that share an SM fit."""
    column = size if direction == "forward" else 2 * size
    for columns in range(others // column + 16, MOST_BYTES // column + 1, 16):
        kernel, cut = choose(_rows(kind, columns, size, 10**6, direction))
        threads = 32 * cut.warps
        assert kernel.module.startswith("resident")
        assert cut.chunks >= 3 and (cut.chunks - 1) * cut.chunk < columns <= cut.chunks * cut.chunk
        assert cut.chunk // 2 % (threads * (16 // size)) == 0
        together = cut.programs // 132
        held = 6 if kernel.name == "forward_ring" else cut.chunks - 1
        assert together * (held * cut.chunk * column + RESERVED) < SHARED_MEMORY
        assert together * threads * cut.registers <= 65536


def test_the_documented_table_is_current():
    assert "\n".join(document_kernels()) in DOCS.read_text(), f"paste document_kernels() into {DOCS}"
