"""entmax attention beside softmax through `regard.attention`: checked against float64 first, then timed.

    PYTHONPATH=. python3 benchmarks/h200_entmax.py --compile i/n      compile a share of the cases
    PYTHONPATH=. python3 benchmarks/h200_entmax.py [WORD …] [--budget 240] [--check 0] [--learned] [--set STATEMENT …]

Runs the cases whose name holds one of the words. A check has two heads of at most 1536 tokens, some sharp and some flat
rows, compared with `regard.reference.attention`. `--set "sparse.LEAST_KEYS['forward'] = 1024"` runs Python first.
"""

from __future__ import annotations

import argparse
import time

import torch
from triton.testing import do_bench

import regard
from regard._backends.gpu.attention import config
from regard._backends.gpu.attention.forward import launch as forward
from regard._backends.gpu.attention.sparse import launch as sparse

# name: batch, heads, tokens, width of k, width of v, options of `regard.attention`, or a bias
CASES: dict[str, tuple] = {
    "B16 H12 N1024 d64 causal": (16, 12, 1024, 64, 64, dict(is_causal=True)),
    "B32 H12 N512 d64": (32, 12, 512, 64, 64, {}),
    "B64 H12 N197 d64": (64, 12, 197, 64, 64, {}),
    "B8 H16 N2048 d128 causal": (8, 16, 2048, 128, 128, dict(is_causal=True)),
    "B4 H32 N2048 d80 causal": (4, 32, 2048, 80, 80, dict(is_causal=True)),
    "B2 H32 N4096 d96 causal": (2, 32, 4096, 96, 96, dict(is_causal=True)),
    "B4 H16 N4096 d128 causal": (4, 16, 4096, 128, 128, dict(is_causal=True)),
    "B2 H8 N4096 d256 causal": (2, 8, 4096, 256, 256, dict(is_causal=True)),
    "B1 H64 N4096 192/128 causal": (1, 64, 4096, 192, 128, dict(is_causal=True)),
    "soft cap 50, B4 H16 N4096 d128": (4, 16, 4096, 128, 128, dict(is_causal=True, softcap=50.0)),
    "window 1024, B1 H16 N16384 d128": (1, 16, 16384, 128, 128, dict(is_causal=True, window=(1024, 0))),
    "ALiBi, B4 H16 N4096 d128": (4, 16, 4096, 128, 128, "alibi"),
    "forgetting, B4 H16 N4096 d128": (4, 16, 4096, 128, 128, "forgetting"),
    "documents, B1 H16 N16384 d128": (1, 16, 16384, 128, 128, "documents"),
}


def make_case(name: str, small: bool = False) -> tuple[list, dict]:
    """(q, k, v, options) of a case, random normal bfloat16."""
    b, h, n, d, e, options = CASES[name]
    b, h, n = (1, 2, min(n, 1536)) if small else (b, h, n)
    x = [torch.randn(b, h, n, w, device="cuda", dtype=torch.bfloat16, requires_grad=True) for w in (d, d, e)]
    gates = torch.nn.functional.logsigmoid(torch.randn(b, h, n, device="cuda") + 4.0)
    cuts = torch.arange(9, dtype=torch.int32, device="cuda") * n // 8
    biases = dict(alibi=lambda: regard.bias.alibi(h), forgetting=lambda: regard.bias.forgetting(gates))
    biases["documents"] = lambda: regard.Mask.documents(cu_seqlens=cuts.int())
    return x, dict(attn_mask=biases[options](), is_causal=True) if isinstance(options, str) else options


def make_entmax(learned: bool, heads: int):
    """entmax15, or entmax with a learned alpha per head."""
    alpha = torch.linspace(1.3, 1.7, heads, device="cuda").requires_grad_()
    return regard.normalizers.get("entmax", alpha=alpha) if learned else "entmax15"


def check(name: str, learned: bool = False) -> str:
    """Compare o, dq, dk and dv of two heads with float64; a third of the rows each normal, sharp and flat."""
    before, (x, options) = dict(sparse.LEAST_KEYS), make_case(name, small=True)
    span = options["window"][0] + 1 if "window" in options else CASES[name][2]
    sparse.LEAST_KEYS.update({kind: 256 if span >= least else least for kind, least in before.items()})
    sharpness = torch.tensor([1.0, 8.0, 0.02], device="cuda")[torch.arange(x[0].shape[2], device="cuda") // 128 % 3]
    x[0] = (x[0].detach() * sharpness[:, None]).to(torch.bfloat16).requires_grad_()
    normalizer = make_entmax(learned, x[0].shape[1])
    out = regard.attention(*x, normalizer=normalizer, **options)
    ours = (out, *torch.autograd.grad(out, x, do := torch.randn_like(out)))
    sparse.LEAST_KEYS.update(before)
    doubles = [y.detach().double().requires_grad_() for y in x]
    truth = regard.reference.attention(*doubles, normalizer=normalizer, **options)[0]
    truths = (truth, *torch.autograd.grad(truth, doubles, do.double()))
    errors = [float((a.detach() - b).norm() / b.norm()) for a, b in zip(ours, map(torch.detach, truths), strict=True)]
    right = errors[0] < 0.012 and all(error < 0.03 for error in errors)  # false of NaN
    return ("ok " if right else "WRONG ") + " ".join(f"{error:.1e}" for error in errors)


def time_call(x: list, options: dict, normalizer) -> tuple[float, float]:
    """(forward, backward) in ms, medians."""
    with torch.no_grad():
        forward = do_bench(lambda: regard.attention(*x, normalizer=normalizer, **options), 10, 40, return_mode="median")
    out = regard.attention(*x, normalizer=normalizer, **options)
    do = torch.randn_like(out)
    return forward, do_bench(lambda: torch.autograd.grad(out, x, do, retain_graph=True), 10, 30, return_mode="median")


def main() -> None:
    """Run the cases that were asked for, or compile a share of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--compile")
    parser.add_argument("--check", type=int, default=1)
    parser.add_argument("--learned", action="store_true")
    chosen, began = parser.parse_args(), time.time()
    for statement in chosen.set:
        exec(statement, dict(sparse=sparse, config=config, forward=forward))
    names = [name for name in CASES if not chosen.words or any(word in name for word in chosen.words)]
    share, shares = map(int, (chosen.compile or "0/1").split("/"))
    who = "softmax", False, *[True] * chosen.learned
    print("| work | check: o dq dk dv | softmax | entmax15 | learned alpha | ÷ softmax |\n" + "| --- " * 6 + "|")
    for name in names[share::shares]:
        if time.time() - began > chosen.budget:
            break
        checks = [check(name, learned) for learned in who[1:] if chosen.check]
        x, options = make_case(name)
        kinds = ["softmax", *(make_entmax(learned, x[0].shape[1]) for learned in who[1:])]
        if chosen.compile:
            for kind in kinds:
                torch.autograd.grad(regard.attention(*x, normalizer=kind, **options).sum(), x)
            continue
        times = [time_call(x, options, kind) for kind in kinds]
        ratios = " , ".join(" / ".join(f"{a / b:.2f}" for a, b in zip(t, times[0], strict=True)) for t in times[1:])
        cells = [" / ".join(f"{t:.3f}" for t in pair) for pair in times] + ["–"] * (3 - len(times))
        print(f"| {name} | {'; '.join(checks)} | {' | '.join(cells)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
