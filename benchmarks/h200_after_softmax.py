"""What should replace or accompany softmax: learned maps on an H200, each beside what it is measured against.

    PYTHONPATH=. python3 benchmarks/h200_after_softmax.py [SECTION …] [--out FILE.json]

A section is a function that first compares its variants with float64 and then returns medians of `do_bench` in
milliseconds, by name. It needs nothing of the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Measurements = dict[str, float]


def measure_learned_alpha() -> Measurements:
    """entmax with α per head and its gradient beside entmax15, bfloat16, causal; at most 1.5 × its time is asked."""
    import torch
    from triton.testing import do_bench

    import regard

    def draw(b: int, h: int, n: int, d: int, dtype: torch.dtype) -> list:
        return [torch.randn(b, h, n, d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]

    def choose(heads: int) -> tuple:
        alpha = torch.linspace(1.3, 1.7, heads, device="cuda", requires_grad=True)
        return alpha, regard.normalizers.get("entmax", alpha=alpha)

    x = draw(1, 4, 1024, 128, torch.bfloat16)
    do = torch.randn_like(x[0])
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        (alpha, choice), given = choose(4), [y.detach().to(dtype).requires_grad_() for y in x]
        out = regard.attention(*given, is_causal=True, normalizer=choice)
        found.append((out, *torch.autograd.grad(out, [*given, alpha], do.to(dtype))))
    for name, ours, truth in zip(("o", "dq", "dk", "dv", "dalpha"), *found, strict=True):
        error = float((ours.double() - truth.double()).norm() / truth.double().norm())
        assert error < 2e-2, f"{name} is off by {error:.1e} of its size"

    times: Measurements = {}
    for b, h, n, d in (
        (16, 16, 1024, 64),
        (16, 16, 1024, 128),
        (4, 16, 4096, 64),
        (4, 16, 4096, 128),
        (1, 16, 16384, 128),
    ):
        x = draw(b, h, n, d, torch.bfloat16)
        do = torch.randn_like(x[0])
        alpha, learned = choose(h)
        for name, normalizer, leaves in (
            ("entmax15", "entmax15", x),
            ("entmax(alpha=1.5)", "entmax(alpha=1.5)", x),
            ("learned alpha", learned, [*x, alpha]),
        ):
            work = f"d {d}, N {n}, {name}"
            out = regard.attention(*x, is_causal=True, normalizer=normalizer)
            backward = lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)  # noqa: E731
            with torch.no_grad():
                forward = lambda: regard.attention(*x, is_causal=True, normalizer=normalizer)  # noqa: E731
                times[f"{work}, forward"] = do_bench(forward, return_mode="median")
            times[f"{work}, backward"] = do_bench(backward, return_mode="median")
        for direction in ("forward", "backward"):
            ours, theirs = (times[f"d {d}, N {n}, {name}, {direction}"] for name in ("learned alpha", "entmax15"))
            times[f"d {d}, N {n}, learned alpha ÷ entmax15, {direction}"] = ours / theirs
            print(f"d {d}, N {n}, {direction}: entmax15 {theirs:.3f}, learned {ours:.3f}", flush=True)
    return times


def check_weights_by_key(q: Any, k: Any, v: Any) -> None:
    """Raises AssertionError unless `received` and `top_keys(8)` of a causal call are those of float64."""
    import torch

    import regard

    _, stats = regard.attention(q, k, v, is_causal=True, enable_gqa=True, return_stats=("received", "top_keys(8)"))
    _, weights = regard.reference.attention(*(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=True)
    received = weights.sum(-2)
    off = float((stats.received.double() - received).norm() / received.norm())
    assert off < 1e-2, f"received is off by {off:.1e} of its size"
    index, best = stats.top_keys.index, weights.topk(8, -1).values
    found = weights.gather(-1, index.clamp_min(0)).masked_fill(index < 0, 0.0)  # float64's weights of the keys found
    gap = float((found.sort(-1, descending=True).values - best).abs().max())
    assert gap < 2e-2, f"top_keys found keys whose weights are {gap:.1e} below the largest"
    off = float((stats.top_keys.weight.double() - found).abs().max())
    assert off < 2e-2, f"the weights of top_keys are off by {off:.1e}"
    assert bool((index[..., 0, 1:] == -1).all()), "the first row of a causal call has one key"
    torch.testing.assert_close(
        stats.received.double().sum(-1), torch.full_like(received[..., 0], q.shape[-2]), rtol=1e-2, atol=0
    )


def measure_weights_by_key() -> Measurements:
    """`received` (at most 1.25 × the forward is asked), `top_keys(8)` (1.5 ×), beside eager's and FlagAttention's way.

    Eager makes the N × N weights and reduces them. FlagAttention's sums over the queries are there if `flag_attn` is.
    """
    import importlib

    import torch
    from triton.testing import do_bench

    import regard

    try:
        flag: Any = importlib.import_module("flag_attn")
    except ImportError:
        flag = None
        print("flag_attn is not installed: its way is not measured", flush=True)

    def eager(q: Any, k: Any, v: Any, reduce: Callable) -> Any:
        s = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[-1] ** -0.5
        p = s.masked_fill(torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), reduce(p)

    times: Measurements = {}
    with torch.no_grad():
        for b, h, g, n, d in (
            (4, 16, 16, 2048, 64),
            (4, 32, 8, 2048, 128),
            (1, 32, 8, 8192, 128),
            (1, 32, 8, 16384, 128),
        ):
            draw = lambda heads: torch.randn(b, heads, n, d, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            q, k, v = draw(h), draw(g), draw(g)
            check_weights_by_key(2 * q[:1, : h // g, :2048], k[:1, :1, :2048], v[:1, :1, :2048])
            call = lambda **more: regard.attention(q, k, v, is_causal=True, enable_gqa=True, **more)  # noqa: E731
            runs: dict[str, Callable] = {
                "forward": call,
                "received": lambda: call(return_stats=("received",)),
                "top_keys(8)": lambda: call(return_stats=("top_keys(8)",)),
                "eager, received": lambda: eager(q, k, v, lambda p: p.sum(-2, dtype=torch.float32)),
                "eager, top_keys(8)": lambda: eager(q, k, v, lambda p: p.topk(8, -1)),
            }
            if flag is not None:
                runs["FlagAttention, received"] = lambda: flag.flash_attention(
                    q,
                    k,
                    v,
                    causal=True,
                    return_total_attention=True,
                )
            work = f"B {b}, H {h}/{g}, N {n}, d {d}"
            for name, run in runs.items():
                times[f"{work}, {name}"] = do_bench(run, return_mode="median")
            for name in ("received", "top_keys(8)"):
                times[f"{work}, {name} ÷ forward"] = times[f"{work}, {name}"] / times[f"{work}, forward"]
    return times


SECTIONS: dict[str, Callable[[], Measurements]] = {
    "learned alpha": measure_learned_alpha,
    "weights by key": measure_weights_by_key,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.sections or SECTIONS:
        results[name] = SECTIONS[name]()
        for work, number in results[name].items():
            print(f"{name}: {work}: {number:.3f}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
