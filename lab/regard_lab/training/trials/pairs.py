"""Sentence pairs for translation: a folder of line-aligned files (`--data`), or a generated language.

A folder holds train.SRC, train.TGT, val.SRC, val.TGT and test*.SRC, test*.TGT, tokenised, one sentence a line. The
generated source language spells words backwards, puts adjectives after nouns and the verb last.

>>> from regard_lab.training.trials import pairs
>>> pairs.generate(1, seed=1)
[('rellim gnuoy rellim teiuq depleh', 'the young miller helped the quiet miller')]
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from regard_lab.training.trials.text import KINDS, MANNERS, VERBS, read_file

PAD, BEGIN, END, UNKNOWN = range(4)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """Words seen at least twice; the first four ids are padding, begin, end and unknown."""

    words: tuple[str, ...]
    ids: dict[str, int]

    @classmethod
    def of(cls, sentences: Sequence[str], least: int = 2) -> Vocabulary:
        """Collect the words that occur at least `least` times."""
        counts = Counter(word for sentence in sentences for word in sentence.split())
        words = ("", "", "", "<unk>", *sorted(word for word, count in counts.items() if count >= least))
        return cls(words, {word: index for index, word in enumerate(words) if index >= UNKNOWN})

    def encode(self, sentence: str) -> list[int]:
        """Return the ids of a sentence, with begin and end."""
        return [BEGIN, *(self.ids.get(word, UNKNOWN) for word in sentence.split()), END]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words between begin and the first end."""
        spoken = itertools.takewhile(lambda index: index != END, ids)
        return " ".join(self.words[index] for index in spoken if index != BEGIN)


@dataclass(frozen=True)
class Corpus:
    """Training, validation and test pairs with the vocabularies of both languages."""

    source: Vocabulary
    target: Vocabulary
    train: list[Pair]
    val: list[Pair]
    test: list[Pair]

    def tensors(self, pairs: Sequence[Pair], length: int) -> tuple[Tensor, Tensor]:
        """Return ids ([N, length], [N, length + 1]), padded or cut."""
        sources = [self.source.encode(source) for source, _ in pairs]
        targets = [self.target.encode(target) for _, target in pairs]
        return pad(sources, length), pad(targets, length + 1)


def pad(rows: Sequence[list[int]], length: int) -> Tensor:
    """Return rows [N, length], padded or cut."""
    return torch.tensor([(row + [PAD] * length)[:length] for row in rows], dtype=torch.int64)


def generate(count: int, seed: int = 0) -> list[Pair]:
    """Generate (source, target) sentences of a small grammar."""
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
    """Return the pairs of a folder, or generated ones, with the vocabularies of the training part."""
    if data is None:
        train, val, test = generate(4000, 0), generate(64, 1), generate(64, 2)
    else:
        train, val, test = (_read(data, part, source, target) for part in ("train", "val", "test*"))
    return Corpus(Vocabulary.of([s for s, _ in train]), Vocabulary.of([t for _, t in train]), train, val, test)


def _read(folder: Path, part: str, source: str, target: str) -> list[Pair]:
    sides = []
    for language in (source, target):
        found = sorted(folder.glob(f"{part}.{language}")) if folder.is_dir() else []
        if not found:
            raise ValueError(f"--data {folder} must be a folder with a file {part}.{language}, one sentence a line")
        sides.append(read_file(found[0]).splitlines())
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"--data {folder}: {part}.{source} has {len(sides[0])} lines, .{target} {len(sides[1])}")
    return list(zip(*sides, strict=True))
