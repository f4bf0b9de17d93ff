"""`regard.check` does no harm and is honest: the model is as it was, and what was not looked at is said."""

import pytest
import torch
from torch import nn

import regard

WORDS = 40


def ids(rows=2, length=32, words=WORDS):
    return torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(0))


def reasons(verdict, code):
    return [one.reason for one in verdict.skipped if one.code == code]


class Model(nn.Module):
    """One causal layer with a table of positions."""

    def __init__(self, positions=64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(WORDS, 16), nn.Embedding(positions, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)
        self.longest = 0

    def forward(self, input_ids):
        length = input_ids.shape[1]
        Model.longest = max(Model.longest, length)
        x = self.embedding(input_ids) + self.places.weight[:length]
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.mark.parametrize("positions, longest", [(50, 50), (32, 32), (9999, 64)])
def test_no_text_is_longer_than_a_table_of_positions(positions, longest):
    Model.longest = 0
    verdict = regard.check(Model(positions), ids(), select="RG218", causal=True)
    assert Model.longest == longest
    assert verdict.passed == ["RG218"] * (longest > 32)
    assert "the limit is 32" in str(reasons(verdict, "RG218")) or longest > 32
