"""In decoding, positions are one too high: the new token stands where the next one belongs."""

from museum.parts import make_batches, make_lm

LINK = "rajveer43/VeloxQuant-MLX#389"
SYMPTOM = "A step with the cache rotates by length + 1: its answer drifts from the full forward."
NEEDS = ("position", "rotary", "rotat")


def make_llama(shift):
    import torch

    model = make_lm("llama")
    inner = model.model.forward

    def forward(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + past
        return inner(input_ids, attention_mask, position_ids + shift * (past > 0), past_key_values, **more)

    model.model.forward = forward
    return model, make_batches(model), {}


def make():
    return make_llama(1)


def sound():
    return make_llama(0)
