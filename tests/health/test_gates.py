"""Output gates in examine, Monitor and using: regard's own, one that a model writes out, and Qwen3-Next's."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard

WIDTH, HEADS, LENGTH = 32, 4, 40


def inputs(batch=2):
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Ours(nn.Module):
    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(1)
        self.attention = regard.nn.MultiheadAttention(WIDTH, HEADS, gate=gate)
        with torch.no_grad():
            self.attention.gate.bias.view(HEADS, -1)[2] = -20.0

    @torch.no_grad()
    def gates(self, x):
        return torch.sigmoid(self.attention.gate(x)).unflatten(-1, (HEADS, -1))

    def forward(self, x):
        return self.attention(x, is_causal=True)


class Written(nn.Module):
    """A gate written out as in Qwen3-Next: after attention, over all heads, or one number for each of them."""

    def __init__(self, per_head):
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, HEADS if per_head else WIDTH)
        self.per_head = per_head
        with torch.no_grad():
            self.gate.bias.view(HEADS, -1)[2] = -20.0

    @torch.no_grad()
    def gates(self, x):
        return torch.sigmoid(self.gate(x)).unflatten(-1, (HEADS, -1))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.per_head:
            return (o * torch.sigmoid(self.gate(x))[..., None]).flatten(2)
        return o.flatten(2) * self.gate(x).sigmoid()


MODELS = {
    "ours, per head": lambda: Ours("head"),
    "ours, per element": lambda: Ours("element"),
    "written, per head": lambda: Written(True),
    "written, per element": lambda: Written(False),
}


@pytest.mark.parametrize("kind", MODELS)
def test_examine_reads_the_gate_and_finds_the_shut_one(kind):
    model, x = MODELS[kind](), inputs()
    report = regard.examine(nn.Sequential(model), [x, x[:1]])
    assert report.unmeasured == []
    want = torch.cat([model.gates(x), model.gates(x[:1])]).mean((0, 1, 3))
    for head in report.heads:
        assert head.gate == pytest.approx(float(want[head.head]), abs=1e-6)
    assert [head.gate_near_zero for head in report.heads] == [0.0, 0.0, 1.0, 0.0]
    found = {finding.kind: finding for finding in report.findings}["shut gate"]
    assert [head for _, head in found.heads] == [2] and found.severity == "note"
    assert "below 0.05 in 100 % of its numbers" in found.evidence


def test_padding_does_not_count():
    model, x = Ours("head"), inputs()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 30:] = False

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, attention_mask):
            return self.inner.attention(x, attn_mask=attention_mask[:, None, None, :])

    report = regard.examine(Padded(), [dict(x=x, attention_mask=mask)], checks=False)
    want = model.gates(x)[..., 0][mask].mean(0)
    assert [head.gate for head in report.heads] == pytest.approx(want.tolist(), abs=1e-6)


def test_a_report_keeps_the_gate(tmp_path):
    report = regard.examine(Ours("head"), [inputs()], checks=False)
    report.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["heads"][2]["gate"] < 1e-6 and data["heads"][2]["gate_near_zero"] == 1.0
    plain = regard.examine(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True), [inputs()], checks=False)
    assert "gate" not in plain.heads[0].to_json()
    assert "shut gate" not in {finding.kind for finding in plain.findings}


def test_merged_rounds_count_each_gate_once(tmp_path):
    model, x = Ours("head"), inputs()
    report = regard.examine(model, [x, x[:1]], checks=False, snapshot=tmp_path / "snapshot.pt")
    want = torch.cat([model.gates(x), model.gates(x[:1])]).mean((0, 1, 3)).tolist()
    assert [head.gate for head in report.heads] == pytest.approx(want, abs=1e-6)


def test_a_sigmoid_elsewhere_is_no_gate():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = regard.nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x):
            before = torch.sigmoid(x)  # of the right shape, in another module
            return torch.sigmoid(self.attention(before))

    report = regard.examine(Mixed(), [inputs()], checks=False)
    assert all(head.gate != head.gate for head in report.heads)


def test_the_monitor_logs_the_mean_gate_per_layer():
    model, rows = nn.Sequential(Ours("head"), Written(False)), []
    with regard.Monitor(model, every=1, log=rows.append, sequences=1):
        model(inputs())
    first = float(model[0].gates(inputs()[:1]).mean())
    assert rows[0]["attention/layer_00/gate"] == pytest.approx(first, abs=1e-6)
    assert 0.0 < rows[0]["attention/layer_01/gate"] < 1.0 and 0.0 < rows[0]["attention/gate"] < 1.0
    plain, rows = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, dropout=0.0), []
    with regard.Monitor(plain, every=1, log=rows.append):
        plain(inputs())
    assert not [name for name in rows[0] if name.endswith("/gate")]


@pytest.mark.parametrize("gate", ["head", "element"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_using_gates_a_model_that_has_none(gate, batch_first):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    x = inputs() if batch_first else inputs().transpose(0, 1)
    plain = module(x, x, x, need_weights=False)[0]
    with regard.using(module, gate=gate) as swap:
        module(x, x, x, need_weights=False)
        assert list(swap.gates) == ["model"]
        layer = swap.gates["model"]
        assert layer.weight.shape == ((HEADS if gate == "head" else WIDTH), WIDTH)
        with torch.no_grad():
            layer.weight.zero_()
        half = module(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(half - module.out_proj.bias, 0.5 * (plain - module.out_proj.bias))
        out = module(x, x, x)[0]
        torch.testing.assert_close(out, half)
        out.square().sum().backward()
        assert layer.weight.grad.abs().sum() > 0
        report = regard.examine(module, [(x, x, x)], checks=False)
        assert [head.gate for head in report.heads] == [0.5] * HEADS
        assert report.how["using"] == [{"gate": gate}]
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], plain)


def test_the_gates_of_using_learn_beside_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True) for _ in range(2)))
    x, target = inputs(), inputs().roll(1, 1)
    with regard.using(model, gate="head") as swap:
        model(x)
        assert list(swap.gates) == ["0/self_attn", "1/self_attn"]
        optimizer = torch.optim.Adam([*model.parameters(), *swap.gates.parameters()], 1e-2)
        before = [p.clone() for p in swap.gates.parameters()]
        losses = []
        for _ in range(5):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, q) for p, q in zip(before, swap.gates.parameters(), strict=True))


def test_what_using_refuses():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
    with pytest.raises(ValueError, match="gate must be None, 'head' or 'element', got 'row'"):
        regard.using(layer, gate="row")
    with pytest.raises(ValueError, match="cannot be combined with context_parallel"):
        regard.using(layer, gate="head", context_parallel=object())

    class Alone(nn.Module):
        def forward(self, n):
            q = torch.zeros(1, 2, n, 4)
            return F.scaled_dot_product_attention(q, q, q)

    with regard.using(Alone(), gate="head") as swap, pytest.raises(ValueError, match="not given an input"):
        swap._interception.model(3)


def test_qwen3_next():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this transformers has no Qwen3-Next")
    config = transformers.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, layer_types=["full_attention"], num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():  # rows of a head: 8 of the query, 8 of the gate
        model.model.layers[0].self_attn.q_proj.weight.view(4, 16, 32)[:, 8:] *= 200.0
    report = regard.examine(model, [{"input_ids": torch.arange(48)[None] % 64}], checks=False)
    assert report.unmeasured == [] and len(report.heads) == 4
    assert all(0.2 < head.gate < 0.8 and head.gate_near_zero > 0.05 for head in report.heads)
