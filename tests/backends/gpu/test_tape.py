"""Recorded calls, on the CPU: a tape repeats torch's ops on other tensors, and is not made of what it cannot repeat."""

import ctypes
import subprocess
import sys
import weakref

import torch

from regard._backends.gpu import launcher, tape


def compute(a, b):
    made = torch.empty(2, *a.shape)
    made.copy_(a)
    largest, where = torch.max(b, 1)
    return made, a.reshape(-1).view(3, 2), largest, None, where


def test_a_tape_repeats_ops_views_and_results():
    a, b = torch.randn(2, 3), torch.randn(4, 5)
    _, kept = tape._record((a, b, None), lambda: compute(a, b))
    assert kept is not None
    a, b = torch.randn(2, 3), torch.randn(4, 5)
    for one, other in zip(kept.replay((a, b, None)), compute(a, b), strict=True):
        assert one is other if one is None else torch.equal(one, other)


def test_a_call_that_reads_a_tensor_from_elsewhere_gets_no_tape():
    a, elsewhere = torch.randn(3), torch.randn(3)
    result, kept = tape._record((a,), lambda: (a + elsewhere,))
    assert kept is None
    torch.testing.assert_close(result[0], a + elsewhere)


def test_a_view_that_follows_from_an_address_is_made_anew():
    def align(x):
        return x[-x.data_ptr() % 64 // 4 :]

    base = torch.arange(100.0)
    first, other = base[3:60], base[8:65]  # 20 bytes apart
    _, kept = tape._record((first,), lambda: (launcher.call_by_address(align, first),))
    assert kept is not None
    (found,) = kept.replay((other,))
    assert torch.equal(found, align(other)) and found.data_ptr() % 64 == 0
    assert torch.equal(launcher.call_by_address(align, other), found)


def test_memory_that_only_kernels_see_is_one_piece():
    """Two launches hand numbers on through scratch: the second reads at the address that the first wrote to."""
    given = []

    def write(*arguments):
        given.append(arguments)
        where, source = arguments[0], arguments[1][0]
        ctypes.memmove(where, source, 12)

    kind = dict(dtype=torch.float32, device=torch.device("cpu"))
    steps = [
        tape.Step(torch.empty, ([3],), kind, (1,), True),  # seen by kernels alone, and so the next one
        tape.Step(torch.empty, ([2, 40],), kind, (2,), True),
        tape.Step(torch.empty, ([3],), kind, (3,), True),  # returned
        tape.Step(torch.empty, ([3],), kind, (4,), True),  # given to one of torch's ops
        tape.Step(torch.ops.aten.fill_.Scalar, (tape.Slot(4), 7.0), {}, (4,), True),
        tape.Step(write, (tape.Slot(2), tape.Nested(tuple, (tape.Slot(0), 5))), {}, (), True, True),
        tape.Step(write, (tape.Slot(1), tape.Nested(tuple, (tape.Slot(4),))), {}, (), True, True),
        tape.Step(write, (tape.Slot(3), tape.Nested(tape.Slot._make, (tape.Slot(2),))), {}, (), True, True),
    ]
    kept = tape.Tape(steps, 1, (tape.Slot(3), None))
    x = torch.randn(3)
    found, nothing = kept.replay((x,))
    assert torch.equal(found, x) and nothing is None
    (second, (address, number)), (first, _), (last, (again,)) = given
    assert address == x.data_ptr() and number == 5 and again == second and last == found.data_ptr()
    assert second - first == 256 and first % 64 == 0
    assert kept.source.count("empty") == 0 and "memory" in kept.source


def test_one_piece_of_scratch_stays_a_tensor():
    kind = dict(dtype=torch.float32, device=torch.device("cpu"))
    given = []
    steps = [
        tape.Step(torch.empty, ([3],), kind, (1,), True),
        tape.Step(given.append, (tape.Slot(1),), {}, (), True, True),
    ]
    kept = tape.Tape(steps, 1, (tape.Slot(0),))
    (found,) = kept.replay((torch.ones(2),))
    assert torch.equal(found, torch.ones(2)) and type(given[0]) is int and "memory" not in kept.source


def test_an_op_without_results_is_no_launch():
    """`for row in x` of no rows is aten.unbind, which returns an empty list."""
    x = torch.empty(0, 3)
    _, kept = tape._record((x,), lambda: (x, *x))
    assert kept is not None and len(kept.replay((torch.empty(0, 3),))) == 1


def test_memory_is_freed_after_its_last_use():
    """The lists of entmax's two gradients are 1 GiB each and never exist together."""
    pages = []

    def make():
        assert not pages or pages[-1]() is None
        page = torch.zeros(4)
        pages.append(weakref.ref(page))
        return page

    steps = [
        tape.Step(make, (), {}, (1,), True),
        tape.Step(torch.ops.aten.alias.default, (tape.Slot(1),), {}, (2,), True),
        tape.Step(torch.ops.aten.add.Tensor, (tape.Slot(0), tape.Slot(2)), {}, (3,), True),
        tape.Step(make, (), {}, (4,), True),
        tape.Step(torch.ops.aten.add.Tensor, (tape.Slot(3), tape.Slot(4)), {}, (5,), True),
    ]
    x = torch.randn(4)
    (found,) = tape.Tape(steps, 1, (tape.Slot(5),)).replay((x,))
    assert torch.equal(found, x) and len(pages) == 2


def test_large_memory_is_free_while_a_call_is_recorded(monkeypatch):
    monkeypatch.setattr(tape, "MAX_BYTES", 1000)
    alive = []

    def compute(x):
        for _ in range(3):
            page = x.new_empty(1000).fill_(2.0)
            alive.append(weakref.ref(page))
            x = x * page[:3]
            del page
            assert alive[-1]() is None
        return (x,)

    x = torch.randn(3)
    _, kept = tape._record((x,), lambda: compute(x))
    assert kept is not None
    torch.testing.assert_close(kept.replay((x,))[0], 8 * x)


def test_recording_does_not_import_torchs_compiler():
    """The second call of a kind is recorded: an import of seconds would surprise users."""
    code = """
import sys, torch
from regard._backends.gpu import tape
x = torch.randn(3)
assert tape._record((x,), lambda: (x + x,))[1] is not None
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
