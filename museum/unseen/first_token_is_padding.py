"""CLS pooling takes index 0, which is a pad token where rows are padded on the left."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import SIZES, fit, inputs_only, kept, masked_batch, seeded

LINK = "huggingface/sentence-transformers#3208"
SYMPTOM = "CLS pooling returns embeddings of PAD tokens when padding_side is left."
NEEDS = ("pad", "pool", "first token", "cls")


class Sentences(nn.Module):
    first_real = True

    def __init__(self):
        super().__init__()
        from transformers import ModernBertConfig, ModernBertModel

        config = ModernBertConfig(
            **{**SIZES, "num_hidden_layers": 2}, cls_token_id=2, sep_token_id=3, local_attention=64
        )
        config._attn_implementation = "eager"
        self.bert = ModernBertModel(config)
        self.head = nn.Linear(64, SIZES["vocab_size"])

    def tokens(self, input_ids, attention_mask):
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    def forward(self, input_ids, attention_mask):
        h = self.tokens(input_ids, attention_mask)
        at = attention_mask.argmax(1) if self.first_real else torch.zeros(len(h), dtype=torch.long)
        return F.normalize(h[torch.arange(len(h)), at], dim=-1)


class AtZero(Sentences):
    first_real = False


def batch(seed, rows=8):
    return masked_batch(seed, rows=rows, side="left")


def loss(model, step):
    one = batch(7000 + step)
    logits = model.head(model.tokens(one["input_ids"], one["attention_mask"]))
    return F.cross_entropy(logits.flatten(0, 1), one["labels"].flatten(), ignore_index=-100)


@kept
def weights():
    return fit(seeded(Sentences), loss, 250, 3e-3).state_dict()


def build(cls):
    model = seeded(cls)
    model.load_state_dict(weights())
    return model.eval(), [inputs_only(batch(at, 4)) for at in (1, 2)], {}


def make():
    return build(AtZero)


def sound():
    return build(Sentences)
