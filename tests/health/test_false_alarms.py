"""Sound models that were alarmed on, and beside each the mistake that is still found."""

import pytest
import torch
from contract_data import codes, run_check
from torch import nn

from museum.parts import Attention, TinyGPT, build, make_text
from regard.health.checks import library_differs, rule_of
from regard.health.checks.finding import LAYERS, MODEL, fill_finding
from regard.health.checks.repairs import list_repairs
from regard.health.contract.diagnosis import diagnose
from regard.health.models.tiny_architectures import spread_weights
from regard.health.probe.library import collect
from regard.health.probe.probe import main_output
from regard.health.probe.trial import Trial
from regard.health.tokens.text import as_batch

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=64, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0)
T5 = dict(SIZES, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)


def make_t5():
    return build(lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)))


def test_an_encoder_decoder_that_is_given_labels_has_two_texts():
    model, ids = make_t5(), make_text(3, 20)
    batch = dict(input_ids=ids, labels=ids.clone())
    assert torch.equal(as_batch(batch, ids.device, model).targets[:, 1:], ids[:, :-1])
    assert [codes(run_check(name, model, batch)) for name in ("leak", "labels", "decoding", "padding")] == [[]] * 4
    assert run_check("decoding", model, batch) == []  # it was made


def test_a_decoder_that_reads_the_encoders_text_is_no_leak():
    config = transformers.BartConfig(
        **SIZES, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    model = build(lambda: transformers.BartForConditionalGeneration(config))
    assert "nothing says" in run_check("leak", model, make_text(2, 20))


class Forgets(transformers.models.t5.modeling_t5.T5Attention):
    """Counts the distances of a step from the first key."""

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        return super().compute_bias(query_length, key_length, device=device)


def test_the_bias_of_a_step_is_that_of_its_position():
    model, ids = make_t5(), make_text(3, 20)
    first = model.decoder.block[0].layer[0].SelfAttention
    first.relative_attention_bias.weight.data.normal_(0.0, 2.0)
    first.__class__ = Forgets
    (found,) = run_check("decoding", model, dict(input_ids=ids, labels=ids))
    assert found.code == "RG207" and "the bias on the scores" in found.evidence


def test_no_scale_is_proposed_to_a_class_that_has_none():
    def kinds(model, batch):
        trial = Trial(model, [batch], [], [], None, None)
        with trial.probe.active():
            return {repair.rule.code for repair in list_repairs(trial)}

    ids = make_text(2, 20)
    assert "RG402" not in kinds(make_t5(), dict(input_ids=ids, labels=ids))
    assert "RG402" in kinds(build(TinyGPT), ids)


class SeesAtPadding(Attention):
    """Queries of padding see every key, so that they have a key at all."""

    leaks = False

    def weigh(self, scores, hidden):
        length = scores.shape[-1]
        shown = self.mask[:length, :length] & ~hidden[:, None, None] | hidden[:, None, :, None]
        shown = shown | torch.tensor(self.leaks)
        return scores.masked_fill(~shown, -torch.inf).softmax(-1)


class Leaks(SeesAtPadding):
    leaks = True


@pytest.mark.parametrize(("attention", "wanted"), [(SeesAtPadding, []), (Leaks, ["RG101"])])
def test_rows_of_padding_are_not_judged(attention, wanted):
    model = build(lambda: TinyGPT(attention))
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :7] = mask[2, :3] = 0
    found = run_check("leak", model, dict(input_ids=make_text(3, 24), attention_mask=mask), causal=True)
    assert codes(found) == wanted


class Prefix(TinyGPT):
    """The first `seen` tokens see one another."""

    def __init__(self, seen):
        super().__init__()
        for block in self.blocks:
            block.attn.mask[:, :seen] = True

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(("seen", "wanted"), [(16, []), (21, ["RG101"])])
def test_a_prefix_without_labels_may_see_itself(seen, wanted):
    ids = make_text(3, 24)
    labels = ids.masked_fill(torch.arange(24) < 16, -100)
    found = run_check("leak", build(lambda: Prefix(seen)), dict(input_ids=ids, labels=labels), causal=True)
    assert codes(found) == wanted


