"""The sentence's vector is the mean over all positions, padding included."""

import torch
from torch import nn

from museum.parts import make_text

LINK = "huggingface/sentence-transformers#2569"
SYMPTOM = "A sentence's vector depends on the longest sentence of its batch."
NEEDS = ("padding", "padded")


class Sentence(nn.Module):
    def __init__(self, masked):
        super().__init__()
        from regard.health.models.tiny_architectures import make_model

        self.encoder, self.masked = make_model("bert"), masked

    def forward(self, input_ids, attention_mask):
        x = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask[..., None].to(x.dtype) if self.masked else torch.ones_like(x[..., :1])
        return (x * kept).sum(1) / kept.sum(1)


def make_bert(masked):
    batches = []
    for seed in (1, 2):
        ids = make_text(6, 24, seed)
        mask = torch.ones_like(ids)
        for row in range(6):
            mask[row, 24 - 3 * row :] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return Sentence(masked).eval(), batches, {}


def make():
    return make_bert(False)


def sound():
    return make_bert(True)
