"""The CPU rows against the float64 reference: every normaliser, dtype and shape, and the edges of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from rows_data import DTYPES, FUSED, with_dtypes

pytest.importorskip("numba")

from row_oracle import INF, NAN, both_ways, oracle, scores

from regard import normalizers
from regard._backends.cpu import tasks as _threads
from regard._backends.cpu.jit import compile
from regard._backends.cpu.rows import launch as rows

pytestmark = pytest.mark.usefixtures("two_threads")
THRESHOLD = [name for name in normalizers.names() if normalizers.get(name).family == "threshold"]


def poisoned(monkeypatch) -> None:
    """Fills fresh memory with NaN, so that an entry that no kernel wrote shows."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def filled(*args, plain=plain, **options):
            x = plain(*args, **options)
            return x.fill_(NAN) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, filled)


def rounding(choice, s, p, dp, scale):
    """What one rounding of a weight, and of the two terms of a gradient, can amount to, in units of eps."""
    slopes = choice._tiles_slopes((s.double() * scale).numpy(), p.numpy(), choice.theta)[0]
    a, b, c = (torch.as_tensor(x) for x in slopes)
    gradient = scale * ((a.abs() + p) * dp.abs() + b.abs() * (c * dp.double()).abs().sum())
    more = 1.0
    if choice.name == "entmax":
        more = 8.0  # a power goes through a logarithm of that size
    if choice.name == "softpick":
        more = 1.0 + float(b.abs().sum())  # exp(s) − 1 cancels where scores are small
    return more * p.amax().item(), more * gradient.amax().item()


def assert_exact(s, choice, dp, p, ds, scale=1.0):
    """Every row within 2 × (the same-precision reference's error + rounding) of the float64 reference."""
    working = torch.float64 if s.dtype == torch.float64 else torch.float32
    for r in range(len(s)):
        one = s[r : r + 1], choice, dp[r : r + 1]
        exact = oracle(*one, scale=scale)
        peer = oracle(*one, scale=scale, dtype=working)
        units = rounding(choice, s[r : r + 1], exact[0], dp[r : r + 1], scale)
        factor = 8 if working == torch.float64 else 2  # the float64 reference rounds too
        for mine, truth, like, unit in zip((p[r : r + 1], ds[r : r + 1]), exact, peer, units, strict=True):
            bound = factor * ((like.to(s.dtype).double() - truth).abs().amax() + torch.finfo(s.dtype).eps * unit)
            assert (mine.double() - truth).abs().amax() <= bound


@pytest.mark.drawn(16)
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(FUSED))
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 64), (5, 100), (20, 257), (3, 5000)], ids=str)
def test_forward_and_backward_are_the_reference(name, dtype, shape, monkeypatch):
    poisoned(monkeypatch)
    choice = normalizers.get(name)
    s = scores(*shape, dtype)
    dp = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    p, ds, _ = both_ways(s, choice, dp)
    assert p.dtype == ds.dtype == dtype
    assert_exact(s, choice, dp, p, ds)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("name", "dtype"), with_dtypes(FUSED))
@pytest.mark.parametrize("n", [5, 64, 300])
def test_a_mask_of_any_strides_removes_entries(name, dtype, n, monkeypatch):
    poisoned(monkeypatch)
    choice, r = normalizers.get(name), 19
    s, dp = scores(r, n, dtype, 2), torch.randn(r, n, generator=torch.Generator().manual_seed(3)).to(dtype)
    generator = torch.Generator().manual_seed(4)
    masks = [
        torch.rand(r, n, generator=generator) < 0.6,
        (torch.rand(1, n, generator=generator) < 0.6).expand(r, n),
        (torch.rand(r, 1, generator=generator) < 0.6).expand(r, n),
        (torch.rand(n, r, generator=generator) < 0.6).T,
    ]
    for mask in masks:
        hidden = s.masked_fill(~mask, NAN), dp.masked_fill(~mask, NAN)  # cannot leak
        p, ds, _ = both_ways(hidden[0], choice, hidden[1], mask=mask, scale=0.7)
        assert (p[~mask] == 0).all() and (ds[~mask] == 0).all()
        for row in range(0, r, 3):
            seen = mask[row]
            if seen.any():
                one = s[row : row + 1, seen], choice, dp[row : row + 1, seen]
                assert_exact(*one, p[row : row + 1, seen], ds[row : row + 1, seen], scale=0.7)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("n", [6, 300])
