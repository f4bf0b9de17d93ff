"""Every call a user makes: `regard.attention` in eager mode against torch's default, cuDNN and FlashAttention-4.

    PYTHONPATH=. python3 benchmarks/h200_calls.py [CASE …] [--out benchmarks/results]
    PYTHONPATH=. python3 benchmarks/h200_calls.py --check FILE; … --checked FILE      in two steps on one machine

Each variant of each case is first compared with float64 on rows of one head (fresh random inputs; this also compiles
the kernels, in parallel), then timed through the public call: medians of `do_bench`, candidates by turns. `host` rows
are the host's time per call, where kernels are shorter than that. Writes h200-calls.md and h200-calls.json.
`--check` writes what was compared and stops; `--checked` reads it. Other work may run beside the first step.
FlashAttention-4 is compiled by other processes: it needs FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from revision import find_revision

TURNS = 3
TWO = ("entropy", "max_logit")
# name: batch, query heads, key heads, queries, keys, width of k, width of v, causal, options of regard.attention
CASES: dict[str, tuple] = {
    "B4 H16 N4096 d128 causal": (4, 16, 16, 4096, 4096, 128, 128, True, {}),
    "B1 H16 N16384 d128 causal": (1, 16, 16, 16384, 16384, 128, 128, True, {}),
    "B1 H16 N16384 d128 full": (1, 16, 16, 16384, 16384, 128, 128, False, {}),
    "B1 H32 N16384 d64 causal": (1, 32, 32, 16384, 16384, 64, 64, True, {}),
    "B2 H32/8 N8192 d128 causal": (2, 32, 8, 8192, 8192, 128, 128, True, {}),
    "B8 H16 N2048 d128 causal": (8, 16, 16, 2048, 2048, 128, 128, True, {}),
    "B16 H12 N1024 d64 causal (GPT-2)": (16, 12, 12, 1024, 1024, 64, 64, True, {}),
    "B32 H12 N512 d64 (BERT)": (32, 12, 12, 512, 512, 64, 64, False, {}),
    "B64 H12 N197 d64 (ViT)": (64, 12, 12, 197, 197, 64, 64, False, {}),
    "B4 H32 N2048 d80 causal": (4, 32, 32, 2048, 2048, 80, 80, True, {}),
    "B2 H32 N4096 d96 causal": (2, 32, 32, 4096, 4096, 96, 96, True, {}),
    "B2 H8 N4096 d256 causal (Gemma)": (2, 8, 8, 4096, 4096, 256, 256, True, {}),
    "B1 H64 N4096 192/128 causal (MLA)": (1, 64, 64, 4096, 4096, 192, 128, True, {}),
    "B4 H16 N4096 d128 causal, soft cap 50": (4, 16, 16, 4096, 4096, 128, 128, True, dict(softcap=50.0)),
    "B1 H16 N16384 d128 causal, window 1024": (1, 16, 16, 16384, 16384, 128, 128, True, dict(window=(1024, 0))),
    "B4 H16 N4096 d128, key lengths": (
        4,
        16,
        16,
        4096,
        4096,
        128,
        128,
        False,
        dict(key_lengths=[4096, 3000, 2000, 1000]),
    ),
    "decode B32 H32/8 Lk4096": (32, 32, 8, 1, 4096, 128, 128, False, {}),
    "decode B1 H32/8 Lk2048": (1, 32, 8, 1, 2048, 128, 128, False, {}),
}
OURS = {
    "regard": {},
    "our kernels": dict(backend="triton"),
    "two statistics": dict(return_stats=TWO),
    "all statistics": dict(return_stats=True),
    "entmax15": dict(normalizer="entmax15"),
}


def make_inputs(case: str, grad: bool = False) -> tuple:
    """q, k, v and the options of a case: random normal bfloat16."""
    import torch

    b, h, g, m, n, d, e, causal, options = CASES[case]
    shapes = (b, h, m, d), (b, g, n, d), (b, g, n, e)
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for s in shapes]
    options = dict(options, is_causal=causal, enable_gqa=h != g)
    if "key_lengths" in options:
        options["key_lengths"] = torch.tensor(options["key_lengths"], device="cuda")
    return tensors, options


def candidates(case: str, tensors: list, options: dict) -> dict[str, Callable]:
    """Every way to compute a case, as functions that return the output alone."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import regard

    sdpa = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable] = {}
    plain = {name: options[name] for name in ("is_causal", "enable_gqa")}
    if set(options) == set(plain):
        found["torch"] = lambda: sdpa(*tensors, **plain)

        def by_cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa(*tensors, **plain)

        found["cuDNN"] = by_cudnn
    fa4 = load_fa4(options, tensors)
    if fa4 is not None:
        found["FA4"] = fa4
    for name, extra in OURS.items():

        def ours(extra=extra):
            result = regard.attention(*tensors, **options, **extra)
            return result[0] if isinstance(result, tuple) else result

        found[name] = ours
    return found


