"""Replayed calls give what computed ones do: outputs, statistics and gradients, on other tensors of the same kind."""

import pytest
import torch

import regard
from regard._backends.gpu import tape
from regard._backends.gpu.attention import launch

OPTIONS = [
    dict(return_stats=True),
    dict(return_stats=True, is_causal=True),
    dict(return_stats=("entropy", "max_logit")),
    dict(normalizer="entmax15", return_stats=True),
    dict(normalizer="sigmoid(bias=-2)"),
    dict(softcap=20.0),
    dict(window=(64, 0)),
    dict(is_causal=True, backend="triton"),
]


def draw(seed, d=64, n=192, heads=4, strided=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, n, heads, d) if strided else (2, heads, n, d)
    made = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [(x.transpose(1, 2) if strided else x).requires_grad_() for x in made]


def run(tensors, options):
    found = regard.attention(*tensors, **options)
    out, stats = found if isinstance(found, tuple) else (found, {})
    do = torch.arange(out.shape[-1], device="cuda", dtype=out.dtype).cos().expand(out.shape)
    return [out.detach(), *(stats[name].detach() for name in stats), *torch.autograd.grad(out, tensors, do)]


@pytest.mark.parametrize(("n", "queries"), [(192, 192), (1024, 1024), (2048, 1), (0, 3)])
@pytest.mark.parametrize("options", [*OPTIONS, dict(normalizer="sparsemax")], ids=str)
def test_a_replay_without_gradients_is_the_call(options, n, queries, monkeypatch):
    """Its row state and scratch are one allocation; on another stream, and in a CUDA graph, too."""
    tape._tapes.clear()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def compute(seed):
        _, k, v = draw(seed, n=n)
        found = regard.attention(draw(seed + 100, n=queries)[0].detach(), k.detach(), v.detach(), **options)
        return [found[0], *found[1].values()] if isinstance(found, tuple) else [found]

    for seed in range(3):
        compute(seed)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        replayed = compute(7)
    side.synchronize()
    q, k, v = draw(107, n=queries)[0].detach(), *(x.detach() for x in draw(7, n=n)[1:])
    with torch.cuda.graph(graph):
        captured = regard.attention(q, k, v, **options)
    graph.replay()
    captured = [captured[0], *captured[1].values()] if isinstance(captured, tuple) else [captured]
    monkeypatch.setattr(launch, "_has_tape", lambda problem: False)
    for one, other, kept in zip(replayed, compute(7), captured, strict=True):
        assert torch.equal(one, other) and torch.equal(kept, other)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replay_is_the_call(options, strided, monkeypatch):
    tape._tapes.clear()
    for seed in range(3):  # computed, recorded, replayed
        run(draw(seed, strided=strided), options)
    assert any(isinstance(kept, tape.Tape) for kept in tape._tapes.values())
    replayed = run(draw(7, strided=strided), options)
    monkeypatch.setattr(launch, "_has_tape", lambda problem: False)
    computed = run(draw(7, strided=strided), options)
    for one, other in zip(replayed, computed, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)  # cuDNN's backward adds in any order
    out = 1 if "return_stats" not in options else len(replayed) - 3
    assert all(torch.equal(one, other) for one, other in zip(replayed[:out], computed[:out], strict=True))


def test_tensors_among_the_options_are_replayed_too():
    tape._tapes.clear()
    for seed in range(4):
        q, k, v = draw(seed)
        mask = torch.rand(2, 1, 192, 192, device="cuda") < 0.8
        out, stats = regard.attention(q, k, v, attn_mask=mask, temperature=torch.full((4, 1, 1), 1.5, device="cuda"),
                                      return_stats=True)  # fmt: skip
        want, _, exact = regard.reference.attention(q, k, v, mask, temperature=1.5, return_stats=True)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(stats.entropy.double(), exact.entropy, rtol=1e-3, atol=1e-3)
