"""Where packed documents begin in a batch, by whatever says it: positions, segment ids, a mask, or lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.health.tokens.text import TokenBatch

SEGMENTS = ("segment", "document", "doc_id", "seq_idx", "sequence_id", "sample_id")
LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seqlens_q")


def find_documents(batch: TokenBatch) -> tuple[Tensor, str] | None:
    """(True where a document begins [B, N], what says so); None if nothing says that a row holds several."""
    shape = batch.targets.shape
    for name, x in batch.named.items():
        if not isinstance(x, Tensor):
            continue
        starts = None
        is_counted = name == "attention_mask" and x.ndim == 2 and _counts(x)
        is_segments = is_counted or any(part in name for part in SEGMENTS)
        if is_segments and x.shape == shape:
            starts = torch.nn.functional.pad((x.diff() != 0) & (x[:, 1:] != 0), (1, 0), value=True)
        elif name in LENGTHS and x.ndim == 1 and shape[0] == 1:
            starts = torch.zeros(shape, dtype=torch.bool, device=x.device)
            starts[0, x[:-1].long().clamp_max(shape[1] - 1)] = True
        elif "mask" in name and x.ndim in (3, 4) and x.shape[-2:] == (shape[1], shape[1]) and x.shape[0] == shape[0]:
            starts = _starts_of_mask(x)
        if starts is not None and bool(starts[:, 1:].any()):
            return starts, name
    return None


def _counts(x: Tensor) -> bool:
    """True for a mask of 1, 1, 2, 2, 3, …: it numbers documents."""
    return not x.is_floating_point() and x.dtype != torch.bool and bool((x > 1).any())


def _starts_of_mask(mask: Tensor) -> Tensor:
    """True at queries that see no key before themselves, [B, N], of a mask [B, (H), N, N]."""
    mask = mask[:, 0] if mask.ndim == 4 else mask
    seen = mask if mask.dtype == torch.bool else mask > -1.0 if bool((mask < 0).any()) else mask != 0
    before = (seen & torch.ones_like(seen[0]).tril(-1)).any(-1)
    return ~before & seen.any(-1)
