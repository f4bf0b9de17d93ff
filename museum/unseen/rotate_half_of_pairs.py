"""A GPT by hand: frequencies laid out for adjacent pairs, rotate_half for halves."""

import torch

from museum.unseen.parts import RopeAttention, RopeLM, blocks_text, fit_lm, kept, seeded

LINK = "raiyanyahya/how-to-train-your-gpt#7"
SYMPTOM = (
    "q and k are not rotated: the two members of a pair get different angles, so scores depend on absolute positions."
)
NEEDS = ("rotat", "rotary", "rope", "interleav", "pair")


class PairAttention(RopeAttention):
    halves = False

    def rope(self, x):
        n = x.shape[2]
        cos, sin = self.cos[:n].repeat_interleave(2, -1), self.sin[:n].repeat_interleave(2, -1)
        if self.halves:
            a, b = x.chunk(2, -1)
            turned = torch.cat([-b, a], -1)
        else:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack([-b, a], -1).flatten(-2)
        return x * cos + turned * sin

    def turn(self, q, k):
        return self.rope(q), self.rope(k)


class HalvesAttention(PairAttention):
    halves = True


def text(seed):
    return blocks_text(8, 40, seed, 6, 6)


@kept
def bad_weights():
    return fit_lm(seeded(lambda: RopeLM(HalvesAttention)), 300, 3e-3, text).state_dict()


@kept
def good_weights():
    return fit_lm(seeded(lambda: RopeLM(PairAttention)), 300, 3e-3, text).state_dict()


def build(attention, weights):
    model = seeded(lambda: RopeLM(attention))
    model.load_state_dict(weights)
    return model.eval(), [{"input_ids": text(3)[:4]}, {"input_ids": text(4)[:4]}], {}


def make():
    return build(HalvesAttention, bad_weights())


def sound():
    return build(PairAttention, good_weights())
