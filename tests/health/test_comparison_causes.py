"""Causes that `regard.compare` names: each reproduces B, and what only tells the models apart is not named."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.comparing.causes import rotary
from regard.health.comparing.causes.orders import explain_orders, find_view, say_order
from regard.health.comparing.causes.trial import Trial

IDS = torch.randint(4, 40, (3, 12), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


class Lossy(nn.Module):
    """Gives one head's logits, and a loss as ports get it wrong."""

    def __init__(self, kind="sound"):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        self.kind = kind

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.mix(self.embed(input_ids)).cumsum(1).tanh())
        shift = 2 if self.kind == "shifted twice" else 1
        targets = labels if self.kind == "padding" else labels.masked_fill(attention_mask == 0, -100)
        each = F.cross_entropy(
            logits[:, :-shift].flatten(0, 1), targets[:, shift:].flatten(), reduction="none", ignore_index=-100,
            label_smoothing=0.1 * (self.kind == "smoothed"),
        ).view(len(logits), -1)  # fmt: skip
        count = (targets[:, shift:] != -100).sum(1, keepdim=True)
        loss = (each / count).sum(1).mean() if self.kind == "by sequence" else each.sum() / count.sum()
        return {"loss": loss / 4 if self.kind == "fourth" else loss, "logits": logits}


MASK = (torch.arange(12) < torch.tensor([12, 9, 7])[:, None]).long()
BATCH = dict(input_ids=IDS, attention_mask=MASK, labels=IDS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shifted twice", "labels[i + 1] in A and on labels[i + 2] in B: B shifts the labels 1 more"),
        ("padding", "8 rows whose labels are padding count in B and not in A"),
        ("by sequence", "rows or sequences are averaged in another way"),
        ("fourth", "every row counts 0.25 times as much in B"),
        ("smoothed", "labels are smoothed by 0 in A and 0.1 in B"),
    ],
)
def test_losses_of_the_same_logits_are_compared(kind, words):
    found = regard.compare(Lossy().eval(), Lossy(kind).eval(), [BATCH])
    assert not found.same and found.named and found.where == "the loss of the model" and found.output == 0.0
    assert words in found.cause, found.cause
    assert regard.compare(Lossy(kind).eval(), Lossy(kind).eval(), [BATCH]).same


def test_a_loss_that_is_no_cross_entropy_has_no_cause():
    class Squared(Lossy):
        def forward(self, **batch):
            found = super().forward(**batch)
            return found | {"loss": found["loss"] ** 2}

    found = regard.compare(Lossy().eval(), Squared().eval(), [BATCH])
    assert not found.same
    assert not found.named or "every row counts" in found.cause  # the square's gradient is a factor of each row's


@pytest.mark.parametrize("name", ["pooled", "aux"])
def test_every_output_of_a_model_counts(name):
    class Two(Lossy):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            return {"last_hidden_state": self.mix(x), "pooled": x[:, 0] * self.factor, "aux": x.mean() * self.factor}

    a, b = Two().eval(), Two().eval()
    a.factor, b.factor = 1.0, 1.0
    assert regard.compare(a, b, [IDS]).same
    b.factor = 1.5
    found = regard.compare(a, b, [IDS])
    assert not found.same and found.where == "pooled of the model" and "1.5 times" in found.cause


def test_decoding_of_an_encoder_decoder_given_labels_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip

    class Forgets(transformers.models.t5.modeling_t5.T5Attention):
        def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
            return super().compute_bias(query_length, key_length, device=device, past_seen_tokens=0)

    torch.manual_seed(0)
    a = transformers.T5ForConditionalGeneration(config).eval()
    b = transformers.T5ForConditionalGeneration(config).eval()
    b.load_state_dict(a.state_dict())
    batch = dict(input_ids=IDS, labels=IDS)
    assert "Decoding with a cache was compared as well." in regard.compare(a, b, [batch]).notes
    b.decoder.block[0].layer[0].SelfAttention.__class__ = Forgets
    found = regard.compare(a, b, [batch])
    assert not found.same and found.where.startswith("decoding with a cache, ")
    assert "the first query at the first key in B" in found.cause


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.view(2, 6, 2, 4).transpose(1, 2).reshape(2, 6, 8), "view(6, 2, 4) and permute(1, 0, 2)"),
        (lambda x: x.view(2, 2, 3, 8).transpose(1, 2).reshape(2, 6, 8), "view(2, 3) and permute(1, 0) of [6]"),
        (lambda x: x.flip(1), "reverse order"),
        (lambda x: x.view(2, 6, 2, 4).transpose(2, 3).reshape(2, 6, 8), "halves and interleaved pairs"),
        (lambda x: x.view(2, 3, 4, 4).flip(2).reshape(2, 6, 8), "view(3, 4, 4) and permute(0, 1, 2), with axes 1"),
        (lambda x: x.roll(1, 0), "of all 2 sequences in another order"),
    ],
)
def test_numbers_in_other_places_are_told_as_a_view(change, words):
    trial = Trial(X, change(X), 1e-6)
    explain_orders(trial)
    assert words in trial.best.text, trial.best.text


