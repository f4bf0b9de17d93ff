"""The Triton rows against the float64 reference: interpreted on small odd shapes here, real ones on a GPU."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import normalizers

pytest.importorskip("triton")

from row_plans import force_cut
from rows_data import FUSED, ONE_OF_EACH
from rows_data import rows as kinds_of_rows

from regard._backends.gpu import bundle
from regard._backends.gpu.rows import exact, ratio, threshold
from regard._backends.gpu.rows import launch as rows
from regard._backends.gpu.rows.plan import Cut

ROOT = Path(normalizers.__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
CHOICES = [*FUSED, "entmax(alpha=1.25)", "sigmoid(bias=-2)"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow, inside the interpreter

CUTS = {  # a row in one program; several rows in one; a row shared by programs
    "whole": Cut(64, 1),
    "several": Cut(64, 1, rows=4),
    "shared": Cut(16, 1, parts=3, meets=not INTERPRETED),
    "launched": Cut(16, 1, parts=3),
}
AGAIN = {"whole": Cut(64, 1, again=True), "launched": Cut(16, 1, parts=3, again=True)}


@pytest.fixture(params=sorted(CUTS))
def cut(request, monkeypatch):
    """Every way to cut a row of 37 columns."""
    if request.param == "shared" and INTERPRETED:
        pytest.skip("interpreted programs run one after another: they cannot wait for one another")
    force_cut(monkeypatch, CUTS[request.param])
    return request.param


def _both(choice, s, dp, theta=None, mask=None, scale=1.0):
    p, state = rows.forward(s, choice, theta, mask, scale)
    saved = p if choice.slope_of_weight is not None else s
    return p, state, rows.backward(dp, saved, state, choice, theta, mask, scale)


def _reference(choice, s, dp, theta, mask, scale, dtype):
    s = s.to(dtype).requires_grad_()
    parameter = choice.theta if theta is None else theta.to(dtype)[:, None]
    p = choice.reference(s * scale, mask, parameter)
    return p.detach(), torch.autograd.grad(p, s, dp.to(dtype))[0]


def _compare(choice, s, dp, theta=None, mask=None, scale=1.0):
    """Within 2 × (the same-precision reference's error + rounding) of float64, weights and gradient."""
    p, state, ds = _both(choice, s, dp, theta, mask, scale)
    exact, gradient = _reference(choice, s, dp, theta, mask, scale, torch.float64)
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    same, same_gradient = _reference(choice, s, dp, theta, mask, scale, wide)
    eps = torch.finfo(s.dtype).eps

    def error(x, truth):
        return (x.double() - truth).abs().amax(-1)

    size = exact.abs().amax(-1)
    assert p.dtype == s.dtype and ds.dtype == s.dtype and state.dtype == wide
    rounded = same.to(s.dtype)
    assert (error(p, exact) <= 2 * (error(rounded, exact) + 4 * eps * size)).all()
    slopes = gradient.abs().amax(-1) + scale * size * dp.double().abs().amax(-1)
    assert (error(ds, gradient) <= 2 * (error(same_gradient.to(s.dtype), gradient) + 8 * eps * slopes)).all()
    return p, state, ds


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", CHOICES)
def test_weights_and_gradient_equal_the_reference(name, cut):
    choice = normalizers.get(name)
    s = kinds_of_rows(37, dtype=torch.float32).to(DEVICE)
    if INTERPRETED and cut == "launched":  # slow: the other cuts cover every kind
        s = s[[1, 3, 4, 8, 11]]
    elif name == "softpick":
        s = s[[0, 1, 3, 4, 6, 7, 8, 11]]  # exp(s) − exp(0) cancels on a flat row, and the record states it so
    dp = torch.randn(s.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    p, _, _ = _compare(choice, s, dp)
    if choice.sums_to == "1":
        assert (p.double().sum(-1) - 1).abs().max() <= 2e-6


@pytest.mark.drawn(4)
@pytest.mark.parametrize("cut", AGAIN)
@pytest.mark.parametrize("name", ["softmax", "softpick", "sigmoid", "entmax15"])
def test_rows_read_again_or_written_in_steps(name, cut, monkeypatch):
    force_cut(monkeypatch, AGAIN[cut])
    choice = normalizers.get(name)
    s, dp = torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    _compare(choice, s, dp)
    s = s.clone()
    s[1, 5], s[2, 36], s[3] = math.nan, math.inf, -math.inf
    p, state, ds = _both(choice, s, dp)
    assert p[1:3].isnan().all() and ds[1:3].isnan().all() and p[[0, 4]].isfinite().all()
    assert (p[3] == 0).all() and (ds[3] == 0).all() and (state[:, 3] == 0).all()


MASKED = [
    pytest.param(name, dtype, marks=pytest.mark.slow if dtype.itemsize == 2 and name not in ONE_OF_EACH else ())
    for dtype in (torch.float64, torch.bfloat16, torch.float16)
    for name in CHOICES
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("name", "dtype"), MASKED)
def test_dtypes_with_mask_and_scale(name, dtype, monkeypatch):
    choice = normalizers.get(name)
    g = torch.Generator().manual_seed(2)
    s = (torch.randn(5, 37, generator=g, dtype=torch.float64) * 3).to(dtype).to(DEVICE)
    dp = torch.randn(5, 37, generator=g, dtype=torch.float64).to(dtype).to(DEVICE)
    mask = (torch.rand(5, 1, generator=g) < 2).expand(5, 37) & (torch.rand(1, 37, generator=g) < 0.7)
    mask[3] = False
    cuts = {torch.float64: ("several", "launched"), torch.bfloat16: ("launched",), torch.float16: ("several",)}
    for cut in cuts[dtype]:
        with monkeypatch.context() as patch:
            force_cut(patch, CUTS[cut])
            p, state, ds = _compare(choice, s, dp, mask=mask.to(DEVICE), scale=0.3)
        assert (p[~mask] == 0).all() and (ds[~mask] == 0).all() and (state[:, 3] == 0).all()


def test_mask_of_any_strides(cut):
    choice = normalizers.get("softmax")
    s, dp = torch.randn(2, 4, 37).to(DEVICE)
    one = torch.rand(37, device=DEVICE) < 0.5
    two = torch.rand(74, 4, device=DEVICE).t()[:, ::2] < 0.5
    for mask in (one.expand(4, 37), two):
        _compare(choice, s, dp, mask=mask)


def test_parameter_per_row(cut):
    theta = torch.tensor([1.05, 1.3, 1.5, 2.0], device=DEVICE)
    s, dp = torch.randn(2, 4, 37).to(DEVICE)
    _compare(normalizers.get("entmax"), s, dp, theta=theta)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", FUSED)
def test_nan_and_infinity_stay_in_their_row(name, cut):
    choice = normalizers.get(name)
    s = torch.randn(7, 37, device=DEVICE)
    s[1, 5], s[2, 36], s[3, ::2], s[4], s[5] = math.nan, math.inf, -math.inf, -math.inf, 1.25
    p, state, ds = _both(choice, s, torch.randn(7, 37, device=DEVICE))
    assert p[1].isnan().all() and p[2].isnan().all() and ds[1].isnan().all() and ds[2].isnan().all()
    rest = [0, 3, 4, 5, 6]
    assert p[rest].isfinite().all() and ds[rest].isfinite().all()
    assert (p[3, ::2] == 0).all() and (p[4] == 0).all() and (ds[4] == 0).all() and (state[:, 4] == 0).all()
    assert (p[5] == p[5, 0]).all()  # ties, to the bit


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax(alpha=1.25)"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_threshold_rows_sum_to_one_and_have_exact_zeros(name, size, cut):
    choice = normalizers.get(name)
    s = (torch.randn(3, 37, generator=torch.Generator().manual_seed(3)) * size).to(DEVICE)
    p, _ = rows.forward(s, choice)
    exact = choice.reference(s.double(), None, choice.theta)
    assert (p.double().sum(-1) - 1).abs().max() <= 2e-6
    assert (p[exact == 0] == 0).all() and (p[exact > 1e-6] > 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (5, 1), (1, 2), (3, 129), (2, 700)])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "entmax15"])
