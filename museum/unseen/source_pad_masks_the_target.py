"""hyunwoongko/transformer: the target's padding mask is made with the source's pad id."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import fit, kept, seeded

LINK = "hyunwoongko/transformer#14"
SYMPTOM = (
    "With another pad id in the target vocabulary, a real target token is hidden as padding, and the padding is not."
)
NEEDS = ("pad",)
SRC_PAD, TRG_PAD, SRC_V, TRG_V, D = 1, 0, 24, 24, 48


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.w_q, self.w_k, self.w_v, self.w_concat = (nn.Linear(D, D) for _ in range(4))

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.n_head, d // self.n_head).transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split(self.w_q(q)), self.split(self.w_k(k)), self.split(self.w_v(v))
        score = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        if mask is not None:
            score = score.masked_fill(mask == 0, -10000)
        out = torch.softmax(score, dim=-1) @ v
        return self.w_concat(out.transpose(1, 2).contiguous().flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = MultiHeadAttention(), nn.LayerNorm(D), nn.LayerNorm(D)
        self.ffn = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, x, src_mask):
        x = self.norm1(x + self.attention(x, x, x, src_mask))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention, self.enc_dec_attention = MultiHeadAttention(), MultiHeadAttention()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(D) for _ in range(3))
        self.ffn = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, dec, enc, trg_mask, src_mask):
        x = self.norm1(dec + self.self_attention(dec, dec, dec, trg_mask))
        x = self.norm2(x + self.enc_dec_attention(x, enc, enc, src_mask))
        return self.norm3(x + self.ffn(x))


class Transformer(nn.Module):
    def __init__(self, trg_pad_in_mask):
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx, self.used = SRC_PAD, TRG_PAD, trg_pad_in_mask
        self.src_emb, self.trg_emb = nn.Embedding(SRC_V, D), nn.Embedding(TRG_V, D)
        self.src_pos, self.trg_pos = nn.Embedding(32, D), nn.Embedding(32, D)
        self.encoder, self.decoder = (
            nn.ModuleList(EncoderLayer() for _ in range(2)),
            nn.ModuleList(DecoderLayer() for _ in range(2)),
        )
        self.linear = nn.Linear(D, TRG_V)

    def forward(self, src, trg):
        src_mask = (src != self.src_pad_idx)[:, None, None, :]
        trg_mask = (trg != self.used)[:, None, None, :] & torch.ones(
            trg.shape[1], trg.shape[1], dtype=torch.bool, device=trg.device
        ).tril()
        x = self.src_emb(src) + self.src_pos(torch.arange(src.shape[1], device=src.device))
        for layer in self.encoder:
            x = layer(x, src_mask)
        y = self.trg_emb(trg) + self.trg_pos(torch.arange(trg.shape[1], device=trg.device))
        for layer in self.decoder:
            y = layer(y, x, trg_mask, src_mask)
        return self.linear(y)


def batch(seed, rows=8):
    """src: ids 2..23, pad 1; trg: <bos> = 2, the same words less 2 (so that 1 is an ordinary word), pad 0."""
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(8, 13, (rows,), generator=g)
    n[0] = 12
    words = torch.randint(3, 13, (rows, 12), generator=g)  # few words, so that each is frequent
    there = torch.arange(12) < n[:, None]
    src = torch.where(there, words, SRC_PAD)
    out = torch.where(there, words - 2, TRG_PAD)  # 1 … 10
    trg = torch.cat([torch.full((rows, 1), 11), out[:, :-1]], 1)
    return {"src": src, "trg": trg}, torch.where(there, out, -100)


def loss(model, step):
    one, labels = batch(1000 + step)
    return F.cross_entropy(model(**one).flatten(0, 1), labels.flatten(), ignore_index=-100)


@kept
def weights():
    return fit(seeded(lambda: Transformer(TRG_PAD)), loss, 350, 2e-3).state_dict()


def build(used):
    model = seeded(lambda: Transformer(used))
    model.load_state_dict(weights())
    return model.eval(), [batch(5, 6)[0], batch(6, 6)[0]], {}


def make():
    return build(SRC_PAD)


def sound():
    return build(TRG_PAD)
