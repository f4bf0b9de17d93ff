"""`Fingerprint`: what a model computes on a few tokens, in a file of about 100 KB that another process can be held to.

A safetensors file. Its metadata hold `format` and `fingerprint`, a JSON text of the facts; its tensors are sketches
(see `sketches.py`) at chosen tokens: `layers.3.q`, `layers.3.output`, `logits.values`, … docs/fingerprint.md has the
schema. The format is read and written with numpy alone:

    8 bytes   n, the length of the header, little-endian
    n bytes   {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]}, …}
    the rest  the tensors, one after another

Nothing in a file is executed; whatever is not of this form is a ValueError of one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "regard-fingerprint/1"
LARGEST = 2**20  # bytes of a file
LARGEST_NUMBER = 1e300  # of a fact
LARGEST_HEADER = 8 * 2**20
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1",
    "BOOL": "?", "BF16": "<u2",
}  # fmt: skip
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
            check(facts, tensors)
        except ValueError as error:
            raise ValueError(f"{shown} is no fingerprint: {error}") from None
        return cls(facts, tensors)

    def __repr__(self) -> str:
        size = len(self.to_bytes()) / 1000
        return (
            f"<Fingerprint of {self.facts['model']}: {len(self.layers)} layers, {self.facts['dtype']}, {size:.0f} kB>"
        )


def check(facts: Any, tensors: dict[str, np.ndarray]) -> None:
    """Raises ValueError for facts that are not of the schema, and for tensors that are not finite."""
    _check_object("its facts", facts, FACTS, REQUIRED)
    for at, layer in enumerate(facts["layers"]):
        _check_object(f"layer {at}", layer, LAYER, ("name", "kind"))
        for part, one in layer.get("rotary", {}).items():
            _check_object(f"rotary.{part[:8]} of layer {at}", one, ROTARY, tuple(ROTARY))
        _check_object(f"sample of layer {at}", layer.get("sample", {}), SAMPLE)
    for name, budget in facts["budgets"].items():
        if not _is_number(budget) or budget < 0:
            raise ValueError(f"the budget of {name[:60]!r} is no number")
    for entry in facts["tokens"]:
        _check_object("an entry of its tokens", entry, TOKENS, ("rows",))
    for name, x in tensors.items():
        if x.dtype.kind not in "fi":
            raise ValueError(f"tensor {name[:60]!r} holds no numbers")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise ValueError(f"tensor {name[:60]!r} holds values that are not finite")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < LARGEST_NUMBER


def _is_place(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31


def _is_list(of: Callable[[Any], bool], count: int | None = None) -> Callable[[Any], bool]:
    """A test for lists whose entries, `count` if it is given, all pass another."""
    return lambda x: isinstance(x, list) and (count is None or len(x) == count) and all(map(of, x))


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_object(x: Any) -> bool:
    return isinstance(x, dict)


NUMBER, TEXT, FLAG = (_is_number, "number"), (_is_text, "text"), (lambda x: isinstance(x, bool), "truth value")
OPTIONAL = (lambda x: x is None or _is_number(x), "number")
OBJECT = (_is_object, "object")
FACTS = dict(
    model=TEXT, dtype=TEXT, rounding=NUMBER, tokens=(_is_list(_is_object), "list of objects"), random=TEXT,
    layers=(_is_list(_is_object), "list of objects"), budgets=OBJECT, config=OBJECT, versions=OBJECT, kernel=TEXT,
)  # fmt: skip
REQUIRED = ("model", "dtype", "rounding", "tokens", "layers", "budgets")
LAYER = dict(
    name=TEXT, kind=TEXT, mask=TEXT, normalizer=TEXT, type=TEXT, obstacle=TEXT, scale=OPTIONAL, softcap=OPTIONAL,
    heads=OPTIONAL, groups=OPTIONAL, width=OPTIONAL, sink=FLAG, bias=FLAG, temperature=FLAG,
    rotary=(lambda x: _is_object(x) and all(map(_is_object, x.values())), "object of objects"), sample=OBJECT,
    modules=(_is_list(_is_text), "list of names"),
)  # fmt: skip
ROTARY = dict(
    pairing=TEXT, width=(_is_place, "width"), base=OPTIONAL, offset=NUMBER, factor=NUMBER,
    frequencies=(_is_list(_is_number), "list of numbers"),
)  # fmt: skip
SAMPLE = dict(rows=(_is_list(_is_place), "list of places"), heads=(_is_list(_is_place), "list of places"))
TOKENS = dict(rows=(_is_list(_is_list(_is_place, 2)), "list of pairs of places"), inputs=TEXT, form=TEXT)


def _check_object(what: str, x: Any, fields: dict[str, tuple], required: Sequence[str] = ()) -> None:
    if not isinstance(x, dict):
        raise ValueError(f"{what} is no JSON object")
    for name, (is_right, kind) in fields.items():
        if name not in x and name in required:
            raise ValueError(f"{what} lacks {name!r}" if not what.endswith("s") else f"{what} lack {name!r}")
        if name in x and not is_right(x[name]):
            raise ValueError(f"{name} in {what} is no {kind}")


def write_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes: the same for the same tensors and metadata, in the order of their names."""
    names = {np.dtype(code): name for name, code in TYPES.items() if name != "BF16"}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    parts, at = [], 0
    for name in sorted(tensors):
        x = np.ascontiguousarray(tensors[name])
        x = x.astype(x.dtype.newbyteorder("<"), copy=False)
        parts.append(x.tobytes())
        header[name] = dict(dtype=names[x.dtype], shape=list(x.shape), data_offsets=[at, at + len(parts[-1])])
        at += len(parts[-1])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def read_tensors(path: str | os.PathLike, largest: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(tensors, metadata) of a file; bfloat16 as float32. A file above `largest` bytes is refused."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError("it is no file")
        if largest is not None and size > largest:
            raise ValueError(f"it has {size:,} bytes, more than the {largest:,} that are read")
        data = path.read_bytes()
        return _parse(data)
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{str(path)!r} cannot be read as safetensors: {reason}") from None


def _parse(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    if len(data) < 10:
        raise ValueError("it is too short")
    length = int.from_bytes(data[:8], "little")
    if length > min(LARGEST_HEADER, len(data) - 8):
        raise ValueError(f"its header claims {length:,} bytes, and the file has {len(data) - 8:,}")
    body = memoryview(data)[8 + length :]
    header = parse_json(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise ValueError("its metadata is not text")
    return {str(name): _tensor(name, entry, body) for name, entry in header.items()}, metadata


def parse_json(text: bytes | str) -> Any:
    """JSON without NaN and Infinity; ValueError in one line for anything else, however deep it is nested."""

    def refuse(word: str) -> Any:
        raise ValueError(f"its JSON holds {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON: {error.msg}") from None


def _are_sizes(x: Any) -> bool:
    """True for a list of whole numbers from 0 on."""
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def _tensor(name: str, entry: Any, body: memoryview) -> np.ndarray:
    shown = repr(str(name)[:60])
    if not isinstance(entry, dict) or entry.get("dtype") not in TYPES:
        raise ValueError(f"tensor {shown} has no dtype that is known")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {shown} has no shape or place")
    kind = np.dtype(TYPES[entry["dtype"]])
    count = 1
    for n in shape:
        count *= n
    begin, end = offsets
    if end > len(body) or end - begin != count * kind.itemsize:
        raise ValueError(f"tensor {shown} does not fit the file: it is cut off, or not what the header says")
    x = np.frombuffer(body[begin:end], kind).reshape(shape)
    if entry["dtype"] == "BF16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.copy()
