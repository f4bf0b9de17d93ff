"""Checks that run the model again: each on a model made to fail it, and none on a model that is right."""

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health import checks, examine
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import TinyLM, batches, checkpoint, encode
from regard.health.probe import task
from regard.health.probe.task import LossChange, frequency_losses, interval
from regard.health.report.summary import describe_loss

WIDTH, HEADS, LENGTH, WORDS = 32, 4, 24, 40


class Attention(nn.Module):
    """Causal self-attention with one mistake, by name."""

    def __init__(self, bug=""):
        super().__init__()
        self.bug = bug
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shown=None):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.bug == "split":
            q, k, v = (t.reshape(batch, HEADS, length, -1) for t in (q, k, v))
        elif self.bug == "over heads":
            q, k, v = (t.reshape(batch, length, HEADS, -1) for t in (q, k, v))
        else:
            q, k, v = (t.reshape(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        if self.bug == "over heads":
            return self.out(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))
        if self.bug == "over batch":
            q, k, v = (t.permute(2, 1, 0, 3) for t in (q, k, v))
            return self.out(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(x.shape))
        order = torch.ones(length, length, dtype=torch.bool).tril()
        mask = dict(none=torch.ones_like(order), soft=torch.where(order, 0.0, -1.0)).get(self.bug, order)
        if shown is not None and mask.dtype == torch.bool:
            mask = mask & shown[:, None, None]
        o = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out((o if self.bug == "join" else o.transpose(1, 2)).reshape(x.shape))


class Model(nn.Module):
    """Logits of token ids, from layers with these mistakes."""

    def __init__(self, *bugs, noise=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention(bug) for bug in bugs)
        self.head, self.noise = nn.Linear(WIDTH, WORDS), noise

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x, None if attention_mask is None else attention_mask.bool())
        return self.head(F.dropout(x, self.noise) if self.noise else x)


