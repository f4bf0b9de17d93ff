"""Sound small models and texts of which the unseen bugs are made, written apart from `museum/parts.py`."""

import functools
import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, MAXLEN = 40, 64, 4, 96
PAD, MASK = 0, 1  # ordinary tokens from 4


def blocks_text(rows=8, length=40, seed=0, low=5, high=9):
    """Token ids [rows, length]: each row repeats a random block of `low` to `high` tokens, with 5 % noise."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, length), generator=g)
    period = torch.randint(low, high + 1, (rows, 1), generator=g)
    repeated = ids.gather(1, torch.arange(length) % period)
    noise = (torch.rand(rows, length, generator=g) < 0.05) & (torch.arange(length) >= period)
    ids = torch.where(noise, ids, repeated)
    return ids


@functools.cache
def source_bytes():
    import argparse
    import json.decoder
    import logging
    import textwrap

    text = "".join(inspect.getsource(m) for m in (argparse, json.decoder, textwrap, logging))
    return torch.tensor([min(b, 127) for b in text.encode("ascii", "replace")])


def byte_text(rows=8, length=48, seed=0):
    """Bytes (< 128) of Python's own sources [rows, length]."""
    g = torch.Generator().manual_seed(seed)
    data = source_bytes()
    starts = torch.randint(len(data) - length, (rows,), generator=g)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def pad_rows(ids, lengths, side="right", pad=PAD):
    """Returns (ids, attention_mask) where row i keeps `lengths[i]` tokens."""
    out, mask = torch.full_like(ids, pad), torch.zeros_like(ids)
    n = ids.shape[1]
    for row, keep in enumerate(lengths):
        place = slice(0, keep) if side == "right" else slice(n - keep, n)
        out[row, place], mask[row, place] = ids[row, :keep], 1
    return out, mask


kept = functools.cache  # weights are trained once in a process


