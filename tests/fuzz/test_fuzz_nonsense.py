"""Any public function with one or two arguments replaced by nonsense: it works, or a refusal names one of them."""

from __future__ import annotations

import math

import pytest
import score_functions
import torch
from fuzz_data import cases
from hypothesis import given
from hypothesis import strategies as st

import regard

pytest.importorskip("numba")

z = torch.tensor([[0.0, 1.0, -2.0], [3.0, 0.5, 0.5]])
q = torch.arange(48.0).reshape(1, 2, 4, 6) / 40
ROWS = dict(z=z, dim=-1, temperature=1.0, mask=None)
CALLS = {
    regard.normalize: dict(scores=z, normalizer="softmax", dim=-1, temperature=1.0, mask=None, backend=None),
    regard.softmax: ROWS,
    regard.sparsemax: ROWS,
    regard.entmax15: ROWS,
    regard.entmax: dict(ROWS, alpha=1.5),
    regard.relu_norm: ROWS,
    regard.sigmoid_norm: dict(ROWS, bias=0.0),
    regard.softmax1: ROWS,
    regard.softpick: ROWS,
    regard.log_softmax: dict(z=z, dim=-1, temperature=1.0),
    regard.logsumexp: dict(z=z, dim=-1, temperature=1.0),
    regard.gumbel_softmax: dict(z=z, temperature=1.0, hard=False, dim=-1, generator=None),
    regard.jacobian: dict(z=z, normalizer="softmax", temperature=1.0),
    regard.vjp: dict(z=z, grad=z, normalizer="softmax", temperature=1.0),
    regard.softmax_backward: dict(grad_output=z, softmax_output=z),
    regard.attention: dict(
        q=q, k=q, v=q, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        normalizer="softmax", temperature=None, softcap=None, score_mod=None, sink=None, window=None, key_lengths=None,
        return_stats=False, backend=None,
    ),
    regard.nn.qk_norm: dict(q=q, k=q, eps=1e-6),
    regard.attention_path: dict(q=q, k=q, v=q, attn_mask=None, is_causal=False, window=None, backend=None),
    regard.statistics.of_scores: dict(scores=z, visible=None, normalizer="softmax", sink=None, first=0),
    regard.statistics.of_weights: dict(weights=z, scores=None, normalizer="softmax", visible=None),
    regard.OnlineSoftmax().update(z).weights: dict(block=z),
    regard.masks.window: dict(n=3, keys=None, left=None, right=None, first=0),
    regard.masks.causal: dict(n=3, keys=None),
    regard.masks.padding: dict(lengths=[1, 2], max_len=3),
    regard.Mask.causal: dict(bottom_right=False),
    regard.Mask.window: dict(left=None, right=None, bottom_right=False),
    regard.Mask.lengths: dict(lengths=[1, 2]),
    regard.Mask.padding: dict(mask=torch.ones(2, 3, dtype=torch.bool)),
    regard.Mask.documents: dict(cu_seqlens=[0, 2, 4], ids=None),
    regard.Mask.prefix: dict(lengths=[1, 2]),
    regard.Mask.chunks: dict(size=2),
    regard.Mask.intervals: dict(lo=[0, 1], hi=[1, 2]),
    regard.bias.alibi: dict(heads=2, bottom_right=False),
    regard.bias.relative: dict(table=torch.zeros(2, 5), bottom_right=False),
    regard.bias.forgetting: dict(log_gates=torch.zeros(1, 2, 4)),
    regard.attention_varlen: dict(
        q=q[0], k=q[0], v=q[0], cu_seqlens_q=[0, 1, 2], cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, scale=None,
        normalizer="softmax", temperature=None, score_mod=None, sink=None, return_stats=False, backend=None,
    ),
    regard.bias.ScoreFunction.soft_cap: dict(cap=2.0),
    regard.bias.ScoreFunction: dict(value=score_functions.fade, slope=score_functions.constant_slope, params=(0.3,)),
}  # fmt: skip
JUNK = [
    None, "", "softmaxx", "entmax(alpha=9)", -1, 0, 7, 2.5, -0.5, math.nan, math.inf, -math.inf, 1 + 2j, True, object(),
    [], [1.0, 2.0], (1, 2, 3), {}, {"a": 1}, torch.tensor(math.nan), torch.tensor([1, 2]), torch.tensor(True),
    torch.zeros(0), torch.zeros(5, 7), torch.zeros(2, 3, dtype=torch.complex64), torch.full((2, 1), -1.0),
    torch.zeros(1, 2, 4, 6, dtype=torch.float64), torch.zeros(1, 2, 4, 5), torch.zeros(3, 2, 4, 6), b"softmax",
    torch.zeros(2, 3).to_sparse(), torch.ones(1).to(torch.float8_e4m3fn), torch.zeros(2, 3).to(torch.float8_e5m2),
    torch.full((2, 3), math.inf), torch.ones(2, 3, dtype=torch.bool), torch.ones(9, dtype=torch.bool), math,
]  # fmt: skip

