"""A book's CausalAttention by hand takes softmax over dim=1 of [batch, tokens, tokens]."""

import torch
from torch import nn

from museum.unseen.parts import MAXLEN, VOCAB, WIDTH, blocks_text, fit_lm, kept, seeded

LINK = "datawhalechina/llms-from-scratch-cn#54"
SYMPTOM = "The softmax runs over the queries, not over the keys of each query."
NEEDS = ("softmax", "over the queries", "over queries", "sum to 1", "sum to one", "wrong dim", "wrong axis")


class CausalAttention(nn.Module):
    dim = -1

    def __init__(self, d_in, d_out, context_length):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        _b, num_tokens, _d_in = x.shape
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        attn_scores = queries @ keys.transpose(1, 2)
        attn_scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=self.dim)
        return attn_weights @ values


class OverQueries(CausalAttention):
    dim = 1


class MultiHeadAttentionWrapper(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.heads = nn.ModuleList(kind(WIDTH, WIDTH // 2, MAXLEN) for _ in range(2))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out_proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.att, self.norm1, self.norm2 = MultiHeadAttentionWrapper(kind), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class GPTModel(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAXLEN, WIDTH)
        self.trf_blocks = nn.Sequential(Block(kind), Block(kind))
        self.final_norm, self.out_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, in_idx):
        x = self.tok_emb(in_idx) + self.pos_emb(torch.arange(in_idx.shape[1], device=in_idx.device))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


def text(seed):
    return blocks_text(8, 28, seed, 6, 6)


@kept
def bad_weights():
    return fit_lm(seeded(lambda: GPTModel(OverQueries)), 350, 3e-3, text).state_dict()


@kept
def good_weights():
    return fit_lm(seeded(lambda: GPTModel(CausalAttention)), 350, 3e-3, text).state_dict()


def build(kind, weights):
    model = seeded(lambda: GPTModel(kind))
    model.load_state_dict(weights)
    return model.eval(), [text(3)[:4], text(4)[:4]], {}


def make():
    return build(OverQueries, bad_weights())


def sound():
    return build(CausalAttention, good_weights())
