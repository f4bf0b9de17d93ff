"""attention with any combination of options, shapes, layouts and dtypes against the dense float64 oracle."""

from __future__ import annotations

import math

import pytest
import score_functions
import torch
from attention_data import FLOOR, ROUNDING
from fuzz_data import DTYPES, cases, laid_out
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import normalizers
from regard._call.scores import resolve_scale

pytest.importorskip("numba")

FUSED = [
    *(name for name in normalizers.names() if normalizers.get(name).fused),
    "entmax(alpha=1.3)",
    "sigmoid(bias=-2)",
]

OF_NORMALIZED = ("entropy", "effective_keys", "participation", "distance", "first_key_mass", "support")


@st.composite
def masks(draw, batch, lq, lk, generator):
    """A `regard.Mask` of one to three parts for batch × lq × lk."""

    def ints(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    def pick(*choices):
        return draw(st.sampled_from(choices))

    aligned, side = pick(False, True), pick(None, 0, 3, 40)
    start = ints(0, lk, batch, 1)
    parts = [
        regard.Mask.causal(aligned),
        regard.Mask.window(side, pick(None, 0, 2), aligned),
        regard.Mask.lengths(ints(0, lk, batch)),
        regard.Mask.padding((torch.arange(lk) >= start) & (torch.arange(lk) < start + pick(0, 5, 200))),
        regard.Mask.prefix(ints(0, lk, batch), aligned),
        regard.Mask.chunks(pick(1, 7, 64)),
        regard.Mask.intervals(ints(0, lk, batch, 1, lq), ints(0, lk, lq)),
    ]
    if lq == lk:
        cuts = ints(0, lk, pick(1, 5)).sort().values.tolist()
        parts.append(regard.Mask.documents([0, *cuts, lk]))
    mask = regard.Mask()
    for part in draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3)):
        mask &= part
    return mask


@st.composite
def calls(draw):
    """(q, k, v, options, off) of a call of `regard.attention` right in form; off: how far its logits may be."""

    def pick(*choices):
        return draw(st.sampled_from(choices))

    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = pick(torch.float32, *DTYPES)
    rank = pick(2, 3, 4, 4, 4, 5)
    batch, groups, share = pick(1, 2, 3), pick(1, 2), pick(1, 1, 3)
    lq, lk = pick(0, 1, 2, 5, 16, 33, 70), pick(0, 1, 2, 7, 16, 41, 130)
    d, e = pick(1, 3, 8, 16, 20), pick(1, 5, 8, 16)
    lead = {2: (), 3: (groups * share,), 4: (batch, groups * share), 5: (2, batch, groups * share)}[rank]
    kv_lead = (*lead[:-1], groups) if lead else ()
    options = {"normalizer": pick(*FUSED), "enable_gqa": rank > 2 and share > 1}
    full = (*lead, lq, lk)
    kind = pick(
        "none", "none", "causal", "causal", "bool", "bias", *(("mask", "mask", "small bias") if rank == 4 else ())
    )
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "mask":
        options["attn_mask"] = draw(masks(batch, lq, lk, generator))
    elif kind == "small bias":
        heads, length = lead[-1], max(lq, lk, 1)
        causal = regard.Mask.causal(bottom_right=True)
        table = torch.randn(heads, 2 * length - 1, generator=generator)
        options["attn_mask"] = pick(causal, None), regard.bias.relative(table, pick(False, True))
        if 0 < lq <= lk and pick(False, True):
            gates = -0.05 * torch.rand(batch, heads, lk, generator=generator)
            options["attn_mask"] = causal, regard.bias.forgetting(gates)
    elif kind != "none":
        sizes = [1 if pick(False, False, True) else size for size in full[pick(0, len(full) - 2) :]]
        shown = torch.rand(sizes, generator=generator) < pick(0.0, 0.5, 0.9)
        bias = torch.randn(sizes, generator=generator).to(dtype).masked_fill(~shown, -math.inf)
        options["attn_mask"] = shown if kind == "bool" else bias
        options["is_causal"] = pick(False, False, True)
    if pick(False, False, True):
        options["window"] = (pick(None, 0, 3, 40), pick(None, 0, 2))
    if rank == 4 and pick(False, False, True):
        options["key_lengths"] = torch.randint(0, lk + 1, (batch,), generator=generator)
    changed = pick("no", "no", "no", "softcap", "score_mod")
    if changed == "softcap":
        options["softcap"] = pick(0.5, 5.0)
    elif changed == "score_mod":
        options["score_mod"] = pick(*score_functions.ALL.values())
    if pick(False, False, True):
        options["temperature"] = pick(0.5, 2.0, "tensor")
        if options["temperature"] == "tensor":
            options["temperature"] = torch.rand(*lead, lq, 1, generator=generator) + 0.5
    if pick(False, False, True):
        options["scale"] = pick(0.3, -0.5, "inverse", "none", "sqrt")
    family = normalizers.get(options["normalizer"])
    if rank > 2 and family.family == "ratio" and family.exponential and pick(False, True):
        options["sink"] = torch.randn(lead[-1], generator=generator)
    size = pick(0.1, 1.0, 6.0, pick(1e-6, 1e-3, 30.0, 1e3, 1e4))
    size = min(size, 1e3) if dtype == torch.float16 else size
    even = options.get("scale") in ("none", -0.5) or (d in (1, 16) and options.get("scale") != 0.3)
    even = even and changed == "no" and "bias" not in kind and not torch.is_tensor(options.get("temperature"))
    exact = even and pick(False, True)

    def tensor(*shape):
        x = torch.randn(shape, generator=generator)
        return laid_out(draw, (x.mul(2).round() if exact else x).to(dtype))

    if exact:  # small whole numbers times a power of two: nothing rounds
        size = 2.0 ** round(math.log2(size))
    q, k, v = tensor(*lead, lq, d) * size, tensor(*kv_lead, lk, d), tensor(*kv_lead, lk, e)
    return q, k, v, options, 0.0 if exact else blur(q, k, options)


