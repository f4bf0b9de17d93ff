"""The same answer another way: each way to run a model is broken in one place, and found; the sound twin is silent."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, T5Config, cache_utils, masking_utils
from transformers import T5ForConditionalGeneration as T5

import regard
from regard.health import checks
from regard.health.checks import NotApplicable, library_differs
from regard.health.examine import evaluation_mode
from regard.health.probe import library
from regard.health.probe.trial import Trial

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
RULES = ("RG101", "RG103", "RG104", "RG105", "RG106", "RG107", "RG202", "RG206", "RG212", "RG220", "RG230", "RG240")


def enlarge(model):
    """Random weights large enough that attention matters."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=generator) * (1.0 if "embed" in name else p.shape[-1] ** -0.5)
    return model.eval()


def llama():
    return enlarge(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64)))


def ids(rows=2, length=40, seed=0):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def judge(model, batch=None, codes=RULES, causal=None):
    """({code: finding}, {code: why it was not made}) of these checks."""
    batch = dict(input_ids=ids(), attention_mask=torch.ones(2, 40, dtype=torch.long)) if batch is None else batch
    trial, found, skipped = Trial(model, [batch], [], [], causal, None, model), {}, {}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    with evaluation_mode(list(model.named_modules())), torch.no_grad(), torch.random.fork_rng([]), trial.probe.active():
        for module in checks.modules():
            if checks.runs_model(module) and any(rule.code in codes for rule in module.RULES):
                try:
                    found |= {one.code: one for one in module.check(trial)}
                except NotApplicable as reason:
                    skipped[module.RULES[0].code] = str(reason)
        skipped |= {rule.code: str(reason) for rule, reason in trial.skipped if rule.code in codes}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert modes == [module.training for module in model.modules()] and torch.equal(random, torch.get_rng_state())
    return found, skipped


def change_call(model, layer, change):
    """Replaces a layer's attention by change(own forward, module, hidden, keywords)."""
    module = model.model.layers[layer].self_attn
    own = module.forward
    return patch.object(module, "forward", lambda hidden_states, **named: change(own, module, hidden_states, named))


def test_a_sound_model_is_silent_and_every_way_is_tried():
    found, skipped = judge(llama())
    assert not found and not skipped


def test_a_sound_encoder_decoder_is_silent():
    model = enlarge(T5(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)))
    found, _ = judge(model, dict(input_ids=ids(), decoder_input_ids=ids(seed=1)[:, :30]))
    assert not found


def lose_mask(own, module, hidden, named):
    mask = torch.zeros(1, 1, 1, 1) if module.training else named.pop("attention_mask")
    return own(hidden, **{**named, "attention_mask": mask})


def scale_twice(own, module, hidden, named):
    with patch.object(module, "scaling", module.scaling * (2 if module.training else 1)):
        return own(hidden, **named)


def hide_too_little(own, module, hidden, named):
    mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    mask[34:] = True  # a buffer for 34 tokens
    return own(hidden, **{**named, "attention_mask": mask[None, None]})


def align_first(own, module, hidden, named):
    past = named["past_key_values"]
    behind = 0 if past is None else past.get_seq_length(1)
    if behind and hidden.shape[1] > 1:
        named["attention_mask"] = torch.ones(hidden.shape[1], behind + hidden.shape[1], dtype=torch.bool).tril()[
            None, None
        ]
    return own(hidden, **named)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lose_mask, "RG103", "model.layers.1.self_attn"),
        (lose_mask, "RG220", "the mask differs"),
        (scale_twice, "RG220", "the scale 0.3536 and 0.7071"),
        (hide_too_little, "RG101", "the mask ends before the text does"),
        (align_first, "RG211", "single steps do not"),
    ],
)
def test_a_layer_that_differs_in_one_way(change, code, words):
    model = llama()
    with change_call(model, 1, change):
        found, _ = judge(model, codes=("RG101", "RG103", "RG206", "RG220"))
    assert words in found[code].evidence and found[code].layer == "model.layers.1.self_attn"


def keys_lost(model):
    def update(self, keys, values, *args, **named):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        return keys, values

    return patch.object(cache_utils.DynamicLayer, "update", update)


def keys_turned(model):
    own = cache_utils.DynamicLayer.update

    def update(self, keys, values, *args, **named):
        own(self, keys, values, *args, **named)
        if keys.shape[2] < self.keys.shape[2]:
            self.keys = torch.cat([self.keys[:, :, : -keys.shape[2]].roll(1, -1), keys], 2)
        return self.keys, self.values

    return patch.object(cache_utils.DynamicLayer, "update", update)


