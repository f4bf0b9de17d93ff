"""Every way in which attention is called: readings against float64, and a swap, on each path."""

import math

import fused_stand_ins as packages
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import _varlen_attn, varlen_attn

import regard
from regard.health.capture.interception import Interception

BATCH, TOKENS, HEADS, WIDTH = 2, 12, 4, 8
ENDS = torch.tensor([0, 5, 6, 14, 24], dtype=torch.int32)  # documents of 24 packed tokens
COMPILED = torch.compile(flex_attention)
PLACE = torch.arange(TOKENS)
CAUSAL = PLACE[:, None] >= PLACE
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def _varlen_on_cpu(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
                   enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):  # fmt: skip
    out = packages.attend_packed(query, key, value, cu_seq_q, cu_seq_k, scale=scale, causal=is_causal,
                                 window=window_size)  # fmt: skip
    return out, out.new_zeros(HEADS, len(query)), torch.zeros(2, dtype=torch.uint64)


_varlen_attn.register_kernel("cpu")(_varlen_on_cpu)


def by_heads(x):
    return x.transpose(1, 2)


def nanogpt(q, k, v):
    q, k, v = map(by_heads, (q, k, v))
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(~CAUSAL, float("-inf"))
    att = F.dropout(F.softmax(att, dim=-1), 0.1, training=False)
    return by_heads(att @ v)


