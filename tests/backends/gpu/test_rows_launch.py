"""Which rows pass through shared memory, told without a card: who is refused, and that what is taken fits."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from regard._backends.gpu.rows.resident import launch as rows_launch
from regard._core import device

BYTES, RESERVED = 233472, 1024  # of a multiprocessor's shared memory, and what each of its programs leaves unused


@pytest.fixture
def card(monkeypatch):
    """(9, 0) and Triton 3.6, unless a test says otherwise."""

    def be(capability=(9, 0), version="3.6.0"):
        device.clear()
        monkeypatch.setattr("triton.__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(major=capability[0], multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    be()
    yield be
    device.clear()


def _rows(columns, dtype=torch.bfloat16, count=200, at=0):
    return SimpleNamespace(
        is_cuda=True, shape=(count, columns), dtype=dtype, device="cuda:0", element_size=lambda: dtype.itemsize,
        data_ptr=lambda: at,
    )  # fmt: skip


def test_only_long_bare_rows_are_taken(card):
    takes, rows, mask = rows_launch.takes, _rows(8192), torch.ones(1, dtype=torch.bool)
    assert takes(rows, "threshold", None, False)
    assert not takes(rows, "threshold", mask, False) and not takes(rows, "threshold", None, True)
    assert not takes(rows, "pointwise", None, False) and not takes(_rows(4096), "threshold", None, False)
    assert not takes(_rows(8200), "threshold", None, False) and not takes(_rows(8192, at=8), "threshold", None, False)
    assert not takes(_rows(8192, count=66), "threshold", None, False)
    assert not takes(_rows(65536, torch.float64), "threshold", None, False)
    assert not takes(_rows(131088), "threshold", None, False)


@pytest.mark.parametrize(("capability", "version"), [((9, 0), "3.5.1"), ((8, 0), "3.6.0"), ((10, 0), "3.9.0")])
def test_only_hopper_and_a_triton_whose_gluon_was_tried(card, capability, version):
    rows, weighs = _rows(65536), SimpleNamespace(slope_of_weight=True, family="ratio", shift="max")
    assert rows_launch.takes(rows, "exponential", None, False)
    assert rows_launch.takes_back(rows, rows, weighs, "exponential", None, False)
    card(capability, version)
    assert not rows_launch.takes(rows, "exponential", None, False)
    assert not rows_launch.takes_back(rows, rows, weighs, "exponential", None, False)


CUTS = [  # bytes of a number and of a column, the bytes of a row that others do as well, the cuts
    *((size, size, rows_launch.OTHERS["threshold", size], rows_launch.CUTS_OF_THRESHOLDS[size]) for size in (2, 4)),
    *((size, size, rows_launch.OTHERS["ratio", size], rows_launch.CUTS) for size in (2, 4)),
    (2, 4, rows_launch.OTHERS_BACK["threshold"], rows_launch.CUTS_BACK),
]


@pytest.mark.parametrize(("number", "column", "others", "cuts"), CUTS, ids=str)
def test_a_row_that_is_taken_fits_its_places(card, number, column, others, cuts):
    """A chunk or more is held, a quarter is whole vectors of all threads, and the programs that share a card fit."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[number]
    for columns in range(others // column + 16, max(cuts) // column + 1, 16):
        chunks, cut, options = rows_launch._cut(_rows(columns, dtype, 10**6), None, column, cuts)
        chunk, threads = cut["CHUNK"], 32 * options["num_warps"]
        assert chunks >= 3 and (chunks - 1) * chunk < columns <= chunks * chunk
        assert cut["EVEN"] == (columns == chunks * chunk) and chunk // 2 % (threads * cut["VECTOR"]) == 0
        together = options["grid"][0] // 132
        assert together * ((chunks - 1) * chunk * column + RESERVED) < BYTES
        assert together * threads * options["maxnreg"] <= 65536 and options["enable_fp_fusion"]
