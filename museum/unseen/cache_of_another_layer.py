"""After one layer's pruned keys and values are made, all later layers go on using them in decoding."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, fit_lm, kept, lm_batches, rotate, seeded

LINK = "pkunlp-icler/FastV#49"
SYMPTOM = "From the aggregation layer on, every layer decodes with that layer's cache instead of its own."
NEEDS = ("cache", "decod")


class Attention(RopeAttention):
    def forward(self, x, state=None):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        start = state[0].shape[2] if state else 0
        n = q.shape[2]
        at = torch.arange(start, start + n)
        q, k = rotate(q, self.cos[at], self.sin[at]), rotate(k, self.cos[at], self.sin[at])
        if state:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        keep = torch.arange(k.shape[2]) <= at[:, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.wo(o.transpose(1, 2).flatten(2)), (k, v)


class LM(RopeLM):
    """forward(input_ids, past_key_values=None, use_cache=False) with one (k, v) per layer, as transformers had it."""

    later_share = False

    def __init__(self):
        super().__init__(Attention, layers=3)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        x, new = self.tok_embeddings(input_ids), []
        for at, layer in enumerate(self.layers):
            source = min(at, 1) if self.later_share else at
            h, state = layer.attention(layer.attention_norm(x), past_key_values[source] if past_key_values else None)
            x = x + h
            y = layer.ffn_norm(x)
            x = x + layer.w2(F.silu(layer.w1(y)) * layer.w3(y))
            new.append(state)
        out = {"logits": self.output(self.norm(x))}
        return {**out, "past_key_values": tuple(new)} if use_cache else out

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=16):
        out = self(input_ids, use_cache=True)
        for _ in range(max_new_tokens):
            token = out["logits"][:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
            out = self(token, past_key_values=out["past_key_values"], use_cache=True)
        return input_ids


class Sharing(LM):
    later_share = True


@kept
def weights():
    return fit_lm(seeded(LM), 500, 3e-3).state_dict()


def build(cls):
    model = seeded(cls)
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    return build(Sharing)


def sound():
    return build(LM)
