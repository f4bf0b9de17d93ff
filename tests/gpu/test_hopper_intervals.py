"""Intervals, windows, soft caps and biases per key in the Hopper kernels, against dense float64 on the GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_data import FLOOR, make
from hopper_data import poison

from regard import statistics
from regard._backends.gpu.attention import launch as attention
from regard._backends.gpu.attention import registry
from regard._backends.gpu.attention.backward import stored_ds
from regard._backends.gpu.attention.hopper import launch as hopper
from regard._backends.gpu.attention.hopper import spans
from regard._call.problem import Upstream

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
ALL = statistics.NAMES
MANY = dict(b=2, h=8, g=4, m=1100, n=1100, d=128, e=128)  # more blocks than multiprocessors: the persistent kernel
FEW = dict(b=1, h=4, g=2, m=780, n=1001, d=128, e=128)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)
    monkeypatch.setattr(spans, "torch", attention.torch)


def draw_documents(p, seed):
    """Causal documents of random lengths, some of one token, the same in every head."""
    b, h, m, n = *p.q.shape[:3], p.k.shape[2]
    cuts = torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < 0.006
    cuts[:, 40:42] = True
    i = torch.arange(n).expand(b, n)
    start = torch.where(cuts, i, 0).cummax(1).values
    return torch.stack([start[:, :m], i[:, :m] + 1, i[:, :m]]).int().cuda()[:, :, None].expand(3, b, h, m)


def draw_any(p, seed):
    """Any intervals in each head, some empty, and positions anywhere."""
    shape, n, generator = p.q.shape[:3], p.k.shape[2], torch.Generator().manual_seed(seed)
    first = torch.randint(0, n, shape, generator=generator)
    last = (first + torch.randint(-40, 600, shape, generator=generator)).clamp(max=n)
    return torch.stack([first, last, torch.randint(0, n, shape, generator=generator)]).int().cuda()


def draw_padding(p, seed):
    """Keys 0 … n less a few on both sides, as left and right padding leaves them; positions beyond the keys too."""
    b, h, m, n = *p.q.shape[:3], p.k.shape[2]
    left, right = torch.randint(0, 300, (2, b, 1), generator=torch.Generator().manual_seed(seed))
    rows = torch.zeros(b, m, dtype=torch.int64)
    position = torch.arange(m) + n - m + 30
    return torch.stack([rows + left, rows + n - right, rows + position]).int().cuda()[:, :, None].expand(3, b, h, m)


DRAW = dict(documents=draw_documents, any=draw_any, padding=draw_padding)


def compute_dense(p, q, k, v, bias):
    """(o, statistics) in float64, straight from the definition; q, k, v and bias may require gradients."""
    group, m, n = p.q.shape[1] // p.k.shape[1], p.q.shape[2], p.k.shape[2]
    i, j = torch.arange(m, device="cuda")[:, None], torch.arange(n, device="cuda")
    (left, right), position = p.reach, i
    visible = torch.ones(*p.q.shape[:3], n, dtype=torch.bool, device="cuda")
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    if p.key_lengths is not None:
        visible &= j < p.key_lengths[:, None, None, None]
    if p.interval is not None:
        visible &= (j >= p.interval[0][..., None]) & (j < p.interval[1][..., None])
        position = p.interval[2][..., None]
    if bias is not None:
        visible = visible & (bias > -math.inf)
    s = p.scale * (q @ k.repeat_interleave(group, 1).mT)
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    if bias is not None:
        s = s + bias.masked_fill(bias == -math.inf, 0.0)
    if p.temperature is not None:
        s = s / p.temperature.double()[..., None]
    s = s.masked_fill(~visible, 0.0)
    weights = p.choice.reference(s, visible, p.choice.theta)
    found = dict(statistics.of_scores(s.detach(), visible, p.choice, names=p.stats)) if p.stats else {}
    if "distance" in found:
        mass = weights.detach().sum(-1)
        far = (weights.detach() * (position - j).abs()).sum(-1)
        found["distance"] = torch.where(mass > 0, far / mass.clamp_min(1e-300), 0.0)
    return weights @ v.repeat_interleave(group, 1), found


def leaves_of(p):
    bias = None if p.bias is None else p.bias[:, :, :1].detach().double().requires_grad_()
    return *(x.detach().double().requires_grad_() for x in (p.q, p.k, p.v)), bias


def check_forward(p, floor=FLOOR):
    assert registry.choose(p).name == "hopper", registry.describe(p)
    answer = attention.forward(p)
    o, found = (x.detach() if isinstance(x, torch.Tensor) else x for x in compute_dense(p, *leaves_of(p)))
    error = float((answer.o.double() - o).norm() / o.norm())
    assert error <= 1.2e-2, f"o is off by {error:.2e}"
    wrong = {}
    for name, ours in zip(p.stats, answer.stats.double(), strict=True):
        truth = found[name]
        bare = ~torch.isfinite(truth)
        far = ((ours - truth).abs() / (truth.abs() + floor[name]))[~bare].max()
        if not (torch.equal(ours[bare], truth[bare]) and far <= 6e-4):
            wrong[name] = float(far)
    assert not wrong, wrong
    return answer


def check_backward(p, kernel):
    from regard._backends.gpu.attention.backward import dkv

    do = torch.randn(p.q.shape, generator=torch.Generator().manual_seed(5)).to(p.q.dtype).cuda()
    leaves = leaves_of(p)
    o, _ = compute_dense(p, *leaves)
    wanted = [x for x in leaves if x is not None]
    truths = torch.autograd.grad((o * do.double()).sum(), wanted)
    chosen, taken = [], []
    choose, run = registry.choose_backward, dkv._run_hopper
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "choose_backward", lambda call: (chosen.append(choose(call).name), choose(call))[1])
        patch.setattr(dkv, "_run_hopper", lambda *a: (taken.append(1), run(*a))[1])
        ours = attention.backward(p, attention.forward(p), Upstream(do, bias=p.bias is not None))
    assert chosen == [kernel] and taken, (chosen, taken)
    wrong = {}
    for name, truth in zip("qkv", truths, strict=False):
        error = float((getattr(ours, name).double() - truth).norm() / truth.norm())
        if not error <= 2.4e-2:
            wrong[name] = error
    if p.bias is not None:
        error = float((ours.bias.double() - truths[3]).norm() / truths[3].norm())
        if not error <= 2.4e-2:
            wrong["bias"] = error
    assert not wrong, wrong


FORWARD = [
    ("documents-plain", "documents", dict(stats=(), **MANY)),
    ("documents-statistics", "documents", dict(stats=ALL, **MANY)),
    ("padding-statistics", "padding", dict(stats=ALL, **MANY)),
    ("any-statistics", "any", dict(stats=ALL, **MANY)),
    ("any-plain", "any", dict(stats=(), **MANY)),
    ("any-few-blocks", "any", dict(stats=(), **FEW)),
    ("any-causal-lengths", "any", dict(stats=(), causal=True, lengths=True, **FEW)),
    ("window-plain", None, dict(stats=(), left=200, right=130, **MANY)),
    ("window-statistics", None, dict(stats=ALL, left=200, right=130, **MANY)),
    ("window-ahead", None, dict(stats=ALL, left=-10, right=300, **MANY)),
    ("documents-64-statistics", "documents", dict(stats=ALL, **MANY | dict(d=64, e=64))),
    ("any-80-statistics", "any", dict(stats=ALL, **FEW | dict(d=80, e=80))),
    ("any-256-plain", "any", dict(stats=(), **FEW | dict(d=256, e=256))),
    ("documents-cap", "documents", dict(stats=(), softcap=20.0, **MANY)),
    ("any-sigmoid", "any", dict(stats=(), name="sigmoid", **MANY)),
    ("any-float16", "any", dict(stats=(), dtype=torch.float16, **MANY)),
]


@pytest.mark.parametrize(("draw", "options"), [case[1:] for case in FORWARD], ids=[case[0] for case in FORWARD])
def test_forward(draw, options):
    p = make_problem(draw, 1, options)
    assert hopper.make_config(p).INTERVAL
    check_forward(p)


def make_problem(draw, seed, options):
    p = make(seed, options.get("name", "softmax"), device="cuda", **dict(dtype=torch.bfloat16) | without_name(options))
    return p if draw is None else replace(p, interval=DRAW[draw](p, seed))


def without_name(options):
    return {key: value for key, value in options.items() if key != "name"}


def test_hidden_keys_may_be_nan():
    """Keys that no query of a block sees: beyond every interval, and between the documents of other blocks."""
    p = make_problem("padding", 2, dict(stats=ALL, **MANY))
    clean = attention.forward(p)
    for entry in range(2):
        lo, hi = p.interval[:2, entry, 0, 0].tolist()
        for x in (p.k, p.v):
            x[entry, :, :lo] = math.nan
            x[entry, :, hi:] = math.nan
    dirty = attention.forward(p)
    assert all(torch.equal(getattr(clean, x), getattr(dirty, x)) for x in ("o", "shift", "z", "stats"))


BACKWARD = [
    ("documents", "documents", "stored ds", dict(**MANY)),
    ("any", "any", "stored ds", dict(**MANY)),
    ("any-short", "any", "two sweeps", dict(**FEW)),
    ("window-causal", None, "stored ds", dict(causal=True, left=300, **MANY)),
    ("window", None, "stored ds", dict(left=200, right=130, **MANY)),
    ("window-of-many", None, "stored ds", dict(causal=True, left=700, **MANY | dict(m=2900, n=2900))),
    ("window-lengths", None, "stored ds", dict(left=400, right=300, lengths=True, **MANY | dict(m=2100, n=2100))),
    ("documents-band", "documents", "stored ds", dict(left=1024, right=0, **MANY | dict(m=2900, n=2900))),
    ("any-band", "any", "stored ds", dict(left=512, right=640, **MANY | dict(m=2100, n=2100))),
    ("padding", "padding", "stored ds", dict(**MANY)),
    ("lengths", None, "stored ds", dict(lengths=True, **MANY)),
    ("lengths-causal-softmax1", None, "stored ds", dict(lengths=True, causal=True, name="softmax1", **MANY)),
    ("cap", None, "stored ds", dict(softcap=3.0, causal=True, **MANY)),
    ("cap-full", None, "stored ds", dict(softcap=3.0, **MANY)),
    ("cap-documents", "documents", "stored ds", dict(softcap=3.0, **MANY)),
]


@pytest.mark.parametrize(("draw", "kernel", "options"), [x[1:] for x in BACKWARD], ids=[x[0] for x in BACKWARD])
def test_backward(draw, kernel, options, monkeypatch):
    monkeypatch.setattr(stored_ds, "torch", attention.torch)  # poisoned: what is read without being stored shows
    check_backward(make_problem(draw, 3, dict(stats=(), **options)), kernel)


def add_key_bias(p, hidden=0.0, seed=4):
    """p with a bias of each head's keys of slope 0.02·j and noise; the share `hidden` of the keys at −inf."""
    (b, h, m), n, generator = p.q.shape[:3], p.k.shape[2], torch.Generator().manual_seed(seed)
    slope = 0.02 * torch.rand(h, 1, 1, generator=generator)
    bias = slope * torch.arange(n) + torch.randn(b, h, 1, n, generator=generator)
    bias = bias.masked_fill(torch.rand(b, h, 1, n, generator=generator) < hidden, -math.inf)
    return replace(p, bias=bias.cuda().expand(b, h, m, n))


