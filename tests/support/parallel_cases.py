"""Checks that every rank runs: calls on shards against the float64 oracle on the whole."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from interpreter import speed_up

import regard
import regard.parallel as parallel
from regard.parallel.group import record_sent
from regard.parallel.layout import spans

NAMES = ("softmax", "softmax1", "relu", "softpick", "sigmoid(bias=-1)", "sparsemax", "entmax15", "entmax(alpha=1.25)")
FUSED = ("softmax", "relu", "softpick", "sigmoid", "entmax15")  # compiled for the CPU; the others by `reference`
SOME = ("visible_keys", "entropy", "logsumexp", "logit_variance", "mass", "max_weight")  # none counts positions
OPTIONS = [
    dict(is_causal=True, temperature=True),
    dict(window=(5, 3), lengths=True, layout="contiguous"),
    dict(mask="bool", is_causal=False),
    dict(mask="bias", softcap=2.0, temperature=True),
    dict(mask="flat", layout="contiguous"),
]


def draw(
    seed: int, *, queries=None, mask=None, temperature=False, sink=False, sharp=2.0, dtype=torch.float32, device="cpu",
    small=False, even=False, gate=False,
):  # fmt: skip
    """The whole call: (leaves, do); lengths are no multiple of anything, unless even."""
    g = torch.Generator().manual_seed(seed)
    b, h, groups = (1, 2, 1) if small else (2, 4, 2)
    m, n, d, e = (256, 256, 64, 64) if even else (queries or 19 + seed % 3, 23 + seed % 4, 8, 5)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    leaves = dict(q=randn(b, h, m, d) * sharp, k=randn(b, groups, n, d), v=randn(b, groups, n, e))
    if mask == "bool":
        shown = torch.rand(b, 1, m, n, generator=g) < 0.6
        shown[0, :, 0] = False  # a row that sees nothing
        leaves["mask"] = shown
    elif mask is not None:
        leaves["mask"] = randn(1, h, 1 if mask == "flat" else m, n)
    if temperature:
        leaves["temperature"] = torch.rand(b, h, m, 1, generator=g) + 0.5
    if sink:
        leaves["sink"] = randn(h)
    if gate:
        leaves["gate"] = randn(b, h, m, 1)
    leaves = {name: x.to(device) for name, x in leaves.items()}
    for x in leaves.values():
        if x.is_floating_point():
            x.requires_grad_()
    return leaves, randn(b, h, m, e).to(device)


def call(function, leaves, rows, keys, options, **more):
    given = {name: rows(leaves[name]) for name in ("temperature", "gate") if name in leaves}
    if "mask" in leaves:
        mask = leaves["mask"]
        given["attn_mask"] = mask if mask.shape[-2] == 1 else rows(mask)
    if "sink" in leaves:
        given["sink"] = leaves["sink"]
    q, k, v = rows(leaves["q"]), keys(leaves["k"]), keys(leaves["v"])
    found = function(q, k, v, enable_gqa=True, **given, **options, **more)
    return found if isinstance(found, tuple) else (found, None)


def pull(out, stats, do):
    """A loss that every gradient has a part in."""
    total = (out.double() * do.double()).sum()
    for name, factor in dict(entropy=0.3, logsumexp=-0.2, logit_variance=0.1).items():
        if stats is not None and stats[name].requires_grad:
            total = total + factor * torch.where(torch.isfinite(stats[name]), stats[name], 0.0).double().sum()
    return total


def check(rank: int, world: int, name: str, seed: int, shared: bool, backend: str | None, options: dict) -> None:
    """Output, statistics and gradients of one call on pieces."""
    options = dict(options)
    layout = options.pop("layout", "balanced")
    drawing = ("mask", "temperature", "sink", "dtype", "sharp", "device", "small", "even", "gate")
    drawn = {key: options.pop(key) for key in drawing if key in options}
    leaves, do = draw(seed, queries=3 if shared else None, **drawn)
    if shared and "mask" in leaves:  # decode has no gradient of a bias
        leaves["mask"] = leaves["mask"].detach()
    narrow = drawn.get("dtype", torch.float32) != torch.float32
    if options.pop("lengths", False):
        options["key_lengths"] = torch.tensor([leaves["k"].shape[2] // 2, leaves["k"].shape[2]])[: len(do)]
    if options.get("mask") is None:
        options.pop("mask", None)
    options |= dict(normalizer=name, return_stats=options.pop("stats", True))

    def same(x):
        return x

    def cut(x):
        return parallel.shard(x, layout=layout)

    rows = same if shared else cut
    learned = [x for x in leaves.values() if x.requires_grad]
    truth, known = call(regard.attention, leaves, same, same, options, backend="reference")
    expected = torch.autograd.grad(pull(truth, known, do), learned)
    function = parallel.decode if shared else parallel.attention
    ours, stats = call(function, leaves, rows, cut, options, layout=layout, backend=backend)
    found = torch.autograd.grad(pull(ours, stats, rows(do)), learned)
    where = f"{name} {options} {layout} {'decode' if shared else 'attention'}"
    close = 2e-2 if narrow else 2e-5
    error = (rows(truth) - ours).detach().abs().max()
    assert error <= close * truth.detach().abs().max().clamp_min(1.0), (where, float(error))
    for statistic, value in ({} if stats is None else stats).items():
        want = rows(known[statistic][..., None])[..., 0]
        bare = ~torch.isfinite(want)
        assert statistic != "visible_keys" or torch.equal(value, want.to(value)), where
        assert torch.equal(value[bare], want[bare].to(value)), (where, statistic)
        counted = narrow or (statistic in ("support", "gradient_gain") and "max" in name and name != "softmax")
        error = ((value - want).abs() / (want.abs() + 1e-2))[~bare]
        assert counted or error.numel() == 0 or error.max() <= 1e-3, (where, statistic, float(error.max()))
    names = [leaf for leaf, x in leaves.items() if x.requires_grad]
    for leaf, want, got in zip(names, expected, found, strict=True):
        total, want = got.cpu(), want.cpu()
        if world > 1 and (not shared or leaf in ("k", "v")):
            dist.all_reduce(total)  # each rank has the share of its positions, or of its queries
        floor = 0.1 * do.cpu().norm()
        error = float((total - want).norm() / (want.norm() + floor))
        assert error <= (2e-2 if narrow else 1e-4), (where, leaf, error)


def every_case(rank: int, world: int) -> None:
    for index, name in enumerate(NAMES):
        backend = None if name.split("(")[0] in FUSED else "reference"
        for at, options in enumerate(OPTIONS):
            if (index + at + world) % 3 == 0 or (world == 2 and name in ("softmax", "entmax15")):
                check(rank, world, name, 7 * index + at, (index + at) % 2 == 0, backend, options)
    for shared in (False, True):
        check(rank, world, "softmax", 3, shared, None, dict(sink=True, is_causal=True, temperature=True))
        check(rank, world, "softmax1", 4, shared, None, dict(sink=True, temperature=True, sharp=30.0))
        check(rank, world, "entmax15", 5, shared, None, dict(gate=True, is_causal=True))
    for name in ("softmax", "sigmoid", "entmax15"):  # causal order alone: chunks together
        for layout in ("balanced", "contiguous"):
            told = dict(is_causal=True, temperature=True, layout=layout)
            check(rank, world, name, 2, False, None, told | dict(stats=SOME))
            if name != "sigmoid":
                check(rank, world, name, 2, False, None, told | dict(stats=False))
    for shared in (False, True):
        check(rank, world, "entmax15", 9, shared, None, dict(mask="bias", temperature=True, stats=False))
    check(rank, world, "entmax(alpha=1.001)", 5, False, None, dict(is_causal=True))
    check(rank, world, "stickbreaking", 5, False, None, dict(is_causal=True))
    check(rank, world, "softmax", 6, False, None, dict(is_causal=True, temperature=True, dtype=torch.bfloat16))


def large_logits(rank: int, world: int) -> None:
    """A threshold next to logits that float32, and then float64, no longer tell from it."""
    k, v = torch.arange(16.0).remainder(5.0).view(1, 1, 16, 1), torch.eye(16)[None, None]
    names = ("sparsemax", "entmax15") if world == 4 else ("entmax15",)
    told = ("mass", "entropy", "max_weight", "gradient_gain")
    for name, size in itertools.product(names, (1e8, 1e20)):
        options = dict(scale=1.0, normalizer=name, return_stats=True)  # kernels of every_case
        truth, known = regard.attention(torch.ones_like(k), size * k, v, backend="reference", **options)
        ours, stats = parallel.attention(*map(parallel.shard, (torch.ones_like(k), size * k, v)), **options)
        torch.testing.assert_close(ours, parallel.shard(truth))
        for key in told:
            torch.testing.assert_close(stats[key], parallel.shard(known[key], dim=-1), msg=f"{name} {size} {key}")


def masked(rank: int, world: int) -> None:
    """A `regard.Mask` of the whole sequence, the same on every rank; biases and masks that differ are refused."""
    g = torch.Generator().manual_seed(2)
    x, y, w = torch.randn(3, 2, 2, 13, 4, generator=g)
    documents = regard.Mask.documents([0, 4, 4, 9, 13]) & regard.Mask.causal()
    padded = regard.Mask.padding(torch.arange(13) >= torch.tensor([[0], [5]])) & regard.Mask.causal()
    for mask, name, backend in (
        (documents, "softmax", None),
        (documents, "entmax15", "torch"),
        (regard.Mask.prefix([3, 8]), "entmax15", None),
        (padded, "sigmoid", None),
    ):
        leaves, whole = ([z.clone().requires_grad_() for z in (x, y)] for _ in range(2))
        q, k = map(parallel.shard, leaves)
        out, stats = parallel.attention(q, k, k, mask, normalizer=name, return_stats=True, backend=backend)
        out.backward(parallel.shard(w))
        truth, exact = regard.attention(whole[0], whole[1], whole[1], mask, normalizer=name, return_stats=True)
        truth.backward(w)
        assert torch.allclose(parallel.unshard(out), truth, atol=2e-5)
        for statistic in exact:
            ours = parallel.unshard(stats[statistic], dim=-1)
            assert torch.allclose(ours, exact[statistic], atol=1e-4, rtol=1e-4), (mask, name, statistic)
        for ours, theirs in zip(leaves, whole, strict=True):
            dist.all_reduce(ours.grad)
            assert torch.allclose(ours.grad, theirs.grad, atol=2e-5), (mask, name)
    last = regard.Mask.causal(bottom_right=True)
    options = dict(normalizer="entmax15", return_stats=("distance",))
    out, stats = parallel.decode(x[:, :, :3], parallel.shard(y), parallel.shard(y), last, **options)
    truth, exact = regard.attention(x[:, :, :3], y, y, last, **options)
    assert torch.allclose(out, truth, atol=2e-5) and torch.allclose(stats.distance, exact.distance, atol=1e-4)
    with pytest.raises(TypeError, match=r"no bias of regard\.bias"):
        parallel.attention(x, y, y, regard.bias.alibi(2))
    with pytest.raises(ValueError, match="different attn_mask"):
        parallel.attention(x, y, y, regard.Mask.prefix([min(rank, 1), 1]))


def odd_pieces(rank: int, world: int) -> None:
    """Pieces of any length, none at all, fewer positions than ranks, dropout, policies."""
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    for layout in ("balanced", "contiguous"):
        for whole in (x, x[:, :, :1]):
            assert torch.equal(parallel.unshard(parallel.shard(whole, layout=layout), layout=layout), whole)
    cuts = torch.tensor([0, 5, 5, 8, 9]) if world == 4 else torch.tensor([0, 6, *[9] * (world - 1)])
    own = x[:, :, cuts[rank] : cuts[rank + 1]]
    for name in ("softmax", "entmax15"):
        wide = dict(is_causal=True, normalizer=name, backend="reference")
        ours = parallel.attention(own, own, own, layout="contiguous", **wide)
        truth = regard.attention(x, x, x, **wide)
        assert torch.allclose(ours, truth[:, :, cuts[rank] : cuts[rank + 1]], atol=1e-6)
        short = x[:, :, :2]
        piece = parallel.shard(short)
        ours, truth = parallel.attention(piece, piece, piece, **wide), regard.attention(short, short, short, **wide)
        assert torch.allclose(parallel.unshard(ours), truth, atol=1e-6)
        holed = x.clone()
        holed[0, 1, 3, 0] = torch.nan
        ours = parallel.unshard(parallel.attention(*(parallel.shard(y) for y in (x, holed, x)), **wide))
        assert torch.equal(ours.isnan(), regard.attention(x, holed, x, **wide).isnan()) and ours.isnan().any()
    pieces = [parallel.shard(x) for _ in range(3)]
    torch.manual_seed(5 + 100 * rank)  # rank 0's seed decides
    ours = parallel.unshard(parallel.attention(*pieces, dropout_p=0.4, is_causal=True))
    torch.manual_seed(5)
    assert torch.allclose(ours, regard.attention(x, x, x, dropout_p=0.4, is_causal=True, backend="cpu"), atol=1e-6)
    for policy in (regard.temperature.SSMax(), regard.temperature.Adaptive()):
        told = dict(is_causal=True, temperature=policy)
        ours = parallel.unshard(parallel.attention(*pieces, **told))
        assert torch.allclose(ours, regard.attention(x, x, x, **told), atol=1e-5)
    q, k, v = pieces
    ours = parallel.attention(q.requires_grad_(), k, v, temperature=regard.temperature.Adaptive())
    (ours,) = torch.autograd.grad(ours.square().sum(), q)
    x.requires_grad_()
    (want,) = torch.autograd.grad(
        regard.attention(x, x.detach(), x.detach(), temperature=regard.temperature.Adaptive()).square().sum(), x
    )
    assert torch.allclose(parallel.unshard(ours), want, atol=1e-5)
    few_keys(rank, world)
    same_sizes(rank, world)
    not_finite(rank, world)
    short = x.detach()[:, :, :2]  # ranks without a query, under a mask
    told = dict(temperature=regard.temperature.SSMax(), attn_mask=torch.tensor([True, False])[None, None, None])
    ours = parallel.unshard(parallel.attention(*[parallel.shard(short)] * 3, **told))
    assert torch.allclose(ours, regard.attention(short, short, short, **told), atol=1e-5)


def not_finite(rank: int, world: int) -> None:
    """A NaN is told by the statistics of the rows that see it; a key whose logit is −inf is hidden."""
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    x = x.double() if world == 4 else x  # the slow test compiles float64 kernels too
    limit = 1e-7 if world == 4 else 1e-4
    for name, backend in itertools.product(("softmax", "entmax15"), ("cpu", "reference")):
        for number in (torch.nan, torch.inf, -torch.inf):
            odd = x.clone()
            odd[0, 1, 3, 0] = number
            told = dict(is_causal=True, normalizer=name, return_stats=True)
            for whole in ((x, odd, x), (odd, x, x)):
                _, known = regard.attention(*whole, **told, backend="reference")
                _, ours = parallel.attention(*map(parallel.shard, whole), **told, backend=backend)
                for statistic, want in known.items():
                    want = parallel.shard(want, dim=-1)
                    close = dict(rtol=limit, atol=limit, equal_nan=True)
                    same = torch.allclose(ours[statistic].double(), want.double(), **close)
                    assert same, (name, backend, number, statistic)


def few_keys(rank: int, world: int) -> None:
    """Ranks that hold no key, or whose keys their own queries do not see: output, statistics, gradients."""
    g = torch.Generator().manual_seed(4)
    for name, m, n, how in (
        ("entmax15", 8, 1, {}),
        ("sparsemax", 7, 2, dict(is_causal=True)),
        ("entmax15", 7, 2, dict(window=(0, 0))),
        ("softmax", 8, 1, {}),
    ):
        for layout in ("contiguous", "balanced"):
            q, k, v, do = (torch.randn(1, 1, size, 4, generator=g, dtype=torch.float64) for size in (m, n, n, m))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            told = dict(normalizer=name, return_stats=True, backend="reference", **how)
            truth, known = regard.attention(*leaves, **told)
            want = torch.autograd.grad((truth * do).sum(), leaves)
            pieces = [parallel.shard(x, layout=layout) for x in (*leaves, do)]
            out, stats = parallel.attention(*pieces[:3], layout=layout, **told)
            ours = torch.autograd.grad((out * pieces[3]).sum(), leaves)
            assert torch.allclose(out, parallel.shard(truth, layout=layout))
            for name_ in ("mass", "entropy", "support"):
                right = parallel.shard(known[name_][..., None], layout=layout)[..., 0]
                assert torch.allclose(stats[name_], right), (name, m, n, how, layout, name_)
            for x, y in zip(ours, want, strict=True):
                dist.all_reduce(x)
                assert torch.allclose(x, y), (name, m, n, how, layout)
    q, k = torch.randn(1, 1, 7, 4, generator=g), torch.randn(1, 1, 1, 4, generator=g)
    bias = torch.randn(1, 1, 7, 1, generator=g).requires_grad_()  # the one key's column, not one for all
    piece = parallel.attention(*map(parallel.shard, (q, k, k, bias)), normalizer="entmax15", backend="reference")
    (ours,) = torch.autograd.grad(piece.sum(), bias)
    assert torch.equal(piece, parallel.shard(k.expand(q.shape))) and torch.equal(ours, torch.zeros_like(bias))


def same_sizes(rank: int, world: int) -> None:
    """As many batches as heads and as numbers per row; no batch, no value; masks whose rows are views of one."""
    g = torch.Generator().manual_seed(6)
    for shape, name in (((0, 2, 9, 4), "softmax"), ((1, 2, 9, 0), "softmax"), ((0, 2, 9, 4), "entmax15")):
        value = torch.randn(shape, generator=g).requires_grad_()
        keys = torch.randn(*shape[:3], 4, generator=g)
        out = parallel.attention(*map(parallel.shard, (keys, keys, value)), normalizer=name, backend="reference")
        assert parallel.unshard(out).shape == shape
        out.sum().backward()
    x = torch.randn(4, 4, 16, 4, generator=g, dtype=torch.float64)
    row = torch.randn(16, generator=g, dtype=torch.float64)
    for made in (None, row, row > 0):
        learned = [x.clone().requires_grad_()]
        learned += [row.clone().requires_grad_()] if made is row else []
        y, mask = learned[0], learned[1] if made is row else made
        told = dict(normalizer="entmax15", backend="reference")
        whole = regard.attention(y, y, y, attn_mask=mask, **told)
        want = torch.autograd.grad(whole.square().sum(), learned)
        piece = parallel.shard(y)
        mask = None if mask is None else mask.expand(1, 1, piece.shape[2], 16)
        out = parallel.attention(piece, piece, piece, attn_mask=mask, **told)
        assert torch.allclose(out, parallel.shard(whole))
        for ours, truth in zip(torch.autograd.grad(out.square().sum(), learned), want, strict=True):
            dist.all_reduce(ours)
            assert torch.allclose(ours, truth)


def same_bits(rank: int, world: int) -> list[bytes]:
    """decode gives every rank the same bits, and the same again."""
    leaves, _ = draw(11, queries=2)
    answers = []
    for name in ("softmax", "entmax15"):
        for _ in range(2):
            out, stats = call(
                parallel.decode, leaves, lambda x: x, parallel.shard, dict(return_stats=True, normalizer=name)
            )
            answers.append(b"".join(x.detach().numpy().tobytes() for x in (out, *stats.values())))
    assert answers[0] == answers[1] and answers[2] == answers[3]
    return answers


def by_step(sent: list[tuple[str, int]]) -> dict[str, int]:
    """The bytes of each kind of step."""
    return {step: sum(size for own, size in sent if own == step) for step, _ in sent}


def bytes_sent(rank: int, world: int) -> None:
    """The formulas of docs/developers/parallel.md."""
    b, h, groups, n, d, e = 1, 4, 2, 22, 8, 6
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(b, heads, n, width, generator=g) for heads, width in ((h, d), (groups, d), (groups, e)))
    q, k, v = (parallel.shard(x).requires_grad_() for x in (q, k, v))
    sizes = [sum(stop - start for start, stop in own) for own in spans(n, world)]
    with record_sent() as sent:
        out = parallel.attention(q, k, v, enable_gqa=True, is_causal=True)
    passed = [(rank - t) % world for t in range(world - 1)]  # whose keys this rank hands on
    ring = sum(sizes[owner] for owner in passed) * b * groups * (d + e) * 4
    assert by_step(sent) == {"ring forward": ring} and len(sent) == world - 1, (sent, ring)
    with record_sent() as sent:
        out.sum().backward()
    gone = [(rank - t) % world for t in range(1, world)]
    back = ring + sum(sizes[owner] for owner in gone) * b * groups * (d + e) * 4
    assert by_step(sent) == {"ring backward": back}, (sent, back)
    few = torch.randn(b, h, 2, d, generator=g)
    with record_sent() as sent, torch.no_grad():
        parallel.decode(few, k, v, enable_gqa=True)
    part = b * h * 2 * (e + 2) * 4
    size = 1 << (world.bit_length() - 1)
    rounds = 1 if rank >= size else size.bit_length() - 1 + (rank < world - size)
    assert by_step(sent) == {"tree": rounds * part}, (sent, rounds, part)
    with record_sent() as sent:
        out = parallel.attention(q, k, v, enable_gqa=True, normalizer="entmax15")
    mine = sizes[rank] * b * groups * (d + e) * 4
    assert by_step(sent) == {"gather forward": mine}, (sent, mine)
    with record_sent() as sent:
        out.sum().backward()
    others = (sum(sizes) - sizes[rank]) * b * groups * (d + e) * 4
    assert by_step(sent) == {"gather forward": mine, "gather backward": others}, (sent, others)


def dies(rank: int, world: int, who: int, how: str, calls: int) -> tuple[float, int, str, str]:
    """Rank `who` is lost in the middle of a call; (seconds, rank, step, message) of the error that the others see."""
    x = parallel.shard(torch.randn(1, 2, 64, 8))
    for _ in range(2):
        parallel.attention(x, x, x, is_causal=True)
    if rank == who:
        from regard._backends.cpu.attention import partial

        own, done = partial.forward, []

        def forward(problem):
            done.append(1)
            if len(done) > calls:
                time.sleep(1.0 if how == "killed" else 600)  # a step as long as a real one
                os._exit(1)
            return own(problem)

        partial.forward = forward
    start = time.monotonic()
    try:
        for _ in range(50):
            parallel.attention(x, x, x, is_causal=True)
    except parallel.RankError as error:
        found = time.monotonic() - start, error.rank, error.step, str(error)
    else:
        raise AssertionError("nothing was noticed")
    if how == "killed":  # a later call fails too
        with pytest.raises(parallel.RankError, match="lost contact with another rank at step 'start of attention"):
            parallel.attention(x, x, x, backend="reference")
    return found


def triton_parts(rank: int, world: int) -> None:
    """The Triton engine, interpreted on the CPU."""
    speed_up()
    check(rank, world, "softmax", 3, False, "triton", dict(sink=True, is_causal=True, temperature=True, small=True))
    check(rank, world, "sigmoid", 5, True, "triton", dict(window=(5, 3), small=True))


def on_the_gpu(rank: int, world: int) -> None:
    """Few calls, of even lengths: a kernel is compiled for every kind of stride, which takes longer than all else."""
    for name, options in (("entmax15", {}), ("sigmoid", dict(dtype=torch.bfloat16)), ("softmax", {})):
        told = dict(is_causal=name != "sigmoid", stats=SOME, device="cuda", small=True, even=True)
        check(rank, world, name, 3, False, None, told | options)


def over_nccl(rank: int, world: int) -> None:
    """NCCL refuses two ranks on one card: the whole call with one."""
    told = dict(is_causal=True, stats=SOME, device="cuda", small=True, even=True)
    check(rank, world, "softmax", 3, False, None, told)
    x = torch.randn(1, 2, 9, 4, device="cuda")
    assert torch.equal(parallel.unshard(parallel.shard(x)), x)
