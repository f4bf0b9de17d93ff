"""What a layer is: a module and its n-th use in a forward, not every token that a model makes inside another's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.capture import call
from regard.health.measure import recorder


class Cached(nn.Module):
    """Self-attention over all that it was given since `forget`."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.inside, self.heads, self.is_causal = nn.Linear(width, 3 * width), heads, True
        self.kept = []

    def forward(self, x):
        now = self.inside(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        self.kept = self.kept or [part[:, :, :0] for part in now[1:]]
        self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, now[1:], strict=True)]
        whole = x.shape[1] == self.kept[0].shape[2]
        return F.scaled_dot_product_attention(now[0], *self.kept, is_causal=whole).transpose(1, 2).flatten(2)


class Steps(nn.Module):
    """A text read in pieces of some length, with a cache for each of `loops` uses of one block."""

    def __init__(self, length, loops=1):
        super().__init__()
        self.length, self.loops, self.block = length, loops, Cached()

    def forward(self, x):
        kept = [[] for _ in range(self.loops)]
        for piece in x.split(self.length, 1):
            for use in range(self.loops):
                self.block.kept = kept[use]
                piece = piece + self.block(piece)
                kept[use] = self.block.kept


def means(report):
    return [[head.statistics.mean(name) for name in regard.statistics.NAMES] for head in report.heads]


@pytest.mark.parametrize("loops", [1, 2])
def test_a_cache_that_grows_is_one_layer(loops):
    torch.manual_seed(0)
    whole, stepwise = Steps(24, loops), Steps(1, loops)
    stepwise.load_state_dict(whole.state_dict())
    x = 3.0 * torch.randn(2, 24, 32)
    expected, report = regard.examine(whole, [x]), regard.examine(stepwise, [x])
    assert [head.index for head in report.heads] == [use for use in range(loops) for _ in range(4)]
    assert report.heads[0].statistics.count("entropy") == 48
    torch.testing.assert_close(torch.tensor(means(report)), torch.tensor(means(expected)), rtol=1e-4, atol=1e-5)


def test_a_model_that_generates_inside_a_forward_has_its_own_layers_and_is_judged():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 2e3

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            written = self.model.generate(
                input_ids=ids, max_new_tokens=7, min_new_tokens=7, do_sample=False, use_cache=True
            )
            self.written = getattr(self, "written", written)  # examine runs it again, to show tokens

    writer = Writer()
    report = regard.examine(writer, [torch.randint(3, 60, (3, 5))])
    expected = regard.examine(model, [writer.written[:, :-1]])
    assert [(head.index, head.head) for head in report.heads] == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    assert {finding.kind for finding in expected.findings} == {finding.kind for finding in report.findings}
    torch.testing.assert_close(torch.tensor(means(report)), torch.tensor(means(expected)), rtol=1e-3, atol=1e-3)


def test_one_module_that_looks_at_itself_and_at_twice_as_many_is_two_layers():
    class Both(nn.Module):
        def forward(self, x, y):
            q, k = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (x, y))
            return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q), k, k)

    report = regard.examine(Both(), [(torch.randn(1, 20, 32), torch.randn(1, 40, 32))])
    assert [head.index for head in report.heads] == [0] * 4 + [1] * 4


def test_an_encoder_that_reads_two_texts_is_one_layer_over_both():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(nn.Embedding(20, 32), nn.TransformerEncoderLayer(32, 4, batch_first=True))

        def forward(self, a, b):
            return self.tower(a) @ self.tower(b).mT

    texts = [torch.randint(20, (1, 12)), torch.randint(20, (1, 12))]
    report = regard.examine(Towers(), [tuple(texts)])
    assert [head.index for head in report.heads] == [0] * 4
    assert report.heads[0].statistics.count("entropy") == 24


def test_too_many_uses_are_read_together_and_the_report_says_so(monkeypatch):
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.att = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            for part in x.split(8, 1):
                self.att(part, part, part, need_weights=False)

    assert call.MAX_USES == recorder.MAX_USES == 64
    monkeypatch.setattr(call, "MAX_USES", 6)
    monkeypatch.setattr(recorder, "MAX_USES", 6)
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.TransformerEncoderLayer(32, 4, batch_first=True), Windows()).eval(),
        torch.randn(1, 64, 32),
    )
    report = regard.examine(model, [x, x], what_if=["temperature=2"])
    flat = report.what_if["temperature=2"].heads
    assert [head.index for head in report.heads] == [head.index for head in flat] == [0] * 4 + [1] * 4
    assert report.how["used_too_often_to_be_layers_each"] == ["1.att"]
    parts = model[0](x).detach().split(8, 1)
    direct = regard.examine(model[1].att, 2 * [(part, part, part) for part in parts])
    assert [head.statistics.count("entropy") for head in report.heads[4:]] == [128] * 4
    torch.testing.assert_close(torch.tensor(means(report)[4:]), torch.tensor(means(direct)), rtol=1e-4, atol=1e-4)
    few = regard.examine(model[1], [x[:, :40]])
    assert [head.index for head in few.heads] == [use for use in range(5) for _ in range(4)]  # as a block in a loop has
    assert "used_too_often_to_be_layers_each" not in few.how


def test_an_empty_batch_among_others_does_no_harm():
    encoder = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    report = regard.examine(encoder, [torch.randn(2, 10, 32), torch.randn(0, 10, 32), torch.randn(2, 10, 32)])
    assert [head.statistics.count("entropy") for head in report.heads] == [40] * 4


class InBlocks(Cached):
    """Attention whose queries come in two blocks: each softmax(q kᵀ)·v; the second in two parts if `hidden`."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, x):
        q, k, v = self.inside(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        (first, second), half = q.chunk(2, 2), x.shape[1] // 2
        out = [(first @ k.mT * 0.3).softmax(-1) @ v]
        weights = torch.cat([second @ k[:, :, :half].mT, second @ k[:, :, half:].mT], -1).mul(0.3).softmax(-1)
        if self.hidden:
            out.append(weights[..., :half] @ v[:, :, :half] + weights[..., half:] @ v[:, :, half:])
        else:
            out.append((second @ k.mT * 0.3).softmax(-1) @ v)
        return torch.cat(out, 2).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("hidden", [False, True])
def test_blocks_of_queries_are_one_layer_and_what_cannot_be_read_of_them_is_said(hidden):
    torch.manual_seed(0)
    report = regard.examine(nn.Sequential(InBlocks(hidden), InBlocks(hidden)), [torch.randn(2, 16, 32)], checks=False)
    assert {(head.index, head.layer) for head in report.heads} == {(0, "0"), (1 + hidden, "1")}
    assert {head.rows for head in report.heads} == {16 if hidden else 32}
    assert [name for name, _ in report.unmeasured] == (["0", "1"] if hidden else [])
    assert all("multiplies a part of its softmax weights by values" in why for _, why in report.unmeasured)


class TalkingAttention(Cached):
    """Heads are mixed before the softmax and after it, as in CaiT."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.inside(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        scores = self.before((q @ k.mT * 0.3).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_heads_that_are_mixed_are_named_with_the_line_of_their_softmax():
    torch.manual_seed(0)
    model = nn.Sequential(Cached(), TalkingAttention())
    report = regard.examine(model, [torch.randn(2, 16, 32)], checks=False)
    ((layer, reason),) = report.unmeasured
    assert (
        layer == "1" and reason.startswith("its softmax (test_uses.py:") and reason.endswith("as where heads are mixed")
    )