def blur(q, k, options):
    """How far rounding may move a logit: some units in the last place of |q|·|k|·scale/T."""
    eps = torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
    largest = [float(x.double().norm(dim=-1).max()) if x.numel() else 0.0 for x in (q, k)]
    scale = abs(resolve_scale(options.get("scale"), q.shape[-1]))
    hot = options.get("temperature", 1.0)
    return 4 * eps * math.prod(largest) * scale / float(hot.min() if torch.is_tensor(hot) and hot.numel() else 1.0)


def exactly(q, k, v, options):
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()}
    return regard.attention(q.double(), k.double(), v.double(), **wide, backend="reference", return_stats=True)


@cases(0.15)
@given(calls())
def test_any_call(call):
    q, k, v, options, off = call
    out, stats = regard.attention(q, k, v, **options, return_stats=True)
    exact, truths = exactly(q, k, v, options)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert out.isfinite().all()
    bound, near = 3 * ROUNDING[q.dtype] + 4 * off, 1.0
    if options["normalizer"] == "softpick":  # near 0 it is a quotient of logits: their error counts beside their size
        size = truths["max_logit"].abs() + truths["logit_variance"].sqrt()
        near = 1.0 + 1.0 / size.where(size > 0, 1.0)
        bound = 30 * bound + 4 * off * float(near.max() if near.numel() else 1.0)
    assert (out.double() - exact).norm() <= bound * (exact.norm() + 1e-3 * v.double().norm() + 1e-9)
    threshold = normalizers.get(options["normalizer"]).family == "threshold"
    fine = 1e-8 if q.dtype == torch.float64 else 3e-3 if threshold and q.dtype.itemsize == 2 else 5e-4
    shaky = truths["mass"] < 1e-30  # below float32's normal numbers
    if options["normalizer"] == "softpick":
        shaky |= truths["mass"] < 1e-3
    for name, truth in truths.items():
        ours, odd = stats[name].double(), ~truth.isfinite()
        assert torch.equal(ours[odd], truth[odd]), name
        odd = odd | (shaky & (name in OF_NORMALIZED or options["normalizer"] == "softpick"))
        if threshold and name in ("support", "gradient_gain", "participation"):
            continue  # a weight of 1e-8 may round to 0
        error = (ours - truth).abs() / (truth.abs() + FLOOR[name])
        allowed = fine + 30 * off * near
        if threshold and name == "entropy":  # −log p of a weight that is nearly 0, times the error of the logits
            allowed = 6.0 * fine + 30 * off + 16 * off / (truth.abs() + FLOOR[name])
        assert (error <= allowed)[~odd].all(), (name, float(error[~odd].max()))


