"""Small Transformers with every choice and every bug as an option: what the calibration trains and breaks.

A bug is a name in `Options.bugs`; the code below has the wrong line beside the right one. Bugs may be put into a
trained model (`model.options.bugs.add("scale 1")`) or be there from the start of training.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHARACTERS = 97  # of regard.health.models.tiny.encode
PAD, MASK, START, VOCABULARY = 97, 98, 99, 100


@dataclass
class Options:
    """One model of the zoo."""

    kind: str = "causal"  # "causal", "masked" or "seq2seq"
    positions: str = "learned"  # "learned", "rope" or "none"
    layers: int = 3
    heads: int = 4
    kv_heads: int = 4
    width: int = 64
    length: int = 64
    qk_norm: bool = False
    window: int | None = None
    post_norm: bool = False
    bias: bool = False
    bugs: set[str] = field(default_factory=set)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rotate(x: Tensor, positions: Tensor, base: float, pairs: bool) -> Tensor:
    """Rotary positions on [B, H, N, D]; `pairs` are neighbours instead of halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos(), angle.sin()
    if pairs:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Self-attention, or cross-attention if `memory` is given."""

    def __init__(self, options: Options, layer: int, causal: bool) -> None:
        super().__init__()
        self.options, self.layer, self.causal = options, layer, causal
        inner = options.kv_heads * options.head_dim
        self.q = nn.Linear(options.width, options.width, bias=options.bias)
        self.k = nn.Linear(options.width, inner, bias=options.bias)
        self.v = nn.Linear(options.width, inner, bias=options.bias)
        self.out = nn.Linear(options.width, options.width, bias=options.bias)

    def has(self, bug: str) -> bool:
        """True if the model has the bug, in every layer or, for "…, one layer", in layer 1."""
        bugs = self.options.bugs
        return bug in bugs or (f"{bug}, one layer" in bugs and self.layer == 1)

    def forward(self, x: Tensor, memory: Tensor | None = None, shown: Tensor | None = None) -> Tensor:
        o, has = self.options, self.has
        cross = memory is not None
        source = memory if cross and not has("cross-attention reads the decoder") else x
        if cross and has("encoder output zero"):
            source = torch.zeros_like(source)
        q, k, v = self.q(x), self.k(source), self.v(source)
        if has("q and k exchanged") and q.shape == k.shape:
            q, k = k, q
        if has("k and v exchanged"):
            k, v = v, k
        q = self.split(q, o.heads, has("heads mixed with time") or has("queries mixed with time"))
        k = self.split(k, o.kv_heads, has("heads mixed with time"))
        v = self.split(v, o.kv_heads, has("heads mixed with time") or has("values mixed with time"))
        if o.qk_norm:
            q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
        if o.positions == "rope" and not cross:
            q, k = self.turn(q, k)
        if has("key heads rolled"):
            k = k.roll(1, 1)
        if has("value heads rolled"):
            v = v.roll(1, 1)
        if has("key head 0 for all"):
            k = k[:, :1].expand_as(k)
        if o.kv_heads < o.heads:
            many = o.heads // o.kv_heads
            wrong = has("key-value groups tiled")
            k, v = (t.repeat(1, many, 1, 1) if wrong else t.repeat_interleave(many, 1) for t in (k, v))
        if has("queries scaled twice"):
            q = q * q.shape[-1] ** -0.5
        scale = self.scale(q.shape[-1])
        mask = self.mask(q.shape[2], k.shape[2], shown, q.device) if not cross else None
        if cross and has("cross-attention sees one key"):
            mask = (torch.arange(k.shape[2]) < 1).expand(q.shape[2], -1)
        drop = 0.2 if has("dropout in attention") else 0.0
        if has("attention over heads"):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        elif has("attention over the batch"):
            q, k, v = (t.permute(2, 1, 0, 3) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, scale=scale).permute(2, 1, 0, 3)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, drop, scale=scale)
        if not has("output not transposed"):
            out = out.transpose(1, 2)
        return self.out(out.reshape(x.shape))

    def split(self, x: Tensor, heads: int, mixed: bool) -> Tensor:
        """[B, N, H·D] as [B, H, N, D]."""
        batch, length, width = x.shape
        if mixed:
            return x.reshape(batch, heads, length, width // heads)
        return x.reshape(batch, length, heads, -1).transpose(1, 2)

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(q.shape[2], device=q.device)
        base = 100.0 if self.has("rotary base 100") else 10000.0
        pairs = self.has("rotary pairs are neighbours")
        if not self.has("rotary on keys only"):
            q = rotate(q, at, base, pairs)
        if not self.has("rotary on queries only"):
            k = rotate(k, at + 3 if self.has("rotary keys 3 late") else at, base, pairs)
        return q, k

    def scale(self, d: int) -> float:
        scales = {"scale 1": 1.0, "scale 1/d": 1 / d, "scale √d": d**0.5, "scale 1/√hidden": self.options.width**-0.5}
        return next((value for bug, value in scales.items() if self.has(bug)), d**-0.5)

    def mask(self, queries: int, keys: int, shown: Tensor | None, device: torch.device) -> Tensor | None:
        """A bool or additive mask [B or 1, 1, M, N], None if all is visible."""
        i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
        ahead = {"mask 1 ahead": 1, "mask 2 ahead": 2, "mask 1 behind": -1}
        if self.causal and not self.has("no causal mask"):
            shift = next((n for bug, n in ahead.items() if self.has(bug)), 0)
            visible = j <= i + shift
            if self.has("mask inverted"):
                visible = j > i
            if self.has("mask transposed"):
                visible = j >= i
            if self.has("rows see one key"):
                visible = j == i
        if self.options.window:
            inside = i - j < self.options.window
            visible = inside & (j - i < self.options.window) if self.has("window on both sides") else visible & inside
        visible = visible[None, None]
        if shown is not None and not self.has("padding mask left out"):
            shown = ~shown if self.has("padding mask inverted") else shown
            visible = visible & shown[:, None, None]
        added = {"mask −5": -5.0, "mask −1": -1.0, "mask −0.1": -0.1}
        soft = next((value for bug, value in added.items() if self.has(bug)), None)
        if soft is not None:
            return torch.where(visible, 0.0, soft)
        return visible.float() if self.has("mask of 1 and 0 added") else visible


class Block(nn.Module):
    """A Transformer block, pre-norm or post-norm, with cross-attention if it reads an encoder."""

    def __init__(self, options: Options, layer: int, causal: bool, cross: bool) -> None:
        super().__init__()
        width = options.width
        self.options, self.layer = options, layer
        self.attention = Attention(options, layer, causal)
        self.cross_attention = Attention(options, layer, False) if cross else None
        self.norm_a, self.norm_b, self.norm_c = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def add(self, x: Tensor, norm: nn.Module, part) -> Tensor:
        bugs = self.options.bugs
        if "norms left out" in bugs:
            return x + part(x)
        if self.options.post_norm:
            return norm(x + part(x))
        return part(norm(x)) if "residual left out" in bugs else x + part(norm(x))

    def forward(self, x: Tensor, memory: Tensor | None, shown: Tensor | None) -> Tensor:
        x = self.add(x, self.norm_a, lambda y: self.attention(y, shown=shown))
        if self.cross_attention is not None and memory is not None:
            x = self.add(x, self.norm_c, lambda y: self.cross_attention(y, memory))
        x = self.add(x, self.norm_b, self.mlp)
        return F.dropout(x, 0.1) if "dropout after blocks" in self.options.bugs else x


class Zoo(nn.Module):
    """Character logits [B, N, V] of ids [B, N]; "seq2seq" reads `input_ids` and writes after `decoder_input_ids`."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.config = SimpleNamespace(pad_token_id=PAD, is_encoder_decoder=options.kind == "seq2seq")
        self.token, self.position = nn.Embedding(VOCABULARY, options.width), nn.Embedding(options.length, options.width)
        causal, cross = options.kind != "masked", options.kind == "seq2seq"
        self.blocks = nn.ModuleList(Block(options, at, causal, cross) for at in range(options.layers))
        encoder = replace(options, kv_heads=options.heads)
        self.encoder = nn.ModuleList(Block(encoder, at, False, False) for at in range(2 if cross else 0))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.5 * options.width**-0.5 if isinstance(module, nn.Linear) else 0.3)

    def embed(self, ids: Tensor) -> Tensor:
        bugs = self.options.bugs
        ids = (ids + 1) % CHARACTERS if "token ids off by one" in bugs else ids
        x = self.token(ids)
        if self.options.positions != "learned" or "positions left out" in bugs:
            return x
        at = torch.arange(ids.shape[1], device=ids.device)
        if "positions off by one" in bugs:
            at = (at + 1).clamp_max(self.options.length - 1)
        if "positions reversed" in bugs:
            at = at.flip(0)
        return x + self.position(at)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        targets: Tensor | None = None,  # for `masked_loss`
    ) -> Tensor:
        shown = None if attention_mask is None else attention_mask.bool()
        memory, x = None, self.embed(input_ids)
        if decoder_input_ids is not None:
            for block in self.encoder:
                x = block(x, None, None)
            memory, x, shown = x, self.embed(decoder_input_ids), None
        for block in self.blocks:
            x = block(x, memory, shown)
        return self.head(self.norm(x))
