"""Gemma 3n's cache: keys are kept after their positions, and get positions again at each step."""

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from museum.unseen.parts import RopeAttention, RopeLM, lm_batches, rope_weights, rotate, seeded

LINK = "google-deepmind/gemma#392"
SYMPTOM = "Sampling with the cache is corrupted: norm and positions are applied several times to cached keys."
NEEDS = ("twice", "again", "rotat", "rotary", "rope", "position")


class CachedAttention(RopeAttention):
    again = False

    def forward(self, x, mask=None, past=None):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        old = 0 if past is None else past[0].shape[2]
        n = q.shape[2]
        cos, sin = self.cos[: old + n], self.sin[: old + n]
        q = rotate(q, cos[old:], sin[old:])
        if self.again:
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            k = rotate(k, cos, sin)
        else:
            k = rotate(k, cos[old:], sin[old:])
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keep = torch.ones(n, old + n, dtype=torch.bool, device=x.device).tril(old)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.wo(o.transpose(1, 2).flatten(2)), (k, v)


class AgainAttention(CachedAttention):
    again = True


class CachedLM(RopeLM):
    def forward(self, input_ids, past_key_values=None, use_cache=False):
        x, new = self.tok_embeddings(input_ids), []
        for i, layer in enumerate(self.layers):
            a, kv = layer.attention(
                layer.attention_norm(x), None, None if past_key_values is None else past_key_values[i]
            )
            x = x + a
            h = layer.ffn_norm(x)
            x = x + layer.w2(F.silu(layer.w1(h)) * layer.w3(h))
            new.append(kv)
        return CausalLMOutputWithPast(
            logits=self.output(self.norm(x)), past_key_values=tuple(new) if use_cache else None
        )


def build(attention):
    model = seeded(lambda: CachedLM(attention))
    model.load_state_dict(rope_weights())
    return model.eval(), lm_batches(4, 36), {}


def make():
    return build(AgainAttention)


def sound():
    return build(CachedAttention)
