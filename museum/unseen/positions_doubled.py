"""The rotary scale falls through to 2.0 where rope_scaling is absent or dynamic: positions are doubled."""

import torch

from museum.unseen.parts import llama, lm_batches

LINK = "lablup/mlxcel#1324"
SYMPTOM = "Every query and key is rotated at twice its true position on every request; text stays fluent."
NEEDS = ("position", "rotary", "rope", "rotat", "twice", "frequenc")


class Doubled(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x, position_ids):
        return self.own(x, 2 * position_ids)


def make():
    model = llama()
    model.model.rotary_emb = Doubled(model.model.rotary_emb)
    return model, lm_batches(), {}


def sound():
    return llama(), lm_batches(), {}
