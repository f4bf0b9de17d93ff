"""`compare(model, reference, batches)`: the first place that differs, its cause tried, and what is no difference."""

import copy
import dataclasses
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.comparing.causes.trial import Trial
from regard.health.models.tiny import TinyLM


@pytest.fixture
def models():
    torch.manual_seed(0)
    reference = TinyLM(layers=3, heads=4, width=32, length=32).eval()
    return copy.deepcopy(reference), reference, [torch.randint(0, 90, (3, 20))]


def test_equal_models_compute_the_same(models):
    found = regard.compare(*models)
    assert found.same and found.first is None and found.output == 0.0 and "the same" in found.cause
    assert len(found.layers) == 3


def test_a_scale_that_differs_in_one_layer(models):
    model, reference, batches = models
    model.blocks[1].attention.scale *= 2.0
    found = regard.compare(model, reference, batches)
    assert not found.same and found.first.index == 1 and found.first.layer == "blocks.1.attention"
    assert found.parts == ["scores", "output"] and "The scales differ" in found.cause
    assert "First difference: blocks.1.attention" in str(found)
    assert found.to_json()["first"] == 1


def test_one_screen_and_one_page_say_what_first_what_it_gains_and_what_was_not_compared(models, tmp_path):
    model, reference, batches = models
    reference.blocks[1].attention.scale *= 40.0
    found, out = regard.compare(model, reference, batches), io.StringIO()
    found.show(out)
    first, *rest = out.getvalue().splitlines()
    assert first.startswith("✗ B differs from A at the scores of blocks.1.attention: The scales") and len(rest) < 23
    assert max(map(len, rest)) <= 80
    names = [line.split("  ")[0] for line in rest if line[:1].strip()]
    assert names[:5] == ["since", "outputs", "do first", "gain", "sure"] and "\nunchecked other text" in out.getvalue()
    with torch.no_grad():
        own = [
            F.cross_entropy(one(batches[0])[:, :-1].flatten(0, 1), batches[0][:, 1:].flatten()) for one in models[:2]
        ]
    assert [one.mean for one in found.losses] == pytest.approx([float(loss) for loss in own], rel=1e-5)
    assert f"gain      loss {float(own[0]):.3g} ± " in out.getvalue()
    page = found.save(tmp_path / "models.html").read_text()
    assert page.index("B differs from A") < page.index("do first") < page.index("name of the first")
    assert "<script" not in page and found.to_json()["losses"][0]["kind"] == "next token"
    same = io.StringIO()
    regard.compare(model, copy.deepcopy(model), batches).show(same)
    assert same.getvalue().startswith("✓ Both models compute the same") and "do first" not in same.getvalue()


def test_heads_in_another_order(models):
    model, reference, batches = models
    weight = model.blocks[2].attention.qkv.weight.data
    weight[32:64] = weight[32:64].roll(8, 0)
    found = regard.compare(model, reference, batches)
    assert found.first.index == 2 and found.parts[0] == "k" and "order [1, 2, 3, 0]" in found.cause


def test_heads_in_another_order_with_an_output_projection_that_knows_it(models):
    model, reference, batches = models
    attention = model.blocks[1].attention
    rows = torch.arange(96).reshape(3, 4, 8)[:, [2, 0, 3, 1]].flatten()
    attention.qkv.weight.data = attention.qkv.weight.data[rows]
    attention.out.weight.data = attention.out.weight.data[:, rows[:32]]
    assert regard.compare(model, reference, batches).same


def test_q_and_k_exchanged(models):
    model, reference, batches = models
    weight = model.blocks[0].attention.qkv.weight.data
    weight[:64] = weight[:64].roll(32, 0)
    found = regard.compare(model, reference, batches)
    assert found.first.index == 0 and "q and k are exchanged" in found.cause