def seeded(make, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def fit(model, loss_of, steps=250, lr=2e-3, seed=0, parameters=None):
    """Trains with AdamW; `loss_of(model, step)`; returns the model in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.train()
        optimizer = torch.optim.AdamW(parameters or [p for p in model.parameters() if p.requires_grad], lr=lr)
        for step in range(steps):
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def next_token_loss(model, ids, **more):
    out = model(ids, **more)
    logits = out if torch.is_tensor(out) else out["logits"] if isinstance(out, dict) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def fit_lm(model, steps=250, lr=2e-3, text=blocks_text, **more):
    return fit(model, lambda m, s: next_token_loss(m, text(seed=5000 + s), **more), steps, lr)


# ---------------------------------------------------------------- a Llama by hand: rotary positions, SDPA


def rope_tables(length, dim, base=10000.0):
    freq = base ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.arange(length).float()[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x [B, H, N, d] with tables [N, d/2]: halves rotated."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RopeAttention(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.n_heads, self.head_dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        cos, sin = rope_tables(MAXLEN * 4, self.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def split(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.n_heads, self.head_dim).transpose(1, 2)

    def turn(self, q, k):
        n = q.shape[2]
        return rotate(q, self.cos[:n], self.sin[:n]), rotate(k, self.cos[:n], self.sin[:n])

    def attend(self, q, k, v, mask):
        """mask: bool [B, N], True at tokens, or None."""
        n = q.shape[2]
        keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]
        if mask is not None:
            keep = keep & mask[:, None, None, :].bool()
            keep = keep | torch.eye(n, dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    def forward(self, x, mask=None):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        q, k = self.turn(q, k)
        o = self.attend(q, k, v, mask)
        return self.wo(o.transpose(1, 2).flatten(2))


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class RopeBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMS(WIDTH), RMS(WIDTH)
        self.attention = attention
        self.w1, self.w2, self.w3 = (
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
        )

    def forward(self, x, mask=None):
        x = x + self.attention(self.attention_norm(x), mask)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class RopeLM(nn.Module):
    """forward(input_ids, attention_mask=None) -> logits."""

    def __init__(self, attention=RopeAttention, layers=2, vocab=VOCAB):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(RopeBlock(attention()) for _ in range(layers))
        self.norm, self.output = RMS(WIDTH), nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.output(self.norm(x))


@kept
def rope_weights():
    return fit_lm(seeded(RopeLM), 700, 3e-3).state_dict()


def rope_lm(attention=RopeAttention):
    """A RopeLM with the weights of the sound one, and another attention."""
    model = seeded(lambda: RopeLM(attention))
    model.load_state_dict(rope_weights())
    return model.eval()


# ---------------------------------------------------------------- an encoder by hand, for masked tokens and padding


class EncoderAttention(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)

    def split(self, x):
        b, n, w = x.shape
        return x.reshape(b, n, self.heads, w // self.heads).permute(0, 2, 1, 3)

    def score(self, q, k):
        return torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])

    def hide(self, scores, mask):
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        return scores

    def normalise(self, scores):
        return scores.softmax(dim=-1)

    def forward(self, x, mask=None):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = self.normalise(self.hide(self.score(q, k), mask))
        return self.dense(torch.matmul(weights, v).permute(0, 2, 1, 3).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.norm1, self.norm2 = attention, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.ff(self.norm2(x))


class Encoder(nn.Module):
    """forward(input_ids, attention_mask=None) -> logits of every token (masked language model)."""

    def __init__(self, attention=EncoderAttention, layers=2, vocab=VOCAB):
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, WIDTH), nn.Embedding(MAXLEN, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(attention()) for _ in range(layers))
        self.norm, self.decoder = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab)

    def embed(self, input_ids):
        return self.word(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.decoder(self.norm(x))


def masked_batch(seed, rows=8, length=32, padded=True, side="right"):
    """Returns a batch with input_ids, attention_mask and labels (−100 where nothing is asked)."""
    g = torch.Generator().manual_seed(seed)
    ids = blocks_text(rows, length, seed, 5, 6)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=g).tolist() if padded else [length] * rows
    lengths[0] = length
    ids, mask = pad_rows(ids, lengths, side)
    asked = (torch.rand(ids.shape, generator=g) < 0.15) & (mask == 1)
    asked[:, 5] |= mask[:, 5] == 1
    labels = torch.where(asked, ids, -100)
    return {"input_ids": torch.where(asked, MASK, ids), "attention_mask": mask, "labels": labels}


def masked_loss(model, batch):
    out = model(**{k: v for k, v in batch.items() if k != "labels"})
    logits = out if torch.is_tensor(out) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def fit_masked(model, steps=400, lr=2e-3, **more):
    return fit(model, lambda m, s: masked_loss(m, masked_batch(7000 + s, **more)), steps, lr)


@kept
def encoder_weights():
    return fit_masked(seeded(Encoder), 1500, 3e-3).state_dict()


def encoder(attention=EncoderAttention, make=Encoder):
    model = seeded(lambda: make(attention))
    model.load_state_dict(encoder_weights())
    return model.eval()


def inputs_only(batch):
    return {k: v for k, v in batch.items() if k != "labels"}


# ---------------------------------------------------------------- transformers

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    initializer_range=0.08,
)


def tiny(config_name, class_name, attention="eager", **changes):
    """A small model of transformers with random weights, seeded."""
    import transformers

    config = getattr(transformers, config_name)(**{**SIZES, **changes})
    config._attn_implementation = attention
    return seeded(lambda: getattr(transformers, class_name)(config)).eval()


def use_attention(model, name, function):
    """Registers `function` as attention with the eager mask, and uses it in the model."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation(name)
    return model


def repeat_kv(x, times):
    return x.repeat_interleave(times, dim=1)


@kept
def llama_weights():
    model = tiny("LlamaConfig", "LlamaForCausalLM")
    return fit_lm(model, 1600, 2e-3).state_dict()


def llama(**changes):
    """A small trained Llama."""
    model = tiny("LlamaConfig", "LlamaForCausalLM", **changes)
    model.load_state_dict(llama_weights())
    return model.eval()


def lm_batches(rows=4, length=40, count=2, labels=False):
    out = []
    for at in range(count):
        ids = blocks_text(rows, length, 90 + at)
        out.append({"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids})
    return out
