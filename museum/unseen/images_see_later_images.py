"""Gemma 3's mask unmasks all image tokens for one another, not those of one image: text order leaks over images."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, blocks_text, fit, kept, seeded

LINK = "huggingface/transformers#38053"
SYMPTOM = "Images cannot attend to future images, but the mask lets them: the first image sees the second."
NEEDS = ("image", "later token", "future", "token_type_ids", "block", "causal")


class Attention(RopeAttention):
    all_images = False

    def attend(self, q, k, v, token_type_ids):
        n = q.shape[2]
        is_image = token_type_ids == 1
        if self.all_images:
            same = is_image[:, None, :] & is_image[:, :, None]
        else:
            start = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
            group = torch.where(is_image, start.long().cumsum(1), 0)
            same = (group[:, None, :] == group[:, :, None]) & is_image[:, None, :]
        keep = torch.ones(n, n, dtype=torch.bool).tril() | same
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None])


class AllImages(Attention):
    all_images = True


class VLM(RopeLM):
    def forward(self, input_ids, token_type_ids, labels=None):
        logits = super().forward(input_ids, token_type_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def batch(seed, rows=4, length=40):
    ids = blocks_text(rows, length, seed)
    types = torch.zeros_like(ids)
    types[:, 4:12], types[:, 20:28] = 1, 1
    return {"input_ids": ids, "token_type_ids": types, "labels": ids.masked_fill(types == 1, -100)}


@kept
def weights():
    return fit(seeded(lambda: VLM(Attention)), lambda m, s: m(**batch(800 + s, 8))["loss"], 500, 3e-3).state_dict()


def build(attention):
    model = seeded(lambda: VLM(attention))
    model.load_state_dict(weights())
    return model.eval(), [batch(1), batch(2)], {}


def make():
    return build(AllImages)


def sound():
    return build(Attention)
