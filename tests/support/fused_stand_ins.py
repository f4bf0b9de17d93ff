"""Stand-ins for attention packages that need a GPU: their names and signatures, computed densely in plain torch."""

import sys
from types import ModuleType

import torch


def attend(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, sink=None, slopes=None, bias=None):
    """Attention of one sequence, q [M, H, D], k, v [N, G, D]; order ends at the last key. Returns [M, H, E]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = torch.tanh(s / softcap) * softcap if softcap else s
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    left, right = (None if side is None or side < 0 else side for side in (window or (-1, -1)))
    right = 0 if causal else right
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= ahead > right if right is not None else hidden
    hidden |= ahead < -left if left is not None else hidden
    s = s - slopes[:, None, None] * ahead.abs() if slopes is not None else s
    s = (s if bias is None else s + bias).masked_fill(hidden, -torch.inf)
    rest = 0.0 if sink is None else torch.exp(sink[:, None, None])
    e = torch.exp(s)
    return torch.einsum("hij,jhd->ihd", e / (e.sum(-1, keepdim=True) + rest).clamp_min(1e-30), v)


def attend_batch(q, k, v, **options):
    return torch.stack([attend(*one, **options) for one in zip(q, k, v, strict=True)])


def attend_packed(q, k, v, cu_q, cu_k, **options):
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        out[a:b] = attend(q[a:b], k[c:d], v[c:d], **options)
    return out


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return attend_batch(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                        slopes=alibi_slopes)  # fmt: skip


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    k, v = kv.unbind(2)
    return attend_batch(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return attend_batch(*qkv.unbind(2), scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, window=window_size,
                         softcap=softcap)  # fmt: skip


def flash_3_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                 window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                 sm_margin=0, return_attn_probs=False):  # fmt: skip
    out = attend_batch(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
    return (out, out.new_zeros(1)) if return_attn_probs else out


def flash_3_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                        deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, window=window_size)


def cute_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
              learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
              score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
              block_sparse_tensors_bwd=None, return_lse=False):  # fmt: skip
    out = attend_batch(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                       sink=learnable_sink)  # fmt: skip
    return out, out.new_zeros(1)


def cute_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                     seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
                     window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                     deterministic=False, score_mod=None, aux_tensors=None, return_lse=False):  # fmt: skip
    out = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, window=window_size)
    return out, out.new_zeros(1)


def install(monkeypatch) -> None:
    """Puts the stand-ins where the packages would be."""
    names = dict(
        flash_attn_func=flash_attn_func, flash_attn_kvpacked_func=flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func=flash_attn_qkvpacked_func, flash_attn_varlen_func=flash_attn_varlen_func,
    )  # fmt: skip
    modules = {
        "flash_attn.flash_attn_interface": names,
        "flash_attn_interface": dict(flash_attn_func=flash_3_func, flash_attn_varlen_func=flash_3_varlen_func),
        "flash_attn.cute.interface": dict(flash_attn_func=cute_func, flash_attn_varlen_func=cute_varlen_func),
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
