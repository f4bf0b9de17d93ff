"""`regard.check`: a verdict on small models, what it selects, groups and prints, and what it leaves as it was."""

import json

import pytest
import torch
from torch import nn

import regard
from regard.health import ContractError, checks, examine
from regard.health.checks.finding import fill_finding
from regard.health.contract import selection
from regard.health.contract.diagnosis import diagnose
from regard.health.contract.verdict import count_from

WORDS = 40


def ids(rows=2, length=32):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """One causal layer; with `mean`, no attention but the mean over all tokens; with `short`, an error below 32."""

    def __init__(self, mean=False, short=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(16, WORDS)
        self.mean, self.short, self.runs = mean, short, 0

    def forward(self, input_ids, labels=None):
        self.runs += 1
        if self.short and not bool((input_ids == ids()).all()):
            raise KeyError("no other text")
        x = self.embedding(input_ids)
        if self.mean:
            return self.head(x + x.mean(1, keepdim=True))
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + o[:, 0])


def test_every_rule_ends_in_one_place_and_nothing_of_the_model_changes():
    model = Model().train()
    state, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    verdict = regard.check(model, [ids()])
    assert verdict and not verdict.failures and "0 failures" in verdict.summary()
    found = {one.code for one in verdict.notes}
    skipped = {one.code for one in verdict.skipped}
    assert found | set(verdict.passed) | skipped == set(checks.rules())
    assert "RG101" in verdict.passed and all(one.reason and one.title for one in verdict.skipped)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_leak_without_attention_is_found_by_check_and_by_examine():
    verdict = regard.check(Model(mean=True), ids(), causal=True)
    (failure,) = verdict.failures
    assert (failure.code, failure.severity, failure.scope, failure.layer) == ("RG101", "critical", "model", None)
    assert failure.cause and failure.fix and failure.evidence
    line, *_, gaps, summary = str(verdict).splitlines()
    assert line.startswith("the whole model: RG101 sees the future (critical)") and failure.fix in line
    assert gaps.startswith("not checked: ") and "no attention call was captured" in gaps and "1 failure" in summary
    report = examine(Model(mean=True), ids(), causal=True)
    assert [one.code for one in report.findings if one.severity == "critical"] == ["RG101"] and report.heads == []
    assert report.summary()[0] == "Sees the future, the whole model."
    assert report.diagnosis[0].code == "RG101" and "RG101" in str(report.to_json()["diagnosis"])
    with pytest.raises(ContractError, match="RG101"):
        report.raise_on("critical")


def test_examine_without_attention_and_without_a_failure_says_so():
    with pytest.raises(ValueError, match="no attention was found"):
        examine(Model(mean=True), ids(), causal=False)


def test_an_error_inside_a_check_is_not_checked_with_its_line():
    model = Model(short=True)
    verdict = regard.check(model, ids(), causal=True)
    (reason,) = {one.reason for one in verdict.skipped if one.code == "RG101"}
    assert "KeyError: 'no other text' (test_check.py, line " in reason and verdict


def test_an_error_on_the_batch_itself_is_raised():
    class Broken(Model):
        def forward(self, input_ids):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        regard.check(Broken(), ids())


def test_selection():
    assert selection.choose_rules("RG101, rg20", "RG202") >= {"RG101", "RG201"}
    assert "RG202" not in selection.choose_rules("RG2", ["RG202"])
    assert selection.choose_rules("sees the future") == {"RG101"}
    with pytest.raises(ValueError, match="no rule is named 'RG0'"):
        selection.choose_rules("RG0")
    verdict = regard.check(Model(), ids(), select=["RG101", "RG301"])
    assert {*verdict.passed, *(one.code for one in verdict.skipped)} == {"RG101", "RG301"}


def test_bad_input():
    with pytest.raises(ValueError, match="batches is empty"):
        regard.check(Model(), [])
    with pytest.raises(ValueError, match="all labels are -100"):
        regard.check(Model(), [dict(input_ids=ids(), labels=torch.full((2, 32), -100))])
    with pytest.raises(ValueError, match="meta device"):
        regard.check(Model().to("meta"), ids())
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        regard.check("gpt2", ids())


def test_time_budget_and_progress():
    seen = []
    verdict = regard.check(Model(), ids(), select="RG1", seconds=0.0, progress=lambda *step: seen.append(step))
    assert [at for _, at, _ in seen] == list(range(len(seen))) and len({total for *_, total in seen}) == 1
    assert any("out of time" in one.reason for one in verdict.skipped if one.code == "RG101")


def finding(code, severity="warning", layers=(), scope="heads"):
    heads = tuple((f"layers.{layer}", head) for layer in layers for head in range(2))
    indices = tuple(layer for layer in layers for _ in range(2))
    layer = f"layers.{layers[0]}" if layers else None
    return fill_finding(checks.rule_of(code), severity, heads, "text", indices=indices, scope=scope, layer=layer)


def test_symptoms_stand_under_the_cause_of_their_own_layers():
    scale = finding("RG401", layers=(0, 1))
    inside, outside = finding("RG301", "critical", (1,)), finding("RG302", layers=(1, 2))
    first, second = diagnose([inside, scale, outside])
    assert first.code == "RG401" and first.severity == "critical" and first.symptoms == (inside,)
    assert second.code == "RG302" and second.symptoms == ()
    whole = finding("RG401", scope="model")
    (cause,) = diagnose([inside, whole, outside])
    assert cause.code == "RG401" and cause.symptoms == (inside, outside)
    assert cause.to_json()["symptoms"][0]["code"] == "RG301"


def test_json_begins_with_a_short_summary():
    verdict = regard.check(Model(mean=True), ids(), causal=True)
    data = json.loads(json.dumps(verdict.to_json()))
    assert next(iter(data)) == "summary" and len(json.dumps(data["summary"])) < 20_000
    assert data["summary"]["ok"] is False and data["summary"]["diagnosis"][0]["code"] == "RG101"
    assert data["failures"][0]["code"] == "RG101" and data["summary"]["counts"]["critical"] == 1


def test_a_baseline_holds_what_is_known(tmp_path):
    verdict = regard.check(Model(mean=True), ids(), causal=True)
    path = tmp_path / "known.json"
    selection.write_baseline(path, verdict.failures)
    new = verdict.without(selection.read_baseline(path))
    assert new and [one.code for one in new.known] == ["RG101"] and "1 in the baseline" in new.summary()
    with pytest.raises(ValueError, match="no baseline"):
        selection.read_baseline(tmp_path / "missing.json")
    assert count_from(verdict.failures, "never") == 0 and count_from(verdict.failures, "warning") == 1


def test_every_rule_has_one_code_and_says_everything():
    rules = checks.rules()
    assert len({rule.code for rule in rules.values()}) == len(rules) > 30
    for rule in rules.values():
        assert all((rule.kind, rule.title, rule.needs, rule.proves, rule.cause, rule.fix)), rule.code
        assert rule.family and rule.fix.endswith(".") and rule.cause.endswith("."), rule.code
        assert not rule.title.endswith("."), rule.code
        for code in rule.explains:
            assert any(known.startswith(code) for known in rules), (rule.code, code)


def test_no_cause_is_a_symptom_of_its_own_symptoms():
    rules = checks.rules()
    below = {
        code: {other for other in rules if other != code and other.startswith(rule.explains or ("none",))}
        for code, rule in rules.items()
    }
    below = {code: {other for other in found if code not in below[other]} for code, found in below.items()}
    left = set(rules)
    while left and (ends := {code for code in left if not below[code] & left}):
        left -= ends
    assert not left, f"these explain one another: {sorted(left)}"
