"""Rotary positions are applied before heads and tokens change places: the angle counts heads, not tokens."""

from museum.unseen.parts import RopeAttention, RopeLM, fit_lm, kept, lm_batches, rope_lm, rotate, seeded

LINK = "NVIDIA/audio-flamingo#27"
SYMPTOM = "apply_rotary_pos_emb takes dimension −2 for the sequence, but was given [B, N, H, d]; training goes worse."
NEEDS = ("position", "rotary", "rope", "rotat", "order of the tokens", "order of tokens")


class Attention(RopeAttention):
    def turn(self, q, k):
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # [B, N, H, d]
        n = q.shape[-2]
        q, k = rotate(q, self.cos[:n], self.sin[:n]), rotate(k, self.cos[:n], self.sin[:n])
        return q.transpose(1, 2), k.transpose(1, 2)


@kept
def weights():
    return fit_lm(seeded(lambda: RopeLM(Attention)), 700, 3e-3).state_dict()  # trained with the bug


def make():
    model = seeded(lambda: RopeLM(Attention))
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def sound():
    return rope_lm(), lm_batches(), {}