def positions_off(model):
    own = model.model.rotary_emb.forward
    return patch.object(
        model.model.rotary_emb, "forward", lambda x, position_ids: own(x, position_ids + (position_ids.shape[1] == 1))
    )


@pytest.mark.parametrize(("bug", "code"), [(keys_lost, "RG209"), (keys_turned, "RG208"), (positions_off, "RG207")])
def test_decoding_names_what_is_wrong_with_the_cache(bug, code):
    model = llama()
    with bug(model):
        found, _ = judge(model, codes=("RG206",))
    assert set(found) == {code} and found[code].layer == "model.layers.0.self_attn"


def drop_mask(model):
    own = model.model.forward
    return patch.object(model.model, "forward", lambda *args, attention_mask=None, **named: own(*args, **named))


def first_rows_mask(model):
    own = model.model.forward

    def forward(*args, attention_mask=None, **named):
        return own(*args, attention_mask=attention_mask[:1].expand_as(attention_mask), **named)

    return patch.object(model.model, "forward", forward)


def count_from_padding(model):
    own = model.model.rotary_emb.forward
    return patch.object(
        model.model.rotary_emb, "forward", lambda x, position_ids: own(x, 1.1 ** torch.arange(x.shape[1])[None])
    )


@pytest.mark.parametrize(
    ("bug", "code"), [(drop_mask, "RG202"), (first_rows_mask, "RG213"), (count_from_padding, "RG203")]
)
def test_padding_made_here(bug, code):
    model = llama()
    with bug(model):
        found, _ = judge(model, codes=("RG202",))
    assert set(found) == {code}


def test_kernels_disagree_where_one_has_another_scale(monkeypatch):
    own = AttentionInterface._global_mapping["sdpa"]

    def wrong(module, q, k, v, mask, scaling=None, **named):
        return own(module, q, k, v, mask, scaling=2 * scaling, **named)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", wrong)
    model = llama()
    found, _ = judge(model, codes=("RG230",))
    assert "'sdpa' the output differs from that of 'eager'" in found["RG230"].evidence.replace("=", " ")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_pristine_twin_names_what_is_not_the_librarys(monkeypatch, is_sound):
    def run(command, **options):
        library.main(Path(command[-1]))  # the library is whole here, so its process is not needed
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(library.subprocess, "run", run)
    model = llama()
    model.model.layers[1].self_attn.register_buffer("harmless", torch.ones(1), persistent=False)
    if is_sound:
        model.model.norm.register_forward_hook(lambda module, inputs, output: None)
    else:
        model.model.layers[1].self_attn.scaling = 1.0
    found, skipped = judge(model, codes=("RG240",))
    assert not skipped and set(found) == (set() if is_sound else {"RG240"})
    if not is_sound:
        text = found["RG240"].evidence
        assert (
            "self_attn.scaling is 1.0" in text
            and "first module that differs is model.layers.1.self_attn.o_proj" in text
        )


class Decoder(nn.Module):
    """Causal attention by hand, with a cache that is returned or kept, and one mistake."""

    def __init__(self, keeps=False, bug=""):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(61, 32), nn.Embedding(64, 32)
        self.qkv, self.head, self.keeps, self.bug, self.cache = nn.Linear(32, 96), nn.Linear(32, 61), keeps, bug, None

    def attend(self, ids, start, past):
        x = self.embedding(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        kept = (k[:, 1:], v[:, 1:]) if self.bug == "forgets" else (k, v)
        queries, keys = q.shape[1], k.shape[1]
        shown = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = (q @ k.mT / 32**0.5).masked_fill(~shown, -torch.inf)
        return self.head(x + scores.softmax(-1) @ v), kept


class Returning(Decoder):
    def forward(self, ids, cache=None):
        start = 0 if cache is None or self.bug == "restarts" else cache[0].shape[1]
        return self.attend(ids, start, cache)


class Keeping(Decoder):
    def forward(self, ids, start_pos=0):
        output, self.cache = self.attend(ids, start_pos, self.cache if start_pos else None)
        return output


@pytest.mark.parametrize("kind", [Returning, Keeping])
def test_caches_made_by_hand(kind):
    found, skipped = judge(kind(), ids(), ("RG106", "RG206"))
    assert not found and not skipped
    wrong, _ = judge(kind(bug="forgets" if kind is Keeping else "restarts"), ids(), ("RG206",))
    assert wrong and all(one.severity == "critical" for one in wrong.values())


def test_a_model_without_a_cache_says_so():
    _, skipped = judge(nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 61)), ids(), ("RG206",), causal=True)
    assert "takes no cache" in skipped["RG206"]


