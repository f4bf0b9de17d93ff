"""torch.func.jvp of `regard.attention` beside its own forward, torch's plain products and jvp-flash-attention.

    PYTHONPATH=. python3 benchmarks/h200_jvp.py [--out benchmarks/results]

Every candidate is first compared with float64, output and tangent, on the first rows of two heads. Then medians of
`do_bench` through the public calls. A candidate that is not installed, or that has no memory, is named with its error.
Writes h200-jvp.md.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

import regard

WORKS = {  # (B, H, N, D, causal)
    "B4 H16 N4096 d128": (4, 16, 4096, 128, False),
    "B4 H16 N4096 d128 causal": (4, 16, 4096, 128, True),
    "B4 H16 N4096 d64": (4, 16, 4096, 64, False),
    "B64 H16 N256 d64": (64, 16, 256, 64, False),
    "B1 H16 N16384 d128 causal": (1, 16, 16384, 128, True),
}
NORMALIZERS = "softmax", "softmax1", "sigmoid", "relu", "softpick", "entmax15", "sparsemax"
ROWS, ERROR = 64, 3e-2


def by_torch(causal: bool) -> Callable:
    """torch's plain products, the only ones that it has a tangent for."""

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def by_package(causal: bool) -> Callable:
    """The package jvp-flash-attention."""
    from jvp_flash_attention.jvp_attention import JVPAttn

    return lambda q, k, v: JVPAttn.fwd_dual(q, k, v, causal=causal)


def by_regard(causal: bool, name: str = "softmax") -> Callable:
    """Ours."""
    return lambda q, k, v: regard.attention(q, k, v, is_causal=causal, normalizer=name)


def find_error(attend: Callable, name: str, at: tuple, along: tuple, causal: bool) -> float:
    """The larger relative error of output and tangent, on the first rows of two heads, against float64."""
    got = torch.func.jvp(attend, at, along)
    part = [x[:1, :2].double() for x in (*at, *along)]
    part[0], part[3] = part[0][:, :, :ROWS], part[3][:, :, :ROWS]

    def exact(q, k, v):
        return regard.reference.attention(q, k, v, is_causal=causal, normalizer=name)[0]

    true = torch.func.jvp(exact, tuple(part[:3]), tuple(part[3:]))
    pairs = zip(got, true, strict=True)
    return max(float((x[:1, :2, :ROWS].double() - y).norm() / y.norm()) for x, y in pairs)


def measure(make: Callable, name: str, at: tuple, along: tuple, causal: bool) -> str | tuple[float, float]:
    """(ms, GiB beyond the inputs) of one jvp, or why there is no number."""
    try:
        attend = make(causal)
        error = find_error(attend, name, at, along, causal)
        if not error <= ERROR:
            return f"wrong by {error:.1e}"
        torch.cuda.reset_peak_memory_stats()
        used = torch.cuda.memory_allocated()
        ms = do_bench(lambda: torch.func.jvp(attend, at, along), return_mode="median")
        return ms, (torch.cuda.max_memory_allocated() - used) / 2**30
    except Exception as problem:
        torch.cuda.empty_cache()
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:60]}"


def write(found: str | tuple[float, float], forward: float) -> str:
    """A cell: ms, times the forward, GiB."""
    return found if isinstance(found, str) else f"{found[0]:.3f} ({found[0] / forward:.2f} ×, {found[1]:.2f} GiB)"


def tabulate(names: tuple[str, ...], rivals: dict[str, Callable]) -> list[str]:
    """One table: a row per work and normaliser."""
    head = ["work", "forward", "jvp, regard", *rivals]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1)]
    for work, (b, h, n, d, causal) in WORKS.items():
        torch.manual_seed(0)
        tensors = [torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
        at, along = tuple(tensors[:3]), tuple(tensors[3:])
        for name in names:
            attend = by_regard(causal, name)
            forward = do_bench(lambda attend=attend, at=at: attend(*at), return_mode="median")
            ours = measure(lambda causal, name=name: by_regard(causal, name), name, at, along, causal)
            cells = [
                write(ours, forward),
                *(write(measure(x, name, at, along, causal), forward) for x in rivals.values()),
            ]
            label = work if len(names) == 1 else f"{work} {name}"
            lines.append(f"| {label} | {forward:.3f} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out = parser.parse_args().out
    rivals = {"jvp, torch's plain products": by_torch, "jvp-flash-attention": by_package}
    softmax = tabulate(("softmax",), rivals)
    others = tabulate(NORMALIZERS[1:], {})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit or 'unknown'}; bfloat16, tangents "
    )
    about += (
        "of q, k and v; ms (times regard's forward, memory beyond the inputs). Checked against float64 before timing."
    )
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["# Forward mode", "", about, "", *softmax, "", "## Other normalisers", "", *others, ""])
    (out / "h200-jvp.md").write_text(text)


if __name__ == "__main__":
    main()
