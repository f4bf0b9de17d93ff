"""Checks that every rank runs: calls that do not fit together raise on every rank, before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import regard
import regard.parallel as parallel
from regard._backends.cpu.attention import launch, partial
from regard.parallel.group import RankGroup


def refused(rank: int, world: int) -> None:
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    last = rank == world - 1
    differ(x, last, world)
    wrong_on_one(x, rank, last, world)
    sentences(x, world)
    if world == 2:
        own_errors()


def differ(x: torch.Tensor, last: bool, world: int) -> None:
    """The last rank calls otherwise than the others."""
    q, k, v = pieces = [parallel.shard(x)] * 3
    narrow = torch.float16 if last else torch.bfloat16
    policy = regard.temperature.SSMax(2.0 if last else 1.0)

    for given, options, what in (
        ([y.to(narrow) for y in pieces], {}, "q of different dtypes"),
        ((q, *[k[:, :1] if last else k] * 2), {}, "k of different shapes"),
        ((q, k, v[..., :2] if last else v), {}, "v of different shapes"),
        ((q.transpose(0, 1), k, v) if last else pieces, {}, "q of different shapes"),
        (pieces, dict(is_causal=last), "different is_causal"),
        (pieces, dict(temperature=policy), "different temperature"),
        (pieces, dict(key_lengths=torch.tensor([9 - last])), "different key_lengths"),
        (
            [y.clone().requires_grad_() for y in pieces],
            dict(temperature=torch.ones(2, requires_grad=last)),
            "and without a gradient of temperature",
        ),
        (pieces, dict(backend="reference" if last else "cpu"), "different backend"),
    ):
        with pytest.raises(ValueError, match=f"rank {world - 1} and rank 0 call with {what}"):
            parallel.attention(*given, **options)
    few = x[:, :, :2]
    for queries in (few * (1 + last), torch.where(torch.tensor(last), torch.nan, few)):
        with pytest.raises(ValueError, match=f"rank {world - 1} and rank 0 call with different q; decode"):
            parallel.decode(queries, k, v)
    with pytest.raises(ValueError, match=f"rank {world - 1} and rank 0 call with q of different shapes"):
        parallel.decode(few[:, :, : 2 - last], k, v)
    rounded = few * (1 + 1e-6 * last)  # as another machine may round
    assert torch.allclose(parallel.decode(rounded, k, v), regard.attention(few, x, x), atol=1e-5)
    for piece, what in (
        (q.int() if last else q, "x of different dtypes"),
        (q[:, :1] if last else q, "x of different s"),
    ):
        with pytest.raises(ValueError, match=f"rank {world - 1} and rank 0 call with {what}"):
            parallel.unshard(piece if last else q)
    with pytest.raises(ValueError, match="calls another function of regard"):
        parallel.unshard(q) if last else parallel.attention(q, k, v)


def wrong_on_one(x: torch.Tensor, rank: int, last: bool, world: int) -> None:
    """What the last rank alone gets wrong is raised there, and told to the others at once."""
    q, k, v = pieces = [parallel.shard(x)] * 3
    for given, options, error in (
        ((q, k, v[:, :, :1] if last else v), {}, "ValueError: k and v must have the same length"),
        (pieces, dict(temperature=torch.ones(1, 2, 7 if last else q.shape[2], 1)), "ValueError: temperature must have"),
        ((q, [1.0] if last else k, v), {}, "TypeError: k must be a tensor, this rank's shard, got list"),
        (pieces, dict(normalizer="sortmax" if last else "softmax"), "ValueError: normalizer 'sortmax' is unknown"),
    ):
        kind, _, text = error.partition(": ")
        told = text if last else f"rank {world - 1} cannot take part: {error}"
        with pytest.raises((ValueError, TypeError), match=told) as caught:
            parallel.attention(*given, **options)
        assert type(caught.value).__name__ == (kind if last else "ValueError")
    told = "dim must be one of the 0" if last else f"rank {world - 1} cannot take part: ValueError: dim must be one"
    with pytest.raises(ValueError, match=told):
        parallel.unshard(torch.tensor(1.0) if last else q)


def sentences(x: torch.Tensor, world: int) -> None:
    """Wrong on every rank: each says what came and what to do."""
    q, k, v = pieces = [parallel.shard(x)] * 3
    mesh = init_device_mesh("cpu", (world,))
    assert torch.equal(parallel.attention(q, k, v, group=mesh), parallel.attention(q, k, v))
    assert torch.equal(parallel.unshard(parallel.shard(x, group=mesh), group=mesh), x)
    learned = q.detach().requires_grad_()
    (once,) = torch.autograd.grad(parallel.attention(learned, k, v).square().sum(), learned, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()
    two = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    assert torch.equal(parallel.shard(x, group=two["b"]), q)
    mask = torch.ones(1, 1, q.shape[2], 7, dtype=torch.bool)
    for call, error in (
        (lambda: parallel.attention(q[0, 0, 0], k, v), r"q must have at least 2 dims"),
        (lambda: parallel.attention(*pieces, layout="round"), "layout must be one of 'balanced', 'contiguous', got"),
        (lambda: parallel.decode(x, k, v, torch.zeros(9, requires_grad=True)), "no gradient of a bias; pass"),
        (lambda: parallel.attention(*pieces, attn_mask=mask), "has 7 columns, but all ranks together have 9 keys"),
        (lambda: parallel.attention(*pieces, key_lengths=[10]), r"key_lengths must lie in \[0, 9\], got 10"),
        (lambda: parallel.attention(*pieces, normalizer="entmax(alpha=33)"), r"alpha must lie in \[1, 32\]"),
        (lambda: parallel.shard(x, 7), r"dim must be one of the 4 of x \(shape \(1, 2, 9, 4\)\), got 7"),
        (lambda: parallel.shard(x, group=two), "a DeviceMesh of 2 dimensions; pass one of them"),
        (lambda: parallel.shard(x, group="all"), "group must be a process group, a DeviceMesh or None, got str"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            call()


def own_errors() -> None:
    """An error that says nothing of another rank stays as it is."""
    group = RankGroup.from_torch()
    with pytest.raises(RuntimeError, match="no such operator") as caught, group.guard("test", 0):
        raise RuntimeError("no such operator")
    assert not isinstance(caught.value, parallel.RankError)


def raises_inside(rank: int, world: int) -> tuple[str, str]:
    """A rank that raises in the midst of a call: (type, message) of what each rank sees."""
    x = parallel.shard(torch.randn(1, 2, 64, 8))
    parallel.attention(x, x, x)
    if rank == 1:
        partial.forward = _full
    try:
        for _ in range(3):  # its keys may be on their way already: then the next call is where it is missed
            parallel.attention(x, x, x)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was noticed")


def _full(problem):
    raise MemoryError("no room for the scores")


def all_full(rank: int, world: int) -> None:
    """Memory runs out on every rank at the same step; whoever catches that and tries again is served at once."""
    whole = torch.randn(1, 2, 24, 4, generator=torch.Generator().manual_seed(0))
    x = parallel.shard(whole).requires_grad_()
    for name, module, function, after in (
        ("softmax", partial, "forward", 0),
        ("softmax", partial, "forward", 1),
        ("softmax", partial, "backward", 1),
        ("entmax15", launch, "forward", 0),
    ):

        def once(name=name):
            out = parallel.attention(x, x, x, normalizer=name)
            (gradient,) = torch.autograd.grad(out.square().sum(), x)
            return gradient

        expected, own, calls = once(), getattr(module, function), []

        def fails(*given, own=own, calls=calls, after=after):
            calls.append(given)
            return own(*given) if len(calls) <= after else _full(given)

        setattr(module, function, fails)
        try:
            with pytest.raises(MemoryError):
                once()
        finally:
            setattr(module, function, own)
        assert torch.equal(once(), expected)
