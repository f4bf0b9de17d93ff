"""Falcon-H1: the branch that applies key_multiplier looks for "key_proj", but the weights are named "k_proj"."""

import torch

from museum.unseen.parts import fit_lm, kept, lm_batches, tiny

LINK = "osaurus-ai/vmlx-swift#186"
SYMPTOM = "Keys are 1 / key_multiplier too large: softmax is nearly a hard argmax, the text degenerates."
NEEDS = ("key_multiplier", "scale", "factor", "logits ×", "too large", "multipl")


def falcon():
    return tiny(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        num_hidden_layers=2,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=16,
        key_multiplier=0.25,
        mamba_n_groups=1,
    )


@kept
def weights():
    return fit_lm(falcon(), 600, 3e-3).state_dict()


def sound():
    model = falcon()
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    model, batches, options = sound()
    with torch.no_grad():  # multipliers are folded into weights at load; the one of the keys never is
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight /= layer.self_attn.key_multiplier
    return model, batches, options
