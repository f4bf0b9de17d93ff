"""`regard.bias`: each bias against its dense form, with gradients, alone and beside a mask; what is refused."""

import pytest
import torch
from rows_data import ONE_OF_EACH, slow_but

import regard
from regard import Mask, bias, normalizers

M, N = 6, 9


def biases(heads=2):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(heads, 2 * N + 3, generator=generator, dtype=torch.float64).requires_grad_()
    gates = (-torch.rand(2, heads, N, generator=generator, dtype=torch.float64)).requires_grad_()
    slopes = torch.rand(heads, generator=generator, dtype=torch.float64).requires_grad_()
    return {
        "alibi": (bias.alibi(slopes, bottom_right=True), slopes),
        "relative": (bias.relative(table), table),
        "forgetting": (bias.forgetting(gates), gates),
    }


def dense_of(name, leaf):
    """The definition, entry by entry."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    if name == "alibi":
        return -leaf[:, None, None] * (i + N - M - j).abs()
    if name == "relative":
        return leaf[:, j - i + leaf.shape[1] // 2]
    total = leaf.cumsum(-1)
    return total[..., N - M :, None] - total[:, :, None]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("normalizer", slow_but((*ONE_OF_EACH, "stickbreaking"), normalizers.names()))
@pytest.mark.parametrize("name", ["alibi", "relative", "forgetting"])
def test_a_bias_is_its_dense_tensor(name, normalizer):
    given, leaf = biases()[name]
    generator = torch.Generator().manual_seed(1)
    q, k, v, upstream = (torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64) for n in (M, N, N, M))
    mask = Mask.causal(bottom_right=True)
    options = dict(normalizer=normalizer, temperature=0.7, return_stats=("logsumexp", "mean_logit", "entropy"))
    out, stats = regard.attention(q, k, v, (mask, given), **options)
    dense = dense_of(name, leaf)
    torch.testing.assert_close(given.dense(q, N).expand(2, 2, M, N), dense.expand(2, 2, M, N))
    truth, _, exact = regard.reference.attention(q, k, v, (mask, dense), **options)
    torch.testing.assert_close(out, truth)
    for statistic, values in stats.items():
        torch.testing.assert_close(values, exact[statistic], msg=statistic)
    ours, theirs = (torch.autograd.grad(x, leaf, upstream)[0] for x in (out, truth))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_term_per_row_moves_the_statistics_of_the_logits(backend):
    """It is added to them after the kernel: they have its gradients, and a row without a key has none of it."""
    given, leaf = biases()["forgetting"]
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64) for n in (M, N, N))
    mask = Mask.causal(bottom_right=True) & Mask.lengths(torch.tensor([N, 0]))
    names = "max_logit", "mean_logit", "logsumexp"
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    options = dict(temperature=temperature, return_stats=names)
    _, stats = regard.attention(q, k, v, (mask, given), **options, backend=backend)
    _, _, exact = regard.reference.attention(q, k, v, (mask, dense_of("forgetting", leaf)), **options)
    assert set(stats) == set(names)
    for statistic in names:
        torch.testing.assert_close(stats[statistic], exact[statistic], msg=statistic)
    assert not stats["mean_logit"][1].any() and stats["max_logit"][1].isneginf().all()
    for wanted in (leaf, temperature):
        ours, theirs = (torch.autograd.grad(x["logsumexp"][0].sum(), wanted, retain_graph=True) for x in (stats, exact))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("normalizer", normalizers.names())
def test_shift_invariance_is_what_it_says(normalizer):
    choice = normalizers.get(normalizer)
    scores = torch.linspace(-2.0, 1.0, 5, dtype=torch.float64)
    same = torch.allclose(
        choice.reference(scores, None, choice.theta), choice.reference(scores + 1.3, None, choice.theta)
    )
    assert choice.is_shift_invariant == same


@pytest.mark.parametrize("normalizer", ["softmax", "entmax15", "sigmoid"])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_alibi_behind_the_query_is_a_term_per_key(normalizer, window):
    q, k, v = (torch.randn(2, 2, n, 4, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (M, N, N))
    q.requires_grad_()
    slopes = torch.tensor([0.5, 0.25]).requires_grad_()
    given, mask = bias.alibi(slopes, bottom_right=True), Mask.causal(bottom_right=True)
    terms = given.terms(q, N, N - M)
    assert terms.relative is None and given.terms(q, N, None).key is None and given.terms(q.float(), N, 0).key is None
    torch.testing.assert_close((terms.key + terms.row[..., None])[0].tril(N - M), given.dense(q, N).tril(N - M))
    dense = dense_of("alibi", slopes)
    if window is not None:
        given, dense, mask = (
            bias.alibi(slopes),
            -slopes[:, None, None] * (torch.arange(M)[:, None] - torch.arange(N)),
            None,
        )
    options = dict(normalizer=normalizer, window=window, return_stats=("max_logit", "logsumexp"))
    ours, stats = regard.attention(q, k, v, (mask, given), **options)
    truth, _, exact = regard.reference.attention(q, k, v, (mask, dense), **options)
    for name in stats:
        torch.testing.assert_close(stats[name].double(), exact[name].double(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.double(), truth, atol=2e-2, rtol=2e-2)
    for a, b in zip(*(torch.autograd.grad(x.double().square().sum(), (q, slopes)) for x in (ours, truth)), strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


def test_second_derivatives():
    _, leaf = biases()["relative"]
    q = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()

    def call(q, table):
        return regard.attention(q, q, q, (Mask.prefix(2), bias.relative(table)), normalizer="sigmoid")

    assert torch.autograd.gradgradcheck(call, (q, leaf))


def test_slopes_of_heads_that_are_no_power_of_two():
    slopes = bias.alibi(6).slopes
    torch.testing.assert_close(slopes, torch.tensor([2.0**-e for e in (2, 4, 6, 8, 1, 3)]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bias.relative(torch.zeros(2, 2 * N - 3)), "at least 2·9 − 1 columns"),
        (lambda: bias.relative(torch.zeros(2, 2 * N)), "odd width"),
        (lambda: bias.relative(torch.zeros(3, 2 * N + 1)), "3 heads, but q has 2"),
        (lambda: bias.alibi(3), "3 heads, but q has 2"),
        (lambda: bias.alibi(0), "heads must be"),
        (lambda: bias.forgetting(torch.zeros(2, 2, N - 1)), "log_gates must have shape"),
        (lambda: bias.forgetting(torch.full((2, 2, N), 0.9)), "log_gates must be ≤ 0.*logsigmoid"),
        (lambda: bias.forgetting(torch.full((2, 2, N), -torch.inf)), "log_gates must be finite.*logsigmoid"),
    ],
)
def test_refused(make, message):
    q, k = torch.randn(2, 2, M, 4), torch.randn(2, 2, N, 4)
    with pytest.raises(ValueError, match=message):
        regard.attention(q, k, k, make(), is_causal=True)


def test_a_length_for_a_flag_is_refused():
    for make in (bias.alibi, lambda x, flag: bias.relative(torch.zeros(2, 5), flag)):
        with pytest.raises(TypeError, match=r"bottom_right of bias.* must be a bool, got int"):
            make(2, 512)


NO_ORDER = {
    "nothing": {},
    "a bias alone": dict(mask=Mask()),
    "lengths": dict(mask=Mask.lengths([N, 5])),
    "a prefix": dict(mask=Mask.prefix(4)),
    "a window ahead": dict(window=(3, N - M + 1)),
}
IN_ORDER = {
    "is_causal": dict(is_causal=True),
    "a mask": dict(mask=Mask.causal(bottom_right=True)),
    "a window": dict(window=(None, N - M)),
    "a dense mask": dict(mask=torch.ones(M, N, dtype=torch.bool).tril(N - M)),
    "intervals": dict(mask=Mask.intervals([0] * M, list(range(N - M + 1, N + 1)))),
}


def forget(queries, mask=None, **options):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 2, n, 4, generator=generator) for n in (queries, N))
    gates = -torch.rand(2, 2, N, generator=generator)
    return regard.attention(
        q, k, k, bias.forgetting(gates) if mask is None else (mask, bias.forgetting(gates)), **options
    )


@pytest.mark.parametrize("name", list(NO_ORDER))
def test_forgetting_needs_causal_order(name):
    with pytest.raises(ValueError, match=r"attn_mask: bias.forgetting needs causal order; pass is_causal=True"):
        forget(M, **NO_ORDER[name])


@pytest.mark.parametrize("name", list(IN_ORDER))
def test_forgetting_in_causal_order(name):
    assert forget(M, **IN_ORDER[name]).isfinite().all()
    torch.testing.assert_close(forget(1), forget(1, Mask.causal(bottom_right=True)))  # one query is the last