def old_bert(q, k, v):
    q, k, v = map(by_heads, (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH)
    scores = scores + torch.where(CAUSAL, 0.0, -10000.0)
    return by_heads(torch.matmul(nn.Softmax(dim=-1)(scores), v))


def batched_products(q, k, v):
    q, k, v = (by_heads(x).reshape(-1, TOKENS, WIDTH) for x in (q, k, v))
    s = torch.baddbmm(torch.zeros(len(q), TOKENS, TOKENS), q, k.mT, beta=1.0, alpha=WIDTH**-0.5)
    s = s.view(BATCH, HEADS, TOKENS, TOKENS).masked_fill(~CAUSAL, torch.finfo(s.dtype).min)
    p = s.softmax(-1).view(-1, TOKENS, TOKENS)
    return by_heads(torch.bmm(p, v).view(BATCH, HEADS, TOKENS, WIDTH))


def einsum_with_bias(q, k, v):
    sim = torch.einsum("b i h d, b j h d -> b h i j", q * WIDTH**-0.5, k)
    sim = sim - SLOPES[:, None, None] * (PLACE[:, None] - PLACE).abs()
    sim = torch.where(CAUSAL, sim, -torch.finfo(sim.dtype).max)
    return torch.einsum("b h i j, b j h d -> b i h d", sim.softmax(dim=-1, dtype=torch.float32), v)


def transposed_values(q, k, v):
    q, k, v = (by_heads(x).reshape(-1, TOKENS, WIDTH) for x in (q, k, v))
    w = torch.bmm(q, k.permute(0, 2, 1)) * WIDTH**-0.5
    w = F.softmax(w, dim=2).permute(0, 2, 1)
    return by_heads(torch.bmm(v.transpose(1, 2), w).transpose(1, 2).reshape(BATCH, HEADS, TOKENS, WIDTH))


def transposed_by_property(q, k, v):
    q, k, v = map(by_heads, (q, k, v))
    p = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    return by_heads((v.mT @ p.mT).mT)


def einsum_of_lists(q, k, v):
    sim = torch.einsum("bihd,bjhd->bhij", [q * WIDTH**-0.5, k])
    return torch.einsum("bhij,bjhd->bihd", [sim.softmax(-1), v])


def soft_capped(q, k, v):
    q, k, v = map(by_heads, (q, k, v))
    s = (q @ k.mT) / math.sqrt(WIDTH)
    s = torch.tanh(s / 2.0) * 2.0
    s += torch.zeros(TOKENS, TOKENS).masked_fill(~CAUSAL, -math.inf)
    return by_heads(s.softmax(-1) @ v)


def packed(function, **options):
    def call(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = function(q, k, v, ENDS, ENDS, 10, 10, **options)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (BATCH, TOKENS))

    return call


def first(function, **options):
    def call(q, k, v):
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def flex(function, score_mod=None, masked=True):
    def call(q, k, v):
        block = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")
        return by_heads(function(*map(by_heads, (q, k, v)), score_mod, block if masked else None))

    return call


def cap_and_slope(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0) - SLOPES[h] * (i - j).abs()


def xformers(bias):
    return lambda q, k, v: packages.memory_efficient_attention(q, k, v, attn_bias=bias)


def xformers_packed(kind):
    def call(q, k, v):
        q, k, v = (x.reshape(1, -1, HEADS, WIDTH) for x in (q, k, v))
        return packages.memory_efficient_attention(q, k, v, kind(ENDS)).reshape(BATCH, TOKENS, HEADS, WIDTH)

    return call


class Engine(nn.Module):
    """Transformer Engine's module in one of its layouts."""

    def __init__(self, layout, **given):
        super().__init__()
        self.layout, self.given = layout, given
        self.core = packages.DotProductAttention(HEADS, WIDTH, qkv_format=layout)

    def forward(self, q, k, v):
        if self.layout == "sbhd":
            out = self.core(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
        elif self.layout == "thd":
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out = self.core(*flat, cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS, attn_mask_type="padding_causal")
        else:
            out = self.core(q, k, v, **self.given)
        return out.reshape(BATCH, TOKENS, HEADS, WIDTH)


P = packages
HIDDEN = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
HIDDEN[1, ..., 9:] = True
BIAS = torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
# path -> (attention of [B, M, H, D], options of the dense float64 logits)
PATHS = {
    "flash_attn_func": (first(P.flash_attn_func, causal=True), dict(causal=True)),
    "flash_attn_func window cap": (first(P.flash_attn_func, causal=True, window_size=(4, 0), softcap=2.0),
                                   dict(causal=True, window=4, cap=2.0)),
    "flash_attn_func both sides": (first(P.flash_attn_func, window_size=(3, 2)), dict(window=3, ahead=2)),
    "flash_attn_func alibi": (first(P.flash_attn_func, causal=True, alibi_slopes=SLOPES), dict(causal=True, slopes=1)),
    "flash_attn_qkvpacked_func": (lambda q, k, v: P.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), 0.0, 0.4),
                                  dict(scale=0.4)),
    "flash_attn_kvpacked_func": (lambda q, k, v: P.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
                                 dict(causal=True)),
    "flash_attn_varlen_func": (packed(P.flash_attn_varlen_func, causal=True), dict(causal=True, documents=True)),
    "flash_attn_varlen_func alibi": (packed(P.flash_attn_varlen_func, causal=True, alibi_slopes=SLOPES),
                                     dict(causal=True, documents=True, slopes=1)),
    "flash_attn_varlen_func window": (packed(P.flash_attn_varlen_func, causal=True, window_size=(2, 0)),
                                      dict(causal=True, documents=True, window=2)),
    "flash 3": (first(P.flash_3_func, causal=True), dict(causal=True)),
    "flash 3 varlen": (packed(P.flash_3_varlen_func), dict(documents=True)),
    "cute": (first(P.cute_func, causal=True, softmax_scale=0.3), dict(causal=True, scale=0.3)),
    "cute sink": (first(P.cute_func, causal=True, learnable_sink=SLOPES), dict(causal=True, sink=SLOPES)),
    "cute varlen": (packed(P.cute_varlen_func, causal=True), dict(causal=True, documents=True)),
    "varlen_attn": (packed(varlen_attn, window_size=(-1, 0)), dict(causal=True, documents=True)),
    "varlen_attn all": (packed(varlen_attn, scale=0.2), dict(documents=True, scale=0.2)),
    "flex_attention": (flex(flex_attention), dict(causal=True)),
    "flex_attention score_mod": (flex(flex_attention, cap_and_slope), dict(causal=True, cap=2.0, slopes=1)),
    "flex_attention unmasked": (flex(flex_attention, cap_and_slope, masked=False), dict(cap=2.0, slopes=1)),
    "flex_attention compiled": (flex(COMPILED, cap_and_slope), dict(causal=True, cap=2.0, slopes=1)),
    "xformers": (xformers(None), {}),
    "xformers causal": (xformers(P.LowerTriangularMask()), dict(causal=True)),
    "xformers bias": (xformers(BIAS), dict(bias=BIAS)),
    "xformers packed": (xformers_packed(P.BlockDiagonalMask), dict(documents=True)),
    "xformers packed causal": (xformers_packed(P.BlockDiagonalCausalMask), dict(causal=True, documents=True)),
    "transformer engine sbhd": (Engine("sbhd"), dict(causal=True)),
    "transformer engine thd": (Engine("thd"), dict(causal=True, documents=True)),
    "transformer engine bshd": (Engine("bshd"), dict(causal=True)),
    "transformer engine alibi": (Engine("bshd", core_attention_bias_type="alibi", alibi_slopes=SLOPES),
                                 dict(causal=True, slopes=1)),
    "transformer engine padding": (Engine("bshd", attn_mask_type="padding", attention_mask=HIDDEN),
                                   dict(hidden=HIDDEN)),
    "nanogpt": (nanogpt, dict(causal=True)),
    "old bert": (old_bert, dict(causal=True)),
    "batched products": (batched_products, dict(causal=True)),
    "einsum": (einsum_with_bias, dict(causal=True, slopes=1)),
    "einsum of lists": (einsum_of_lists, {}),
    "transposed values": (transposed_values, {}),
    "transposed by a property": (transposed_by_property, {}),
    "soft cap by hand": (soft_capped, dict(causal=True, cap=2.0)),
}  # fmt: skip


