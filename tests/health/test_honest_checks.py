"""`regard.check` does no harm and is honest: the model is as it was, and what was not looked at is said."""

from types import SimpleNamespace

import pytest
import torch
from contract_data import codes, run_check
from torch import nn

import regard
from regard.health.capture.call import Call
from regard.health.checks import distance_bias, scale_of_config, weight_repairs
from regard.health.probe import library
from regard.health.probe.probe import CapturedCall
from regard.testing import ContractError

WORDS = 40


def ids(rows=2, length=32, words=WORDS):
    return torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(0))


def reasons(verdict, code):
    return [one.reason for one in verdict.skipped if one.code == code]


class Model(nn.Module):
    """One causal layer with a table of positions."""

    longest = 0  # tokens that any model was given

    def __init__(self, positions=64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(positions, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        Model.longest = max(Model.longest, length)
        x = self.embedding(input_ids) + self.positions.weight[:length]
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Cached(nn.Module):
    """One causal layer with a cache of keys and values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, input_ids, cache=None):
        x = self.embedding(input_ids)
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        o = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.head(x + o[:, 0]), (k, v)


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


def test_an_error_of_regard_is_not_the_models(monkeypatch):
    monkeypatch.setattr("regard.health.probe.trial.TOLERANCE", None)
    (reason,) = reasons(regard.check(Model(), ids(), select="RG101", causal=True), "RG101")
    assert reason.startswith("regard failed; please report that it raised AttributeError") and "trial.py" in reason


class NoTensor(Model):
    def forward(self, input_ids):
        super().forward(input_ids)
        return {"words": "none"}


def test_what_the_model_returns_is_not_an_error_of_regard():
    (reason,) = reasons(regard.check(NoTensor(), ids(), select="RG101", causal=True), "RG101")
    assert reason == "the model returned dict, which holds no tensor of real numbers"


def test_a_wrong_kernel_of_regard_is_said(monkeypatch):
    run = Call.run
    monkeypatch.setattr(Call, "run", lambda call: 1.5 * run(call))
    (reason,) = reasons(regard.check(Model(), ids(), select="RG420"), "RG420")
    assert "regard's own kernel differs by 0.5 from plain torch in 1 of 1 layers" in reason


class OneSided(Cached):
    """Queries are rotated and keys are not; every token sees all."""

    def forward(self, input_ids, attention_mask):
        q, k, v = (t[:, None] for t in self.qkv(self.embedding(input_ids)).chunk(3, -1))
        angle = torch.arange(q.shape[2])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003])
        a, b = q.chunk(2, -1)
        q = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        mask = attention_mask[:, None, None].bool()
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, mask)[:, 0])


def test_a_finding_stays_where_a_later_question_cannot_be_asked():
    shown = torch.arange(32) < torch.tensor([[5], [5]])
    batch = {"input_ids": ids(), "attention_mask": shown.long()}
    assert [one.code for one in regard.check(OneSided(), batch, select="RG72").failures] == ["RG720"]


def test_code_of_the_user_is_his_wherever_it_lies():
    def load(file, module):
        space = {"__name__": module}
        exec(compile("def patch(x): return x", file, "exec"), space)
        return space["patch"]

    for file in ("/home/torch/mine.py", "/data/transformers/patch.py", "/x/regard/y.py", "<stdin>"):
        assert library._is_foreign(load(file, "__main__"))
    assert not library._is_foreign(load("<string>", "transformers.utils.generic"))
    assert not library._is_foreign(nn.functional.softmax)


def test_what_time_left_untried_is_not_passed(monkeypatch):
    monkeypatch.setattr(weight_repairs, "SECONDS", 0.0)
    monkeypatch.setattr(weight_repairs, "FEW_SECONDS", 0.0)
    (reason,) = reasons(regard.check(Model(), ids(), select="RG621", causal=True), "RG621")
    assert "0 of " in reason and "other readings of the weights were tried in 0 s" in reason


@pytest.mark.parametrize("code", ["RG402", "RG420"])
def test_memory_that_ran_out_is_said(monkeypatch, code):
    def fail(call):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(Call, "run", fail)
    (reason,) = reasons(regard.check(Model(), ids(), select=code, causal=True), code)
    assert "OutOfMemoryError: too large" in reason


def test_chunks_that_are_refused_are_not_passed():
    class OneByOne(Cached):
        def forward(self, input_ids, cache=None):
            if cache is not None and input_ids.shape[1] > 1:
                raise ValueError("one token at a time")
            return super().forward(input_ids, cache)

    for model, count in ((Cached(), 0), (OneByOne(), 1)):
        verdict = regard.check(model, ids(), select="RG2", causal=True)
        assert "RG206" in verdict.passed and ("RG211" in verdict.passed) == (not count)
        assert len(reasons(verdict, "RG211")) == count


def test_a_loss_that_was_not_measured_is_said(monkeypatch):
    def fail(*_):
        raise RuntimeError("no loss")

    monkeypatch.setattr("regard.health.probe.task.Task.read", fail)
    verdict = regard.check(Model(), dict(input_ids=ids()), select="RG8", causal=True)
    assert "no loss" in str(reasons(verdict, "loss")) and "loss" in verdict.describe_skipped()


def test_layers_of_an_encoder_are_not_those_of_a_decoder():
    def layers():
        return nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    part = nn.ModuleDict({"encoder": layers(), "decoder": layers()})
    found = list(weight_repairs.list_repairs_of_one_layer(SimpleNamespace(part=part, captured=(None, {}))))
    places = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert [one.meaning.rpartition("in ")[2] for one in found] == [f"{place} alone" for place in places]
    assert [list(one.values()) for one in found] == [[f"{place}.weight"] for place in places]


def test_a_bias_of_mixed_sign_is_no_alibi():
    def bias(slopes):
        rows = torch.tensor(slopes)[:, None] * torch.arange(11, -1, -1)
        q = torch.zeros(1, 3, 12, 4)
        return CapturedCall(
            ("layer", 0), Call(nn.Identity(), q, q, q, None, "sdpa", mask=rows[None, :, None], cross=False), q, q, q, q
        )

    def check(slopes):
        trial = SimpleNamespace(
            captured=(None, {("layer", 0): bias(slopes)}), find=lambda rule, *_: [rule.code], token_task=None, task=None
        )
        return distance_bias.check(trial)

    assert check([-0.1, -0.2, -0.4]) == ["RG741"] and check([0.1, 0.2, 0.4]) == ["RG740"]
    assert check([0.1, -0.2, 0.4]) == []


def test_a_scale_of_code_by_hand_hides_no_configured_one(monkeypatch):
    by_hand = SimpleNamespace(code="RG421", severity="warning")
    monkeypatch.setattr(scale_of_config, "check_by_hand", lambda *_: [by_hand])
    monkeypatch.setattr(scale_of_config, "layer_config", lambda *_: object())
    monkeypatch.setattr(scale_of_config, "configured_scale", lambda *_: ("attention_multiplier", 1.0))
    assert codes(run_check("scale_of_config", Model(), ids())) == ["RG421", "RG410"]
