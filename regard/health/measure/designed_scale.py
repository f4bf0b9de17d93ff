"""Is the scale of a layer's call the one that its class means? Then it says nothing about a mistake.

Under QK-norm, by a module or by hand, the norms bound the logits whatever the scale is (Gemma 3n and 4 use 1); T5 has
none because its weights start smaller; Granite's is a number of the configuration.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

QK_NORM = re.compile(r"(^|[._])(q|k|qk|query|key)_?(layer_?)?norm$|(^|\.)norm_?(q|k)$")
SCALE_OF_ONE = re.compile(r"self\.(scaling|scale)\s*=\s*1(\.0*)?\s*(#|$)", re.MULTILINE)
COMMENT = re.compile(r"#.*")
SOFTMAX = re.compile(r"softmax\(")
ANY_SCALE = re.compile(r"scal|sqrt|norm_factor|\*\*\s*\(?-?\s*\(?(0?\.5|1\s*/\s*2)")  # in the code of a class
NAMED = ("attention_multiplier", "query_pre_attn_scalar")
BUCKETS = "relative_attention_num_buckets"  # of the T5 family
SAME = 1e-3
EQUAL_NORMS = 0.02  # of the largest: rounding in bfloat16


def have_equal_norms(*tensors: Tensor) -> bool:
    """True if the rows of a head [B, H, N, D] all have one norm, as after an l2 or RMS norm without weights.

    >>> x = torch.randn(1, 2, 5, 8)
    >>> have_equal_norms(x), have_equal_norms(torch.nn.functional.normalize(x, dim=-1))
    (False, True)
    """
    sizes = [torch.linalg.vector_norm(x.detach().float(), dim=-1) for x in tensors]
    return all(x.shape[2] > 1 and bool((x.amin(2) > (1 - EQUAL_NORMS) * x.amax(2)).all()) for x in sizes)


def is_designed(module: nn.Module, scale: float) -> bool:
    """True if a layer's class or configuration means this scale of its scores, though it is not 1/√d."""
    if any(QK_NORM.search(name) for name in module._modules):
        return True
    config = getattr(module, "config", None)
    for name in NAMED:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            meant = float(value) if name == NAMED[0] else float(value) ** -0.5
            return abs(scale / meant - 1) < SAME
    kind: Any = next((one for one in type(module).__mro__ if one.__module__.startswith("transformers.")), None)
    if kind is None or abs(scale - 1) > SAME:
        return False
    return hasattr(module, BUCKETS) or hasattr(module, "relative_attention_bias") or _sets_one(kind)


@cache
def _sets_one(kind: Any) -> bool:
    """True if the class sets its scale to 1, or computes softmax(q kᵀ) without any, as GPT-Neo's, and is as written."""
    try:
        source, file = COMMENT.sub("", inspect.getsource(kind)), inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return False
    if SCALE_OF_ONE.search(source):
        return True
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in vars(kind).values() if callable(one))
    is_as_written = all(code.co_filename == file for code in codes if code is not None)
    return is_as_written and SOFTMAX.search(source) is not None and ANY_SCALE.search(source) is None
