"""The port rotates q, k and v; the weights come from a model that rotates q and k."""

from museum.unseen.parts import RopeAttention, lm_batches, rope_lm, rotate

LINK = "lucidrains/x-transformers#182"
SYMPTOM = "x-transformers rotated the values too, unlike other implementations; removed in 1.20.0."
NEEDS = ("value", "rotary", "rope", "rotat")


class Attention(RopeAttention):
    def attend(self, q, k, v, mask):
        n = v.shape[2]
        return super().attend(q, k, rotate(v, self.cos[:n], self.sin[:n]), mask)


def make():
    return rope_lm(Attention), lm_batches(), {}


def sound():
    return rope_lm(), lm_batches(), {}
