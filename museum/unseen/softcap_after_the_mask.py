"""tanh caps the scores after the mask was added: −inf becomes −cap, and later tokens get a little weight."""

import torch

from museum.unseen.parts import fit_lm, kept, lm_batches, repeat_kv, tiny, use_attention

LINK = "onnx/onnx#7865"
SYMPTOM = (
    "A fused attention op for Gemma 2 applies the soft cap after the mask: with a small cap, tokens see the future."
)
NEEDS = ("soft cap", "softcap", "cap after", "capped")


def attend(module, query, key, value, attention_mask, scaling, softcap, late, **more):
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if late and attention_mask is not None:
        scores = scores + attention_mask
    scores = softcap * torch.tanh(scores / softcap)
    if not late and attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def cap_then_mask(module, query, key, value, attention_mask, scaling=None, softcap=None, **more):
    return attend(module, query, key, value, attention_mask, scaling, softcap, late=False)


def mask_then_cap(module, query, key, value, attention_mask, scaling=None, softcap=None, **more):
    return attend(module, query, key, value, attention_mask, scaling, softcap, late=True)


def gemma():
    return tiny("Gemma2Config", "Gemma2ForCausalLM", head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=5.0,
                final_logit_softcapping=30.0, sliding_window=256)  # fmt: skip


@kept
def weights():
    return fit_lm(gemma(), 600, 3e-3).state_dict()


def build(function):
    model = gemma()
    model.load_state_dict(weights())
    return use_attention(model, f"heldout_{function.__name__}", function), lm_batches(), {}


def make():
    return build(mask_then_cap)


def sound():
    return build(cap_then_mask)
