"""The configuration scales the rotation as Llama 3.1 does; the faster path builds plain frequencies."""

import torch

from museum.parts import make_batches, make_lm

LINK = "unslothai/unsloth#6197"
SYMPTOM = "rope_type llama3 is ignored: short texts look right, long ones become gibberish."
NEEDS = ("scaling", "llama3", "frequenc")

SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def make_llama(dropped):
    model = make_lm("llama", rope_parameters=SCALED, max_position_embeddings=256)
    if dropped:
        rotary, width = model.model.rotary_emb, model.config.head_dim
        rotary.inv_freq = 1e4 ** -(torch.arange(0, width, 2).float() / width)
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model, make_batches(model, length=48), {}


def make():
    return make_llama(True)


def sound():
    return make_llama(False)
