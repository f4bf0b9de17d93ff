"""Readings against the dense eager weights of the same model in float64, over the families of models people use."""

import copy
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard
from regard.health.examine import examine

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperModel,
)  # fmt: skip

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
ROPE = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)


def tokens(*shape):
    return torch.randint(1, 60, shape)


def padded(batch=3, length=19, side="right"):
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        cut = 4 * row
        mask[row, slice(length - cut, None) if side == "right" else slice(0, cut)] = 0
    return dict(input_ids=tokens(batch, length), attention_mask=mask)


def bert():
    return BertModel(BertConfig(**SMALL)), padded()


def gpt2():
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64, scale_attn_by_inverse_layer_idx=True
    )
    return GPT2Model(config), padded(side="left")


def llama():
    return LlamaModel(LlamaConfig(**SMALL, **ROPE)), padded(side="left")


def llama_unpadded():
    return LlamaModel(LlamaConfig(**SMALL, **ROPE)), dict(input_ids=tokens(2, 23))


def mistral():
    return MistralModel(MistralConfig(**SMALL, **ROPE, sliding_window=5)), padded()


def gemma2():
    config = Gemma2Config(**SMALL, **ROPE, sliding_window=6, attn_logit_softcapping=0.7, query_pre_attn_scalar=8)
    return Gemma2Model(config), padded()


def gpt_oss():
    config = GptOssConfig(
        **SMALL, **ROPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=6, rope_parameters=None
    )
    model = GptOssModel(config)
    model.set_experts_implementation("eager")
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model, padded()


def t5():
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60, decoder_start_token_id=0)
    return T5Model(config), dict(**padded(), decoder_input_ids=tokens(3, 11))


def t5_of_equal_lengths():
    """Encoder and decoder of one length: the encoder's padding is no padding of the decoder's queries."""
    model, batch = t5()
    return model, dict(batch, decoder_input_ids=tokens(3, 19))


def whisper():
    config = WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=30, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    return WhisperModel(config), dict(input_features=torch.randn(2, 8, 40), decoder_input_ids=tokens(2, 9))


def vit():
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)), dict(pixel_values=torch.randn(2, 3, 16, 16))


MODELS = [bert, gpt2, llama, llama_unpadded, mistral, gemma2, gpt_oss, t5, t5_of_equal_lengths, whisper, vit]
FROM_WEIGHTS = ("visible_keys", "mass", "entropy", "effective_keys", "participation", "max_weight", "support",
                "distance", "first_key_mass", "gradient_gain")  # fmt: skip
FROM_LOGITS = ("max_logit", "mean_logit", "logit_variance", "logsumexp")


class Eager(TorchFunctionMode):
    """Keeps what goes into and comes out of every softmax over four dims, and keeps it in float64."""

    def __init__(self):
        super().__init__()
        self.logits, self.weights = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        softmax = getattr(func, "__name__", "") == "softmax" and args[0].ndim == 4
        if softmax:
            kwargs.pop("dtype", None)
        result = func(*args, **kwargs)
        if softmax:
            self.logits.append(args[0])
            self.weights.append(result)
        return result


def sharpen(model):
    """Rows of every kind: from flat to nearly one-hot."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(
                part in name for part in ("query", "q_proj", "c_attn", ".q.", "key", "k_proj", ".k.")
            ):
                weight.mul_((12.0 if ".1." in name else 4.0) / (4.0 if isinstance(model, T5Model) else 1.0))
    return model.eval()


def truth(model, batch):
    """[(logits or None, weights, visible)] per attention call, float64, dense, from the model run eagerly."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad(), Eager() as seen:
        model(**batch)
    found = []
    for logits, weights in zip(seen.logits, seen.weights, strict=True):
        sinks = hasattr(model.config, "num_local_experts")
        logits, weights = (None, weights[..., :-1]) if sinks else (logits, weights)
        found.append((logits, weights, weights > 0 if logits is None else logits > torch.finfo(torch.float64).min / 2))
    return found


def counted(batch, index, weights):
    """[B, M]: the query rows that are not padding; a decoder's tokens, after the encoder's two layers, are all real."""
    mask = batch.get("attention_mask")
    if mask is None or ("decoder_input_ids" in batch and index >= 2):
        return torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool)
    return mask.bool()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_readings_are_those_of_the_eager_weights(make):
    torch.manual_seed(7)
    model, batch = make()
    sharpen(model)
    report = examine(model, [batch])
    assert report.unmeasured == []
    calls = truth(model, batch)
    by_layer = {}
    for head in report.heads:
        by_layer.setdefault(head.index, []).append(head)
    assert sorted(by_layer) == list(range(len(calls)))
    entropies = []
    for index, (logits, weights, visible) in enumerate(calls):
        rows = counted(batch, index, weights)
        dense = (
            {}
            if logits is None
            else dict(regard.statistics.of_scores(logits.masked_fill(~visible, -math.inf), visible))
        )
        expected = {name: dense[name] for name in FROM_LOGITS if name in dense}
        by_weights = regard.statistics.of_weights(weights, visible=visible)
        if logits is None:  # the sink is a key too for the Jacobian: 1 − Σp² over the keys, weighed
            by_weights["gradient_gain"] = (weights * (1 - weights)).sum(-1)
        expected |= {name: by_weights[name] for name in FROM_WEIGHTS}
        ratio = expected["entropy"] / expected["visible_keys"].log()
        entropies.append(ratio[ratio.isfinite()])
        assert [head.head for head in by_layer[index]] == list(range(weights.shape[1]))
        for head in by_layer[index]:
            for name, values in expected.items():
                x = values[:, head.head][rows]
                spread = head.statistics[name]
                assert spread.count == x.numel(), name
                near = dict(rel=1e-4, abs=2e-5 if name in ("mean_logit", "max_logit", "logsumexp") else 1e-6)
                assert spread.mean == pytest.approx(x.mean().item(), **near), name
                assert spread.min == pytest.approx(x.min().item(), **near), name
                assert spread.max == pytest.approx(x.max().item(), **near), name
                assert spread.std == pytest.approx(x.std(correction=0).item(), rel=1e-3, abs=1e-4), name
            x = ratio[:, head.head][rows]
            x = x[expected["visible_keys"][:, head.head][rows] > 1]
            assert head.statistics["entropy_ratio"].mean == pytest.approx(x.mean().item(), rel=1e-4)
            middle = head.statistics["entropy_ratio"].quantile(0.5)
            assert x.quantile(0.4) - 0.005 <= middle <= x.quantile(0.6) + 0.005
    everything = torch.cat(entropies)
    assert everything.min() < 0.6 < everything.max()  # sharp rows and flat rows were among them
