"""Stand-ins for attention packages that need a GPU: their names and signatures, computed densely in plain torch."""

import sys
from types import ModuleType

import torch


def attend(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, sink=None, slopes=None, bias=None,
           at_first_key=False):  # fmt: skip
    """Returns attention [M, H, E] of one sequence, q [M, H, D], k, v [N, G, D] (order ends at the last key)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = torch.tanh(s / softcap) * softcap if softcap else s
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (0 if at_first_key else len(k) - len(q))
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
                         softcap=softcap, slopes=alibi_slopes)  # fmt: skip


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False):
    return attend_batch(q, k_cache, v_cache, causal=causal)


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


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    if isinstance(attn_bias, BlockDiagonalMask):
        cu = attn_bias.q_seqinfo.seqstart, attn_bias.k_seqinfo.seqstart
        return attend_packed(query[0], key[0], value[0], *cu, scale=scale, causal=attn_bias.causal)[None]
    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else None
    causal = isinstance(attn_bias, LowerTriangularMask)
    first = causal and not isinstance(attn_bias, LowerTriangularFromBottomRightMask)
    one = [attend(*x, scale=scale, causal=causal, at_first_key=first, bias=None if bias is None else bias[at])
           for at, x in enumerate(zip(query, key, value, strict=True))]  # fmt: skip
    return torch.stack(one)


class LowerTriangularMask:
    """xformers' causal order from the first key."""


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """xformers' causal order up to the last key."""


class SequenceInfo:
    def __init__(self, seqstart):
        self.seqstart = seqstart


class BlockDiagonalMask:
    """xformers' packed documents."""

    causal = False

    def __init__(self, ends):
        self.q_seqinfo = self.k_seqinfo = SequenceInfo(ends)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    causal = True


class DotProductAttention(torch.nn.Module):
    """Transformer Engine's module: the output has its heads joined, and True hides in `attention_mask`."""

    def __init__(self, num_attention_heads, kv_channels, attention_dropout=0.0, qkv_format="sbhd",
                 attn_mask_type="causal", window_size=None, softmax_scale=None):  # fmt: skip
        super().__init__()
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softmax_scale = window_size, softmax_scale

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
                cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
                max_seqlen_kv=None, attn_mask_type=None, window_size=None, checkpoint_core_attention=False,
                core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
                inference_params=None, pad_between_seqs=None):  # fmt: skip
        order = attn_mask_type or self.attn_mask_type
        layout, qkv = qkv_format or self.qkv_format, (query_layer, key_layer, value_layer)
        options = dict(scale=self.softmax_scale, causal="causal" in order, at_first_key="bottom_right" not in order)
        options["slopes"] = alibi_slopes if core_attention_bias_type == "alibi" else None
        if layout == "thd":
            return attend_packed(*qkv, cu_seqlens_q, cu_seqlens_kv, **options).flatten(-2)
        q, k, v = (x.transpose(0, 1) for x in qkv) if layout == "sbhd" else qkv
        hidden = [None] * len(q) if attention_mask is None else attention_mask.float() * -1e30
        one = [attend(*x, bias=bias, **options) for *x, bias in zip(q, k, v, hidden, strict=True)]
        out = torch.stack(one).flatten(-2)
        return out.transpose(0, 1) if layout == "sbhd" else out


def install(monkeypatch) -> None:
    """Puts the stand-ins where the packages would be."""
    names = dict(
        flash_attn_func=flash_attn_func, flash_attn_kvpacked_func=flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func=flash_attn_qkvpacked_func, flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )  # fmt: skip
    modules = {
        "flash_attn.flash_attn_interface": names,
        "flash_attn_interface": dict(flash_attn_func=flash_3_func, flash_attn_varlen_func=flash_3_varlen_func),
        "flash_attn.cute.interface": dict(flash_attn_func=cute_func, flash_attn_varlen_func=cute_varlen_func),
        "xformers.ops.fmha": dict(memory_efficient_attention=memory_efficient_attention),
        "transformer_engine.pytorch.attention": dict(DotProductAttention=DotProductAttention),
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
