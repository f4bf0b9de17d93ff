"""`regard check`, `regard rule` and the pytest plugin: targets, exit statuses, settings, what they print."""

import json
import sys

import pytest
import torch

import regard
from regard.cli import main
from regard.health import ContractError, checks
from regard.health.commands.rule import make_page
from regard.testing import assert_contract

pytest_plugins = ["pytester"]
MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, causal):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.causal = nn.Embedding(32, 16), nn.Linear(16, 32), causal

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal))

class NetForCausalLM(Net):
    pass

def leaky():
    print("noise")
    return NetForCausalLM(False), [torch.randint(32, (2, 24))]

def sound():
    return NetForCausalLM(True), [torch.randint(32, (2, 24))]

def empty():
    return NetForCausalLM(True), []

def meta():
    return NetForCausalLM(True).to("meta"), [torch.randint(32, (2, 24))]

def broken():
    raise RuntimeError("no data")
"""
SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=64))
label = -100 if "masked" in __file__ else 5
data = [dict(input_ids=torch.randint(50, (16,)), labels=torch.full((16,), label)) for _ in range(4)]

def build():
    arguments = TrainingArguments("out", report_to=[], use_cpu=True, per_device_train_batch_size=2)
    return Trainer(model=model, args=arguments, train_dataset=data)

trainer = build()
trainer.train()
raise SystemExit("never reached")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "nets", None)
    del sys.modules["nets"]
    (tmp_path / "nets.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("nets", None)


def test_red_and_green(folder, capsys, monkeypatch):
    assert main(["check", "nets:leaky", "--select", "RG101"]) == 1
    out = capsys.readouterr().out
    line, summary = out.splitlines()
    assert "RG101 sees the future (critical)" in line and "Fix: " in line and "1 failure" in summary
    assert main(["check", "nets:sound", "--select", "RG101"]) == 0
    assert main(["check", "nets:leaky", "--select", "RG101", "--fail-on", "never"]) == 0
    capsys.readouterr()
    assert main(["check", "nets:sound", "--select", "RG101", "--seconds", "0"]) == 2
    assert capsys.readouterr().out.startswith("INCOMPLETE: nothing was checked")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    capsys.readouterr()
    assert main(["check", "nets:leaky", "--select", "RG101", "--fail-on", "critical"]) == 1
    assert "\n::error title=RG101 sees the future in the whole model::" in capsys.readouterr().out


def test_json_settings_and_baseline(folder, capsys):
    (folder / "pyproject.toml").write_text('[tool.regard]\nselect = ["RG101", "RG201"]\nignore = ["RG201"]\n')
    assert main(["check", "nets:leaky", "--json", "--write-baseline", "known.json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["summary"]["counts"]["failures"] == 1 and [one["code"] for one in data["failures"]] == ["RG101"]
    assert data["passed"] == data["skipped"] == []
    assert main(["check", "nets:leaky", "--baseline", "known.json"]) == 0
    (folder / "pyproject.toml").write_text('[tool.regard]\nselekt = "RG1"\n')
    assert main(["check", "nets:leaky"]) == 2
    assert "no setting 'selekt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["./nowhere"], "no folder './nowhere'"),
        (["nomodule:make"], "no module 'nomodule'"),
        (["nofile.py:trainer"], "no file 'nofile.py'"),
        (["nets:nothing"], "has no function 'nothing'"),
        (["nets:broken"], "no data"),
        (["nets:empty"], "batches is empty"),
        (["nets:meta"], "meta device"),
        (["tokens"], "has no config.json"),
        (["hf-tiny:lama"], "did you mean llama"),
        (["nets:sound", "--select", "RG0"], "no rule is named 'RG0'"),
        (["nets:sound", "--baseline", "none.json"], "--write-baseline"),
        (["nets:sound", "--fail-on", "often"], "often"),
    ],
)
def test_bad_usage_ends_in_one_line_and_status_2(folder, capsys, words, says):
    (folder / "tokens").mkdir()
    (folder / "tokens" / "tokenizer.json").write_text("{}")
    assert main(["check", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err


def test_a_trainer_in_a_script_is_checked_and_not_trained(folder, capsys):
    pytest.importorskip("accelerate")
    for name in ("train.py", "masked.py"):
        (folder / name).write_text(SCRIPT)
    for target in ("train.py:trainer", "train.py:build"):
        assert main(["check", target, "--select", "RG101,RG201"]) == 0
        assert "2 passed" in capsys.readouterr().out
    assert main(["check", "masked.py:trainer"]) == 2
    assert "all labels are -100" in capsys.readouterr().err


def test_a_tiny_architecture(capsys):
    pytest.importorskip("transformers")
    assert main(["check", "hf-tiny:qwen3", "--select", "RG1,RG201"]) == 0
    assert "hf-tiny:qwen3: 0 failures" in capsys.readouterr().out


def test_rules_are_explained_listed_and_on_a_page(capsys):
    assert main(["rule", "rg101"]) == 0
    out = capsys.readouterr().out
    rule = checks.rule_of("RG101")
    assert all(
        text in out for text in (rule.code, rule.kind, rule.title, rule.cause, rule.fix, rule.proves, rule.needs)
    )
    assert main(["rule"]) == 0 and len(capsys.readouterr().out.splitlines()) > len(checks.rules())
    assert main(["rule", "RG999"]) == 2
    page = make_page()
    for code, one in checks.rules().items():
        assert f"\n| {code} | {one.kind} | " in page, code


def test_assert_contract():
    def peek(causal):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        model = torch.nn.Sequential(torch.nn.Embedding(32, 16), layer)
        assert_contract(model, torch.randint(32, (2, 24)), "RG101", causal=causal)

    peek(False)
    with pytest.raises(ContractError, match="RG101"):
        peek(True)
    assert issubclass(ContractError, AssertionError) and regard.testing.assert_contract is assert_contract


def test_pytest_has_one_test_per_rule(pytester):
    pytester.makepyfile(nets=MODULE)
    pytester.syspathinsert()
    options = ["-p", "no:cacheprovider", "-rs"]
    result = pytester.runpytest_inprocess(*options, "--regard-model=nets:leaky", "--regard-select=RG101,RG102,RG201")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*nets:leaky: RG101 sees the future*", "*RG101 sees the future (critical)*"])
    missing = pytester.runpytest_inprocess(*options, "--regard-model=./nowhere", "--regard-select=RG101")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*no folder './nowhere'*"])


def test_pytest_compares_with_a_golden_fingerprint(pytester, tmp_path):
    pytester.makepyfile(nets=MODULE)
    pytester.syspathinsert()
    assert main(["fingerprint", "nets:sound", "-o", "golden.regard"]) == 0
    sys.modules.pop("nets", None)
    options = ["-p", "no:cacheprovider", "--regard-select=RG201", "--regard-golden"]
    same = pytester.runpytest_inprocess(*options, "golden.regard", "--regard-model=nets:sound")
    same.assert_outcomes(passed=2)
    other = pytester.runpytest_inprocess(*options, "golden.regard", "--regard-model=nets:leaky")
    other.assert_outcomes(passed=1, failed=1)
    missing = pytester.runpytest_inprocess(*options, "none.regard", "--regard-model=nets:sound")
    missing.assert_outcomes(passed=1, failed=1)
    sys.modules.pop("nets", None)
