"""Hybrids: the first line says what was not attention, and the other mixers are read by what they add and remember."""

import pytest
import torch

import regard
from regard.health import mixers
from regard.health.mixers import Mixers

pytest.importorskip("transformers")
from regard.health.models.tiny_architectures import make_model
from regard.health.models.tiny_inputs import make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

# model type -> (kind of its other mixers, has a decay that is read)
HYBRIDS = {
    "qwen3_next": ("GatedDeltaNet", True),
    "qwen3_5_text": ("GatedDeltaNet", True),
    "olmo_hybrid": ("GatedDeltaNet", True),
    "lfm2": ("ShortConv", False),
    "recurrent_gemma": ("RG-LRU", True),
    "bamba": ("Mamba2", True),
    "jamba": ("Mamba", True),
    "granitemoehybrid": ("Mamba2", True),
    "nemotron_h": ("Mamba2", True),
    "zamba2": ("Mamba2", True),
    "falcon_h1": ("Mamba2", True),
}


def examine(model, **options):
    return regard.examine(model, [make_batch(model)], checks=False, **options)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_first_line_counts_the_mixers_of_a_hybrid(name):
    kind, has_decay = HYBRIDS[name]
    options = dict(layer_types=["conv", "full_attention"]) if name == "lfm2" else {}
    report = examine(make_model(name, **options))
    others = report.mixers["others"]
    assert others and {one["kind"] for one in others} == {kind} and report.mixers["attention"] >= 1
    total = report.mixers["attention"] + len(others)
    verb = "is" if report.mixers["attention"] == 1 else "are"
    line = f"{report.mixers['attention']} of {total} token mixers {verb} softmax attention; {len(others)} {kind}"
    assert report.summary()[0].startswith(line)
    for one in others:
        assert one["failure"] is None and one["numbers"]["output_rms"] > 0.0
        assert ("memory_median" in one["numbers"]) == has_decay
        assert 0.0 < one["numbers"].get("memory_median", 1.0) < float("inf")
    assert not [one for one in report.findings if one.kind in ("silent mixer", "forgetful mixer")]


def test_projections_of_zeros_are_found_and_their_twins_are_not():
    model = make_model("qwen3_next", layer_types=["linear_attention"] * 3 + ["full_attention"], num_hidden_layers=4)
    assert examine(model).summary()[0].startswith("1 of 4 token mixers is softmax attention; 3 GatedDeltaNet")
    with torch.no_grad():
        for layer in model.layers[:3]:
            layer.linear_attn.out_proj.weight.zero_()
    (found,) = (one for one in examine(model).findings if one.kind == "silent mixer")
    assert (found.code, found.severity, found.layer) == ("RG330", "warning", "layers.0.linear_attn")
    assert "layers.2.linear_attn" in found.evidence


def test_a_state_that_is_emptied_at_every_token_is_found():
    model = make_model("bamba")
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                module.A_log.fill_(6.0)
    assert ("forgetful mixer", "RG331") in [(one.kind, one.code) for one in examine(model).findings]


def test_the_decay_of_a_delta_net_is_what_its_kernel_is_given(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next as source

    model, given = make_model("qwen3_next"), []
    rule = source.torch_chunk_gated_delta_rule
    monkeypatch.setattr(
        source, "torch_chunk_gated_delta_rule", lambda *args, **named: given.append(named) or rule(*args, **named)
    )
    numbers = examine(model).mixers["others"][0]["numbers"]
    decay, write = given[0]["g"].double(), given[0]["beta"].double()
    assert numbers["write_mean"] == pytest.approx(float(write.mean()), rel=1e-5)
    memory = -1.0 / decay.flatten(0, 1).mean(0)
    assert numbers["memory_max"] == pytest.approx(float(memory.max()), rel=1e-4)


def test_a_failure_of_ours_ends_the_reading_and_not_the_forward(monkeypatch):
    def fail(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr(mixers, "KINDS", tuple(kind._replace(read=fail) for kind in mixers.KINDS))
    report = examine(make_model("bamba"))
    assert {one["failure"] for one in report.mixers["others"]} == {"RuntimeError: ours"}
    assert report.summary()[0].endswith("not at all.")


def test_a_model_of_attention_alone_says_nothing_of_mixers():
    report = examine(make_model("llama"))
    assert report.mixers is None and "mixers" not in report.to_json()
    assert Mixers(make_model("llama").named_modules()).readings == []
