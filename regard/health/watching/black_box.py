"""The black box: of the last samples the worst row of each group of layers, in memory, written when something happens.

A row is a query and its largest logits: positions and token ids of the keys, logits, norms of q and k, what the other
keys sum to. The file is text: a first line that names it, then JSON, compressed; reading it runs no code.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._call.scores import resolve_scale
from regard.health.capture.call import Call, causal_rows, select_rows
from regard.health.report import files
from regard.health.watching.incidents import Incident, group_of

SAMPLES = 64  # that are kept
KEYS = 16  # of a row, the largest
MAGIC = b"regard black box 1\n"
MOST_TEXT = 2**16  # token ids of a sample
NAMES = ("head", "query", "rest", "q_norm", "visible", "scale", "width")


class BlackBox:
    """The worst rows of the last samples."""

    def __init__(self, path: str | Path | None = None, tokenizer: Any = None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"black_box: there is no folder {str(self.path.parent)!r}; create it first")
        self.tokenizer = tokenizer
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    def add(self, step: int, rows: Mapping[str, dict[str, Any]], tokens: Tensor | None) -> None:
        """Keeps the worst row of each group of layers of a sample; rows by the layer's label."""
        worst: dict[str, dict[str, Any]] = {}
        for label, row in rows.items():
            known = worst.get(group_of(label))
            if known is None or not row["logits"] or row["logits"][0] > (known["logits"] or [-math.inf])[0]:
                worst[group_of(label)] = {"layer": label, **row}
        if not worst:
            return
        ids = None if tokens is None else tokens[0].tolist()[:MOST_TEXT]
        for row in worst.values():
            if ids is not None and max([row["query"], *row["keys"]], default=0) < len(ids):
                row["query_token"], row["key_tokens"] = ids[row["query"]], [ids[at] for at in row["keys"]]
                if self.tokenizer is not None:
                    row["query_text"] = self.tokenizer.decode([row["query_token"]])
                    row["key_texts"] = [self.tokenizer.decode([token]) for token in row["key_tokens"]]
        self.samples.append({"step": step, "rows": list(worst.values())})

    def write(self, path: str | Path, incidents: Sequence[Incident] = ()) -> None:
        """Writes the samples, and the incidents so far, into one file."""
        content = {"incidents": [one.to_json() for one in incidents], "samples": list(self.samples)}
        files.write(Path(path), MAGIC + zlib.compress(json.dumps(content).encode()))


def read_black_box(path: str | Path) -> dict[str, Any]:
    """Returns the content of a file of `BlackBox.write`; raises ValueError for any other file."""
    refusal = f"{str(path)!r} is not a black box that regard.Monitor wrote"
    try:
        whole = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    if not whole.startswith(MAGIC):
        raise ValueError(refusal)
    try:
        content = json.loads(zlib.decompress(whole[len(MAGIC) :]))
        rows = [row for sample in content["samples"] for row in sample["rows"]]
        well_made = all(len(row["logits"]) == len(row["keys"]) for row in rows)
        well_made &= all(isinstance(one["text"], str) for one in content["incidents"])
    except (ValueError, KeyError, TypeError, zlib.error):
        raise ValueError(f"{refusal}, or it is damaged") from None
    if not well_made:
        raise ValueError(f"{refusal}, or it is damaged")
    return content


def find_tokens(inputs: tuple, named: Mapping[str, Any]) -> Tensor | None:
    """Returns the token ids [B, L] that a model was given: its first tensor of integers with two dims."""
    preferred = named.get("input_ids")
    for x in (preferred, *inputs, *named.values()):
        if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int64, torch.int32):
            return x[:1].detach()
    return None


def measure_worst_row(call: Call) -> list[Tensor]:
    """Returns the row with the largest logit of the first sequence, on the device: numbers, keys, logits, norms."""
    q, k = call.q[0].detach().float(), call.k[0].detach().float()  # [H, M, D], [G, N, D]
    scale = resolve_scale(call.options.get("scale"), q.shape[-1])
    if isinstance(scale, Tensor):
        scale = scale.detach().float().reshape(-1, 1, 1)
    repeats = q.shape[0] // k.shape[0]
    stride = max(1, q.shape[1] // 256)  # of the queries, where there are many
    rows = torch.arange(q.shape[1] - 1, -1, -stride, device=q.device).flip(0)
    s = (q[:, rows].unflatten(0, (k.shape[0], repeats)) @ k[:, None].transpose(-1, -2)).flatten(0, 1) * scale
    if call.causal:
        s = s.masked_fill(~causal_rows(rows, k.shape[1])[0], -math.inf)
    mask = select_rows(call.densified().mask, rows)
    if mask is not None:
        mask = mask[:1] if mask.ndim == 4 else mask
        mask = mask.reshape((1,) * (3 - min(mask.ndim, 3)) + tuple(mask.shape[-3:]))
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.float()
    at = s.amax(-1).flatten().nan_to_num(nan=math.inf).argmax()[None]  # the host would wait for an index without dims
    head, row = at // len(rows), at % len(rows)
    logits = s.flatten(0, 1)[at][0]
    top = logits.topk(min(KEYS, len(logits)))
    rest = logits.scatter(0, top.indices, -math.inf).logsumexp(0)
    query, keys = q[head, rows[row]], k[head // repeats, top.indices]
    norm, width = query.norm(dim=-1), torch.full_like(rest, q.shape[-1])[None]
    used = scale.expand(len(q), 1, 1)[head, 0, 0] if isinstance(scale, Tensor) else torch.full_like(norm, scale)
    numbers = [head, rows[row], rest[None], norm, (logits > -math.inf).sum()[None], used, width]
    return [torch.cat([x.float() for x in numbers]), top.indices.float(), top.values, keys.norm(dim=-1)]


def as_row(parts: Sequence[Tensor], dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the tensors of `measure_worst_row`, on the host, as plain values."""
    numbers, keys, logits, norms = (x.tolist() for x in parts)
    row: dict[str, Any] = dict(zip(NAMES, numbers, strict=True))
    visible = [at for at, logit in enumerate(logits) if logit != -math.inf]
    for name in ("head", "query", "visible", "width"):
        row[name] = int(row[name])
    row["rest"] = row["rest"] if math.isfinite(row["rest"]) else None
    row |= {"keys": [int(keys[at]) for at in visible], "logits": [logits[at] for at in visible]}
    return row | {"k_norms": [norms[at] for at in visible], "dtype": str(dtype).removeprefix("torch.")}
