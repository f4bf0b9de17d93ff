"""Sides of a comparison that a command line names: models, fingerprints, dumps, reports."""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.health.commands import files
from regard.health.comparing.fingerprint import Fingerprint
from regard.health.comparing.models import FILES, read_side
from regard.health.models.loading import is_function
from regard.health.models.targets import load_target


@dataclass
class Loaded:
    """A model and the batches that its target brings."""

    model: nn.Module
    batches: Any


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", help="text to run the model on (default: a built-in sample)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (64)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (2)")
    files.add_model_arguments(parser)


def is_report(target: str) -> bool:
    """True for the path of a report: whatever is a file and no fingerprint."""
    return Path(target).suffix == ".json" or (os.path.isfile(target) and Path(target).suffix not in FILES)


def load_side(target: str, options: argparse.Namespace) -> Fingerprint | Loaded:
    """What a target names: the fingerprint of a file or a dump, or a model with its batches."""
    path = Path(target)
    if path.suffix in FILES or (path.is_dir() and not (path / "config.json").is_file()):
        return read_side(target)
    plain = not is_function(target)
    subject = load_target(
        target, text=files.read_text(options.text) if plain and options.text is not None else None,
        length=options.length if plain else None, batch=options.batch, limit=1, device=options.device,
        dtype=options.dtype if plain else None, pickle=options.allow_pickle,
    )  # fmt: skip
    model = subject.model if subject.predictor is None else subject.predictor
    model = model if plain or options.dtype is None else model.to(getattr(torch, options.dtype))
    return Loaded(model, list(itertools.islice(subject.batches, 1)))
