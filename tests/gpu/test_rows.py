"""Rows on a GPU: float32 softmax never has a larger error than torch's; long rows with the plan they really get."""

import pytest
import torch

from regard import normalizers
from regard._backends.gpu.rows import launch as rows
from regard.normalizers import jit, tl

COUNTS, SPREADS = (1, 2, 8, 64, 128), (0.1, 0.5, 1.0, 3.0, 10.0, 50.0)


def _no_larger(ours, theirs, truth):
    """Largest and mean error; a tie may differ by float64's rounding of the mean."""
    ours, theirs = (ours.double() - truth).abs(), (theirs.double() - truth).abs()
    assert ours.isfinite().all()
    for of in (torch.max, torch.mean):
        assert of(ours) <= of(theirs) * (1 + 1e-9)


@pytest.mark.parametrize("n", [3, 17, 100, 257, 1000, 4096, 20000, 65536])  # 240 sets of rows in all
def test_softmax_error_is_no_larger_than_torchs(n):
    choice = normalizers.get("softmax")
    generator = torch.Generator("cuda").manual_seed(n)
    for spread in SPREADS:
        for count in COUNTS:
            x, dp = torch.randn(2, count, n, device="cuda", generator=generator)
            x *= spread
            p, state = rows.forward(x, choice)
            _no_larger(p, torch.softmax(x, -1), torch.softmax(x.double(), -1))
            wide, slopes = p.double(), dp.double()
            truth = wide * (slopes - (wide * slopes).sum(-1, keepdim=True))
            ds = rows.backward(dp, p, state, choice)
            _no_larger(ds, torch._softmax_backward_data(dp, p, 1, torch.float32), truth)


@pytest.mark.parametrize("name", ["softmax", "softmax1"])
def test_a_temperature_costs_no_accuracy(name):
    """Within 0.51 units in the last place of every normal weight, at any scale."""
    choice = normalizers.get(name)
    x = torch.randn(64, 3000, device="cuda")
    for scale in (0.3, 1.0, 7.7):
        p, _ = rows.forward(x, choice, None, None, scale)
        exact = choice.reference(x.double() * scale, None, None)
        unit = torch.exp2(torch.floor(torch.log2(exact)) - 23)
        assert ((p.double() - exact).abs() <= 0.51 * unit)[exact > 1e-37].all()


@pytest.mark.parametrize("top", [0.0, 1e4, 1e9, 3e38, -3e38])
def test_huge_scores_are_one_hot_and_finite(top):
    x = torch.full((5, 300), -float("inf"), device="cuda")
    x[:, 1:] = top - (abs(top) + 100) * torch.rand(5, 299, device="cuda") * 0.3 - 100
    x[:, 7] = top
    p, _ = rows.forward(x, normalizers.get("softmax"))
    exact = torch.softmax(x.double(), -1)
    assert (p[:, 0] == 0).all() and ((p.double() - exact).abs() <= 1e-7).all()


LONG = [(name, torch.bfloat16, n) for name in ("softmax", "softmax1", "relu", "softpick") for n in (32768, 65536)]
LONG += [(name, torch.float32, n) for name in ("softmax", "relu", "softpick") for n in (8192, 16384, 32768, 65536)]
LONG += [(name, dtype, 50256) for name in ("softmax", "softpick") for dtype in (torch.float16, torch.float32)]
LONG += [(name, torch.float32, 33024) for name in ("softmax", "softpick")]
LONG += [(name, torch.bfloat16, 100_000) for name in ("softmax", "softpick", "relu")]


@pytest.mark.parametrize(("name", "dtype", "n"), LONG, ids=str)
def test_long_rows_of_any_size(name, dtype, n):
    """With nothing masked, then with every seventh score −inf, in every fifth row all others the lowest float."""
    choice = normalizers.get(name)
    largest = 1e30 if name == "relu" else 1e38  # its sum would overflow
    sizes = torch.tensor([1e-30, 1e-3, 1.0, 30.0, 1e11, largest], device="cuda").repeat_interleave(24)[:, None]
    most = torch.finfo(dtype).max
    s = (torch.randn(144, n, device="cuda").clamp(-3, 3) * sizes).clamp(-most, most).to(dtype)
    if name == "softpick" and dtype != torch.float32:
        s = s[48:].contiguous()  # exp(s) − 1 in float32
    for _ in range(2):
        exact = choice.reference(s.double(), None, choice.theta)
        _poisoned = torch.full_like(s, float("nan"))  # freed at once: what the kernel gets for its result
        del _poisoned
        p, _ = rows.forward(s, choice)
        error = (p.double() - exact).abs().amax(-1)
        assert (error <= 32 * torch.finfo(dtype).eps * exact.amax(-1)).all()
        s = s.clone()
        s[::5] = torch.finfo(dtype).min
        s[:, ::7] = -float("inf")