class Layer(nn.Module):
    """Projections around one attention; sharp and flat rows among them."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.attend = attend if isinstance(attend, nn.Module) else None
        self._function = [attend]

    def split(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in self.qkv(x).chunk(3, -1))
        return q * torch.linspace(0.5, 8.0, q.shape[1])[:, None, None].to(q), k, v

    def forward(self, x):
        return self._function[0](*self.split(x)).flatten(-2)


def dense(q, k, scale=None, causal=False, window=None, ahead=None, cap=None, slopes=None, documents=False, bias=None,
          hidden=None, sink=None):  # fmt: skip
    """Float64 logits [B, H, M, N] of q, k [B, M, H, D] (packed: one sequence), with −inf for what is hidden."""
    if documents:
        q, k = (x.reshape(1, -1, HEADS, WIDTH) for x in (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (WIDTH**-0.5 if scale is None else scale)
    s = cap * torch.tanh(s / cap) if cap else s
    place = torch.arange(q.shape[1])
    distance = place - place[:, None]
    s = s - SLOPES[:, None, None] * distance.abs() if slopes else s
    s = s if bias is None else s + bias
    see = torch.ones(len(place), len(place), dtype=torch.bool)
    see &= distance <= 0 if causal else see
    see &= distance >= -window if window else see
    see &= distance <= ahead if ahead else see
    if documents:
        owner = torch.searchsorted(ENDS[1:].long(), place, right=True)
        see &= owner[:, None] == owner
    s = s.masked_fill(~see, -math.inf)
    return s if hidden is None else s.masked_fill(hidden, -math.inf)


@pytest.fixture(params=PATHS, ids=lambda name: name.replace(" ", "-"))
def path(request, monkeypatch):
    packages.install(monkeypatch)
    torch.manual_seed(0)
    attend, options = PATHS[request.param]
    return Layer(attend).eval(), torch.randn(BATCH, TOKENS, 32), options


def test_readings_are_those_of_float64(path):
    layer, x, options = path
    report = regard.examine(layer, [x])
    heads = 1 if layer._function[0] is transposed_values else HEADS  # its heads are among the sequences
    assert report.unmeasured == [] and len(report.heads) == heads
    q, k, _ = (part.detach().double() for part in layer.split(x))
    logits = dense(q, k, **options)
    logits = logits.reshape(-1, heads, *logits.shape[-2:])
    visible = logits > -math.inf
    expected = dict(regard.statistics.of_scores(logits, visible)) if "sink" not in options else {}
    counted = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool)
    if "hidden" in options:
        counted = ~options["hidden"][:, 0, 0]
    if "sink" in options:
        every = torch.cat([logits, options["sink"].double()[:, None, None].expand(*logits.shape[:-1], 1)], -1)
        expected["mass"] = every.softmax(-1)[..., :-1].sum(-1)
        expected["max_logit"] = logits.amax(-1)
    for head in report.heads:
        for name, values in expected.items():
            spread, values = head.statistics[name], values[:, head.head][counted]
            near = dict(rel=1e-4, abs=2e-5)
            assert spread.count == values.numel(), name
            assert spread.mean == pytest.approx(values.mean().item(), **near), name
            assert spread.max == pytest.approx(values.max().item(), **near), name
            assert spread.min == pytest.approx(values.min().item(), **near), name


def test_packed_documents_are_neither_padded_nor_n_by_n(monkeypatch):
    packages.install(monkeypatch)
    torch.manual_seed(0)
    attend, _ = PATHS["flash_attn_varlen_func alibi"]
    layer, x, seen = Layer(attend).eval(), torch.randn(BATCH, TOKENS, 32), []

    def observe(call, name, run):
        seen.append(call)
        return run()

    with Interception(layer, observe=observe) as one, one.torch_calls(), torch.no_grad():
        expected = layer(x)
    (call,) = seen
    assert call.mask is None and call.q.shape == (1, HEADS, BATCH * TOKENS, WIDTH)
    numbers = [x.numel() for part in call.parts for one in getattr(part, "parts", [part]) for x in vars(one).values()
               if isinstance(x, torch.Tensor)]  # fmt: skip
    assert numbers and max(numbers) <= BATCH * TOKENS
    o, dense = call.run(), call.densified()
    assert dense.mask.shape[-2:] == (BATCH * TOKENS, BATCH * TOKENS) and not dense.parts
    torch.testing.assert_close(dense.run(), o)
    merged = o[0].transpose(0, 1).reshape(BATCH, TOKENS, -1)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)


def test_nothing_stays_changed(path):
    layer, x, _ = path
    functions = (
        P.flash_attn_func,
        P.flash_3_func,
        P.cute_func,
        P.memory_efficient_attention,
        varlen_attn,
        flex_attention,
    )
    codes, forward = [f.__code__ for f in functions], P.DotProductAttention.forward
    with regard.using(layer, temperature=2.0):
        layer(x)
        assert P.flash_attn_func.__code__ not in codes
    assert [f.__code__ for f in functions] == codes and P.DotProductAttention.forward is forward


def test_a_swap_reaches_it(path):
    layer, x, options = path
    if "sink" in options:
        pytest.skip("entmax15 has no sink")
    with regard.using(layer, normalizer="entmax15") as swap:
        found = layer(x)
    assert swap.calls == 1
    q, k, v = (part.detach().double() for part in layer.split(x))
    p = regard.normalize(dense(q, k, **options), "entmax15")
    v = v.reshape(1, -1, HEADS, WIDTH) if options.get("documents") else v
    expected = torch.einsum("bhij,bjhd->bihd", p, v).reshape(BATCH, TOKENS, -1)
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    assert layer.qkv.weight.grad.abs().sum() > 0


def engine(**given):
    core = P.DotProductAttention(HEADS, WIDTH, qkv_format="bshd")
    return lambda q, k, v: core(q, k, v, **given).unflatten(-1, (HEADS, WIDTH))


FEWER_QUERIES = {
    "flash alibi": first(P.flash_attn_func, causal=True, alibi_slopes=SLOPES),
    "xformers first key": xformers(P.LowerTriangularMask()),
    "xformers last key": xformers(P.LowerTriangularFromBottomRightMask()),
    "engine first key": engine(),
    "engine last key": engine(attn_mask_type="causal_bottom_right"),
    "engine first key alibi": engine(core_attention_bias_type="alibi", alibi_slopes=SLOPES),
}


@pytest.mark.parametrize("name", FEWER_QUERIES)
def test_orders_of_fewer_queries_than_keys(name, monkeypatch):
    packages.install(monkeypatch)
    torch.manual_seed(0)
    layer, x = Layer(lambda q, k, v: FEWER_QUERIES[name](q[:, :5], k, v)).eval(), torch.randn(BATCH, TOKENS, 32)
    with regard.using(layer, normalizer="softmax") as swap:
        found = layer(x)
    assert swap.calls == 1
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)


REFUSED = {
    "its cache": (first(P.flash_attn_with_kvcache, causal=True), "flash_attn_with_kvcache writes keys and values"),
    "no slopes": (engine(core_attention_bias_type="alibi"), "core_attention_bias_type='alibi', which is not measured"),
    "no mask": (engine(attn_mask_type="padding"), "padding by cu_seqlens in batches, which is not measured"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_measured_is_named(name, monkeypatch):
    packages.install(monkeypatch)
    function, reason = REFUSED[name]
    layer, x = Layer(function).eval(), torch.randn(BATCH, TOKENS, 32)
    ((_, told),) = regard.examine(layer, [x]).unmeasured
    assert reason in told


def test_a_check_gives_no_kernel_documents_behind_its_tokens(monkeypatch):
    """On a GPU the kernel wrote there, into other tensors of the process, where a check's text was shorter."""
    packages.install(monkeypatch)
    torch.manual_seed(0)
    given, attend = [], packages.attend_packed

    def watch(q, k, v, ends, *args, **options):
        given.append((len(q), int(ends.max())))
        return attend(q, k, v, ends, *args, **options)

    monkeypatch.setattr(packages, "attend_packed", watch)
    verdict = regard.check(Layer(PATHS["varlen_attn"][0]).eval(), [torch.randn(BATCH, TOKENS, 32)])
    assert given and all(end <= tokens for tokens, end in given)
    assert any("cu_seqlens" in one.reason for one in verdict.skipped)
