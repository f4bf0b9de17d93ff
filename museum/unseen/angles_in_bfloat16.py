"""inv_freq and the positions are cast to bfloat16 before they are multiplied: positions beyond 256 fall together."""

import torch

from museum.unseen.parts import blocks_text, fit_lm, kept, tiny

LINK = "huggingface/candle#3520"
SYMPTOM = "RoPE phases are computed in bfloat16; short texts are right, long ones diverge."
NEEDS = ("bfloat16", "rotary", "rope", "precision", "rounding", "angle", "position")


class Rounded(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.register_buffer("inv_freq", own.inv_freq.to(torch.bfloat16), persistent=False)

    def forward(self, x, position_ids):
        angle = (position_ids[..., None].to(torch.bfloat16) * self.inv_freq).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def llama():
    return tiny("LlamaConfig", "LlamaForCausalLM", max_position_embeddings=512, attention="sdpa")


@kept
def weights():
    model = fit_lm(llama(), 500, 4e-3)
    return fit_lm(model, 120, 2e-3, text=lambda seed: blocks_text(2, 320, seed)).state_dict()


def sound():
    model = llama()
    model.load_state_dict(weights())
    return model.eval(), [{"input_ids": blocks_text(2, 320, 90 + at)} for at in range(2)], {}


def make():
    model, batches, options = sound()
    model.model.rotary_emb = Rounded(model.model.rotary_emb)
    return model, batches, options
