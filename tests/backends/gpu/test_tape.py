"""Recorded calls, on the CPU: a tape repeats torch's ops on other tensors, and is not made of what it cannot repeat."""

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