def test_an_order_that_is_no_view():
    generator = torch.Generator().manual_seed(2)
    assert find_view(torch.randperm(24, generator=generator)) is None
    assert say_order(torch.tensor([1, 2, 3, 0])) == ": the first is the last"
    trial = Trial(X, torch.randn(X.shape, generator=generator), 1e-6)
    explain_orders(trial)
    assert trial.best is None
    at = torch.arange(256).view(1, 4, 4, 4, 4).transpose(2, 3).reshape(16, 16)  # 4 × 4 windows of 4 × 4 tokens
    image = torch.randn(256, 8, generator=generator)
    rolled = image.view(16, 16, 8).roll((-1, 2), (0, 1)).reshape(256, 8)
    trial = Trial(image[at], rolled[at], 1e-6)
    explain_orders(trial)
    assert "the image is shifted by 1 rows and -2 columns more" in trial.best.text


class Turned(nn.Module):
    """Attention with rotary positions that are applied in a wrong way."""

    def __init__(self, how=""):
        super().__init__()
        torch.manual_seed(4)
        self.qkv, self.out, self.how = nn.Linear(32, 96), nn.Linear(32, 32), how

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        angle = torch.arange(n)[:, None] * 100.0 ** (-torch.arange(4) / 4)
        if self.how == "axes":
            angle[5:, 1] = angle[5:, 1].flip(0)
        table = angle.repeat_interleave(2, -1) if self.how == "layout" else torch.cat([angle, angle], -1)

        def turn(x):
            return x * table.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * table.sin()

        q, k, v = turn(q), turn(k), turn(v) if self.how == "values" else v
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("layout", "B rotates halves (j, j + r/2) with the angles of pairs (2j, 2j + 1)"),
        ("values", "B rotates the values by their positions"),
        ("axes", "B turns pairs 1 of tokens 5–"),
    ],
)
def test_rotary_positions_applied_in_a_wrong_way(how, words):
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    found = regard.compare(Turned(), Turned(how), [x])
    assert found.named and words in found.cause, found.cause


def test_angles_alike_in_all_heads_are_recovered():
    x = torch.randn(1, 3, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    angle = torch.linspace(-2, 2, 10).view(1, 5, 2).double()
    turned = rotary.turn_by(x, angle, "pairs")
    assert torch.allclose(rotary.recover_angles(x, turned, "pairs", 1e-9), angle)
    assert rotary.recover_angles(x, turned, "halves", 1e-9) is None
    assert rotary.recover_angles(x[:, :1], turned[:, :1], "pairs", 1e-9) is None  # of one head any pair is a rotation


class Pooled(nn.Module):
    """A vector per sequence: the mean of what the mask shows, or what a port takes."""

    def __init__(self, how="mean"):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.mix, self.how = nn.Embedding(40, 16), nn.Linear(16, 16), how

    def forward(self, input_ids, attention_mask=None):
        x = self.mix(self.embed(input_ids))
        if self.how == "last":
            return x[:, -1]
        mask = torch.ones_like(input_ids) if self.how == "all" or attention_mask is None else attention_mask
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def test_another_pooling_is_named():
    batch = dict(input_ids=torch.arange(36).view(3, 12), attention_mask=MASK)
    said = regard.compare(Pooled().eval(), Pooled("all").eval(), [batch]).cause
    assert "A takes the mean without padding from" in said and "B the mean of all tokens" in said
    assert "B tokens 11, 11, 11 of its sequences (2 of them padding)" in (
        regard.compare(Pooled().eval(), Pooled("last").eval(), [batch]).cause
    )


def test_what_one_model_ignores_is_named_by_running_the_other_without_it():
    class Counting(Pooled):
        def forward(self, input_ids, position_ids=None):
            x = self.embed(input_ids)
            return x if position_ids is None or self.how == "ignores" else x * torch.cos(position_ids[..., None] * x)

    batch = dict(input_ids=IDS, position_ids=torch.arange(12).expand(3, 12) % 5)
    found = regard.compare(Counting().eval(), Counting("ignores").eval(), [batch])
    assert found.named and found.cause.startswith("B ignores position_ids: it gives what A gives without it.")


def test_a_dependence_is_told_and_proves_no_cause():
    class Leaks(Pooled):
        def forward(self, input_ids):
            x = self.mix(self.embed(input_ids)).cumsum(1).tanh()
            return x if self.how == "mean" else x + 0.3 * x.mean(1, keepdim=True).sin()

    found = regard.compare(Leaks().eval(), Leaks("leaks").eval(), [IDS])
    assert not found.same and not found.named and found.is_seen and "B sees the future" in found.cause
    assert dict(found.fields())["sure"].startswith("both runs show it")


def test_shapes_that_differ_are_no_cause():
    found = regard.compare(nn.Linear(8, 8), nn.Linear(8, 6), [X])
    assert not found.same and not found.named and "neither holds the other's numbers" in found.cause


def test_a_softmax_of_one_head_over_the_queries():
    class One(nn.Module):
        def __init__(self, dim):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v, self.dim = *(nn.Linear(8, 8, bias=False) for _ in "qkv"), dim

        def forward(self, x):
            s = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(8)
            s = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
            return s.softmax(self.dim) @ self.v(x)

    for dims, name in (((-1, 1), "B"), ((1, -1), "A")):
        found = regard.compare(*map(One, dims), [X])
        assert found.named and f"{name} takes the softmax over the queries, not the keys" in found.cause


def test_a_conversion_of_fused_weights_is_named_as_check_names_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    a, b = (transformers.GPTNeoXForCausalLM(config).eval() for _ in range(2))
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        for layer in b.gpt_neox.layers:
            for p in layer.attention.query_key_value.parameters():
                p.copy_(p.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2))
    found = regard.compare(a, b, [IDS])
    assert found.named and "head by head" in found.cause and "with that undone both are equal" in found.cause