def load_fa4(options: dict, tensors: list) -> Callable | None:
    """FlashAttention-4 on the same tensors in its own layout [B, N, H, D]; None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    if "key_lengths" in options:
        return None
    turned = [x.transpose(1, 2) for x in tensors]
    window = options.get("window", (None, None))
    keywords = dict(causal=options["is_causal"], window_size=window, softcap=options.get("softcap") or 0.0)

    def run():
        out = flash_attn_func(*turned, **keywords)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def compile_fa4(case: str) -> None:
    """Compile FlashAttention-4's kernels of a case, forward and backward, while the checks compile ours."""
    import torch

    tensors, options = make_inputs(case, grad=True)
    run = load_fa4(options, tensors)
    if run is None:
        return
    try:
        out = run()
        torch.autograd.grad(out, tensors, torch.randn_like(out))
    except Exception as error:
        print(f"  {case}: FA4: {type(error).__name__}: {str(error)[:160]}", flush=True)


def check(case: str) -> dict[str, str]:
    """Compare each of our variants with float64 on the last 64 rows of one head; "ok" or what is wrong."""
    import torch

    import regard

    results = {}
    for name, extra in OURS.items():
        try:
            tensors, options = make_inputs(case, grad=True)
            out = regard.attention(*tensors, **options, **extra)
            out, stats = out if isinstance(out, tuple) else (out, {})
            if CASES[case][3] is not None and out.shape[2] > 1:
                torch.autograd.grad(out, tensors, torch.randn_like(out))
            results[name] = compare(out.detach(), stats, tensors, options, extra)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return results


def compare(out, stats, tensors, options, extra) -> str:
    """The largest error of 64 rows of the first and last head, relative to the largest entry."""
    import regard

    q, k, v = (x.detach() for x in tensors)
    rows, worst = min(64, q.shape[2]), 0.0
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        g = h * k.shape[1] // q.shape[1]
        first = q.shape[2] - rows
        given = {name: options[name] for name in ("softcap", "window") if name in options}
        if "key_lengths" in options:
            given["key_lengths"] = options["key_lengths"][b : b + 1]
        want, _, exact = regard.reference.attention(
            q[b : b + 1, h : h + 1, first:], k[b : b + 1, g : g + 1], v[b : b + 1, g : g + 1],
            is_causal=options["is_causal"], normalizer=extra.get("normalizer", "softmax"), return_stats=TWO,
            first_query=first, **given,
        )  # fmt: skip
        ours = out[b, h, first:].double()
        worst = max(worst, ((ours - want[0, 0]).abs().max() / want.abs().max()).item())
        for name in TWO if stats else ():
            worst = max(
                worst, ((stats[name][b, h, first:].detach().double() - exact[name][0, 0]).abs().max()).item() / 4
            )
    return f"ok {worst:.1e}" if worst < 0.03 and math.isfinite(worst) else f"WRONG {worst:.1e}"


