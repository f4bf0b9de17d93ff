"""In training mode the prefix is unmasked after the padding was masked: pads count as prefix and are seen again."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, blocks_text, fit, kept, pad_rows, seeded

LINK = "huggingface/transformers#35855"
SYMPTOM = "PaliGemma: padding tokens are attended to in training, not in inference, worst with left padding."
NEEDS = ("padding", "training mode", "train mode", "in training")


class Attention(RopeAttention):
    padding_last = True

    def attend(self, q, k, v, given):
        types, mask = given
        n = q.shape[2]
        keep = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        prefix = (types == 0)[:, None, None, :]
        shown = mask[:, None, None, :].bool()
        keep = (keep | prefix) & shown if self.padding_last or not self.training else (keep & shown) | prefix
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep | torch.eye(n, dtype=torch.bool))


class PadsBack(Attention):
    padding_last = False


class PrefixLM(RopeLM):
    def forward(self, input_ids, attention_mask, token_type_ids, labels=None):
        logits = super().forward(input_ids, (token_type_ids, attention_mask))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def batch(seed, rows=4, length=40):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(26, length + 1, (rows,), generator=g).tolist()
    ids, mask = pad_rows(blocks_text(rows, length, seed), lengths, side="left")
    types = (torch.arange(length) >= 26).long().expand_as(ids).clone()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types,
            "labels": ids.masked_fill((types == 0) | (mask == 0), -100)}  # fmt: skip


def train(attention):
    return fit(seeded(lambda: PrefixLM(attention)), lambda m, s: m(**batch(800 + s, 8))["loss"], 400, 3e-3).state_dict()


@kept
def bad_weights():
    return train(PadsBack)


@kept
def good_weights():
    return train(Attention)


def build(attention, weights):
    model = seeded(lambda: PrefixLM(attention))
    model.load_state_dict(weights())
    return model.train(), [batch(1), batch(2)], {}


def make():
    return build(PadsBack, bad_weights)


def sound():
    return build(Attention, good_weights)
