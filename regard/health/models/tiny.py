"""A character language model small enough to ship with the package; the scale of its scores is an option.

>>> from regard.health.models.tiny import TinyLM, encode
>>> model = TinyLM(layers=1, heads=2, width=16)
>>> model(encode("to be")[None]).shape
torch.Size([1, 5, 97])
"""

from __future__ import annotations

import json
from importlib import resources
from typing import IO, Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\ufffd"  # the last stands for everything else


class Attention(nn.Module):
    """Causal self-attention, scaled by 1/√d ("sqrt") or not at all ("none")."""

    def __init__(self, width: int, heads: int, scale: str) -> None:
        super().__init__()
        self.heads, self.scale = heads, {"sqrt": (width // heads) ** -0.5, "none": 1.0}[scale]
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(o.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, scale: str, expansion: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, scale)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class TinyLM(nn.Module):
    """Next-character logits. Query and key weights start with unit variance, so that q·k has variance d_k."""

    def __init__(
        self, layers: int = 4, heads: int = 4, width: int = 128, length: int = 128, scale: str = "sqrt",
        expansion: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options: dict[str, Any] = dict(
            layers=layers, heads=heads, width=width, length=length, scale=scale, expansion=expansion
        )
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Embedding(length, width)
        blocks = [Block(width, heads, scale, expansion) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.5)
        for block in blocks:
            nn.init.normal_(block.attention.qkv.weight, std=width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[-1] > self.position.num_embeddings:
            raise ValueError(
                f"ids: {ids.shape[-1]} characters, but the model has {self.position.num_embeddings} positions"
            )
        x = self.token(ids) + self.position(torch.arange(ids.shape[-1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encode(text: str) -> Tensor:
    """Character ids, int64."""
    known = {character: index for index, character in enumerate(CHARACTERS)}
    return torch.tensor([known.get(character, len(CHARACTERS) - 1) for character in text], dtype=torch.int64)


def batches(text: str, length: int, size: int) -> list[Tensor]:
    """The text in windows of `length` characters, `size` windows to a batch."""
    ids = encode(text)
    if not len(ids):
        raise ValueError("text is empty; there is nothing to examine")
    if len(ids) < length:
        return [ids[None]]
    windows = ids[: len(ids) // length * length].reshape(-1, length)
    return list(windows.split(size))


def load(file: IO[bytes]) -> tuple[TinyLM, dict[str, str]]:
    """Return a saved model and its notes."""
    arrays = dict(numpy.load(file, allow_pickle=False))
    notes = json.loads(str(arrays.pop("notes")))
    model = TinyLM(**notes.pop("options"))
    state = model.state_dict()
    matrices, vectors = ([name for name, value in state.items() if value.ndim == n] for n in (2, 1))
    flat = {name: torch.from_numpy(values).float() for name, values in arrays.items()}
    numbers = flat["numbers"].split([state[name].numel() for name in matrices])
    steps = flat["steps"].split([len(state[name]) for name in matrices])
    weights = dict(zip(vectors, flat["vectors"].split([len(state[name]) for name in vectors]), strict=True))
    for name, number, step in zip(matrices, numbers, steps, strict=True):
        weights[name] = number.reshape_as(state[name]) * step[:, None]
    model.load_state_dict(weights)
    return model.eval(), notes


def checkpoint(name: str) -> tuple[TinyLM, dict[str, str]]:
    """Load a model of `regard/checkpoints` and the notes saved with it."""
    with resources.files("regard").joinpath("checkpoints", f"{name}.npz").open("rb") as file:
        return load(file)
