"""`regard.check` does no harm and is honest: the model is as it was, and what was not looked at is said."""

import pytest
import torch
from torch import nn

import regard
from regard.testing import ContractError

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


@pytest.mark.parametrize(("positions", "longest"), [(50, 50), (32, 32), (9999, 64)])
def test_no_text_is_longer_than_a_table_of_positions(positions, longest):
    Model.longest = 0
    verdict = regard.check(Model(positions), ids(), select="RG218", causal=True)
    assert Model.longest == longest
    assert verdict.passed == ["RG218"] * (longest > 32)
    assert "the limit is 32" in str(reasons(verdict, "RG218")) or longest > 32


OUTSIDE = {}


class Remembers(Model):
    """Adds what it has seen so far, kept in `kept(self)`, to its embeddings."""

    def __init__(self, kept):
        super().__init__()
        self.cache, self.kept = {}, kept

    def forward(self, input_ids):
        held = self.kept(self)
        held["longest"] = max(held.get("longest", 0), input_ids.shape[1])
        held.setdefault("table", torch.zeros(1))[:] = held["longest"]
        return super().forward(input_ids) * (1 + held["table"])


@pytest.mark.parametrize("kept", [lambda model: model.cache, lambda model: OUTSIDE])
def test_the_model_answers_as_before_or_the_verdict_says_so(kept):
    model = Remembers(kept)
    with torch.no_grad():
        before = model(ids(length=8))
        verdict = regard.check(model, ids(length=24), causal=True)
        is_same = torch.equal(before, model(ids(length=8)))
    assert is_same == (not OUTSIDE)
    assert is_same or ("running the model changed it" in str(verdict) and not verdict)


def test_a_check_that_could_not_measure_is_not_green(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("regard.health.contract.check.measure", fail)
    verdict = regard.check(Model(32), ids(), causal=True)
    assert not verdict and not verdict.failures and "no such thing" in verdict.error
    assert str(verdict).startswith("INCOMPLETE: attention could not be measured") and verdict.without(set()).error
    with pytest.raises(ContractError, match="INCOMPLETE"):
        verdict.raise_on("critical")
    assert verdict.to_json()["summary"]["error"] == verdict.error
    assert regard.check(Model(), ids(), select="RG101", causal=True)  # needs no measuring


def test_a_selection_of_which_nothing_was_checked_is_not_green():
    verdict = regard.check(Model(), ids(), select="RG101", seconds=0.0)
    assert not verdict and str(verdict).startswith("INCOMPLETE: nothing was checked: out of time")
    assert regard.check(Model(), ids(), select="RG101", causal=False)  # there is nothing to check
