"""Losses on a GPU: correct first, then bandwidth against a copy, and time against the package `entmax`.

    PYTHONPATH=. python3 benchmarks/h200_losses.py [--markdown benchmarks/results/h200-losses.md]

Bytes: forward reads the logits, backward reads them and writes the gradient, so that a copy of the logits moves as much
as backward does. Where `entmax` is not installed, a loss written in plain torch stands in for it: the same sort, sums
and temporaries.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from regard import losses, normalizers, reference
from regard._backends.gpu.losses import launch

NAMES = ("softmax", "sparsemax", "entmax15", "entmax(alpha=1.3)")
SHAPES = ((8192, 32768), (8192, 32000), (4096, 131072), (4096, 128256))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HAS_PACKAGE = importlib.util.find_spec("entmax") is not None


def make_rows(rows: int, columns: int, dtype: torch.dtype, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits as wide as a trained model's, and random targets."""
    logits = torch.empty(rows, columns, device="cuda", dtype=dtype).normal_(0.0, spread)
    return logits, torch.randint(columns, (rows,), device="cuda")


def find_faults(name: str, columns: int, dtype: torch.dtype) -> list[str]:
    """Compares loss and gradient of rows of several spreads with float64."""
    faults = []
    for spread in (0.01, 0.3, 1.0, 5.0):
        logits, target = make_rows(16, columns, dtype, spread)
        choice = normalizers.get(name)
        loss, state = launch.forward(logits, target, choice)
        ds = launch.backward(torch.ones_like(loss), logits, target, state, choice)
        exact = reference.fenchel_young_loss(logits, target, name)
        gradient = reference.normalize(logits, name)
        gradient[torch.arange(16, device="cuda"), target] -= 1.0
        error, slope = (loss.double() - exact).abs().max().item(), (ds.double() - gradient).abs().max().item()
        if not (error < 1e-5 * (1 + exact.abs().max().item()) and slope < {"bf16": 4e-3}.get(_short(dtype), 1e-5)):
            faults.append(
                f"{name} {_short(dtype)} n = {columns}, spread {spread}: loss {error:.1e}, gradient {slope:.1e}"
            )
    return faults


def _short(dtype: torch.dtype) -> str:
    return next(short for short, kind in DTYPES.items() if kind == dtype)


def measure(call: Callable[[], object]) -> float:
    """Milliseconds, the median."""
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=50, return_mode="median")


def weigh_by_sorting(z: Tensor, alpha: float) -> Tensor:
    """sparsemax or entmax15 by a full sort, as `entmax` computes them."""
    z = (z - z.amax(-1, keepdim=True)) * (alpha - 1.0)
    ordered = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean = ordered.cumsum(-1) / count
    if alpha == 2.0:
        tau = mean - 1.0 / count
    else:
        spread = count * ((ordered**2).cumsum(-1) / count - mean**2)
        tau = mean - ((1.0 - spread) / count).clamp_min(0.0).sqrt()
    tau = tau.gather(-1, (tau <= ordered).sum(-1, keepdim=True) - 1)
    return (z - tau).clamp_min(0.0) ** (1.0 / (alpha - 1.0))


class SortingLoss(torch.autograd.Function):
    """The loss from sorted weights, which are kept for backward."""

    @staticmethod
    def forward(ctx, z: Tensor, target: Tensor, alpha: float) -> Tensor:
        p = weigh_by_sorting(z, alpha)
        loss = (1.0 - (p**alpha).sum(-1)) / (alpha * (alpha - 1.0))
        p.scatter_add_(1, target[:, None], torch.full_like(p, -1.0))
        ctx.save_for_backward(p)
        return loss + torch.einsum("ij,ij->i", p, z)

    @staticmethod
    def backward(ctx, dl: Tensor):
        return dl[:, None] * ctx.saved_tensors[0], None, None


def find_rival(name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What the loss is compared with: torch's cross entropy, the package, or plain torch."""
    if name == "softmax":
        return lambda z, y: torch.nn.functional.cross_entropy(z, y, reduction="none")
    if HAS_PACKAGE:
        import entmax

        found = {"sparsemax": entmax.sparsemax_loss, "entmax15": entmax.entmax15_loss}.get(name)
        return found or (lambda z, y: entmax.entmax_bisect_loss(z, y, normalizers.get(name).theta))
    alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name)
    return None if alpha is None else lambda z, y: SortingLoss.apply(z, y, alpha)