def test_what_lies_behind_an_attention(models):
    model, reference, batches = models
    model.blocks[0].mlp[0].weight.data *= 1.5
    found = regard.compare(model, reference, batches)
    assert found.first.index == 0 and "MLP" in found.where and "times A's" in found.cause
    other = copy.deepcopy(reference)
    other.head.weight.data *= 2.0
    found = regard.compare(other, reference, batches)
    assert not found.same and found.first is None and found.where == "the output of head"


class Dropping(nn.Module):
    """Applies dropout whatever its mode."""

    def forward(self, x):
        return F.dropout(x, 0.1)


def test_dropout_that_is_left_on(models):
    model, reference, batches = models
    model.blocks[1].mlp.append(Dropping())
    found = regard.compare(model, reference, batches)
    assert not found.same and "dropout" in found.cause and "blocks.1.mlp.3" in found.where


def test_one_model_in_training_mode(models):
    model, reference, batches = models
    for one in (model, reference):
        one.blocks[1].mlp.append(nn.Dropout(0.1))
    assert regard.compare(model.eval(), reference.eval(), batches).same
    found = regard.compare(model.train(), reference, batches)
    assert not found.same and "training mode" in found.cause
    found = regard.compare(model, reference.train(), batches)
    assert found.same and "evaluation mode" in found.notes[-1]


def test_models_of_different_depth(models):
    _, reference, batches = models
    found = regard.compare(TinyLM(layers=2, heads=4, width=32, length=32), reference, batches)
    assert not found.same and "2 and 3 layers" in found.cause


def test_a_difference_in_the_second_sequence_and_the_last_row(models):
    model, reference, batches = models

    class Late(nn.Module):
        def forward(self, x):
            x = x.clone()
            x[1, -1] *= 1.01
            return x

    model.blocks[1].mlp.append(Late())
    found = regard.compare(reference, model, batches)
    assert not found.same and found.first.index == 1


class ByHand(nn.Module):
    """Causal attention in plain torch; `change` is what is done to the weights, as a port may get it wrong."""

    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.out, self.change = nn.Linear(32, 96), nn.Linear(32, 32), change

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        s = (q @ k.transpose(-1, -2)) * 8**-0.5
        p = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        o = (p if self.change is None else self.change(p)) @ v
        return self.out(o.transpose(1, 2).reshape(b, n, w))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: 0.9 * p, "0.9 times"),
        (lambda p: p / p.sum(-1, keepdim=True) ** 2 * 0.5, "0.5 times"),
        (lambda p: p.flip(1), "order [3, 2, 1, 0]"),
        (lambda p: p.bfloat16().float(), "bfloat16"),
    ],
)
def test_attention_by_hand_loses_nothing_behind_the_softmax(change, words):
    found = regard.compare(ByHand(), ByHand(change), [torch.randn(2, 12, 32)])
    assert not found.same and any(word in found.cause for word in words.split("|")), found.cause