def ids(batch=4, seed=0):
    return torch.randint(3, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def found(model, given=None, **options):
    report = examine(model, [ids()] if given is None else given, ablate=False, **options)
    assert report.unmeasured == []
    return {one.kind: one for one in report.findings}


def test_a_right_model_passes_every_check():
    report = examine(Model("", "", ""), [ids()], ablate=False)
    assert not set(checks.kinds(runs=True)) & {one.kind for one in report.findings}
    assert "no two layers hold the same weights" in report.checks.done + [name for name, _ in report.checks.skipped]
    assert "later tokens do not change earlier outputs" in report.checks.done


@pytest.mark.parametrize(("bugs", "layer"), [(("none", "", ""), 0), (("", "none", ""), 1), (("", "", "soft"), 2)])
def test_a_leak_is_found_and_the_layer_where_it_begins(bugs, layer):
    finding = found(Model(*bugs))["sees the future"]
    assert finding.severity == "critical" and set(finding.indices) == {layer}
    assert f"begins in the attention of layers.{layer}." in finding.evidence


def test_a_model_that_may_see_everything_does_not_leak():
    model = Model("none", "none")
    report = examine(model, [ids()], ablate=False)
    assert "sees the future" not in {one.kind for one in report.findings}
    assert any("causal=True" in reason for _, reason in report.checks.skipped)
    assert "sees the future" in found(model, causal=True)
    assert "sees the future" not in found(model, causal=False)


@pytest.mark.parametrize("bug", ["split", "join", "over heads"])
def test_heads_mixed_with_time(bug):
    assert found(Model(bug, bug))["heads mixed with time"].severity == "critical"


def test_sequences_mixed():
    assert "sequences mixed" in found(Model("over batch", ""))


class Packed(nn.Module):
    """One causal layer over packed documents, which it keeps apart or not."""

    def __init__(self, apart):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.project, self.out, self.apart = nn.Linear(16, 48), nn.Linear(16, 32), apart

    def forward(self, input_ids, position_ids):
        x = self.embedding(input_ids) + self.positions(position_ids)
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.apart:
            document = (position_ids == 0).cumsum(-1)
            shown = shown & (document[:, None, :, None] == document[:, None, None, :])
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        return self.out(x + o.transpose(1, 2).flatten(2))


def test_documents_mixed():
    rows = ((20, 1, 19), (9, 31))
    places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    batch = dict(input_ids=torch.randint(32, (2, 40), generator=torch.Generator().manual_seed(0)), position_ids=places)
    finding = found(Packed(apart=False), [batch])["documents mixed"]
    assert finding.severity == "warning" and "regard.Mask.documents" in finding.remedy and len(finding.heads) == 2
    report = examine(Packed(apart=True), [batch], ablate=False)
    assert "documents mixed" not in {one.kind for one in report.findings}
    assert "packed documents do not change one another" in report.checks.done
    whole = dict(batch, position_ids=torch.arange(40).expand(2, 40))
    assert "documents mixed" not in found(Packed(apart=False), [whole])


def test_random_in_evaluation():
    assert "random in evaluation" in found(Model("", noise=0.1))


def test_padding_on_the_left_moves_the_text_and_an_unmarked_one_is_seen():
    text, mask = ids().clone(), torch.ones(4, LENGTH, dtype=torch.long)
    text[::2, :8], mask[::2, :8] = 0, 0
    model = Model("", "")
    assert "padding moves the text" in found(model, [dict(input_ids=text, attention_mask=mask)])
    right = dict(input_ids=text.flip(1), attention_mask=mask.flip(1))
    assert not {"padding moves the text", "sees padding"} & found(model, [right]).keys()
    model.config = type("Config", (), dict(pad_token_id=0))()
    assert "sees padding" in found(model, [dict(input_ids=text)])


def test_encoder_ignored():
    class Translator(nn.Module):
        def __init__(self, reads):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head, self.reads = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), reads
            self.self_attn = Attention()
            self.cross_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, input_ids, decoder_input_ids):
            memory, x = self.embedding(input_ids), self.embedding(decoder_input_ids)
            x = x + self.self_attn(x)
            memory = memory if self.reads else torch.zeros_like(memory)
            return self.head(x + self.cross_attn(x, memory, memory)[0])

    given = [dict(input_ids=ids(), decoder_input_ids=ids(seed=1))]
    assert "encoder ignored" not in found(Translator(True), given)
    assert found(Translator(False), given)["encoder ignored"].heads[0][0] == "cross_attn"


def test_duplicate_layers():
    model = Model("", "", "")
    model.layers[2].load_state_dict(model.layers[1].state_dict())
    assert set(found(model)["duplicate layers"].indices) == {1, 2}


def test_rank_collapse():
    model = Model("", "")
    model.embedding.weight.data *= 1e-3
    model.position.weight.data *= 1e-3
    model.embedding.weight.data += 1.0
    assert "rank collapse" in found(model)