RELATED = {
    "q": ("q", "k", "v"),
    "k": ("k", "q"),
    "v": ("v", "k", "q"),
    "cu_seqlens_k": ("cu_seqlens",),
    "softmax_scale": ("scale",),
    "heads": ("heads", "slopes"),
    "cap": ("cap", "params"),
    "params": ("params", "value must take"),
    "value": ("value", "slope"),
}


@cases(0.07)
@given(st.data())
def test_nonsense_is_refused_by_name_or_works(data):
    function = data.draw(st.sampled_from(list(CALLS)))
    given_ = dict(CALLS[function])
    changed = data.draw(st.lists(st.sampled_from(list(given_)), min_size=1, max_size=2, unique=True))
    for argument in changed:
        given_[argument] = data.draw(st.sampled_from(JUNK))
    try:
        function(**given_)
    except (TypeError, ValueError) as refusal:
        said = str(refusal)
        assert any(name in said for argument in changed for name in RELATED.get(argument, (argument,))), said


def draw_ints(data, low, high, *sizes):
    """A list of ints of one of these lengths, in any order."""
    size = data.draw(st.sampled_from(sizes))
    return data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))


MAKERS = {  # of (data) -> a mask or bias for (1, 2, 4, 6) that may not fit
    "lo|hi|intervals": lambda data: regard.Mask.intervals(draw_ints(data, -2, 6, 4, 4, 3), draw_ints(data, -2, 6, 4)),
    "cu_seqlens": lambda data: regard.Mask.documents(cu_seqlens=[0, *draw_ints(data, 0, 5, 0, 1, 3), 4]),
    "ids": lambda data: regard.Mask.documents(ids=torch.tensor(draw_ints(data, -1, 3, 4, 4, 5))),
    "lengths": lambda data: regard.Mask.lengths(draw_ints(data, -1, 5, 1, 1, 2)),
    "lengths|prefix": lambda data: regard.Mask.prefix(draw_ints(data, -1, 5, 1, 1, 2)),
    "mask": lambda data: regard.Mask.padding(torch.tensor([draw_ints(data, 0, 1, 4, 4, 5)]) > 0),
    "size": lambda data: regard.Mask.chunks(data.draw(st.integers(-1, 6))),
    "table": lambda data: regard.bias.relative(torch.randn(data.draw(st.integers(1, 3)), data.draw(st.integers(4, 9)))),
    "log_gates": lambda data: regard.bias.forgetting(torch.zeros(1, *draw_ints(data, 1, 5, 2))),
    "heads|alibi": lambda data: regard.bias.alibi(data.draw(st.integers(-1, 3))),
}  # fmt: skip


@cases(0.03)
@given(st.data())
def test_a_mask_that_does_not_fit_is_refused_by_name_and_others_are_their_dense_twins(data):
    name = data.draw(st.sampled_from(list(MAKERS)))
    causal = data.draw(st.booleans())
    try:
        given_ = MAKERS[name](data)
        out = regard.attention(q, q, q, given_, is_causal=causal, normalizer="softmax1")
    except (TypeError, ValueError) as refusal:
        said = str(refusal)
        assert any(word in said for word in (*name.split("|"), "attn_mask", "Mask.")), said
        return
    dense = given_.dense(4, 4) if isinstance(given_, regard.Mask) else given_.dense(q, 4)
    twin = regard.attention(q, q, q, dense, is_causal=causal, normalizer="softmax1")
    torch.testing.assert_close(out, twin, rtol=1e-5, atol=1e-6)
