"""The mask is built from the padding alone if there is one; causal only without a mask."""

import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, blocks_text, pad_rows, rope_lm

LINK = "huggingface/candle#3609"
SYMPTOM = "Any caller that passes an attention mask gets bidirectional attention: batched evaluation sees the answers."
NEEDS = ("later token", "future", "causal", "sees ahead")


class Attention(RopeAttention):
    def attend(self, q, k, v, mask):
        mask = None if mask is None else mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def batches():
    out = []
    for seed in (31, 32):
        ids, mask = pad_rows(blocks_text(4, 40, seed), [40, 33, 27, 36])
        out.append({"input_ids": ids, "attention_mask": mask})
    return out


def make():
    return rope_lm(Attention), batches(), {}


def sound():
    return rope_lm(), batches(), {}