def test_rows_that_see_one_key():
    class Lonely(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (4, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, torch.eye(x.shape[1], dtype=torch.bool))

    assert "rows that see one key" in found(Lonely(), [torch.randn(2, LENGTH, WIDTH)])


def test_one_layer_whose_queries_and_keys_are_strangers():
    class Agreeing(nn.Module):
        def __init__(self, agrees):
            super().__init__()
            self.agrees = agrees

        def forward(self, x):
            q, k, shared = torch.randn(3, 4, HEADS, 32, 16, generator=torch.Generator().manual_seed(0))
            if self.agrees:
                q, k = q + 2.0 * shared[..., :1], k + 2.0 * shared[..., 1:2]
            return F.scaled_dot_product_attention(q, k, k)

    model = nn.Sequential(*(Agreeing(agrees) for agrees in (True, True, False, True)))
    report = examine(model, [torch.zeros(1)])
    (finding,) = [one for one in report.findings if one.kind == "q and k are strangers"]
    assert set(finding.indices) == {2} and finding.severity == "warning"


@pytest.fixture(scope="module")
def trained():
    model, _ = checkpoint("tiny-scaled")
    return model, batches(sample_text(), model.options["length"], 8)[:2]


def test_the_loss_stands_beside_the_texts_frequencies(trained):
    model, text = trained
    report = examine(model, text, ["temperature=30"], ablate=False)
    assert report.loss.bigram < report.loss.unigram < report.loss.uniform and report.loss.mean < report.loss.unigram
    joined = torch.cat(text)
    own = F.cross_entropy(model(joined[:, :-1]).flatten(0, 1), joined[:, 1:].flatten()).item()
    assert report.loss.mean == pytest.approx(own, abs=0.05)
    assert report.summary()[1].startswith("Loss ") and "guessing by the token before: " in report.summary()[1]
    few = examine(model, [text[0][:1, :60]], ablate=False).summary()[1]
    assert few.endswith("; 59 tokens are too few to judge it.")
    effect = report.what_if["temperature=30"].loss
    assert effect.word == "makes it worse now; may help training" and effect.low > 0.0


def test_a_model_that_loses_to_frequencies_is_untrained_or_broken(trained):
    torch.manual_seed(0)
    fresh = examine(TinyLM(layers=2, heads=2, width=32), trained[1], ablate=False)
    assert fresh.summary()[0].endswith(" Noted: untrained or broken.")
    model, text = trained
    shifted = [(batch + 1) % 90 for batch in text]
    broken = {one.kind: one for one in examine(model, shifted, ablate=False).findings}
    assert broken["untrained or broken"].severity == "critical"


def test_a_loss_stands_beside_the_guess_to_beat_next():
    def guess(mean, unigram, bigram, uniform=9.0):
        reading = task.LossReading("next token", mean, mean, mean, 8, 500, unigram, bigram, uniform)
        return describe_loss(SimpleNamespace(loss=reading)).partition("guessing by ")[2]

    assert guess(2.0, 3.0, 2.5) == guess(2.6, 3.0, 2.5) == "the token before: 2.5"
    assert guess(3.2, 3.0, 3.5) == guess(3.2, 3.0, 2.5) == "frequency: 3"
    assert guess(3.2, 3.0, 2.5, uniform=2.9) == "an even chance: 2.9"


def test_repairs_name_the_scale_and_heads_in_another_order(trained):
    model, text = trained
    scales = [block.attention.scale for block in model.blocks]
    try:
        for block in model.blocks:
            block.attention.scale *= 32**0.5
        finding = {one.kind: one for one in examine(model, text, ablate=False).findings}["scale off"]
        assert finding.severity == "warning" and "Tried here" in finding.remedy
    finally:
        for block, scale in zip(model.blocks, scales, strict=True):
            block.attention.scale = scale
    kept = [block.attention.qkv.weight.data.clone() for block in model.blocks]
    try:
        for block, weight in zip(model.blocks, kept, strict=True):
            width = weight.shape[1]
            block.attention.qkv.weight.data[2 * width :] = weight[2 * width :].roll(width // 4, 0)
        assert "heads in another order" in {one.kind for one in examine(model, text, ablate=False).findings}
    finally:
        for block, weight in zip(model.blocks, kept, strict=True):
            block.attention.qkv.weight.data = weight


@pytest.mark.parametrize("kind", ["q and k exchanged", "rotary positions off"])
def test_other_repairs_have_their_kind(kind):
    assert kind in checks.kinds()


def test_ablation_is_the_loss_without_the_heads_columns(trained):
    model, text = trained
    report = examine(model, text[:1], ablate=30.0)
    own = report.checks.ablation
    assert own.unit == "loss" and own.missing == 0 and len(own.heads) == len(report.heads)
    out, kept = model.blocks[1].attention.out.weight, model.blocks[1].attention.out.weight.data.clone()
    d = kept.shape[1] // 4
    part = text[0][: own.sequences, :128]

    def loss():
        with torch.no_grad():
            return float(F.cross_entropy(model(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten()))

    before = loss()
    try:
        out.data[:, d : 2 * d] = 0.0
        assert own.heads[1, 1] == pytest.approx(loss() - before, abs=1e-4)
        out.data[:] = 0.0
        assert own.layers[1] == pytest.approx(loss() - before, abs=1e-4)
    finally:
        out.data[:] = kept
    assert report.heads[5].ablation == own.heads[1, 1] == report.heads[5].to_json()["ablation"]


def test_the_printed_checks_are_plain_lines(trained):
    model, text = trained
    shown = io.StringIO()
    examine(model, text[:1], ablate=2.0).show(shown, full=True)
    assert "\n\nwithout a head the loss rises by" in shown.getvalue() and "\\n" not in shown.getvalue()


def test_a_model_without_a_loss_is_ablated_by_its_output():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True), 2)
    report = examine(nn.Sequential(nn.Embedding(WORDS, WIDTH), encoder), [ids()], ablate=30.0, causal=False)
    assert report.loss is None and report.checks.ablation.unit == "output"
    assert all(0.0 < change < 2.0 for change in report.checks.ablation.heads.values())


def test_a_given_loss_and_its_what_ifs():
    model, x = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True), [torch.randn(3, 12, WIDTH) for _ in range(3)]
    report = examine(model, x, ["qk_norm"], loss=lambda model, batch: model(batch).square().mean(), ablate=5.0)
    assert report.loss.kind == "the given loss" and report.loss.sequences == 9
    assert report.what_if["qk_norm"].loss.word in task.WORDS.values()


