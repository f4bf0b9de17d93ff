"""The output gate on the GPU against the float64 reference: every layout, dtype and kernel, both orders, decoding."""

import pytest
import torch

import regard


def drawn(*shape, dtype=torch.bfloat16, size=1.0):
    return (size * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["head", "element"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 257, 64), (1, 8, 8, 1024, 128), (2, 4, 4, 1, 96)])
def test_output_and_gradients(dtype, kind, name, sizes):
    torch.manual_seed(0)
    batch, heads, groups, queries, width = sizes
    q = drawn(batch, heads, queries, width, dtype=dtype)
    k, v = (drawn(batch, groups, max(queries, 333), width, dtype=dtype) for _ in range(2))
    g = drawn(batch, queries, heads, 1 if kind == "head" else width, dtype=dtype, size=4.0)
    options = dict(is_causal=queries > 1, enable_gqa=heads != groups, normalizer=name)
    out, stats = regard.attention(q, k, v, gate=g.transpose(1, 2), return_stats=("mass",), **options)
    plain = regard.attention(q, k, v, gate=g.transpose(1, 2), **options)
    do = torch.randn_like(out)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, g)]
    truth, _, exact = regard.reference.attention(
        *wide[:3], gate=wide[3].transpose(1, 2), return_stats=("mass",), **options
    )
    want = torch.autograd.grad(truth, wide, do.double())
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    assert error(stats.mass, exact["mass"]) < limit
    for one in (out, plain):
        assert error(one, truth) < limit
        for ours, theirs in zip(torch.autograd.grad(one, (q, k, v, g), do), want, strict=True):
            assert ours.isfinite().all() and error(ours, theirs) < 2 * limit


def test_the_same_call_again_and_other_strides():
    torch.manual_seed(1)
    q = drawn(2, 4, 300, 64)
    for layout in ("rows first", "heads first", "expanded"):
        g = drawn(2, 300, 4).transpose(1, 2) if layout == "rows first" else drawn(2, 4, 300)
        g = drawn(4, 1).expand(2, 4, 300) if layout == "expanded" else g
        truth = regard.reference.attention(q, q, q, gate=g, is_causal=True)[0]
        for _ in range(3):  # a plan and a remembered launch serve the later ones
            assert error(regard.attention(q, q, q, gate=g, is_causal=True), truth) < 2e-2


def test_double_backward_and_compile():
    torch.manual_seed(2)
    q, g = drawn(1, 2, 33, 32, dtype=torch.float32), drawn(1, 2, 33, dtype=torch.float32)

    def loss(call, q, g):
        (dg,) = torch.autograd.grad(call(q, g).cos().sum(), g, create_graph=True)
        return torch.autograd.grad(dg.sin().sum(), (q, g))

    found = loss(lambda q, g: regard.attention(q, q, q, gate=g, normalizer="relu"), q, g)
    wide = [x.detach().double().requires_grad_() for x in (q, g)]
    want = loss(lambda q, g: regard.reference.attention(q, q, q, gate=g, normalizer="relu")[0], *wide)
    for ours, theirs in zip(found, want, strict=True):
        assert error(ours, theirs) < 1e-3
    compiled = torch.compile(lambda q, g: regard.attention(q, q, q, gate=g, normalizer="entmax15"), fullgraph=True)
    with torch.no_grad():
        truth = regard.reference.attention(q, q, q, gate=g, normalizer="entmax15")[0]
        assert error(compiled(q, g), truth) < 1e-4


def test_one_kernel_each_way():
    """The gate adds one launch to forward and one to backward."""
    q, g = drawn(1, 2, 256, 64), drawn(1, 2, 256)

    def launches(function):
        function()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        return [event.key for event in profile.key_averages() if "gate_" in event.key]

    assert launches(lambda: regard.attention(q, q, q, gate=g)) == ["gate_forward"]
    out = regard.attention(q, q, q, gate=g)
    assert launches(lambda: torch.autograd.grad(out.sum(), g, retain_graph=True)) == ["gate_backward"]


def test_modules_and_health():
    torch.manual_seed(3)
    layer = regard.nn.MultiheadAttention(128, 4, gate="head", forget_gate=True).cuda()
    x = torch.randn(2, 64, 128, device="cuda")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer

        def forward(self, x):
            return self.attention(x, is_causal=True)

    report = regard.examine(Model(), [x], checks=False)
    want = torch.sigmoid(layer.gate(x)).mean((0, 1)).tolist()
    assert report.unmeasured == []
    assert [head.gate for head in report.heads] == pytest.approx(want, abs=1e-5)
    model, rows = Model(), []
    with regard.Monitor(model, every=1, log=rows.append):
        model(x)
    assert rows[0]["attention/gate"] == pytest.approx(sum(want) / len(want), abs=1e-2)  # of the first sequence
    differential = regard.nn.DifferentialAttention(128, 4, layer=2).cuda().bfloat16()
    out = differential(x.bfloat16(), is_causal=True)
    assert out.isfinite().all()
