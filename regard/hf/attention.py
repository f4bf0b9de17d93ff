"""The function behind `attn_implementation="regard"`: one attention of a transformers model by `regard.attention`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

import regard
from regard import normalizers
from regard._call.mask.documents import document_mask, find_starts, recall
from regard._call.mask.mask import Mask
from regard._call.mask.parts import check_cu_seqlens
from regard.health.capture.call import Call, hide, output_and_weights
from regard.statistics import Statistics

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before transformers 5.2
    _active_collector = None  # type: ignore[assignment]

READ = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_k", "position_ids", "sliding_window", "indices", "block_indices",
        "output_attentions"}  # fmt: skip
# what transformers passes along for other functions, for outputs, or because the mask already holds it
HARMLESS = {
    "max_length_q", "deterministic", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "return_dict", "use_cache", "cache_position", "labels", "encoder_hidden_states", "encoder_attention_mask",
}  # fmt: skip


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
) -> tuple[Tensor, Tensor | None]:
    """Computes one attention of a transformers model by `regard.attention`: the function behind "regard".

    Args:
        module: the attention module.
        query, key, value: [B, H, M, D], [B, G, N, D], [B, G, N, E].
        attention_mask: bool (True = visible) or additive, [B, 1 or H, M, N]; None for causal order or no mask.
        dropout, scaling, is_causal, softcap: as transformers passes them; None for the module's own, or none.
        s_aux: a learned sink per head; left out under a normaliser without an exponential denominator.
        position_bias: added to the scores, [1 or B, H, M, N].
        normalizer: as in `regard.attention`.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k` and `position_ids` tell packed documents apart; `indices` [B, M, K] or
            `block_indices` are the keys that sparse attention keeps; `output_attentions` asks for the weights.

    Returns:
        The output [B, M, H, E] and, where the model asks for them, the weights [B, H, M, N]; else None.

    Raises:
        ValueError: A keyword is given that is not known here, or the mask is not a bool or float one of four dims.
    """
    _refuse(attention_mask, kwargs)
    attention_mask = _keep_indices(module, attention_mask, key.shape[2], query.dtype, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    ordered = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    mask = attention_mask if attention_mask is None or attention_mask.shape[-1] <= keys else attention_mask[..., :keys]
    documents = mask_of_documents(module, kwargs, query.shape[0], queries, keys, ordered)
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
    options: dict[str, Any] = dict(scale=scaling, normalizer=normalizer, softcap=softcap, sink=sink)
    if _wants_weights(module, kwargs):
        if isinstance(visible, (tuple, regard.Mask)):
            raise ValueError(
                "attn_implementation='regard': no weights of packed documents; leave output_attentions out"
            )
        call = Call(module, query, key, value, lambda _: query, "regard", visible, causal, options, dropout)
        output, weights = output_and_weights(call)
        return output.transpose(1, 2).contiguous(), weights
    wanted = _reading.get()
    asked = {} if wanted is None else dict(return_stats=wanted.names, return_weights=wanted.rows)
    output = regard.attention(
        query, key, value, visible, dropout, causal, enable_gqa=query.shape[1] != key.shape[1], **options, **asked
    )
    if wanted is not None:
        output, stats = output
        wanted.found.append(stats)
    return output.transpose(1, 2).contiguous(), None


class _Reading(NamedTuple):
    names: tuple[str, ...]
    rows: Any
    found: list[Statistics]


_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


@contextmanager
def reading(*names: str, return_weights: Any = None) -> Iterator[list[Statistics]]:
    """Within it, models of `attn_implementation="regard"` append each attention's statistics to the list it yields.

        with regard.hf.reading("received", "top_keys(8)") as stats:
            model(ids)
        stats[3].received                                  # of the fourth layer: (B, H, keys)

    Args:
        names: as in `return_stats` of `regard.attention`.
        return_weights: rows whose weights are wanted, as there.
    """
    found: list[Statistics] = []
    token = _reading.set(_Reading(names, return_weights, found))
    try:
        yield found
    finally:
        _reading.reset(token)


def _wants_weights(module: nn.Module, kwargs: dict) -> bool:
    """True if the running model collects its weights: by a keyword, its configuration, or hooks on its modules."""
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    collected = None if _active_collector is None else _active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _refuse(mask: Any, kwargs: dict) -> None:
    """Raises ValueError for what would be left out of the result."""
    for name, fix in (("cache", "turn continuous batching off"), ("head_mask", "prune the heads instead")):
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation='regard' does not take {name}; {fix}")
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in READ and name not in HARMLESS:
            raise ValueError(
                f"attn_implementation='regard' does not know {name}=, which this model gives its attention; load it "
                "with attn_implementation='eager' or 'sdpa' and use regard.using"
            )
    if mask is None or (
        isinstance(mask, Tensor) and mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    ):
        return
    shape = f"{tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        f"attn_implementation='regard' takes bool or additive masks of four dims, got {shape}: this model makes its "
        "mask without transformers' AttentionMaskInterface; load it with attn_implementation='sdpa' and use "
        "regard.using"
    )


def _keep_indices(module: nn.Module, mask: Tensor | None, keys: int, dtype: torch.dtype, kwargs: dict) -> Tensor | None:
    """Returns the mask that hides the keys which an indexer has not kept as well (DeepSeek V3.2, MiniMax M3)."""
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if indices is not None:
        hidden = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool).scatter(-1, indices.long(), False)[
            :, None
        ]
        return ~hidden if mask is None else hide(mask[..., :keys], hidden)
    if blocks is None:
        return mask
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise ValueError(
            "attn_implementation='regard' does not know block_indices= of this model; load it with 'eager'"
        )
    positions = kwargs.get("position_ids")
    return build(blocks, mask, keys, dtype, blocks.device, positions)


def mask_of_documents(
    module: nn.Module, kwargs: dict, batch: int, queries: int, keys: int, causal: bool
) -> Mask | None:
    """Returns the mask of packed documents, by `cu_seq_lens_*` or by positions that start anew; None without any."""
    cu_q, cu_k, window = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "sliding_window"))
    limits = window - 1 if window and causal else None, None
    if cu_q is None and cu_k is None:
        documents = _find_documents(module, kwargs.get("position_ids"), batch) if causal and queries == keys else None
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


_DOCUMENTS = WeakIdKeyDictionary()  # position_ids -> (version or module, mask): read once for the layers of a forward


def _find_documents(module: nn.Module, position_ids: Tensor | None, batch: int) -> Mask | None:
    """Returns the mask of documents by the positions of every row; None if none start anew, or cannot be read."""
    if position_ids is None or torch.compiler.is_compiling() or len(position_ids) != batch:  # one row: the model's own
        return None
    known = _DOCUMENTS.get(position_ids)
    if position_ids.is_inference():  # no version tells whether it was changed: read anew when its reader comes again
        if known is None or known[0] is module:
            known = _DOCUMENTS[position_ids] = module, _read_documents(position_ids)
    elif known is None or known[0] != position_ids._version:
        known = _DOCUMENTS[position_ids] = position_ids._version, _read_documents(position_ids)
    return known[1]


def _read_documents(position_ids: Tensor) -> Mask | None:
    starts = find_starts(position_ids)
    return None if starts is None else Mask.documents(ids=starts.cumsum(-1))
