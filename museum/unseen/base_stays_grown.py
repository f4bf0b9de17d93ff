"""Dynamic NTK: after one long input the rotary base stays grown, and later short inputs are rotated with it."""

import torch

from museum.unseen.parts import blocks_text, llama_weights, tiny

LINK = "huggingface/transformers#27226"
SYMPTOM = "When the length grows and then shrinks, the base is not scaled back: the same text gives other logits later."
NEEDS = (
    "rotary",
    "rope",
    "earlier call",
    "call before",
    "previous call",
    "same input",
    "state",
    "called again",
    "twice",
)


class Sticky(torch.nn.Module):
    """LlamaRotaryEmbedding of transformers 4.35 with dynamic scaling."""

    def __init__(self, own):
        super().__init__()
        self.config, self.rope_type, self.attention_scaling = own.config, own.rope_type, 1.0
        self.max_seq_len_cached = self.original = own.config.max_position_embeddings
        self.factor, self.base, self.dim = 4.0, 10000.0, 2 * len(own.inv_freq)
        self.register_buffer("inv_freq", own.original_inv_freq.clone(), persistent=False)

    def forward(self, x, position_ids):
        length = int(position_ids.max()) + 1
        if length > self.max_seq_len_cached:  # grows, and never returns
            self.max_seq_len_cached = length
            base = self.base * ((self.factor * length / self.original) - (self.factor - 1)) ** (
                self.dim / (self.dim - 2)
            )
            self.inv_freq = base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angle = position_ids[..., None].float() * self.inv_freq
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def dynamic():
    model = tiny("LlamaConfig", "LlamaForCausalLM", max_position_embeddings=48,
                 rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})  # fmt: skip
    model.load_state_dict(llama_weights())
    return model.eval()


def batches():
    return [{"input_ids": blocks_text(3, length, 60 + length)} for length in (32, 90, 40)]


def make():
    model = dynamic()
    model.model.rotary_emb = Sticky(model.model.rotary_emb)
    return model, batches(), {}


def sound():
    return dynamic(), batches(), {}