class Drops(transformers.LlamaForCausalLM):
    """Leaves out the mask on purpose, and computes as the library does."""

    def forward(self, input_ids, attention_mask=None, **more):
        return super().forward(input_ids, attention_mask=None, **more)


class Scales(Drops):
    def forward(self, input_ids, **more):
        found = super().forward(input_ids, **more)
        found.logits = 2 * found.logits
        return found


@pytest.mark.parametrize(("kind", "wanted"), [(Drops, []), (Scales, ["RG240"])])
def test_a_subclass_is_compared_with_what_it_hands_on(kind, wanted, monkeypatch):
    def run_here(model, batch):
        plain = transformers.LlamaForCausalLM(model.config).eval()
        plain.load_state_dict(model.state_dict())
        return collect(plain, batch.args, batch.named)

    monkeypatch.setattr(library_differs, "run_twin", run_here)  # no process is started
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    model = build(lambda: kind(transformers.LlamaConfig(**sizes)))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0
    forward = transformers.LlamaForCausalLM.forward
    found = run_check("library_differs", model, dict(input_ids=make_text(2, 16), attention_mask=mask))
    assert codes(found) == wanted and transformers.LlamaForCausalLM.forward is forward


class WithTable(Attention):
    """Keeps a table of more positions than any text has."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(64, 32)

    def split(self, x):
        return super().split(x + self.places.weight[: x.shape[1]])


def test_rows_of_a_table_that_were_not_looked_up_are_no_mistake():
    assert codes(run_check("gradients", build(lambda: TinyGPT(WithTable)), make_text(2, 20))) == []


def test_a_softmax_over_the_queries_heads_the_future_that_it_shows():
    axis = fill_finding(rule_of("RG710"), "critical", (), "over the queries", scope=LAYERS, layer="blocks.0.attn")
    leak = fill_finding(rule_of("RG101"), "critical", (), "begins somewhere", scope=MODEL)
    (cause,) = diagnose([leak, axis])
    assert cause.code == "RG710" and cause.symptoms == (leak,)


class Moved(TinyGPT):
    """Positions count from the padding, or a state runs through it."""

    def __init__(self, is_state):
        super().__init__()
        self.is_state = is_state

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = self.place(input_ids, attention_mask if self.is_state else None)
        x = self.wte(input_ids) + self.wpe(position_ids)
        x = x + 0.1 * x.cumsum(1) if self.is_state else x
        for block in self.blocks:
            x = block(x, None if attention_mask is None else attention_mask == 0)
        return self.head(self.ln_f(x))


@pytest.mark.parametrize(("is_state", "wanted"), [(False, ["RG203"]), (True, ["RG202"])])
def test_padding_on_the_left_that_moves_the_text_or_is_read(is_state, wanted):
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :7] = 0
    batch = dict(input_ids=make_text(3, 24), attention_mask=mask)
    assert codes(run_check("padding", build(lambda: Moved(is_state)), batch)) == wanted


class Tower(nn.Module):
    """Returns one vector per image: of many layers that nearly lose it, or of the first image for all."""

    def __init__(self, is_first):
        super().__init__()
        self.is_first, self.last = is_first, nn.Linear(48, 4)

    def forward(self, pixel_values):
        x = pixel_values[:1].expand_as(pixel_values) if self.is_first else 1e-40 * pixel_values.double()
        return self.last(x.flatten(1).to(self.last.weight.dtype))


@pytest.mark.parametrize("is_first", [False, True])
def test_an_image_that_is_nearly_lost_is_not_ignored(is_first):
    found = run_check("inputs_ignored", build(lambda: Tower(is_first)), dict(pixel_values=torch.randn(3, 3, 4, 4)))
    assert codes(found) == ["RG806"] * is_first


def test_the_main_output_is_not_the_loss():
    hidden = torch.zeros(2, 5)
    assert main_output(dict(loss=torch.zeros(2), audio_values=hidden)) is hidden


def test_weights_of_convolutions_are_spread_by_all_that_they_read():
    layer = nn.Conv1d(64, 64, 3)
    spread_weights(layer)
    assert 0.8 < layer.weight.std() * 192**0.5 < 1.2
