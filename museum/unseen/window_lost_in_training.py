"""unsloth's Mistral: in training no 4D mask is made and run_attention on SDPA gets no window."""

import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, MistralConfig, MistralForCausalLM
from transformers.masking_utils import sdpa_mask

from museum.unseen.parts import SIZES, blocks_text, fit_lm, kept, repeat_kv, seeded

LINK = "unslothai/unsloth#8253"
SYMPTOM = "In an ordinary training step every sequence longer than sliding_window attends to its whole causal history."
NEEDS = ("window",)


def run_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    if module.training:
        o = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        o = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            is_causal=attention_mask is None and query.shape[2] > 1,
        )
    return o.transpose(1, 2).contiguous(), None


AttentionInterface.register("unsloth_like", run_attention)
AttentionMaskInterface.register("unsloth_like", sdpa_mask)


def new(attention):
    config = MistralConfig(**{**SIZES, "sliding_window": 12})
    config._attn_implementation = attention
    return seeded(lambda: MistralForCausalLM(config))


def text(seed):
    return blocks_text(8, 40, seed, 6, 6)


@kept
def weights():
    return fit_lm(new("sdpa"), 250, 3e-3, text).state_dict()


def build(attention):
    model = new(attention)
    model.load_state_dict(weights())
    return (
        model.train(),
        [{"input_ids": text(3)[:4], "labels": text(3)[:4]}, {"input_ids": text(4)[:4], "labels": text(4)[:4]}],
        {},
    )


def make():
    return build("unsloth_like")


def sound():
    return build("sdpa")
