"""Opacus' DPMultiheadAttention views the heads' output as [batch, tokens, width] with no transpose."""

import torch

from museum.unseen.parts import EncoderAttention, encoder, inputs_only, masked_batch

LINK = "meta-pytorch/opacus#825"
SYMPTOM = "Head positions are spliced into time positions; the output is that of no nn.MultiheadAttention."
NEEDS = (
    "transpose",
    "reshape",
    "view",
    "splice",
    "heads are mixed",
    "merge",
    "heads and positions",
    "heads and tokens",
)


class DPAttention(EncoderAttention):
    def forward(self, x, mask=None):
        bsz, tgt_len, embed_dim = x.shape
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = self.normalise(self.hide(self.score(q, k), mask)).flatten(0, 1)
        attn_output = torch.bmm(weights, v.flatten(0, 1))  # (bsz * num_heads, tgt_len, head_dim)
        return self.dense(attn_output.view(bsz, tgt_len, embed_dim))


def build(attention):
    return encoder(attention), [inputs_only(masked_batch(3, 4)), inputs_only(masked_batch(4, 4))], {}


def make():
    return build(DPAttention)


def sound():
    return build(EncoderAttention)
