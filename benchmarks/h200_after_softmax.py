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


SECTIONS: dict[str, Callable[[], Measurements]] = {
    "learned alpha": measure_learned_alpha,
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
