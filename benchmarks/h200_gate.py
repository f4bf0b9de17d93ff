"""The output gate: what it adds to attention's forward and backward, per head and per element.

    PYTHONPATH=. python3 benchmarks/h200_gate.py [--out benchmarks/results]

Each gated call is first compared with float64 on rows of one head, output and gradients. Then the public call is timed
with and without the gate, and with torch's own o·sigmoid(g): medians of `do_bench`, candidates by turns. "bytes" is the
time that the gate's own reads and writes take at the bandwidth of a copy on this machine. Writes h200-gate.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from triton.testing import do_bench

import regard

BATCH, HEADS, LENGTH, WIDTH = 4, 16, 4096, 128
KINDS = {"head": 1, "element": WIDTH}
CASES = {
    "full": dict(is_causal=False),
    "causal": dict(is_causal=True),
    "causal, two statistics": dict(is_causal=True, return_stats=("entropy", "max_logit")),
    "causal, entmax15": dict(is_causal=True, normalizer="entmax15"),
}
ROUNDS = 5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def output_of(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def check(options: dict, kind: str) -> dict[str, float]:
    """The largest relative errors of output and gradients of one head against float64."""
    q, k, v = (draw(1, 1, 1024, WIDTH) for _ in range(3))
    g, do = draw(1, 1, 1024, KINDS[kind]), draw(1, 1, 1024, WIDTH).detach()
    out = output_of(regard.attention(q, k, v, gate=g, **options))
    found = out, *torch.autograd.grad(out, (q, k, v, g), do)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, g)]
    truth = regard.reference.attention(*wide[:3], gate=wide[3], **options)[0]
    exact = truth, *torch.autograd.grad(truth, wide, do.double())
    names = "o", "dq", "dk", "dv", "dg"
    pairs = zip(names, found, exact, strict=True)
    return {name: float((x.double() - y).norm() / y.norm()) for name, x, y in pairs}


def copy_bandwidth() -> float:
    """Bytes per second of a copy of 1 GiB, reads and writes counted."""
    x = torch.empty(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * 2**30 / (do_bench(lambda: y.copy_(x), return_mode="median") * 1e-3)


def count_bytes(kind: str) -> tuple[int, int]:
    """Bytes that the gate reads and writes: forward o, g → o; backward do, o, g → do, dg."""
    o = 2 * BATCH * HEADS * LENGTH * WIDTH
    g = o // WIDTH * KINDS[kind]
    return 2 * o + g, 3 * o + 2 * g


def time_by_turns(functions: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each, candidates by turns."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            found[name].append(do_bench(function, return_mode="median"))
    return {name: statistics.median(times) for name, times in found.items()}


def measure(options: dict) -> dict[str, dict[str, float]]:
    """Milliseconds of forward and backward: without a gate, with each kind, and with torch's own product."""
    q, k, v = (draw(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3))
    do = draw(BATCH, HEADS, LENGTH, WIDTH).detach()
    gates = {kind: draw(BATCH, HEADS, LENGTH, width) for kind, width in KINDS.items()}
    calls: dict[str, tuple[Callable, list]] = {
        "none": (lambda: output_of(regard.attention(q, k, v, **options)), [q, k, v])
    }
    for kind, g in gates.items():
        calls[kind] = (lambda g=g: output_of(regard.attention(q, k, v, gate=g, **options)), [q, k, v, g])
        calls[f"{kind}, by torch"] = (
            lambda g=g: output_of(regard.attention(q, k, v, **options)) * torch.sigmoid(g),
            [q, k, v, g],
        )

    def quietly(call: Callable) -> Callable:
        def run():
            with torch.no_grad():
                return call()

        return run

    forward = time_by_turns({name: quietly(call) for name, (call, _) in calls.items()})
    outputs = {name: (call(), leaves) for name, (call, leaves) in calls.items()}
    backward = time_by_turns(
        {
            name: lambda o=o, leaves=leaves: torch.autograd.grad(o, leaves, do, retain_graph=True)
            for name, (o, leaves) in outputs.items()
        }
    )
    return {name: dict(forward=forward[name], backward=backward[name]) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for h200-gate.json")
    folder = parser.parse_args().out
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    found: dict = {"device": torch.cuda.get_device_name(), "copy_GB_per_s": bandwidth / 1e9, "cases": {}}
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    for case, options in CASES.items():
        errors = {kind: check(options, kind) for kind in KINDS}
        worst = max(error for each in errors.values() for error in each.values())
        assert worst < 2e-2, (case, errors)
        times = measure(options)
        found["cases"][case] = dict(errors=errors, milliseconds=times)
        none = times.pop("none")
        print(f"{case}: error ≤ {worst:.1e}; without a gate {none['forward']:.3f} + {none['backward']:.3f} ms")
        for name, each in times.items():
            costs = {way: each[way] - none[way] for way in each}
            total = 100.0 * sum(costs.values()) / sum(none.values())
            shares = ", ".join(
                f"{way} {1e3 * costs[way]:+.0f} µs = {100 * costs[way] / none[way]:+.1f} %" for way in each
            )
            there, back = (1e6 * n / bandwidth for n in count_bytes(name.partition(",")[0]))
            print(f"  {name:18} {shares}; both {total:+.1f} %  (bytes: {there:.0f} + {back:.0f} µs)")
    if folder is not None:
        (folder / "h200-gate.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
