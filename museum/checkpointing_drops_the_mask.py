"""With gradient checkpointing the blocks are called without their mask."""

import torch
from torch.utils.checkpoint import checkpoint

from museum.parts import Attention, TinyGPT, build, make_texts, train

LINK = "lightly-ai/lightly#2049"
SYMPTOM = "set_grad_checkpointing() changes the answer: checkpointed blocks get x alone, so padding is read."
NEEDS = ("checkpoint", "padding", "training")


class Encoder(TinyGPT):
    """An encoder with padding; `forgets`: its checkpointed blocks get no mask."""

    supports_gradient_checkpointing = True

    def __init__(self, forgets):
        super().__init__(Both)
        self.forgets, self.gradient_checkpointing = forgets, True

    def forward(self, input_ids, attention_mask=None):
        x = self.wte(input_ids) + self.wpe(self.place(input_ids, attention_mask))
        hidden = None if attention_mask is None else attention_mask == 0
        for block in self.blocks:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, None if self.forgets else hidden, use_reentrant=False)
            else:
                x = block(x, hidden)
        return self.head(self.ln_f(x))


class Both(Attention):
    def make_mask(self, length):
        return torch.ones(length, length, dtype=torch.bool)


def make_encoder(forgets):
    model = build(lambda: Encoder(forgets))
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        mask[1::2, -7:] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return train(model, 20), batches, {"causal": False}


def make():
    return make_encoder(True)


def sound():
    return make_encoder(False)