def time_case(case: str) -> dict[str, list[float]]:
    """{candidate: [forward ms, backward ms]}, medians of the turns."""
    import torch
    from triton.testing import do_bench

    tensors, options = make_inputs(case, grad=True)
    runs = candidates(case, tensors, options)
    found: dict[str, list[list[float]]] = {name: [[], []] for name in runs}
    for turn in range(TURNS):
        order = list(runs)
        for name in order if turn % 2 == 0 else reversed(order):
            try:
                with torch.no_grad():
                    found[name][0].append(do_bench(runs[name], warmup=15, rep=30, return_mode="median"))
                if tensors[0].shape[2] > 1:
                    out = runs[name]()
                    do = torch.randn_like(out)
                    back = lambda out=out, do=do: torch.autograd.grad(out, tensors, do, retain_graph=True)  # noqa: E731
                    found[name][1].append(do_bench(back, warmup=15, rep=30, return_mode="median"))
            except Exception as error:
                found[name] = [[math.nan], [math.nan]]
                print(f"  {case}: {name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    return {name: [statistics.median(times) if times else math.nan for times in pair] for name, pair in found.items()}


def host_us(function: Callable, count: int = 200) -> float:
    """Microseconds of the host per call, the best of five loops."""
    import torch

    best = math.inf
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return best


def time_host() -> dict[str, tuple[float, float]]:
    """{row: (ours, torch's)} in µs, of B1 H8 N128 d64 and of rows [64, 128]."""
    import torch

    import regard

    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = {}
    with torch.no_grad():
        base = host_us(lambda: sdpa(q, k, v))
        for name, extra in OURS.items():
            rows[f"forward, {name}"] = host_us(lambda extra=extra: regard.attention(q, k, v, **extra)), base
    leaves, do = [x.requires_grad_() for x in (q, k, v)], torch.randn(1, 8, 128, 64, device="cuda").bfloat16()

    def both(run):
        out = run()
        torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, do)

    base = host_us(lambda: both(lambda: sdpa(q, k, v)), 100)
    for name, extra in OURS.items():
        ours = host_us(lambda extra=extra: both(lambda: regard.attention(q, k, v, **extra)), 100)
        rows[f"forward + backward, {name}"] = ours, base
    z = torch.randn(64, 128, device="cuda")
    base = host_us(lambda: torch.softmax(z, -1))
    for name in ("softmax", "entmax15"):
        rows[f"rows, {name}"] = host_us(lambda name=name: regard.normalize(z, name)), base
    return rows


def table(times: dict, host: dict, checks: dict) -> str:
    """The results as Markdown: ms forward / backward, and ratios to the fastest rival."""
    columns = ["torch", "cuDNN", "FA4", *OURS]
    lines = ["| work | " + " | ".join(columns) + " | regard ÷ best rival | all statistics ÷ best |"]
    lines.append("| --- |" + " --- |" * (len(columns) + 2))

    def pair(values):
        return (
            "–"
            if values is None or math.isnan(values[0])
            else " / ".join("–" if math.isnan(x) else f"{x:.3f}" for x in values)
        )

    for case, found in times.items():
        rivals = [found[name] for name in ("torch", "cuDNN", "FA4") if name in found]
        best = [min((x[way] for x in rivals if not math.isnan(x[way])), default=math.nan) for way in (0, 1)]
        ratios = [
            pair([x / y for x, y in zip(found[name], best, strict=True)]) for name in ("regard", "all statistics")
        ]
        lines.append(f"| {case} | " + " | ".join([*(pair(found.get(name)) for name in columns), *ratios]) + " |")
    lines += ["", "| host time, B1 H8 N128 d64; rows 64 × 128 | µs | torch's | ratio |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {a:.1f} | {b:.1f} | {a / b:.2f} |" for name, (a, b) in host.items()]
    wrong = [
        f"{case}: {name}: {text}" for case, found in checks.items() for name, text in found.items() if text[:2] != "ok"
    ]
    lines += [
        "",
        f"Checked against float64 before timing: {sum(map(len, checks.values()))} calls, {len(wrong)} wrong.",
        *wrong,
    ]
    return "\n".join(lines)


def main() -> None:
    import torch
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names of cases; all without")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--check", type=Path, help="compare with float64, write the results to this file and stop")
    parser.add_argument("--checked", type=Path, help="the file that --check wrote on this machine")
    arguments = parser.parse_args()
    names = [case for case in CASES if not arguments.cases or any(part in case for part in arguments.cases)]
    checks = json.loads(arguments.checked.read_text()) if arguments.checked else {}
    with multiprocessing.get_context("spawn").Pool(min(14, len(names))) as pool:
        compiling = pool.map_async(compile_fa4, names, chunksize=1)
        if not checks:
            checks = dict(zip(names, pool.map(check, names, chunksize=1), strict=True))
        compiling.wait()
    if arguments.check:
        arguments.check.write_text(json.dumps(checks))
        print(checks)
        return
    host = time_host()
    print({name: [round(x, 1) for x in pair] for name, pair in host.items()}, flush=True)
    times = {}
    for case in names:
        times[case] = time_case(case)
        print(case, {name: [round(x, 3) for x in pair] for name, pair in times[case].items()}, flush=True)
    commit = find_revision()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, commit {commit}"
    about = f"{torch.cuda.get_device_name()}, {versions}; ms, forward / backward, through `regard.attention`; bfloat16."
    text = f"# Every call\n\n{about}\n\n{table(times, host, checks)}\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "h200-calls.md").write_text(text)
    (arguments.out / "h200-calls.json").write_text(
        json.dumps(dict(versions=versions, times=times, host=host, checks=checks))
    )
    print(text)


if __name__ == "__main__":
    main()
