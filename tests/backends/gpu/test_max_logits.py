"""The kernel of the largest logits, here in Triton's interpreter, against float64."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from logit_data import check, check_nan, draw

from regard._backends.gpu import max_logits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (150, 90), (20, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_rows_and_a_few(causal, queries, keys, dtype):
    check(*draw(queries, keys, dtype=dtype), causal)


def test_nan_stays_and_the_largest_of_three_calls_is_kept():
    check_nan(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16))


def test_what_it_leaves_to_attention():
    q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 1, 4, 8)
    assert max_logits.can_note(q, k, None, 1.0)
    for other_q, other_k, mask, scale in (
        (q, k, torch.ones(4, 4, dtype=torch.bool), 1.0), (q, k, None, -1.0), (q.double(), k.double(), None, 1.0),
        (q, k.bfloat16(), None, 1.0), (q, k.expand(1, 2, 4, 8), None, 1.0), (q.expand(2, 3, 4, 8), k, None, 1.0),
    ):  # fmt: skip
        assert not max_logits.can_note(other_q, other_k, mask, scale)


@pytest.mark.parametrize(("large", "wanted"), [
    (True, {(2, 128): (128, 128, 3), (2, 256): (64, 32, 2), (4, 128): (64, 64, 3), (4, 256): (16, 16, 2)}),
    (False, {(2, 128): (64, 64, 2), (2, 256): (32, 32, 2), (4, 64): (64, 64, 2), (4, 256): (16, 16, 2)}),
])  # fmt: skip
def test_blocks_follow_the_card(monkeypatch, large, wanted):
    monkeypatch.setattr(max_logits, "has_large_shared_memory", lambda device: large)
    for (size, wide), blocks in wanted.items():
        q = SimpleNamespace(is_cuda=True, device=None, element_size=lambda size=size: size)
        assert max_logits.choose_blocks(q, 1000, wide) == blocks
        assert max_logits.choose_blocks(q, 9, wide)[0] == 16
