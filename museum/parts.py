"""Tiny models, texts and attention functions that the bugs of the museum are made of; everything here is sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 64


def make_text(rows: int = 8, length: int = 32, seed: int = 0) -> Tensor:
    """Returns token ids [rows, length]: half follow from the last token, half repeat the one four before."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(VOCABULARY - 5, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(VOCABULARY - 5, (rows, length), generator=generator)
    choices = torch.rand(rows, length, generator=generator)
    for at in range(4, length):
        ids[:, at] = torch.where(choices[:, at] < 0.5, order[ids[:, at - 1]], ids[:, at])
        ids[:, at] = torch.where(choices[:, at] > 0.55, ids[:, at - 4], ids[:, at])
    return ids + 5


def make_texts(count: int = 2, **options: Any) -> list[Tensor]:
    """Returns `count` batches of token ids."""
    return [make_text(seed=100 + at, **options) for at in range(count)]


def train(model: nn.Module, steps: int = 120) -> nn.Module:
    """Returns the model after a few steps on next tokens, in evaluation mode; the global random state is left."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model.train()
        for step in range(steps):
            ids = make_text(seed=1000 + step)
            logits = model(ids)
            logits = getattr(logits, "logits", logits)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """Returns `make()` under a fixed seed, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


class Attention(nn.Module):
    """Causal attention of several heads as in nanoGPT; a bug overrides one of its methods."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, length: int = LENGTH) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", self.make_mask(length), persistent=False)

    def make_mask(self, length: int) -> Tensor:
        return torch.tril(torch.ones(length, length, dtype=torch.bool))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        return q, k, v

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5

    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """`hidden`: [B, N], True at padding."""
        length = scores.shape[-1]
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None], torch.finfo(scores.dtype).min)
        return scores.softmax(-1)

    def merge(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).contiguous().flatten(2)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        return self.proj(self.merge(self.weigh(self.score(q, k), hidden) @ v))


class Block(nn.Module):
    """A layer: attention, then an MLP."""

    def __init__(self, attention: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), hidden)
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    """A language model of two layers with learned positions."""

    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def place(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.wte(input_ids) + self.wpe(self.place(input_ids, attention_mask))
        hidden = None if attention_mask is None else attention_mask == 0
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(self.ln_f(x))


def make_gpt(attention: type[nn.Module] = Attention, trained: bool = True) -> tuple[nn.Module, list[Tensor], dict]:
    """Returns a small language model with that attention, trained briefly, and its batches."""
    model = build(lambda: TinyGPT(attention))
    return train(model) if trained else model, make_texts(), {}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    repeat: Callable[[Tensor, int], Tensor] | None = None, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by hand with the signature of transformers' `AttentionInterface`."""
    groups = query.shape[1] // key.shape[1]
    repeat = repeat or (lambda x, times: x.repeat_interleave(times, dim=1))
    key, value = repeat(key, groups), repeat(value, groups)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def make_lm(name: str, function: Callable | None = None, **options: Any) -> nn.Module:
    """Returns a small causal language model of transformers; `function` is its attention, registered."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    from regard.health.models.tiny_architectures import make_model

    model = make_model(name, kind="ForCausalLM", **options)
    if function is not None:
        registered = f"museum_{function.__module__.rpartition('.')[2]}_{function.__name__}"
        AttentionInterface.register(registered, function)
        AttentionMaskInterface.register(registered, eager_mask)
        model.set_attn_implementation(registered)
    return model


def make_batches(model: nn.Module, length: int = 24, padding: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Returns two batches for a model of transformers."""
    from regard.health.models.tiny_inputs import make_batch

    return [make_batch(model, 3, length, seed, padding, **options) for seed in (0, 1)]


def keep_causal(query: Tensor, key: Tensor) -> Tensor:
    """Returns a plain causal mask [M, N] to add, aligned at the end."""
    queries, keys = query.shape[2], key.shape[2]
    shown = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return torch.zeros(queries, keys, device=query.device).masked_fill(~shown, torch.finfo(torch.float32).min)
