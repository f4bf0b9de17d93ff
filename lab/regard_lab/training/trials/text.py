"""Text for character models: a file (`--data`), or generated sentences.

The generated text can be learned step by step: letters, words, word order, and names that recur some sixty characters
later, which needs attention.

>>> from regard_lab.training.trials import text
>>> print(text.generate(1, seed=0), end="")
the merry singer of renby helped the tired clerk of wenby near the market. renby called the singer, wenby the clerk.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from regard.health.models.tiny import encode

KINDS = ("baker", "miller", "sailor", "weaver", "painter", "shepherd", "singer", "clerk")
MANNERS = ("old", "young", "quiet", "merry", "tired", "proud")
VERBS = ("met", "heard", "saw", "helped", "followed")
PLACES = ("mill", "harbour", "market", "bridge", "old gate")
STARTS = ("ren", "tar", "mil", "sel", "bro", "hal", "wen", "dor", "cal", "fen")
ENDS = ("wick", "ly", "ham", "stow", "by", "ford", "mere", "don")


def generate(sentences: int, seed: int = 0) -> str:
    """Generate sentences of a small grammar, each with two towns that are named twice."""
    chance = random.Random(seed)

    def person():
        return chance.choice(MANNERS), chance.choice(KINDS), chance.choice(STARTS) + chance.choice(ENDS)

    lines = []
    for _ in range(sentences):
        (manner, kind, town), (other_manner, other_kind, other_town) = person(), person()
        verb, place = chance.choice(VERBS), chance.choice(PLACES)
        lines.append(
            f"the {manner} {kind} of {town} {verb} the {other_manner} {other_kind} of {other_town} near the {place}. "
            f"{town} called the {kind}, {other_town} the {other_kind}.\n"
        )
    return "".join(lines)


def read_file(path: Path) -> str:
    """Return the text of a file; raise ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"--data {path} is not text: its byte {wrong.start} is not UTF-8; give a text file") from None


@cache
def split_text(data: Path | None) -> tuple[Tensor, Tensor]:
    """Return the character ids for training (the first 90 %) and validation (the rest)."""
    whole = generate(4000) if data is None else read_file(data)
    ids = encode(whole)
    if len(ids) < 4096:
        raise ValueError(f"--data {data} has {len(ids)} characters, too few to train on; give 4096 or more")
    return ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]


def draw_windows(ids: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw [count, length + 1] ids from random places: inputs and, shifted by one, targets."""
    starts = torch.randint(len(ids) - length - 1, (count, 1), generator=generator)
    return ids[(starts + torch.arange(length + 1)).to(ids.device)].long()
