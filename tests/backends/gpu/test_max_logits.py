"""The kernel of the largest logits, here in Triton's interpreter, against float64."""

import math

import pytest
import torch

pytest.importorskip("triton")

from regard._backends.gpu import max_logits


def note(q, k, v, causal, rows):
    held = torch.full((3 + q.shape[1] + 2,), -math.inf)
    assert max_logits.can_note(q, k, None, 0.25)
    max_logits.note_largest(q, k, v, causal, 0.25, rows, held)
    return held


def expect(q, k, causal):
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.25
    hidden = (
        torch.ones(s.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(s.shape[-2:], dtype=torch.bool)
    )
    return s.masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (150, 90), (20, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_rows_and_a_few(causal, queries, keys, dtype):
    torch.manual_seed(queries + keys)
    q = torch.randn(2, queries, 4, 24).to(dtype).transpose(1, 2) - 2.0  # negative logits too
    k, v = torch.randn(2, 2, keys, 24).to(dtype) + 2.0, torch.randn(2, 2, keys, 5).to(dtype)
    s = expect(q, k, causal)
    whole, few = note(q, k, None, causal, 0), note(q, k, v, causal, 16)
    assert whole[:2].tolist() == few[:2].tolist() == [4.0, 24.0] and whole[2] == -math.inf
    torch.testing.assert_close(whole[3:7].double(), s.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)
    step = max(1, queries // 16)
    torch.testing.assert_close(
        few[3:7].double(), s[0, :, (queries - 1) % step :: step].amax((1, 2)), rtol=1e-5, atol=1e-5
    )
    norm = v[0, :, :: max(1, keys // 16)].double().norm(dim=-1).mean()
    torch.testing.assert_close(few[2].double(), norm, rtol=1e-4, atol=1e-4)
    assert (whole[7:] == -math.inf).all()


def test_nan_stays_and_the_largest_of_two_calls_is_kept():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    held = torch.full((5,), -math.inf)
    for factor in (1.0, 5.0, 0.1):
        max_logits.note_largest(q * factor, k, None, True, 0.25, 0, held)
    torch.testing.assert_close(held[3:].double(), expect(5.0 * q, k, True).amax((0, 2, 3)), rtol=1e-5, atol=1e-5)
    q[0, 1, 7, 3] = math.nan
    max_logits.note_largest(q, k, None, True, 0.25, 0, held)
    max_logits.note_largest(q.nan_to_num(), k, None, True, 0.25, 0, held)
    assert held[3].isfinite() and held[4].isnan()


def test_what_it_leaves_to_attention():
    q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 1, 4, 8)
    assert max_logits.can_note(q, k, None, 1.0)
    for other_q, other_k, mask, scale in (
        (q, k, torch.ones(4, 4, dtype=torch.bool), 1.0), (q, k, None, -1.0), (q.double(), k.double(), None, 1.0),
        (q, k.bfloat16(), None, 1.0), (q, k.expand(1, 2, 4, 8), None, 1.0),
    ):  # fmt: skip
        assert not max_logits.can_note(other_q, other_k, mask, scale)