def test_shapes_with_the_real_plan(name, shape):
    s, dp = torch.randn(2, *shape).to(DEVICE)
    choice = normalizers.get(name)
    if s.numel():
        _compare(choice, s, dp)
    else:
        p, state, ds = _both(choice, s, dp)
        assert p.shape == ds.shape == shape and state.shape == (2, shape[0]) and (state == 0).all()


def test_long_rows_with_the_real_plan():
    """Longer than a program holds: published and finished here; met on a GPU."""
    _compare(normalizers.get("softmax"), *torch.randn(2, 1, 33001).to(DEVICE))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(1, 1_000_000), (3, 200_001), (300, 65536), (70_000, 33)])
def test_real_shapes(name, shape):
    sizes = torch.tensor([1.0, 0.1, 10.0], device=DEVICE).repeat(shape[0])[: shape[0], None]
    s = torch.randn(shape, device=DEVICE) * sizes
    p, _, _ = _compare(normalizers.get(name), s, torch.randn(shape, device=DEVICE))
    if normalizers.get(name).family == "threshold":
        assert (p.double().sum(-1) - 1).abs().max() <= 2e-6


@pytest.mark.parametrize("name", ["softmax", "relu", "sigmoid", "sparsemax"])
def test_every_kernel_is_launched(name, monkeypatch):
    """The cut "launched" reaches each kernel and stage."""
    force_cut(monkeypatch, CUTS["launched"])
    launched = []
    for module in (exact, ratio, threshold):
        for kernel in vars(module).copy():
            if kernel.startswith(("forward_", "backward_", "solve_rows")):
                monkeypatch.setattr(module, kernel, _Spy(getattr(module, kernel), kernel, launched))
    _both(normalizers.get(name), *torch.randn(2, 2, 37).to(DEVICE))
    stages = {
        "softmax": ["forward_exact publish", "forward_exact finish", "backward_exact publish", "backward_exact finish"],
        "relu": ["forward_ratio publish", "forward_ratio finish", "backward_ratio publish", "backward_ratio finish"],
        "sigmoid": ["forward_ratio publish", "forward_ratio finish", "backward_ratio finish"],
        "sparsemax": ["forward_threshold publish", "solve_rows", "forward_threshold finish",
                      "backward_threshold publish", "backward_threshold finish"],
    }  # fmt: skip
    assert launched == stages[name]