class Hand(nn.Module):
    """A block by hand: grouped heads, rotary positions, soft cap, norm of queries, a gated MLP, each as ports err."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.o = dict(tile=False, cap=None, low=False, width=8, act=F.silu, late=False, own=True, start=0) | options
        self.embed, self.place = nn.Embedding(50, 32), nn.Embedding(40, 32)
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(8), *(nn.Linear(32, 48) for _ in "gu"), nn.Linear(48, 32)
        for part in (self.q, self.kv, self.norm):
            part.weight.data = part.weight.data * 3
        self.norm.weight.data -= torch.linspace(0, 2, 8)

    def turn(self, x):
        half = self.o["width"] // 2
        angle = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = (f(angle).bfloat16().float() if self.o["low"] else f(angle) for f in (torch.cos, torch.sin))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def forward(self, ids):
        (b, n), o = ids.shape, self.o
        x = self.embed(ids) + self.place(torch.arange(n) + o["start"])
        q = self.q(x).view(b, n, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, 2, 8).permute(2, 0, 3, 1, 4)
        q, k = self.norm(self.turn(q)) if o["late"] else self.turn(self.norm(q)), self.turn(k)
        k, v = (z.repeat(1, 2, 1, 1) if o["tile"] else z.repeat_interleave(2, 1) for z in (k, v))
        s = q @ k.transpose(-1, -2) * 8**-0.5
        s = s if o["cap"] is None else o["cap"] * torch.tanh(s / o["cap"])
        seen = torch.ones(n, n).tril(0 if o["own"] else -1).bool()
        seen[0, 0] = True
        y = self.out((s.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).reshape(b, n, 32))
        return y + self.down(o["act"](self.gate(y)) * self.up(y))


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ({}, dict(tile=True), "k and v: B repeats whole groups of heads"),
        (dict(tile=True), {}, "k and v: B repeats each head"),
        (dict(cap=2.0), dict(cap=3.0), "The soft caps of the logits differ: 2 in A, 3 in B."),
        ({}, dict(cap=3.0), "The soft caps of the logits differ: none in A, 3 in B."),
        ({}, dict(low=True), "q and k: B rounds cosines and sines of rotary angles to bfloat16."),
        ({}, dict(width=4), "q and k: rotary positions turn 8 dims of a head in A and 4 in B"),
        ({}, dict(late=True), "B has turned it by rotary positions when it comes here, A not yet."),
        ({}, dict(own=False), "The masks differ: B hides each query's own key, which A shows."),
        ({}, dict(act=F.gelu), "B computes GELU(gate)·up where A computes SiLU(gate)·up."),
        ({}, dict(start=2), "its numbers are 2 larger in B than in A"),
    ],
)
def test_what_is_done_between_modules(a, b, words):
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    found = regard.compare(Hand(**a), Hand(**b), [ids])
    assert not found.same and found.named and words in found.cause, found.cause


class Arranged(nn.Module):
    """Computes its rows each alone, or padded on the left."""

    def __init__(self, model, how):
        super().__init__()
        self.model, self.how = model, how

    def forward(self, ids):
        if self.how == "alone":
            return torch.cat([self.model(row[None]) for row in ids])
        return self.model(ids.flip(0)).flip(0) if self.how == "flipped" else self.model(ids)


@pytest.mark.parametrize("how", ["alone", "flipped"])
def test_tokens_in_another_arrangement_are_judged_by_the_output(models, how):
    model, reference, batches = models
    found = regard.compare(Arranged(reference, "whole"), Arranged(model, how), batches)
    assert found.same and any("The outputs alone were compared" in note for note in found.notes)
    model.head.weight.data *= 1.1
    found = regard.compare(Arranged(reference, "whole"), Arranged(model, how), batches)
    assert not found.same and not found.named and "places inside cannot be compared" in found.cause


def test_a_cause_is_found_from_either_side():
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    for hidden in (0.0, -3.0):  # what is computed with a finite mask cannot be undone, and follows from the sound side
        pair = Hidden(-torch.inf), Hidden(hidden)
        found = [regard.compare(*models, [x]) for models in (pair, pair[::-1])]
        assert f"B gives hidden keys {hidden:.4g}" in found[0].cause and "masks differ" in found[1].cause


class Hidden(ByHand):
    """Puts a number in the place of hidden logits."""

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        o = attend(q, k, v, seen, self.change)
        return self.out(o.transpose(1, 2).reshape(b, n, w))


def attend(q, k, v, seen, hidden):
    return torch.where(seen, q @ k.transpose(-1, -2) * 8**-0.5, hidden).softmax(-1) @ v


def test_padding_counts_where_it_reaches_other_tokens():
    from museum.parts import Attention, TinyGPT, build
    from museum.rows_without_keys import Infinite

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    batch = {"input_ids": torch.arange(24).reshape(2, 12), "attention_mask": mask}
    found = regard.compare(*(build(lambda: TinyGPT(one)) for one in (Attention, Infinite)), [batch])
    assert not found.same and "not finite" in found.cause


class Leaking(ByHand):
    """A projection of keys that reads later tokens, or tokens of other rows."""

    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, x):
        return super().forward(x + 0.1 * self.leak(x))


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (lambda x: x.sin().sum(1, keepdim=True), "a token depends on later tokens in B and does not in A"),
        (lambda x: x.sin().mean(0, keepdim=True), "a row depends on other rows of the batch in B and does not in A"),
        (
            lambda x: torch.arange(len(x))[:, None, None] * x.sin().cumsum(1),
            "place in the batch in B and does not in A",
        ),
    ],
)
def test_what_one_model_alone_depends_on(leak, words):
    class Model(nn.Module):
        def __init__(self, leak):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.block = nn.Embedding(20, 32), Leaking(leak)

        def forward(self, ids):
            return self.block(self.embed(ids))

    ids = torch.arange(36).reshape(3, 12) * 7 % 20
    found = regard.compare(Model(torch.zeros_like), Model(leak), [ids])
    assert not found.same and words in found.cause, found.cause


def test_models_trained_apart_are_compared_by_their_code(models):
    _, reference, batches = models
    other = TinyLM(layers=3, heads=4, width=32, length=32).eval()
    kept = {name: x.clone() for name, x in other.state_dict().items()}
    found = regard.compare(reference, other, batches)
    assert not found.same and "With A's weights in B both compute the same." in found.notes[-1]
    other.blocks[1].attention.scale *= 2.0
    found = regard.compare(reference, other, batches)
    assert "trained apart" in found.cause and "The scales differ" in found.cause and found.first.index == 1
    assert all(torch.equal(x, kept[name]) for name, x in other.state_dict().items())


class Stateful(TinyLM):
    """Its state_dict holds what is no tensor."""

    def get_extra_state(self):
        return {"step": 3}

    def set_extra_state(self, state):
        raise AssertionError("the extra state is no weight")


def test_an_extra_state_is_no_weight(models):
    a, b = (Stateful(layers=1, heads=4, width=32, length=32).eval() for _ in range(2))
    found = regard.compare(a, b, models[2])
    assert not found.same and "With A's weights in B both compute the same." in found.notes[-1]


class Buckets(nn.Module):
    """A bias by T5's buckets of the distance."""

    def __init__(self, both):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.table, self.out = both, nn.Embedding(8, 4), nn.Linear(32, 32)

    def forward(self, x):
        n = x.shape[1]
        distance = torch.arange(n) - torch.arange(n)[:, None]
        d = distance.abs() if self.both else (-distance).clamp_min(0)
        exact = 2 if self.both else 4
        far = exact + ((d / exact).clamp_min(1).log() / math.log(16 / exact) * exact).long()
        place = torch.where(d < exact, d, far.clamp_max(2 * exact - 1)) + self.both * 4 * (distance > 0)
        bias = self.table(place).permute(2, 0, 1)
        heads = self.out(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, heads, heads, bias[None]).transpose(1, 2).flatten(2)


