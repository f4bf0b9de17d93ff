"""Decoding with a cache that evicts: the next position is the number of kept keys, not of the tokens seen."""

import torch
import torch.nn.functional as F

from museum.unseen.parts import RopeAttention, RopeLM, fit_lm, kept, lm_batches, rotate, seeded

LINK = "rajveer43/VeloxQuant-MLX#137"
SYMPTOM = "cache.offset is conflated with the kept rows: once a key is evicted, queries are rotated at wrong positions."
NEEDS = ("cache", "decod")
WINDOW = 12


class Attention(RopeAttention):
    """Sliding window of 12; with a cache, only the last 12 keys are kept, rotated."""

    counts_kept = False

    def forward(self, x, cache=None):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        n = q.shape[2]
        start = 0 if not cache else (cache["k"].shape[2] if self.counts_kept else cache["seen"])
        at = torch.arange(start, start + n)
        q, k = rotate(q, self.cos[at], self.sin[at]), rotate(k, self.cos[at], self.sin[at])
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        gap = torch.arange(k.shape[2] - n, k.shape[2])[:, None] - torch.arange(k.shape[2])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < WINDOW))
        if cache is not None:
            cache.update(k=k[:, :, -(WINDOW - 1) :], v=v[:, :, -(WINDOW - 1) :], seen=cache.get("seen", 0) + n)
        return self.wo(o.transpose(1, 2).flatten(2))


class Counting(Attention):
    counts_kept = True


class LM(RopeLM):
    """forward(input_ids, past_key_values=None, use_cache=False) as in transformers; a cache is a list of dicts."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        if past_key_values is None and use_cache:
            past_key_values = [{} for _ in self.layers]
        x = self.tok_embeddings(input_ids)
        for at, layer in enumerate(self.layers):
            x = layer(x, past_key_values[at] if past_key_values is not None else None)
        out = {"logits": self.output(self.norm(x))}
        return {**out, "past_key_values": past_key_values} if use_cache else out

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=16):
        out = self(input_ids, use_cache=True)
        for _ in range(max_new_tokens):
            token = out["logits"][:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
            out = self(token, past_key_values=out["past_key_values"], use_cache=True)
        return input_ids


@kept
def weights():
    return fit_lm(seeded(lambda: LM(Attention)), 500, 3e-3).state_dict()


def build(attention):
    model = seeded(lambda: LM(attention))
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    return build(Counting)


def sound():
    return build(Attention)
