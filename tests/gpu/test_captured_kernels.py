"""Attention kernels of other packages, the real ones: their calls are seen, read as float64 has them, and swapped."""

import importlib
import math

import pytest
import torch
from torch import nn

import regard

BATCH, TOKENS, HEADS, WIDTH = 2, 384, 4, 64
ENDS = (0, 100, 101, 300, BATCH * TOKENS)  # documents, packed


def ends_of(q):
    """The documents of a batch of any size: with those of another one the kernel would write beyond its output."""
    tokens = q.shape[0] * q.shape[1]
    return torch.tensor([*(end for end in ENDS if end < tokens), tokens], dtype=torch.int32, device="cuda")


def flash_cute(q, k, v):
    module = pytest.importorskip("flash_attn.cute.interface")
    out = module.flash_attn_func(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out


def flash_cute_varlen(q, k, v):
    module = pytest.importorskip("flash_attn.cute.interface")
    ends = ends_of(q)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out = module.flash_attn_varlen_func(*flat, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
    return (out[0] if isinstance(out, tuple) else out).unflatten(0, (BATCH, TOKENS))


def torch_varlen(q, k, v):
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    ends = ends_of(q)
    longest = int(ends.diff().max())
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return varlen_attn(*flat, ends, ends, longest, longest, window_size=(-1, 0)).unflatten(0, (BATCH, TOKENS))


def flex(compiled):
    def call(q, k, v):
        module = importlib.import_module("torch.nn.attention.flex_attention")
        function = torch.compile(module.flex_attention) if compiled else module.flex_attention
        block = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cuda")
        slope = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
        bias = lambda s, b, h, i, j: s - slope[h] * (i - j)  # noqa: E731
        return function(*(x.transpose(1, 2) for x in (q, k, v)), bias, block).transpose(1, 2)

    return call


PATHS = {  # path -> (attention of [B, M, H, D], documents?, slopes of ALiBi?)
    "flash_attn.cute": (flash_cute, False, False),
    "flash_attn.cute varlen": (flash_cute_varlen, True, False),
    "varlen_attn": (torch_varlen, True, False),
    "flex_attention": (flex(False), False, True),
    "flex_attention compiled": (flex(True), False, True),
}


class Layer(nn.Module):
    """Projections around one attention; sharp and flat rows among them."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self._function = [attend]

    def split(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in self.qkv(x).chunk(3, -1))
        return q * torch.linspace(0.5, 4.0, q.shape[1], device=q.device, dtype=q.dtype)[:, None, None], k, v

    def forward(self, x):
        return self._function[0](*self.split(x)).flatten(-2)


def logits(q, k, documents, slopes):
    """Float64 logits [B, H, M, N], with −inf for what is hidden; packed documents are one sequence."""
    if documents:
        q, k = (x.reshape(1, -1, HEADS, WIDTH) for x in (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * WIDTH**-0.5
    place = torch.arange(q.shape[1], device="cuda")
    behind = place[:, None] - place
    if slopes:
        s = s - torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda", dtype=s.dtype)[:, None, None] * behind
    owner = torch.searchsorted(torch.tensor(ENDS[1:], device="cuda"), place, right=True)
    see = (behind >= 0) & (owner[:, None] == owner) if documents else behind >= 0
    return s.masked_fill(~see, -math.inf)


@pytest.fixture(params=PATHS, ids=lambda name: name.replace(" ", "-"))
def path(request):
    torch.manual_seed(0)
    attend, *options = PATHS[request.param]
    layer = Layer(attend).eval().to("cuda", torch.bfloat16)
    x = torch.randn(BATCH, TOKENS, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # skips where the package is not installed
    return layer, x, options


def test_readings_are_those_of_float64(path):
    layer, x, options = path
    report = regard.examine(layer, [x])
    assert report.unmeasured == [] and len(report.heads) == HEADS
    with torch.no_grad():
        q, k, _ = layer.split(x)
    s = logits(q, k, *options)
    expected = regard.statistics.of_scores(s, s > -math.inf)
    for head in report.heads:
        for name in ("entropy", "max_logit", "max_weight", "distance", "logsumexp"):
            values, spread = expected[name][:, head.head], head.statistics[name]
            assert spread.count == values.numel(), name
            assert spread.mean == pytest.approx(values.mean().item(), rel=1e-3, abs=1e-3), name
            assert spread.max == pytest.approx(values.max().item(), rel=1e-3, abs=1e-3), name


def test_a_swap_reaches_it(path):
    layer, x, options = path
    with regard.using(layer, normalizer="entmax15") as swap:
        found = layer(x)
    assert swap.calls == 1
    q, k, v = (part.detach() for part in layer.split(x))
    p = regard.normalize(logits(q, k, *options), "entmax15")
    v = v.reshape(1, -1, HEADS, WIDTH) if options[0] else v
    expected = torch.einsum("bhij,bjhd->bihd", p, v.double()).reshape(BATCH, TOKENS, -1)
    error = (found.detach().double() - expected).norm() / expected.norm()
    assert error < 1e-2
    found.square().sum().backward()
    assert layer.qkv.weight.grad.abs().sum() > 0