def test_what_is_vague_is_no_matter_of_words():
    a = torch.randn(4, 8)
    trial = Trial(a, 2 * a, 0.0)
    trial.explains("weights", 2 * a, "proj.a vector per position is that of axis 1 of its size.")
    trial.explains("a factor", 2 * a, "it is 2 times A's in B.")
    assert trial.best.kinds == {"weights"}
    trial.found.reverse()
    trial.found[0] = dataclasses.replace(trial.found[0], is_vague=True)
    assert trial.best.kinds == {"weights"}


def test_buckets_of_distances_are_told():
    found = regard.compare(Buckets(False), Buckets(True), [torch.randn(2, 12, 32)])
    assert "other buckets: earlier keys alone" in found.cause and "both directions" in found.cause


class Caching(nn.Module):
    """A model of one attention that decodes with a cache; positions are added to what comes in."""

    def __init__(self, shift=0):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.qkv, self.head = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50)
        self.position, self.shift = nn.Embedding(64, 32), shift

    def forward(self, ids, cache=None):
        start = 0 if cache is None else cache[0].shape[2] + self.shift
        x = self.embed(ids) + self.position(torch.arange(start, start + ids.shape[1]))
        q, k, v = self.qkv(x).reshape(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.head(o.transpose(1, 2).flatten(2)), (k, v)


class Tempered(Caching):
    """Queries of later tokens are larger, as in layers without rotary positions of Llama 4."""

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).reshape(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q = q * (1 + (1 + torch.arange(ids.shape[1]) // 4).log() * self.shift)[:, None]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_a_temperature_by_position_is_no_missing_norm(pair):
    a, b = (Tempered(shift).eval() for shift in pair)
    assert "a temperature or scale that follows the position" in regard.compare(a, b, [torch.arange(12)[None]]).cause


def test_decoding_and_training_are_compared_where_one_forward_agrees():
    found = regard.compare(Caching(), Caching(shift=1), [torch.arange(12)[None]])
    assert not found.same and found.where.startswith("decoding with a cache, ") and "forward 2" in found.where
    sound = regard.compare(Caching(), Caching(), [torch.arange(12)[None]])
    assert sound.same and sound.notes[-1] == "Decoding with a cache was compared as well."

    class Trained(ByHand):
        def forward(self, x):
            return super().forward(x) * (1.5 if self.training else 1.0)

    x = torch.randn(2, 12, 32)
    found = regard.compare(ByHand(), Trained(), [x])
    assert not found.same and found.where.startswith("in training mode, ") and "1.5 times" in found.cause
    assert "in evaluation mode alone" in regard.compare(ByHand().eval(), Trained(), [x]).notes[0]
    assert "training mode was not" in regard.compare(ByHand().eval(), Trained().eval(), [x]).notes[0]


class Stepping(Caching):
    """After a prompt it takes one token at a time."""

    def forward(self, ids, cache=None):
        if cache is not None and ids.shape[1] > 1:
            raise ValueError("one token at a time")
        return super().forward(ids, cache)


class Failing(TinyLM):
    """In training it wants what the batch has not."""

    def forward(self, ids):
        return super().forward(ids) if not self.training else self.targets[ids]


def test_a_further_look_that_fails_is_a_note(models):
    ids = torch.arange(12)[None]
    sound = regard.compare(Stepping(), Stepping(), [ids])
    assert sound.same and "was compared as well, one token at a time: in A, " in sound.notes[-1]
    found = regard.compare(Caching(), Stepping(shift=1), [ids])
    assert not found.same and found.where.startswith("decoding with a cache, ")
    a, b = (Failing(layers=1, heads=4, width=32, length=32) for _ in range(2))
    b.load_state_dict(a.state_dict())
    kept = regard.compare(a, b, models[2])
    assert kept.same and kept.notes[0].startswith("Training mode was not compared: AttributeError")
    assert a.training and b.training


def decode(model):
    logits, cache = model(torch.arange(6)[None])
    for _ in range(3):
        logits, cache = model(logits[:, -1:].argmax(-1), cache)


def test_generation_is_compared_step_by_step():
    assert regard.compare(Caching(), Caching(), decode).same
    found = regard.compare(Caching(), Caching(shift=1), decode)
    assert not found.same and "forward 2" in found.where and "position" in found.where


def test_rounding_is_no_difference(models):
    model, reference, batches = models
    assert regard.compare(model.bfloat16(), copy.deepcopy(model), batches).same
    found = regard.compare(model, reference, batches)  # bfloat16 and float32
    assert found.same and 0 < found.output < found.rounding * 10


def test_what_it_needs(models):
    model, reference, batches = models
    with pytest.raises(ValueError, match="batches"):
        regard.compare(model, reference)
    with pytest.raises(TypeError, match="b must be a torch"):
        regard.compare(model, "report.json", batches)
