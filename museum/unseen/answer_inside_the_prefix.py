"""Fine-tuning of a prefix language model: a 4D mask of ones goes in, and the answer is seen as a part of the prefix."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, blocks_text, fit, kept, seeded

LINK = "huggingface/transformers#30918"
SYMPTOM = "PaliGemma's attention mask was all ones in training: labels leak; the loss is low, the answers are bad."
NEEDS = ("later token", "future", "causal", "labels", "answer", "sees ahead")
PREFIX = 14


class PrefixAttention(RopeAttention):
    def attend(self, q, k, v, token_type_ids):
        """Full attention within the prefix (type 0), causal on the suffix (type 1)."""
        n = q.shape[2]
        keep = torch.ones(n, n, dtype=torch.bool).tril() | (token_type_ids == 0)[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


class AllOnes(RopeAttention):
    def attend(self, q, k, v, token_type_ids):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool)
        )


class PrefixLM(RopeLM):
    def forward(self, input_ids, token_type_ids, labels=None):
        logits = super().forward(input_ids, token_type_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def batch(seed, rows=4, length=36):
    ids = blocks_text(rows, length, seed)
    types = (torch.arange(length) >= PREFIX).long().expand_as(ids).clone()
    return {"input_ids": ids, "token_type_ids": types, "labels": ids.masked_fill(types == 0, -100)}


def train(attention):
    return fit(seeded(lambda: PrefixLM(attention)), lambda m, s: m(**batch(800 + s, 8))["loss"], 400, 3e-3).state_dict()


@kept
def bad_weights():
    return train(AllOnes)


@kept
def good_weights():
    return train(PrefixAttention)


def build(attention, weights):
    model = seeded(lambda: PrefixLM(attention))
    model.load_state_dict(weights())
    return model.eval(), [batch(1), batch(2)], {}


def make():
    return build(AllOnes, bad_weights)


def sound():
    return build(PrefixAttention, good_weights)
