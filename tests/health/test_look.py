"""`regard.look`: top keys, received mass and kinds of heads, against the models' own weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.models.tiny import TinyLM
from regard.health.tokens.reader import weight_blocks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
IDS = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(3))


def make(kind, implementation="eager", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation=implementation).eval()


MODELS = {
    "bert": lambda how: make("Bert", how),
    "llama with grouped queries": lambda how: make("Llama", how, num_key_value_heads=2),
    "gemma2 with soft cap and window": lambda how: make(
        "Gemma2", how, num_key_value_heads=2, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0
    ),
    "gpt-oss with sinks": lambda how: make(
        "GptOss", how, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
}


def own_weights(model, ids, **named):
    return model(ids, output_attentions=True, **named).attentions


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name):
    model = MODELS[name]("eager")
    if "sinks" in name:
        for layer in model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    expected = own_weights(model, IDS[:1])
    seen = regard.look(model, IDS, top=20)
    assert len(seen.heads) == 8 and seen.unmeasured == []
    for head in seen.heads:
        own = expected[head.index][0, head.head]
        torch.testing.assert_close(head.map, own, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(head.received, own.sum(0), atol=2e-5, rtol=1e-4)
        for row in head.top:
            weights = torch.tensor([key.weight for key in row.keys])
            torch.testing.assert_close(weights, own[row.query][[key.index for key in row.keys]], atol=2e-6, rtol=1e-4)
            assert bool((weights[1:] <= weights[:-1]).all())
            assert len(row.keys) == int((own[row.query] > 0).sum())


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_one_head_reads_as_among_all(how):
    model = MODELS["llama with grouped queries"](how)
    everything = regard.look(model, dict(input_ids=IDS))
    one = regard.look(model, dict(input_ids=IDS), layer=1, head=3)
    whole = next(head for head in everything.heads if (head.index, head.head) == (1, 3))
    assert (one.one.layer, one.kind) == (whole.layer, whole.kind)
    torch.testing.assert_close(one.map, whole.map)
    assert one.top == whole.top
    assert one.scores == pytest.approx(whole.scores)


def test_torch_and_regard_layers_and_using():
    torch.manual_seed(1)
    x = torch.randn(1, 9, 32)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    expected = theirs(x, x, x, average_attn_weights=False)[1][0]
    seen = regard.look(theirs, (x, x, x))
    torch.testing.assert_close(torch.stack([head.map for head in seen.heads]), expected, atol=1e-6, rtol=1e-4)
    ours = regard.nn.MultiheadAttention(32, 4, normalizer="entmax15")
    seen = regard.look(ours, (x, x, x), head=1)
    torch.testing.assert_close(seen.map.sum(-1), torch.ones(9))
    assert all(len(row.keys) < 9 for row in seen.top)  # entmax gives some keys exactly 0
    with regard.using(theirs, normalizer="sparsemax", temperature=0.1):
        sharp = regard.look(theirs, (x, x, x))
        swapped = theirs(x, x, x, average_attn_weights=False)[1][0]
    torch.testing.assert_close(torch.stack([head.map for head in sharp.heads]), swapped, atol=1e-5, rtol=1e-4)


def test_padding_queries_give_nothing():
    model = MODELS["bert"]("sdpa")
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 12:] = 0
    batch = dict(input_ids=IDS, attention_mask=mask)
    assert len(regard.look(model, batch).tokens) == 12
    mask[0] = 1
    mask[0, :5] = 0  # on the left, where it cannot be cut off
    seen = regard.look(model, batch, layer=0, head=0)
    assert float(seen.received.sum()) == pytest.approx(15.0, abs=1e-4)
    assert float(seen.received[:5].sum()) == 0.0


def test_blocks_of_rows_are_the_whole():
    model = MODELS["gemma2 with soft cap and window"]("eager")
    calls = []

    def observe(call, name, run):
        calls.append(call)
        return run()

    from regard.health.capture.interception import Interception

    interception = Interception(model, observe=observe)
    with interception, torch.no_grad(), interception.torch_calls():
        model(IDS[:1])
    for call in calls:
        (_, whole, output), *rest = weight_blocks(call)
        blocks = [weights for _, weights, _ in weight_blocks(call, size=250)]
        assert not rest and len(blocks) > 4
        torch.testing.assert_close(torch.cat(blocks, 1), whole)
        torch.testing.assert_close(output, regard.reference.attention(call.q, call.k, call.v, **call.arguments)[0][0])


def test_long_texts_have_no_map():
    model = TinyLM(layers=1, heads=2, width=16, length=400)
    ids = torch.randint(1, 90, (300,), generator=torch.Generator().manual_seed(0))
    seen = regard.look(model, ids, layer=0, head=1, rows=[-1, 3], top=4)
    assert seen.map is None
    assert [row.query for row in seen.top] == [299, 3]
    assert float(seen.received.sum()) == pytest.approx(300.0, rel=1e-5)


class Patterns(nn.Module):
    """Five heads that look at one thing each: previous, same, first, next or the token after an earlier copy."""

    def __init__(self, causal=True):
        super().__init__()
        self.causal = causal
        self.place = nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        at = torch.arange(ids.shape[1])
        place, token = F.one_hot(at, 256).float(), F.one_hot(ids[0], 256).float()
        first = F.one_hot(torch.zeros_like(at), 256).float()
        before = torch.cat([torch.zeros(1, 256), token[:-1]])
        pairs = [
            (place.roll(-1, 1), place), (token, token), (first, place), (place.roll(1, 1), place), (token, before)
        ]  # fmt: skip
        q, k = (torch.stack(side)[None] for side in zip(*pairs, strict=True))
        return F.scaled_dot_product_attention(30.0 * q, k, k, is_causal=self.causal, scale=1.0)


def test_kinds_of_heads():
    ids = torch.tensor([[7, 3, 50, 21, 99, 14, 80, 33, 62, 11, 45, 71, 28, 90, 5, 66]])
    kinds = [head.kind for head in regard.look(Patterns(), ids).heads]
    assert kinds[:3] == ["previous token", "same token", "first key"] and kinds[4] == "induction"
    assert regard.look(Patterns(causal=False), ids, head=3).kind == "next token"
    scores = regard.look(Patterns(), ids, layer=0, head=4).scores
    assert scores["induction"] > 0.99 and scores["previous token"] < 0.2
    flat = regard.look(TinyLM(layers=1, heads=1, width=8), ids % 90, layer=0, head=0)
    assert flat.kind == "mixed" and flat.score < 0.4


def test_delimiters_need_names():
    ids = torch.tensor([[7, 3, 50, 21, 99, 14, 80, 33, 62, 11, 45, 71]])
    names = {7: "a", 50: ".", 62: ","}
    seen = regard.look(TinyLM(layers=1, heads=2), ids % 97, tokenizer=lambda token: names.get(token, "word"))
    assert seen.tokens[2] == "." and all("delimiter" in head.scores for head in seen.heads)
    assert "delimiter" not in regard.look(TinyLM(layers=1, heads=2), ids % 97).heads[0].scores


def test_encoder_decoder_names_both_sides():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5Model._from_config(config, attn_implementation="eager").eval()
    batch = dict(input_ids=IDS[:, :11], decoder_input_ids=IDS[:, 11:])
    seen = regard.look(model, batch, tokenizer=lambda token: f"t{token}")
    cross = [head for head in seen.heads if "EncDec" in head.layer]
    assert cross[0].tokens == [f"t{token}" for token in IDS[0, 11:].tolist()]
    assert cross[0].key_tokens == [f"t{token}" for token in IDS[0, :11].tolist()]
    expected = model(**batch, output_attentions=True).cross_attentions[0][0]
    torch.testing.assert_close(torch.stack([head.map for head in cross]), expected, atol=1e-5, rtol=1e-4)


def test_it_prints_and_draws(tmp_path):
    model = TinyLM(layers=2, heads=2, width=16)
    seen = regard.look(model, IDS, tokenizer=lambda token: "<b>" if token % 2 else "x\x1b")
    assert "\x1b" not in str(seen.heads[0]) and "4 heads on 20 tokens" in str(seen)
    page = seen.save(tmp_path / "look.html").read_text()
    assert "<b>" not in page.replace("<b>0", "").replace("<b>1", "") and "layer-1-head-1" in page
    assert seen._repr_html_().startswith("<iframe sandbox=")
    with pytest.raises(ValueError, match="4 heads"):
        seen.top  # noqa: B018
    with pytest.raises(ValueError, match="html"):
        seen.save(tmp_path / "look.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layer=7), "2 attention layers, got 7"),
        (dict(layer="blocks.1.attentoin"), "did you mean 'blocks.1.attention'"),
        (dict(layer=0, head=9), "heads 0 to 1, not 9"),
        (dict(rows=50), "20 queries, got row 50"),
        (dict(rows=1.5), "rows must be an int"),
        (dict(top=0), "top must be at least 1"),
        (dict(sequence=2), "2 sequences, got 2"),
        (dict(layer=True), "layer must be an index"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        regard.look(TinyLM(layers=2, heads=2, width=16), IDS, **options)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer="):
        regard.look(TinyLM(layers=1), "some text")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        regard.look("gpt2", IDS)


class NextCharacter(TinyLM):
    """forward(idx, targets) gives (logits, loss), as nanoGPT's."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("form", [lambda x, y: dict(idx=x), lambda x, y: dict(idx=x, targets=y), lambda x, y: (x, y)])
def test_tokens_are_shown_whatever_the_ids_are_called(form):
    torch.manual_seed(0)
    model, ids = NextCharacter(layers=1, heads=2, width=16, length=64).eval(), torch.randint(0, 90, (2, 33))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, seen = regard.look(model, x), regard.look(model, form(x, y))
    assert seen.heads[0].tokens == [f"#{token}" for token in x[0].tolist()]
    assert seen.heads[1].scores == plain.heads[1].scores and "induction" in seen.heads[1].scores
    tokens = regard.examine(model, [form(x, y)], checks=False, tokenizer=str).tokens
    assert tokens["text"] == [str(token) for token in x[0].tolist()] and len(tokens["heads"]) == 2
