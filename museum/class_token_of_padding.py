"""The class token is taken at place 0, where a text that is padded on the left has padding."""

import torch

from museum.padding_in_the_mean import Sentence
from museum.parts import make_text

LINK = "huggingface/sentence-transformers#3208"
SYMPTOM = "Sentences of other lengths in one batch get vectors of padding."
NEEDS = ("pooling", "padding")


class Classes(Sentence):
    """`masked`: the first place that the mask shows."""

    def forward(self, input_ids, attention_mask):
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        x = self.encoder(input_ids, attention_mask=attention_mask, position_ids=positions).last_hidden_state
        first = attention_mask.int().argmax(1) if self.masked else torch.zeros(len(x), dtype=torch.long)
        return x[torch.arange(len(x)), first]


def make_bert(masked):
    batches = []
    for seed in (1, 2):
        ids = make_text(6, 24, seed)
        mask = (torch.arange(24) >= 3 * torch.arange(6)[:, None]).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return Classes(masked).eval(), batches, {}


def make():
    return make_bert(False)


def sound():
    return make_bert(True)