KEY_BIAS = [
    ("causal-plain", None, 0.0, dict(stats=(), causal=True, **MANY)),
    ("full-few-blocks", None, 0.0, dict(stats=(), **FEW)),
    ("some-hidden-plain", None, 0.3, dict(stats=(), causal=True, **MANY)),
]


@pytest.mark.parametrize(("draw", "hidden", "options"), [x[1:] for x in KEY_BIAS], ids=[x[0] for x in KEY_BIAS])
def test_forward_of_a_key_bias(draw, hidden, options):
    p = add_key_bias(make_problem(draw, 6, options), hidden)
    assert hopper.make_config(p).KEY_BIAS
    check_forward(p)


@pytest.mark.parametrize("hidden", [0.0, 0.3], ids=["shown", "some-hidden"])
@pytest.mark.parametrize(
    "options",
    [dict(causal=True), dict(), dict(lengths=True), dict(causal=True, left=300)],
    ids=["causal", "full", "lengths", "window"],
)
def test_backward_of_a_key_bias(options, hidden, monkeypatch):
    monkeypatch.setattr(stored_ds, "torch", attention.torch)
    p = add_key_bias(make_problem(None, 3, dict(stats=(), **options, **MANY)), hidden)
    check_backward(p, "stored ds")


@pytest.mark.parametrize("options", [dict(causal=True), dict(causal=True, left=300)], ids=["causal", "window"])
def test_backward_of_a_steep_key_bias(options, monkeypatch):
    """Forgetting gates add up: exp(bias) overflows, and queries beyond the last must not meet it."""
    monkeypatch.setattr(stored_ds, "torch", attention.torch)
    p = make_problem(None, 3, dict(stats=(), **options, **MANY))
    b, h, m, n = *p.q.shape[:3], p.k.shape[2]
    assert m % 64
    bias = 0.3 * torch.arange(n, device="cuda").float() + torch.zeros(b, h, 1, n, device="cuda")
    check_backward(replace(p, bias=bias.expand(b, h, m, n)), "stored ds")
