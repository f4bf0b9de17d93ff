"""A converter fuses q, k, v with cat([q, k, v]) where the fused layer is read interleaved by head."""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from museum.unseen.parts import VOCAB, blocks_text, fit_lm, kept, seeded

LINK = "NVIDIA-NeMo/RL#2802"
SYMPTOM = "The loaded attention gets scrambled q, k and v; nothing raises, the shapes agree."
NEEDS = ("query_key_value", "interleav", "order of the rows", "fused", "permut", "scrambl")


def new():
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        initializer_range=0.08,
    )
    config._attn_implementation = "sdpa"
    return seeded(lambda: GPTNeoXForCausalLM(config))


def text(seed):
    return blocks_text(8, 32, seed, 6, 6)


@kept
def weights():
    return fit_lm(new(), 300, 3e-3, text).state_dict()


def build(bug):
    model = new()
    model.load_state_dict(weights())
    if bug:
        with torch.no_grad():
            for layer in model.gpt_neox.layers:
                fused = layer.attention.query_key_value
                for p in (fused.weight, fused.bias):
                    q, k, v = (
                        p.detach().clone().reshape(4, 3, 16, *p.shape[1:]).unbind(1)
                    )  # what the source checkpoint keeps apart
                    p.copy_(torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]))
    return (
        model.eval(),
        [{"input_ids": text(3)[:4], "labels": text(3)[:4]}, {"input_ids": text(4)[:4], "labels": text(4)[:4]}],
        {},
    )


def make():
    return build(True)


def sound():
    return build(False)