OVERFLOWS = ("relu", torch.float32)  # where one program does not hold the row


@pytest.mark.parametrize(("name", "dtype", "n"), [x for x in LONG if x[2] > 32768 and x[:2] != OVERFLOWS], ids=str)
def test_nan_rows_and_gradients_of_long_rows(name, dtype, n):
    """NaN rows are alone, an empty row is 0; gradients as the reference's; equal bits."""
    choice = normalizers.get(name)
    s, dp = torch.randn(2, 96, n, device="cuda").to(dtype)
    s[3, 5], s[4, n - 1], s[5], s[6, : n // 2] = float("nan"), float("inf"), -float("inf"), -float("inf")
    s[7, n // 3] = 40.0
    p, state = rows.forward(s, choice)
    saved = p if choice.slope_of_weight is not None else s
    ds = rows.backward(dp, saved, state, choice)
    again, again_state = rows.forward(s, choice)
    assert torch.equal(p.nan_to_num(-1), again.nan_to_num(-1)) and torch.equal(
        state.nan_to_num(-1), again_state.nan_to_num(-1)
    )
    assert torch.equal(ds.nan_to_num(-1), rows.backward(dp, saved, state, choice).nan_to_num(-1))
    assert p[3:5].isnan().all() and ds[3:5].isnan().all() and (p[5] == 0).all() and (ds[5] == 0).all()
    kept = [i for i in range(96) if i not in (3, 4)]
    wide = s[kept].double().requires_grad_()
    exact = choice.reference(wide, None, choice.theta)
    gradient = torch.autograd.grad(exact, wide, dp[kept].double())[0]
    eps, size = torch.finfo(dtype).eps, exact.detach().amax(-1)
    assert ((p[kept].double() - exact.detach()).abs().amax(-1) <= 4 * eps * size).all()
    slopes = gradient.abs().amax(-1) + size * dp[kept].double().abs().amax(-1)
    assert ((ds[kept].double() - gradient).abs().amax(-1) <= 8 * eps * slopes).all()


SOLVED = [(torch.float32, n) for n in (8208, 16400, 33024, 65536)]
SOLVED += [(torch.bfloat16, n) for n in (4112, 8192, 16384, 20000, 50256, 100_000)]


@pytest.mark.parametrize(("dtype", "n"), SOLVED, ids=str)
@pytest.mark.parametrize(("name", "alpha"), [("sparsemax", 2.0), ("entmax15", 1.5), ("entmax(alpha=1.25)", 1.25)])
def test_long_rows_of_threshold_maps(name, alpha, dtype, n):
    """Rows in which few or many weigh; of NaN, +inf, nothing and one number; their gradients; equal bits."""
    choice, eps = normalizers.get(name), torch.finfo(dtype).eps
    sizes = torch.tensor([1e-30, 1e-3, 1.0, 30.0, 1e11, 1e38], device="cuda").repeat_interleave(24)[:, None]
    s, dp = (torch.randn(2, 144, n, device="cuda").clamp(-3, 3)).to(dtype)
    s *= sizes.to(dtype)
    s[:, ::7] = -float("inf")
    s[50, 5], s[51, n - 1], s[52:54], s[53, n // 2] = float("nan"), float("inf"), -float("inf"), -2.0
    p, state = rows.forward(s, choice)
    again, again_state = rows.forward(s, choice)
    ds = rows.backward(dp, p if choice.slope_of_weight is not None else s, state, choice)
    assert torch.equal(p.nan_to_num(-1), again.nan_to_num(-1))
    assert torch.equal(state.nan_to_num(-1), again_state.nan_to_num(-1))
    assert p[50:52].isnan().all() and ds[50:52].isnan().all() and (p[52] == 0).all() and (ds[52] == 0).all()
    assert p[53, n // 2] == 1.0
    kept = [i for i in range(144) if i not in (50, 51, 52)]
    exact = choice.reference(s[kept].double(), None, choice.theta)
    same = choice.reference(s[kept].float(), None, choice.theta).to(dtype)
    bound = 2 * ((same.double() - exact).abs().amax(-1) + 8 * eps * exact.amax(-1))
    assert ((p[kept].double() - exact).abs().amax(-1) <= bound).all()
    if dtype == torch.float32:
        assert ((p[kept].double().sum(-1) - 1).abs() <= 2e-6).all()
    # from the same weights: near the edge of the support slopes are as steep as τ's last bit
    a, wide = torch.where(p[kept] > 0, p[kept].double() ** (2.0 - alpha), 0.0), dp[kept].double()
    gradient = a * (wide - (a * wide).sum(-1, keepdim=True) / a.sum(-1, keepdim=True))
    slopes = gradient.abs().amax(-1) + a.amax(-1) * wide.abs().amax(-1)
    assert ((ds[kept].double() - gradient).abs().amax(-1) <= (1e-5 + eps) * slopes).all()


@jit
def far(e, s, c):
    return tl.abs(s) * e


@jit
def far_slope(e, s, c):
    return (tl.abs(s) + tl.where(s > 0.0, 1.0, -1.0)) * e


def far_reference(scores, visible, theta):
    """|s|·exp(s) / Σ."""
    s = scores.where(scores > -float("inf"), 0.0)
    u = s.abs() * torch.exp(s - scores.detach().amax(-1, keepdim=True))
    return u / u.sum(-1, keepdim=True)


@pytest.mark.parametrize("n", [40000, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_long_rows_of_a_ratio_whose_slopes_do_not_end(dtype, n):
    """A map of one's own, 0·∞ at −inf: backward takes another score for it."""
    ratio = normalizers.Ratio(
        name="far", formula="", sums_to="1", sparse=False, paper="", reference=far_reference, numerator=far,
        numerator_slope=far_slope,
    )  # fmt: skip
    choice, eps = normalizers.Choice(ratio, None), torch.finfo(dtype).eps
    s, dp = torch.randn(2, 96, n, device="cuda").to(dtype)
    s[s == 0], s[:, ::7] = 1.0, -float("inf")  # |s| has no slope at 0
    p, state = rows.forward(s, choice, None, None, 0.5)
    ds = rows.backward(dp, s, state, choice, None, None, 0.5)
    wide = (0.5 * s.double()).requires_grad_()
    exact = far_reference(wide, None, None)
    gradient = 0.5 * torch.autograd.grad(exact, wide, dp.double())[0]
    size = exact.detach().amax(-1)
    assert ((p.double() - exact.detach()).abs().amax(-1) <= 8 * eps * size).all()
    slopes = gradient.abs().amax(-1) + 2 * size * dp.double().abs().amax(-1)
    assert ((ds.double() - gradient).abs().amax(-1) <= 16 * eps * slopes).all()


MANY = [("softmax1", torch.float32, 36864), ("softmax", torch.bfloat16, 40000), ("entmax15", torch.float32, 36864)]


@pytest.mark.parametrize(("name", "dtype", "n"), MANY, ids=str)
def test_many_long_rows(name, dtype, n):
    """So many that programs begin one after another, and some have a row more than others."""
    choice, s = normalizers.get(name), torch.randn(2117, n, device="cuda").to(dtype)
    p, state = rows.forward(s, choice)
    dp = torch.randn_like(s)
    ds = rows.backward(dp, p, state, choice)
    for part in range(0, len(s), 512):
        wide = s[part : part + 512].double().requires_grad_()
        exact = choice.reference(wide, None, choice.theta)
        gradient = torch.autograd.grad(exact, wide, dp[part : part + 512].double())[0]
        exact = exact.detach()
        if name != "entmax15":
            slopes = gradient.abs().amax(-1) + exact.amax(-1) * dp[part : part + 512].double().abs().amax(-1)
            error = (ds[part : part + 512].double() - gradient).abs().amax(-1)
            assert (error <= 8 * torch.finfo(dtype).eps * slopes).all()
        error = (p[part : part + 512].double() - exact).abs().amax(-1)
        assert (error <= (8 if name == "entmax15" else 2) * torch.finfo(dtype).eps * exact.amax(-1)).all()