class _Spy:
    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched, self.arg_names = kernel, name, launched, kernel.arg_names

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            stage = args[self.arg_names.index("STAGE")] if "STAGE" in self.arg_names else ""
            self.launched.append(f"{self.name} {stage}".strip())
            return self.kernel[grid](*args, **kwargs)

        return launch


NINTH = """
import torch
from regard.normalizers import Ratio, jit, tl

@jit
def squared(e, s, c):
    return tl.maximum(s, 0.0) * tl.maximum(s, 0.0)

@jit
def slope(e, s, c):
    return 2.0 * tl.maximum(s, 0.0)

def reference(scores, visible, theta):
    u = torch.relu(scores if visible is None else scores.masked_fill(~visible, 0.0)) ** 2
    z = u.sum(-1, keepdim=True)
    return u / z.masked_fill(z == 0, 1.0)

normalizer = Ratio(name="squared_relu", formula="max(s, 0)² / Σ", sums_to="1 or 0", sparse=True, paper="none",
                   reference=reference, numerator=squared, numerator_slope=slope, shift="none")
"""


@pytest.fixture
def ninth(tmp_path):
    (tmp_path / "squared_relu.py").write_text(NINTH)
    normalizers.discover(tmp_path)
    yield normalizers.get("squared_relu")
    normalizers._members.pop("squared_relu", None)


def test_a_ninth_normalizer_runs_from_its_file(ninth, cut):
    _compare(ninth, *torch.randn(2, 4, 37).to(DEVICE))


COMPILE = """
import linecache, pathlib, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from regard import normalizers
from regard._backends.gpu import bundle

@triton.jit
def kernel(x, F: tl.constexpr):
    s = tl.load(x)
    tl.store(x, F.numerator(s, s, s))

folder = pathlib.Path(sys.argv[1])
for text in sys.argv[2:]:
    (folder / "squared_relu.py").write_text(text)
    linecache.clearcache()
    normalizers._members.pop("squared_relu", None)
    normalizers.discover(folder)
    F = bundle.of(normalizers.get("squared_relu"))
    source = ASTSource(kernel, signature={"x": "*fp32", "F": "constexpr"}, constexprs={"F": F})
    options = {"enable_fp_fusion": True}
    print(F)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    print("====")
"""


def test_editing_a_tile_function_reaches_the_compiled_kernel(tmp_path):
    """One disk cache, one file, edited: the second compilation must not answer with the first one's code."""
    text = NINTH.replace("return tl.maximum(s, 0.0) * tl.maximum(s, 0.0)", "return once(s) * once(s)")
    text = text.replace("@jit\ndef squared", "@jit\ndef once(s):\n    return tl.maximum(s, 0.0)\n\n@jit\ndef squared")
    edited = text.replace("tl.maximum(s, 0.0)\n\n@jit", "tl.maximum(s, 0.0) + 0.0 * s\n\n@jit")  # a callee
    assert edited != text != NINTH
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    (tmp_path / "compile.py").write_text(COMPILE)
    (tmp_path / "normalizers").mkdir()
    command = [sys.executable, str(tmp_path / "compile.py"), str(tmp_path / "normalizers"), text, text, edited]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split("====\n")
    first, again, other = ((printed[k].splitlines()[0], printed[k].splitlines()[1:]) for k in range(3))
    assert again == first
    assert other[0] != first[0], "the bundle's key"
    assert other[1] != first[1], "the code"


def test_a_bundle_is_hashable_and_stable():
    softmax = bundle.of(normalizers.get("softmax"))
    assert softmax is bundle.of(normalizers.get("softmax").normalizer)
    assert hash(softmax) == hash(bundle._bundle(normalizers.get("softmax").normalizer))
    assert repr(softmax) == f"Bundle(ratio, {softmax.cache_key})"
    assert softmax.cache_key != bundle.of(normalizers.get("softmax1")).cache_key