def test_rounding_of_a_dtype_is_no_failure():
    found, _ = judge(llama().bfloat16())
    assert not found


def test_a_batch_whose_size_matters():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(61, 16)

        def forward(self, ids):
            x = self.embedding(ids)
            return F.layer_norm(x, (16,)) * x.shape[0]

    assert set(judge(Mean(), ids(), ("RG212",), causal=True)[0]) == {"RG212"}


def forget_documents(model):
    own = masking_utils.find_packed_sequence_indices
    assert own is not None
    return patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@pytest.mark.parametrize("is_sound", [True, False])
def test_rows_packed_here_give_what_they_give_alone(is_sound):
    model = llama()
    with nullcontext() if is_sound else forget_documents(model):
        found, _ = judge(model, codes=("RG215",))
    assert set(found) == (set() if is_sound else {"RG215"})
    assert is_sound or found["RG215"].severity == "warning"


class Segments(nn.Module):
    """One causal layer that keeps documents apart by segment ids or a mask, or does not."""

    def __init__(self, apart):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head, self.apart = (
            nn.Embedding(61, 32),
            nn.Linear(32, 96),
            nn.Linear(32, 61),
            apart,
        )

    def forward(self, input_ids, segment_ids=None, attention_mask=None, position_ids=None):
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.apart and segment_ids is not None:
            shown = shown & (segment_ids[:, :, None] == segment_ids[:, None])
        if self.apart and attention_mask is not None:
            shown = shown & attention_mask[:, 0]
        return self.head(x + (q @ k.mT / 32**0.5).masked_fill(~shown, -torch.inf).softmax(-1) @ v)


def test_documents_as_a_collator_tells_them():
    segments = (torch.arange(40) >= 17).long().expand(2, -1)
    mask = (segments[:, :, None] == segments[:, None]).tril()[:, None]
    for told in (dict(segment_ids=segments), dict(attention_mask=mask)):
        batch = dict(input_ids=ids(), **told)
        assert not judge(Segments(True), batch, ("RG102",), causal=True)[0]
        assert next(iter(told)) in judge(Segments(False), batch, ("RG102",), causal=True)[0]["RG102"].evidence
    batch = dict(input_ids=ids(), segment_ids=segments, position_ids=torch.arange(40).expand(2, -1))
    assert "RG217" in judge(Segments(True), batch, ("RG215",), causal=True)[0]


def test_an_end_of_text_inside_a_row_is_noted():
    model, text = llama(), ids()
    text[:, 20] = model.config.eos_token_id = 2
    found, _ = judge(model, dict(input_ids=text), ("RG215",))
    assert found["RG216"].severity == "note" and "2 of 2 rows" in found["RG216"].evidence


def registered(weigh, module, query, key, value, attention_mask, scaling=None, **_):
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
    p = weigh(scaling * query @ k.transpose(-1, -2) + attention_mask)
    return (p @ v).transpose(1, 2).contiguous(), p


@pytest.mark.parametrize("is_sound", [True, False])
def test_examine_checks_attention_that_a_user_registered(monkeypatch, is_sound):
    """A sound function has the checks and no finding; one that is no softmax, in one layer, is blamed alone."""
    monkeypatch.setattr(library_differs, "run_twin", Mock(side_effect=NotApplicable("it takes a second process")))
    mine = partial(registered, (lambda s: s.softmax(-1)) if is_sound else lambda s: F.normalize(s.sigmoid(), 1, -1))
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", mine)
    known = masking_utils.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(known, "mine", known["eager"])
    model = llama()
    model.set_attn_implementation("mine" if is_sound else "eager")
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "mine"
    report = regard.examine(model, [dict(input_ids=ids(), attention_mask=torch.ones(2, 40, dtype=torch.long))])
    assert {"RG101", "RG201", "RG206", "RG420", "RG621"} <= set(report.checks.made)
    blamed = {name for finding in report.findings for name, _ in finding.heads}
    assert len(report.heads) == (8 if is_sound else 4) and blamed == (
        set() if is_sound else {"model.layers.1.self_attn"}
    )
    assert [finding.code for finding in report.findings] == ([] if is_sound else ["RG420"])
