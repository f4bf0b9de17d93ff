"""The pooled index is the number of valid tokens minus one: right for right padding, a pad token for left padding."""

import torch
from torch import nn

from museum.unseen.parts import blocks_text, llama, pad_rows, seeded

LINK = "huggingface/peft#3620"
SYMPTOM = "Sequence classification picks a padding position when the batch is padded on the left."
NEEDS = ("pad", "pool", "last token")


class Classifier(nn.Module):
    rightmost = True

    def __init__(self):
        super().__init__()
        self.backbone = llama().model
        self.score = nn.Linear(64, 3)

    def forward(self, input_ids, attention_mask):
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions).last_hidden_state
        if self.rightmost:
            at = (torch.arange(input_ids.shape[1]) * attention_mask).argmax(-1)
        else:
            at = attention_mask.sum(-1) - 1
        return self.score(h[torch.arange(len(h)), at])


class ByCount(Classifier):
    rightmost = False


def batches():
    out = []
    for seed in (41, 42):
        ids, mask = pad_rows(blocks_text(4, 32, seed), [32, 20, 9, 14], side="left")
        out.append({"input_ids": ids, "attention_mask": mask})
    return out


def make():
    return seeded(ByCount).eval(), batches(), {}


def sound():
    return seeded(Classifier).eval(), batches(), {}
