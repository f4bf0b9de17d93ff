"""`regard.attention_varlen`: each document by itself gives the same, with every normaliser, statistic and gradient."""

import itertools

import pytest
import torch

import regard
from regard import Mask, normalizers
from regard._call.mask import documents

CU_Q, CU_K = [0, 5, 5, 12, 16], [0, 6, 8, 14, 15]  # no queries, fewer and more queries than keys


def draw():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=generator) for n, h in ((16, 4), (15, 2), (15, 2)))
    return [x.requires_grad_() for x in (q, k, v)]


def by_document(q, k, v, mask, **options):
    """(out, statistics) of one reference call per document."""
    found = []
    for i0, i1, j0, j1 in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:], strict=False):
        own = (x.transpose(0, 1)[None] for x in (q[i0:i1], k[j0:j1], v[j0:j1]))
        found.append(regard.attention(*own, mask, enable_gqa=True, return_stats=True, backend="reference", **options))
    out = torch.cat([o[0].transpose(0, 1) for o, _ in found])
    return out, {name: torch.cat([stats[name][0] for _, stats in found], -1) for name in found[0][1]}


@pytest.mark.parametrize("normalizer", normalizers.names())
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (3, -1)}])
def test_documents_by_themselves(normalizer, options):
    inputs, mask = draw(), Mask()
    if options:
        mask = Mask.causal(bottom_right=True)
    if "window_size" in options:
        mask &= Mask.window(3, None, bottom_right=True)
    out, stats = regard.attention_varlen(
        *inputs, CU_Q, torch.tensor(CU_K, dtype=torch.int32), 7, 6, normalizer=normalizer, return_stats=True, **options
    )
    truth, exact = by_document(*inputs, mask, normalizer=normalizer)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
    for name, values in stats.items():
        assert values.shape == (4, 16)
        torch.testing.assert_close(values, exact[name], atol=2e-4, rtol=2e-4, msg=name)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad(truth, inputs, upstream)
    for ours, gradient in zip(torch.autograd.grad(out, inputs, upstream), theirs, strict=True):
        torch.testing.assert_close(ours, gradient, atol=2e-5, rtol=2e-4)


def test_two_names_of_the_scale():
    inputs = draw()
    ours = regard.attention_varlen(*inputs, CU_Q, CU_K, softmax_scale=0.5)
    torch.testing.assert_close(ours, regard.attention_varlen(*inputs, CU_Q, CU_K, scale=0.5))
    with pytest.raises(ValueError, match="two names"):
        regard.attention_varlen(*inputs, CU_Q, CU_K, softmax_scale=0.5, scale=0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(cu_seqlens_q=[0, 5, 15]), "cu_seqlens_q must end at the number of tokens, 16, got 15"),
        (dict(cu_seqlens_k=[0, 9, 8, 14, 15]), "cu_seqlens_k must begin with 0 and never fall"),
        (dict(cu_seqlens_q=[1, 5, 5, 12, 16]), "begin with 0"),
        (dict(cu_seqlens_q=[0, 16]), "as many documents"),
        (dict(cu_seqlens_k=None), "cu_seqlens_k must be given"),
        (dict(window_size=(-2, 0)), "window_size"),
        (
            dict(gate=torch.zeros(4, 16)),
            r"gate must have shape \(16, 4\), .*, or \(16, 4, 8\), .*, got shape \(4, 16\)",
        ),
        (dict(gate=torch.zeros(16, 4, 7)), r"gate must have shape \(16, 4\), .* got shape \(16, 4, 7\)"),
        (dict(gate=torch.zeros(16)), r"gate must have shape \(16, 4\), .* got shape \(16,\)"),
    ],
)
def test_refused(changed, message):
    q, k, v = draw()
    with pytest.raises(ValueError, match=message):
        regard.attention_varlen(q, k, v, **{"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **changed})


def test_refused_shapes():
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"q must have shape \(tokens, heads, width\)"):
        regard.attention_varlen(q[None], k, v, CU_Q, CU_K)


def test_layers_share_the_mask_of_their_cu_seqlens_until_it_changes():
    from regard._core.plans import MAX_INTERVALS, plans, with_interval

    plans.clear(), with_interval.clear(), documents._recent.clear()
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    first = regard.attention_varlen(q, k, v, cu, causal=True, normalizer="entmax15")
    torch.testing.assert_close(regard.attention_varlen(q, k, v, cu, causal=True, normalizer="entmax15"), first)
    assert len(documents._recent) == len(plans) == 1
    cu.numpy()[1] = 7  # past torch: the same tensor and version, other documents
    other = regard.attention_varlen(q, k, v, cu, causal=True, normalizer="entmax15")
    torch.testing.assert_close(other, regard.attention_varlen(q, k, v, [0, 7, 9], causal=True, normalizer="entmax15"))
    assert not torch.allclose(other, first)
    for _ in range(2 * MAX_INTERVALS):  # batches come and go: neither masks nor plans pile up
        regard.attention_varlen(q, k, v, cu.clone(), normalizer="entmax15")
    assert len(documents._recent) <= documents.MOST and len(plans) <= MAX_INTERVALS
    with torch.inference_mode():
        ends = torch.tensor([0, 4, 9])
        regard.attention_varlen(q, k, v, ends, causal=True, normalizer="entmax15")
        ends[1] = 7
        torch.testing.assert_close(regard.attention_varlen(q, k, v, ends, causal=True, normalizer="entmax15"), other)


def test_a_maximum_that_is_too_small_is_refused():
    x = torch.randn(8, 2, 4)
    regard.attention_varlen(x, x, x, [0, 3, 8], max_seqlen_q=5, max_seqlen_k=5)
    with pytest.raises(ValueError, match="5 tokens, more than the maximum that was given, 4"):
        regard.attention_varlen(x, x, x, [0, 3, 8], max_seqlen_q=4, max_seqlen_k=4)


def test_the_longest_document_is_known_where_queries_and_keys_share_it():
    ends, other = [0, 300, 1000, 1100, 2000], [0, 300, 1000, 1100, 2001]
    reach, names = {}, ("cu_seqlens_q", "cu_seqlens_k")
    for causal in (False, True):
        made = documents.pack_documents((ends,), ("cu_seqlens_q",), 2000, 2000, torch.device("cpu"), causal)
        reach[causal] = made.parts[0].reach
    assert reach == {False: (899, 899), True: (899, 0)}
    made = documents.pack_documents((ends, other), names, 2000, 2001, torch.device("cpu"), True, longest=10)
    assert made.parts[0].reach == (None, None)  # and a promise that nobody uses is not looked at
    x = torch.randn(2000, 2, 8)
    whole = regard.attention_varlen(x, x, x, ends, causal=True)
    for begin, end in itertools.pairwise(ends):
        own = x[begin:end].transpose(0, 1)
        alone = regard.attention(own, own, own, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(whole[begin:end], alone)