def test_checks_can_be_left_out_and_functions_are_not_run_again():
    assert examine(Model(""), [ids()], checks=False).checks is None
    runs = []

    def batch(model):
        runs.append(1)
        return model(ids())

    examine(Model(""), [batch])
    assert len(runs) == 1
    with pytest.raises(ValueError, match="ablate must be"):
        examine(Model(""), [ids()], ablate=-1.0)


def test_the_checks_survive_a_file(trained, tmp_path):
    model, text = trained
    report = examine(model, text[:1], ["qk_norm"], ablate=5.0)
    path = report.save(tmp_path / "report.json")
    loaded = regard.health.Report.load(path)
    assert loaded.to_json() == json.loads(path.read_text())
    assert loaded.loss.mean == report.loss.mean and loaded.checks.ablation.heads == report.checks.ablation.heads


def test_frequencies_of_a_text_leave_each_token_out():
    text = encode("abababababababab")[None]
    unigram, bigram = frequency_losses(text[:, :-1], text[:, 1:], 97)
    assert bigram < 0.5 < unigram < math.log(97)
    once = torch.arange(50)[None]  # every token occurs once: nothing can be predicted
    assert frequency_losses(once[:, :-1], once[:, 1:], 97) == pytest.approx((math.log(97),) * 2)


def test_words_of_a_loss_change():
    assert LossChange(2.0, -0.1, -0.2, -0.05).word == "helps"
    assert LossChange(2.0, 0.1, 0.05, 0.2).word == "makes it worse now; may help training"
    assert LossChange(2.0, 0.1, -0.1, 0.3).word == "no difference"
    assert LossChange(2.0, 0.5, -math.inf, math.inf).word == "cannot tell"
    assert interval(torch.tensor([1.0]))[1] == -math.inf


def test_a_masked_model_is_judged_by_its_masked_tokens_and_a_base_model_by_its_predictor():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=WORDS
    )
    config.mask_token_id = 1
    whole = transformers.BertForMaskedLM(config).eval()
    batch = [dict(input_ids=ids(16))]
    report = examine(whole.base_model, batch, predictor=whole, ablate=5.0)
    assert report.loss.kind == "masked token" and report.heads[0].layer.startswith("encoder.")
    assert len(report.checks.ablation.heads) == len(report.heads) == 4
    with regard.using(whole, normalizer="entmax15", qk_norm=True):
        how = examine(whole, batch, checks=False).how
    assert how["using"] == [dict(normalizer="entmax15", qk_norm=True)]
