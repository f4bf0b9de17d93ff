"""Names for transformers: after `import regard.hf` a model takes `attn_implementation="regard"`, any normaliser's too.

>>> import regard.hf
>>> from transformers import LlamaConfig, LlamaModel
>>> config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
>>> model = LlamaModel._from_config(config, attn_implementation="regard:entmax15")
>>> model(torch.arange(6)[None]).last_hidden_state.shape
torch.Size([1, 6, 32])

"regard" is softmax; "regard:entmax15" and "regard:entmax(alpha=1.25)" name a normaliser. Masks are those that
transformers makes for "sdpa", as bool. Scale, soft cap, sinks and position biases are the model's own.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

import regard
from regard import normalizers
from regard._core.mask.parts import check_cu_seqlens
from regard._core.mask.varlen import recall
from regard.health.capture.call import hide
from regard.health.capture.documents import document_mask, find_starts
from regard.mask import Mask

try:
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError('regard.hf needs transformers 4.57 or newer: pip install "regard[hf]"') from error

__all__ = ["attention_forward", "register"]

NAME = "regard"


def register(normalizer: str = "softmax") -> str:
    """Registers a normaliser with transformers and returns the name to give as `attn_implementation`.

    >>> import regard.hf
    >>> regard.hf.register("entmax(alpha=1.25)")
    'regard:entmax(alpha=1.25)'

    Importing `regard.hf` registers every name of `regard.normalizers.names()`. A name with a parameter is registered
    when a model asks for it; a name is registered by hand only where no model does, as in a sub-configuration.

    Raises:
        ValueError: The normaliser is unknown or its parameter is outside its range.
    """
    normalizers.get(normalizer)
    return _register(f"{NAME}:{normalizer}", normalizer)


def _register(name: str, normalizer: str) -> str:
    AttentionInterface.register(name, partial(attention_forward, normalizer=normalizer))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    normalizer: str = "softmax",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes one attention of a transformers model by `regard.attention`: the function behind "regard".

    Args:
        module: the attention module.
        query, key, value: [B, H, M, D], [B, G, N, D], [B, G, N, E].
        attention_mask: bool (True = visible) or additive, [B, 1 or H, M, N]; None for causal order or no mask.
        dropout, scaling, is_causal, softcap: as transformers passes them; None for the module's own, or none.
        s_aux: a learned sink per head; left out under a normaliser without an exponential denominator.
        position_bias: added to the scores, [1 or B, H, M, N].
        normalizer: as in `regard.attention`.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k` and `position_ids` tell packed documents apart; others are not read.

    Returns:
        The output [B, M, H, E], and None in the place of the weights.

    Raises:
        ValueError: A paged cache or a head mask is given, or the mask has not four dims.
    """
    _refuse(attention_mask, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    ordered = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    mask = attention_mask if attention_mask is None or attention_mask.shape[-1] <= keys else attention_mask[..., :keys]
    documents = _mask_of_documents(kwargs, query.shape[0], queries, keys, ordered)
    if mask is not None and documents is not None:
        mask, documents = hide(mask, ~documents.dense(queries, keys)), None
    causal = ordered and mask is None and documents is None
    if mask is not None and mask.is_floating_point():
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if position_bias is not None:
        bias = position_bias[..., :keys]
        mask = bias if mask is None else hide(bias, ~mask) if mask.dtype == torch.bool else bias + mask
    visible = mask if documents is None else documents if mask is None else (documents, mask)
    sink = s_aux if s_aux is not None and normalizers.get(normalizer).softmax_family else None
    output = regard.attention(
        query, key, value, visible, dropout, causal, scaling, query.shape[1] != key.shape[1],
        normalizer=normalizer, softcap=softcap, sink=sink,
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def _refuse(mask: Any, kwargs: dict) -> None:
    """Raises ValueError for what would be left out of the result."""
    for name, fix in (("cache", "turn continuous batching off"), ("head_mask", "prune the heads instead")):
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation='regard' does not take {name}; {fix}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 4):
        shape = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attn_implementation='regard' takes masks of four dims, got {shape}: this model makes its mask without "
            "transformers' AttentionMaskInterface; load it with attn_implementation='sdpa' and use regard.using"
        )


def _mask_of_documents(kwargs: dict, batch: int, queries: int, keys: int, causal: bool) -> Mask | None:
    """Returns the mask of packed documents, by `cu_seq_lens_*` or by positions that start anew; None without any."""
    cu_q, cu_k, window = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "sliding_window"))
    limits = window - 1 if window and causal else None, None
    if cu_q is None and cu_k is None:
        documents = _find_documents(kwargs.get("position_ids"), batch) if causal and queries == keys else None
        return None if documents is None else documents & Mask.causal() & Mask.window(*limits)
    if cu_q is None or cu_k is None or batch != 1:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must both be given, for one row of packed documents (a batch of {batch} "
            "here); several rows are told apart by position_ids that start anew"
        )
    is_one, longest = cu_q is cu_k, kwargs.get("max_length_k")
    cu_q = _check_ends(cu_q, "cu_seq_lens_q", queries)
    cu_k = cu_q if is_one else _check_ends(cu_k, "cu_seq_lens_k", keys)
    options = queries, keys, causal, limits, longest if type(longest) is int else None
    return recall((cu_q, cu_k), options, lambda: document_mask(cu_q, cu_k, *options))


def _check_ends(cu: Any, name: str, tokens: int) -> Tensor:
    """Returns cu_seqlens; raises where their values can be read without a wait and are wrong. Padding may follow."""
    if isinstance(cu, Tensor) and (cu.device.type != "cpu" or torch.compiler.is_compiling()):
        return cu
    cu = check_cu_seqlens(cu, name)
    if int(cu[-1]) > tokens:
        raise ValueError(f"{name} must end at the number of tokens, {tokens}, or before, got {int(cu[-1])}")
    return cu


_DOCUMENTS = WeakIdKeyDictionary()  # position_ids -> (version, mask): read once for the layers of a forward


def _find_documents(position_ids: Tensor | None, batch: int) -> Mask | None:
    """Returns the mask of documents by the positions of every row; None if none start anew, or cannot be read."""
    if position_ids is None or torch.compiler.is_compiling() or len(position_ids) != batch:  # one row: the model's own
        return None
    if position_ids.is_inference():  # no version tells whether it was changed
        return _read_documents(position_ids)
    known = _DOCUMENTS.get(position_ids)
    if known is None or known[0] != position_ids._version:
        known = _DOCUMENTS[position_ids] = position_ids._version, _read_documents(position_ids)
    return known[1]


def _read_documents(position_ids: Tensor) -> Mask | None:
    starts = find_starts(position_ids)
    return None if starts is None else Mask.documents(ids=starts.cumsum(-1))


def _register_on_request(check: Any) -> Any:
    """Wraps a model's check of `attn_implementation`: "regard:…" is registered first."""

    @wraps(check)
    def wrapped(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if isinstance(requested_attention, str) and requested_attention.partition(":")[0] == NAME:
            if ":" in requested_attention:
                register(requested_attention.partition(":")[2])
            if not self._can_set_attn_implementation():
                raise ValueError(
                    f"{type(self).__name__} computes attention by its own code, not by transformers' "
                    f"AttentionInterface; attn_implementation={requested_attention!r} would change nothing"
                )
        return check(self, requested_attention, *args, **kwargs)

    return wrapped


_register(NAME, "softmax")
for _name in normalizers.names():
    register(_name)
_CHECK = "get_correct_attn_implementation"
setattr(PreTrainedModel, _CHECK, _register_on_request(getattr(PreTrainedModel, _CHECK)))