def measure_both_ways(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> float:
    """Milliseconds of forward and backward through autograd."""
    given = logits.detach().requires_grad_()
    upstream = torch.ones(len(logits), device="cuda")

    def both() -> None:
        found = loss(given, target)
        torch.autograd.grad(found, given, upstream.to(found.dtype))

    return measure(both)


def measure_rival(name: str, columns: int, dtype: torch.dtype) -> str:
    """How many times as long a rival takes, forward and backward, on 1024 rows: its temporaries are large."""
    rival = find_rival(name)
    if rival is None:
        return "–"
    logits, target = make_rows(1024, columns, dtype)
    theirs = measure_both_ways(rival, logits, target)
    ours = measure_both_ways(lambda z, y: losses.fenchel_young_loss(z, y, name), logits, target)
    return f"{theirs / ours:.1f}"


def build_table() -> list[str]:
    head = "| | dtype | rows × classes | forward, ms (% of a copy) | backward, ms (%) | both (%) | rival / ours |"
    lines = [head, "| --- " * 7 + "|"]
    for rows, columns in SHAPES:
        for short, dtype in DTYPES.items():
            logits, target = make_rows(rows, columns, dtype)
            copy = measure(functools.partial(torch.empty_like(logits).copy_, logits))
            lines.append(f"| copy | {short} | {rows} × {columns} | {copy / 2:.3f} | {copy:.3f} | {1.5 * copy:.3f} | |")
            for name in NAMES:
                choice = normalizers.get(name)
                loss, state = launch.forward(logits, target, choice)
                forward = measure(lambda x=logits, y=target, c=choice: launch.forward(x, y, c))
                backward = measure(lambda d=loss, x=logits, y=target, s=state, c=choice: launch.backward(d, x, y, s, c))
                shares = [50 * copy / forward, 100 * copy / backward, 150 * copy / (forward + backward)]
                lines.append(
                    f"| {name} | {short} | {rows} × {columns} | {forward:.3f} ({shares[0]:.0f}) | {backward:.3f} "
                    f"({shares[1]:.0f}) | {forward + backward:.3f} ({shares[2]:.0f}) | "
                    f"{measure_rival(name, columns, dtype)} |"
                )
                print(lines[-1], flush=True)
    return lines


def build_spread_table() -> list[str]:
    """Forward at several spreads: flat rows, in which lanes hide scores, are read more than once."""
    lines = [
        "| | " + " | ".join(f"spread {spread}" for spread in (0.01, 0.1, 0.3, 1.0, 3.0)) + " |",
        "| --- " * 6 + "|",
    ]
    for name in NAMES[1:]:
        cells = []
        for spread in (0.01, 0.1, 0.3, 1.0, 3.0):
            logits, target = make_rows(4096, 131072, torch.bfloat16, spread)
            choice = normalizers.get(name)
            cells.append(f"{measure(lambda x=logits, y=target, c=choice: launch.forward(x, y, c)):.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, help="file to write")
    options = parser.parse_args()
    faults = [
        fault
        for name in NAMES
        for columns in (1000, 32000, 32768, 128256, 131072)
        for dtype in DTYPES.values()
        for fault in find_faults(name, columns, dtype)
    ]
    rival = "the package entmax" if HAS_PACKAGE else "plain torch with a full sort, as entmax computes"
    text = [
        f"# Losses on {torch.cuda.get_device_name()}", "",
        f"Checks against float64: {'; '.join(faults) or 'no faults'}.", "",
        "Random normal logits of spread 2. Per cent of a copy's bandwidth: forward moves half of a copy's bytes, "
        f"backward as many. Rival, forward and backward on 1024 rows: {rival}; for softmax torch's cross entropy.", "",
        *build_table(), "",
        "Forward, ms, 4096 × 131072 bf16, by the spread of the logits:", "", *build_spread_table(), "",
    ]  # fmt: skip
    print("\n".join(text))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(text))


if __name__ == "__main__":
    main()
