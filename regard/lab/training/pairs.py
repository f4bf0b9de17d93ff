"""Sentence pairs for translation: a folder of line-aligned files (`--data`), or a made-up language that needs none.

A folder holds train.SRC, train.TGT, val.SRC, val.TGT and test*.SRC, test*.TGT, tokenised, one sentence a line. The
made-up source language spells words backwards, puts adjectives after nouns and the verb last.

>>> from regard.lab.training import pairs
>>> pairs.made(1, seed=1)
[('rellim gnuoy rellim teiuq depleh', 'the young miller helped the quiet miller')]
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from regard.lab.training.text import KINDS, MANNERS, VERBS, read

PAD, BEGIN, END, UNKNOWN = range(4)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """Words seen at least twice; the first four ids are padding, begin, end and unknown."""

    words: tuple[str, ...]
    ids: dict[str, int]

    @classmethod
    def of(cls, sentences: Sequence[str], least: int = 2) -> Vocabulary:
        counts = Counter(word for sentence in sentences for word in sentence.split())
        words = ("", "", "", "<unk>", *sorted(word for word, count in counts.items() if count >= least))
        return cls(words, {word: index for index, word in enumerate(words) if index >= UNKNOWN})

    def encode(self, sentence: str) -> list[int]:
        return [BEGIN, *(self.ids.get(word, UNKNOWN) for word in sentence.split()), END]

    def decode(self, ids: Sequence[int]) -> str:
        """The words between begin and the first end."""
        words = []
        for index in ids:
            if index == END:
                break
            if index != BEGIN:
                words.append(self.words[index])
        return " ".join(words)


@dataclass(frozen=True)
class Corpus:
    source: Vocabulary
    target: Vocabulary
    train: list[Pair]
    val: list[Pair]
    test: list[Pair]

    def tensors(self, pairs: Sequence[Pair], length: int) -> tuple[Tensor, Tensor]:
        """([N, length], [N, length + 1]) ids, padded; what is longer is cut."""
        sources = [self.source.encode(source) for source, _ in pairs]
        targets = [self.target.encode(target) for _, target in pairs]
        return padded(sources, length), padded(targets, length + 1)


def padded(rows: Sequence[list[int]], length: int) -> Tensor:
    return torch.tensor([(row + [PAD] * length)[:length] for row in rows], dtype=torch.int64)


def made(count: int, seed: int = 0) -> list[Pair]:
    """(source, target) sentences of a small grammar."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        (a, b), (c, d) = ((chance.choice(MANNERS), chance.choice(KINDS)) for _ in range(2))
        verb = chance.choice(VERBS)
        backwards = " ".join(word[::-1] for word in (b, a, d, c, verb))
        found.append((backwards, f"the {a} {b} {verb} the {c} {d}"))
    return found


@cache
def corpus(data: Path | None, source: str = "de", target: str = "en") -> Corpus:
    """The pairs of a folder, or made-up ones; vocabularies are those of the training part."""
    if data is None:
        train, val, test = made(4000, 0), made(64, 1), made(64, 2)
    else:
        train, val, test = (_read(data, part, source, target) for part in ("train", "val", "test*"))
    return Corpus(Vocabulary.of([s for s, _ in train]), Vocabulary.of([t for _, t in train]), train, val, test)


def _read(folder: Path, part: str, source: str, target: str) -> list[Pair]:
    sides = []
    for language in (source, target):
        found = sorted(folder.glob(f"{part}.{language}")) if folder.is_dir() else []
        if not found:
            raise ValueError(f"--data {folder} must be a folder with a file {part}.{language}, one sentence a line")
        sides.append(read(found[0]).splitlines())
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"--data {folder}: {part}.{source} has {len(sides[0])} lines, .{target} {len(sides[1])}")
    return list(zip(*sides, strict=True))