@cases(0.05)
@given(calls())
def test_any_gradient_of_a_call(call):
    q, k, v, options, off = call
    if q.dtype.itemsize == 2:
        q, k, v = q.float(), k.float(), v.float()
        options = {n: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
    if options["normalizer"] == "sparsemax" and off == 0.0:  # whole numbers lie at τ, where its slope jumps
        q = q * 1.1
        off = blur(q, k, options)
    ours = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, (exact, truths) = regard.attention(*ours, **options), exactly(*theirs, options)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    found = torch.autograd.grad(out, ours, g, allow_unused=True, materialize_grads=True)
    truth = torch.autograd.grad(exact, theirs, g.double(), allow_unused=True, materialize_grads=True)
    size = g.double().norm() * (1.0 + max(float(x.detach().double().abs().max()) if x.numel() else 0.0 for x in ours))
    for name, mine, right in zip("qkv", found, truth, strict=True):
        assert mine.isfinite().all(), name
        rough = 20.0 if normalizers.get(options["normalizer"]).family == "threshold" else 8.0
        if options["normalizer"] in ("softpick", "relu"):  # 1/Z, and Z is no less than the largest logit
            top = truths["max_logit"].detach()
            small = 1.0 / float(top[top > 0].min()) if (top > 0).any() else 0.0
            rough *= 10.0 + small
        assert (mine.double() - right).norm() <= rough * (ROUNDING[q.dtype] + off) * (right.norm() + size), name


def test_what_nobody_sees_leaks_nothing():
    q, k, v = (torch.randn(2, 3, 8, 4) for _ in range(3))
    k[:, :, 5:], v[:, :, 5:] = math.nan, math.inf
    for name in FUSED:
        out, stats = regard.attention(q, k, v, key_lengths=[5, 5], normalizer=name, return_stats=True)
        clean, right = regard.attention(q, k[:, :, :5], v[:, :, :5], normalizer=name, return_stats=True)
        torch.testing.assert_close(out, clean)
        for statistic, value in right.items():
            torch.testing.assert_close(stats[statistic], value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", FUSED)
def test_a_row_with_a_nan_or_infinite_logit_says_so(name, value):
    """Found by this fuzz: entropy 0 and mass 0, as if the row had been measured."""
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    bias = torch.zeros(6, 6)
    bias[2, 3] = value
    clean = torch.arange(6) != 2
    right = regard.attention(q, k, v, torch.zeros(6, 6), normalizer=name, return_stats=True)
    for backend in ("cpu", "reference"):
        out, stats = regard.attention(q, k, v, bias, normalizer=name, return_stats=True, backend=backend)
        assert out[:, :, 2].isnan().all() and (stats["visible_keys"] == 6).all()
        torch.testing.assert_close(out[:, :, clean], right[0][:, :, clean])
        for statistic, x in stats.items():
            torch.testing.assert_close(x[..., clean], right[1][statistic][..., clean])
            if statistic == "max_logit":
                torch.testing.assert_close(x[..., 2], torch.full((1, 2), value), equal_nan=True)
            elif statistic != "visible_keys":
                assert x[..., 2].isnan().all(), statistic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax(alpha=1.3)", "entmax(alpha=1.7)"])
def test_large_logits_leave_a_threshold_its_digits(name, dtype):
    """Found by this fuzz: (α − 1)·s rounds by the size of s, and a row of one key weighed 0.996."""
    generator = torch.Generator().manual_seed(5)
    q, k = 2.0**13 * torch.ones(1, 1, 9, 1), torch.randint(-4, 5, (1, 1, 40, 1), generator=generator) + 0.0
    k[..., 20:, :] = 4.0 - torch.arange(20.0)[:, None] / 2**14  # beside the largest logit: steps of 1/2
    q, k, v = q.to(dtype), k.to(dtype), torch.randn(1, 1, 40, 3, generator=generator).to(dtype)
    options = dict(is_causal=True, normalizer=name, scale=1.0)
    for first in (0, 20):
        keys = (q, k[..., first:, :].requires_grad_(), v[..., first:, :])
        out, stats = regard.attention(*keys, **options, return_stats=True)
        exact, truths = exactly(*keys, options)
        fine = 1e-10 if dtype == torch.float64 else 3e-5
        torch.testing.assert_close(out.double(), exact, rtol=fine, atol=fine)
        torch.testing.assert_close(stats["mass"].double(), truths["mass"], rtol=fine, atol=0.0)
        torch.testing.assert_close(stats["entropy"].double(), truths["entropy"], rtol=10 * fine, atol=10 * fine)
        (ours,), (right,) = (torch.autograd.grad(x.double().square().sum(), keys[1]) for x in (out, exact))
        torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))
