"""A static mask [B, 64] is filled with the stride of the prompt: row 0 sees too much, row 1 nothing of its own."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, blocks_text, fit_lm, kept, pad_rows, seeded

LINK = "microsoft/onnxruntime-genai#1639"
SYMPTOM = "Static masking with batch > 1 gives [[1,1,1,1,0],[0,0,0,0,0]] where [[1,1,0,0,0],[1,1,0,0,0]] was meant."
NEEDS = ("batch", "row", "padding", "sample", "mask")
SLOTS = 64


class Attention(RopeAttention):
    """Keys and values are written to 64 slots; the mask says which slots hold tokens."""

    right_stride = True

    def attend(self, q, k, v, mask):
        b, _h, n, d = q.shape
        keys, values = (F.pad(x, (0, 0, 0, SLOTS - n)) for x in (k, v))
        mask = torch.ones(b, n) if mask is None else mask
        slots = torch.zeros(b * SLOTS, dtype=torch.bool)
        for row in range(b):
            at = row * (SLOTS if self.right_stride else n)
            slots[at : at + n] = mask[row].bool()
        slots = slots.view(b, 1, 1, SLOTS)
        keep = (torch.arange(SLOTS) <= torch.arange(n)[:, None]) & slots
        scores = (q @ keys.transpose(2, 3) * d**-0.5).masked_fill(~keep, -30000.0)
        return scores.softmax(-1) @ values


class WrongStride(Attention):
    right_stride = False


@kept
def weights():
    return fit_lm(seeded(lambda: RopeLM(Attention)), 700, 3e-3).state_dict()


def batches():
    out = []
    for seed in (31, 32):
        ids, mask = pad_rows(blocks_text(4, 32, seed), [32, 25, 29, 21])
        out.append({"input_ids": ids, "attention_mask": mask})
    return out


def build(attention):
    model = seeded(lambda: RopeLM(attention))
    model.load_state_dict(weights())
    return model.eval(), batches(), {}


def make():
    return build(WrongStride)


def sound():
    return build(Attention)
