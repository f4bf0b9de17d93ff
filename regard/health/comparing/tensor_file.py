"""Reads and writes the safetensors format with numpy alone: a JSON header, then the bytes of the tensors.

    8 bytes   n, the length of the header, little-endian
    n bytes   {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]}, …}
    the rest  the tensors, one after another

Nothing in a file is executed; whatever is not of this form is a ValueError of one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1",
    "BOOL": "?", "BF16": "<u2",
}  # fmt: skip
LARGEST_HEADER = 8 * 2**20


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
