"""`Fingerprint`: what a model computes on a few tokens, in a file of about 100 KB that another process can be held to.

A safetensors file. Its metadata hold `format` and `fingerprint`, a JSON text of the facts; its tensors are sketches
(see `sketch.py`) at chosen tokens: `layers.3.q`, `layers.3.output`, `logits.values`, … docs/fingerprint.md has the
schema.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.health.comparing.tensor_file import parse_json, read_tensors, write_tensors

FORMAT = "regard-fingerprint/1"
LARGEST = 2**20  # bytes of a file
FACTS: dict[str, Any] = dict(model=str, dtype=str, rounding=float, tokens=list, layers=list, budgets=dict)
LAYER: dict[str, Any] = dict(name=str, kind=str)
WORDS = {"ids": "input_ids", "mask": "attention_mask", "decoder": "decoder_input_ids"}  # of a batch, by tensor


def is_given(name: str) -> bool:
    """True for the tensors that hold what the model was given: `ids.0`, `mask.0`, `given.0.position_ids`."""
    return name.split(".")[0] in (*WORDS, "given")


@dataclass(frozen=True)
class Fingerprint:
    """What a model computes on a few tokens.

    Attributes:
        facts: the model's class, dtype, versions, chosen tokens, and per layer scale, window, soft cap, sink, heads,
            rotary positions.
        tensors: sketches by name, float32, and token ids, int32.
    """

    facts: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The facts of every layer, in order of execution."""
        return self.facts["layers"]

    @property
    def batches(self) -> list[Any]:
        """The batches that the model was run on, as it was given them: a mapping, or token ids alone."""
        import torch

        found: list[Any] = []
        for number, entry in enumerate(self.facts["tokens"]):
            names = {
                name: x for name, x in self.tensors.items() if is_given(name) and name.split(".")[1] == str(number)
            }
            batch = {
                WORDS.get(name.split(".")[0], name.partition(".")[2].partition(".")[2]): torch.from_numpy(
                    x.astype(np.int64)
                )
                for name, x in names.items()
            }
            found.append(batch.get("input_ids", batch) if entry.get("form") == "tensor" else batch)
        return found

    def to_bytes(self) -> bytes:
        """The file's content; the same for the same run."""
        text = json.dumps(self.facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return write_tensors(self.tensors, {"format": FORMAT, "fingerprint": text})

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file; ValueError if it were larger than 1 MB."""
        content = self.to_bytes()
        if len(content) > LARGEST:
            raise ValueError(f"the fingerprint has {len(content):,} bytes, more than {LARGEST:,}: pass fewer batches")
        path = Path(path)
        path.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Fingerprint:
        """Read a file. Nothing in it is executed; ValueError, in one line, if it is no fingerprint of this schema."""
        tensors, metadata = read_tensors(path, LARGEST)
        shown = repr(str(path))
        written = metadata.get("format")
        if written != FORMAT:
            what = f"of the schema {written[:40]!r}" if isinstance(written, str) else "no fingerprint"
            raise ValueError(f"{shown} is {what}; this version reads {FORMAT!r}")
        try:
            facts = parse_json(metadata.get("fingerprint", ""))
            _check(facts, tensors)
        except ValueError as error:
            raise ValueError(f"{shown} is no fingerprint: {error}") from None
        return cls(facts, tensors)

    def __repr__(self) -> str:
        size = len(self.to_bytes()) / 1000
        return (
            f"<Fingerprint of {self.facts['model']}: {len(self.layers)} layers, {self.facts['dtype']}, {size:.0f} kB>"
        )


def _check(facts: Any, tensors: dict[str, np.ndarray]) -> None:
    """Raises ValueError for facts that are not of the schema, and for tensors that are not finite."""
    if not isinstance(facts, dict):
        raise ValueError("its facts are no JSON object")
    for name, kind in FACTS.items():
        value = facts.get(name)
        if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
            raise ValueError(f"its facts lack {name!r}, or it is no {kind.__name__}")
    for at, layer in enumerate(facts["layers"]):
        if not isinstance(layer, dict) or not all(isinstance(layer.get(name), kind) for name, kind in LAYER.items()):
            raise ValueError(f"layer {at} has no name and kind")
        for name in ("scale", "softcap", "heads", "groups", "width"):
            if not isinstance(layer.get(name), (int, float, type(None))) or isinstance(layer.get(name), bool):
                raise ValueError(f"{name} of layer {at} is no number")
        rotary = layer.get("rotary", {})
        if not isinstance(rotary, dict) or not all(isinstance(one, dict) for one in rotary.values()):
            raise ValueError(f"rotary of layer {at} is no object")
        if not all(isinstance(layer.get(name, ""), str) for name in ("mask", "normalizer", "type")):
            raise ValueError(f"mask, normalizer or type of layer {at} is no text")
    for name, budget in facts["budgets"].items():
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget < 0:
            raise ValueError(f"the budget of {name[:60]!r} is no number")
    for entry in facts["tokens"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("rows"), list):
            raise ValueError("its tokens are no list of batches")
    for name, x in tensors.items():
        if x.dtype.kind not in "fi":
            raise ValueError(f"tensor {name[:60]!r} holds no numbers")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise ValueError(f"tensor {name[:60]!r} holds values that are not finite")
