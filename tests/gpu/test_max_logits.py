"""The kernel of the largest logits, compiled, against float64 on the same GPU."""

import pytest
import torch
from logit_data import check, check_nan, draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [24, 64, 80, 128, 256])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(1, 900, False), (700, 700, True), (300, 1100, False)])
@pytest.mark.parametrize("groups", [1, 4])
def test_all_rows_and_a_few(dtype, d, queries, keys, causal, groups):
    check(*draw(queries, keys, groups=groups, d=d, dtype=dtype, device="cuda"), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_stays_and_the_largest_of_three_calls_is_kept(dtype):
    q, k, _ = draw(500, 500, d=80, dtype=dtype, device="cuda")
    check_nan(q, k)