def test_bad_rows_are_nan_and_alone(name, n):
    choice = normalizers.get(name)
    s = scores(40, n, torch.float32)
    good = rows.forward(s, choice)[0]
    bad = s.clone()
    bad[3, n // 2], bad[17, 0], bad[20], bad[25, 1:] = NAN, INF, -INF, -INF
    p, ds, state = both_ways(bad, choice, torch.ones_like(s))
    assert p[[3, 17]].isnan().all() and ds[[3, 17]].isnan().all()
    assert (p[20] == 0).all() and (ds[20] == 0).all() and (state[:, 20] == 0).all()
    assert (p[25, 1:] == 0).all() and p[25].isfinite().all()
    others = [i for i in range(40) if i not in (3, 17, 20, 25)]
    assert torch.equal(p[others], good[others]) and ds[others].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES[:3], pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1e-37, 1e-12, 1e-4, 0.3])
def test_softpick_of_small_scores_does_not_cancel(size, dtype):
    choice = normalizers.get("softpick")
    size = max(size, torch.finfo(dtype).tiny)
    s = (size * torch.randn(6, 300, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).to(dtype)
    dp = torch.randn(6, 300, generator=torch.Generator().manual_seed(4)).to(dtype)
    p, ds, _ = both_ways(s, choice, dp)
    exact, slope = oracle(s, choice, dp)
    bound = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8)
    assert (p.double() - exact).abs().amax() <= bound * exact.amax()
    fits = slope.abs().amax(-1) < torch.finfo(dtype).max / 4
    error = (ds.double() - slope).abs().amax(-1) / slope.abs().amax(-1)
    assert (error[fits] <= 4 * bound).all() and (fits.all() or size < 1e-4)


@pytest.mark.parametrize("top", [0.33, 0.36, 2.0, 30.0])
def test_softpick_keeps_the_digits_of_small_scores_beside_a_large_one(top):
    s = 1e-3 * torch.randn(20, 300, generator=torch.Generator().manual_seed(5))
    s[:, 7] = top
    p = rows.forward(s, normalizers.get("softpick"))[0]
    exact = normalizers.get("softpick").reference(s.double(), None, None)
    torch.testing.assert_close(p.double(), exact, rtol=1e-6 * max(1.0, top), atol=0.0)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)], ids=str)
def test_empty(name, shape):
    p, ds, state = both_ways(torch.empty(shape), normalizers.get(name), torch.empty(shape))
    assert p.shape == ds.shape == shape and state.shape == (2, shape[0]) and (state == 0).all()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("n", [37, 1000])
def test_ties_are_equal_to_the_bit(name, n):
    s = torch.randn(5, n, generator=torch.Generator().manual_seed(5))
    places = torch.randperm(n, generator=torch.Generator().manual_seed(6))[: n // 5]
    s[:, places] = 3.0  # near the maximum, so that it has weight in every map
    p = rows.forward(s, normalizers.get(name), scale=0.3)[0][:, places]
    assert (p == p[:, :1]).all() and (p > 0).any()


@pytest.mark.parametrize("name", THRESHOLD)
@pytest.mark.parametrize("size", [1e-3, 1e-1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("n", [1, 64, 1000, 10_000])
def test_threshold_rows_sum_to_one(name, size, n):
    s = size * torch.randn(4, n, generator=torch.Generator().manual_seed(7))
    for scale in (1.0, 0.37):
        p = rows.forward(s, normalizers.get(name), scale=scale)[0]
        assert (p.double().sum(-1) - 1).abs().max() <= 2e-6
    exact = oracle(s, normalizers.get(name), s)[0]
    assert (p.isfinite()).all() and ((exact > 1e-6) <= (rows.forward(s, normalizers.get(name))[0] > 0)).all()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("n", [70_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_columns(name, n):
    choice = normalizers.get(name)
    s = torch.randn(2, n, generator=torch.Generator().manual_seed(8))
    s[1] *= 1e-3
    p, _ = rows.forward(s, choice)
    exact = choice.reference(s.double(), None, choice.theta)
    peer = choice.reference(s, None, choice.theta)
    for r in range(2):
        unit = 1.2e-7 * rounding(choice, s[r : r + 1], exact[r : r + 1], s[r : r + 1], 1.0)[0]
        assert (p[r] - exact[r]).abs().max() <= 2 * ((peer[r] - exact[r]).abs().max() + unit)
    if name in THRESHOLD:
        assert (p.double().sum(-1) - 1).abs().max() <= 2e-6


@pytest.mark.parametrize("n", [64, 1024, 32768])
@pytest.mark.parametrize("size", [1e-2, 1.0, 10.0])
def test_softmax_is_as_exact_as_torch(n, size):
    s = size * torch.randn(2**20 // n, n, generator=torch.Generator().manual_seed(9))
    exact = torch.softmax(s.double(), -1)
    ours = (rows.forward(s, normalizers.get("softmax"))[0] - exact).abs()
    theirs = (torch.softmax(s, -1) - exact).abs()
    assert ours.mean() <= theirs.mean() and ours.max() <= theirs.max()


def test_alpha_per_row():
    choice = normalizers.get("entmax")
    s, dp = scores(6, 200, torch.float64, 10), scores(6, 200, torch.float64, 11)
    alpha = torch.tensor([1.05, 1.25, 1.5, 1.75, 1.9, 2.0], dtype=torch.float64)
    p, ds, _ = both_ways(s, choice, dp, theta=alpha)
    exact = oracle(s, choice, dp, theta=alpha)
    torch.testing.assert_close(p, exact[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ds, exact[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(p[5], rows.forward(s[5:], normalizers.get("sparsemax"))[0][0], rtol=0, atol=1e-12)


def test_many_threads_at_once_and_splits_of_any_size():
    choice = normalizers.get("entmax15")
    s = [scores(700, 100, torch.float32, seed) for seed in range(8)]
    alone = [rows.forward(x, choice)[0] for x in s]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: rows.forward(x, choice)[0], s * 4))
    assert all(torch.equal(a, b) for a, b in zip(alone * 4, together, strict=True))
    assert torch.equal(torch.cat([rows.forward(part, choice)[0] for part in s[0].split(37)]), alone[0])


def test_run_row_ranges_covers_every_row_once_and_passes_errors_on():
    seen, lock = torch.zeros(1001, dtype=torch.int64), threading.Lock()

    def count(first, last):
        with lock:
            seen[first:last] += 1

    _threads.run_row_ranges(count, 1001, cost=1e6)
    assert (seen == 1).all()
    with pytest.raises(ZeroDivisionError):
        _threads.run_row_ranges(lambda first, last: 1 // 0, 1001, cost=1e6)
    _threads.run_row_ranges(
        lambda first, last: _threads.run_row_ranges(count, 1001, cost=1e6), 2, cost=1e6
    )  # from inside
    assert (seen == 3).all()


SECOND_PROCESS = """
    import sys
    import torch
    from regard import normalizers
    from regard._backends.cpu.rows import launch as rows
    for name in [*sys.argv[1:], "softmax"]:
        choice = normalizers.get(name)
        p = rows.forward(torch.zeros(2, 4), choice)[0]
    assert (p == 0.25).all()
    print(sum(rows._row_kernel(choice.normalizer, "forward", torch.float32).stats.cache_hits.values()))
"""


def test_a_second_process_loads_from_disk(tmp_path):
    """Also without the kernel that its functions were first compiled for."""
    command = [sys.executable, "-c", textwrap.dedent(SECOND_PROCESS)]
    hits = []
    for names in (["softmax1"], []):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        for name in ("NUMBA_CACHE_DIR", "REGARD_CACHE"):
            environment.pop(name, None)
        given = dict(env=environment, check=True, capture_output=True, text=True, timeout=240)
        run = subprocess.run([*command, *names], **given)
        hits.append(int(run.stdout))
    assert hits == [0, 1]
    folder = tmp_path / "regard"
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.glob("*.py"))) == 2


def test_kernels_share_the_functions_that_they_have_in_common():
    kernels = [
        rows._row_kernel(normalizers.get(name).normalizer, "forward", torch.float32) for name in ("softmax1", "relu")
    ]
    one, other = (vars(sys.modules[kernel.py_func.__module__]) for kernel in kernels)
    shared = [name for name in one if name in other and name in compile._shared]
    assert shared and all(one[name] is other[name] is compile._shared[name] for name in shared)
    own = [name for name in one if name in compile._shared and name not in other]
    assert own  # a tile function of one normaliser alone


def test_a_temporary_folder_takes_the_place_of_an_unwritable_one(tmp_path, monkeypatch):
    (tmp_path / "regard").write_text("a file where the folder should be")
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = compile._store_source("any", "content")
    assert path.parent == compile._temporary_folder() and path.read_text(encoding="utf-8") == "content"


@pytest.mark.slow  # the test above has the folder
def test_an_unwritable_cache_folder_is_no_obstacle(tmp_path):
    (tmp_path / "regard").write_text("a file where the folder should be")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(SECOND_PROCESS)], env=environment, check=True, timeout=240)


def test_regard_cache_names_the_folder_and_an_unusable_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kernels"))
    assert compile.cache_folder() == tmp_path / "kernels"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"REGARD_CACHE=.*file cannot keep compiled kernels: .*; name another"):
        compile._store_source("any", "content")


@pytest.mark.slow
def test_two_processes_compile_into_one_empty_folder(tmp_path):
    environment = {**os.environ, "REGARD_CACHE": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", textwrap.dedent(SECOND_PROCESS)]
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=240)
    assert run.stdout.strip() == "1"  # what the two left is whole: a third loads it
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".py"]


def test_without_numba_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match="pip install numba"):
        compile.require_numba()


def test_primitives_are_accurate_to_the_last_digits():
    from numba import njit

    from regard._backends.cpu.jit import primitives as prim

    @njit
    def evaluate(x, small, out):
        for i in range(x.size):
            out[0, i], out[1, i] = prim.log(x[i]), prim.log2(x[i])
            out[2, i], out[3, i] = prim.exp(small[i]), prim.exp2(small[i])
            out[4, i] = prim.growth(small[i] / small.dtype.type(300.0))

    x, small = np.geomspace(1e-37, 1e37, 999), np.linspace(-80.0, 80.0, 999)
    out = np.empty((5, 999), np.float32)
    x, small = x.astype(np.float32), small.astype(np.float32)
    evaluate(x, small, out)
    wide, tiny = small.astype(np.float64), (small / np.float32(300.0)).astype(np.float64)
    right = np.log(x.astype(np.float64)), np.log2(x.astype(np.float64)), np.exp(wide), np.exp2(wide), np.expm1(tiny)
    for ours, theirs in zip(out, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4e-7, atol=1e-7 if abs(theirs[499]) < 1 else 0.0)


@pytest.mark.parametrize(
    ("name", "gain", "power"), [("sparsemax", 1.0, 1.0), ("entmax15", 0.5, 2.0), ("entmax", 0.5, 2.0)]
)
@pytest.mark.parametrize("n", [9, 700])
def test_the_state_of_a_threshold_map_holds_its_threshold(name, gain, power, n):
    s = scores(9, n, torch.float64)
    p, state = rows.forward(s, normalizers.get(name))
    torch.testing.assert_close((gain * s - state[0][:, None]).clamp_min(0.0) ** power, p, rtol=1e-9, atol=1e-12)
