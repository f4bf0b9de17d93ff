"""Masks and biases without an N × N tensor: `regard.attention` beside FlexAttention and FlashAttention-4 in one run.

    PYTHONPATH=. python3 benchmarks/h200_masks.py [CASE …] [--budget 180] [--out benchmarks/results]

Every variant of every case is first compared with float64, output and dq, on rows of two heads; this also compiles the
kernels, in parallel. Then medians of `do_bench` through the public calls, candidates by turns. Rows that the budget of
seconds leaves no time for are named as not measured. Writes h200-masks.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from revision import find_revision

OURS: dict[str, dict] = {
    "regard": {},
    "all statistics": dict(return_stats=True),
    "entmax15": dict(normalizer="entmax15"),
}
RIVALS = ("FlexAttention", "FA4")
PADDED = 4096, 3000, 2000, 1000
DOCUMENTS, CHECKED_ROWS = 32, 64


class Case(NamedTuple):
    """One work: its inputs, and what it means, for the check and for the rivals."""

    tensors: list  # q, k, v: [B, H, N, D], require gradients
    ours: Callable[..., Any]  # of options such as normalizer
    visible: Callable  # (b, h, i, j) -> bool, on index tensors
    bias: Callable | None = None  # (b, h, i, j) -> what is added to the score
    softcap: float | None = None
    fa4: dict | None = None  # its options; None: it cannot say this work
    cu_seqlens: Any = None  # FA4 takes its varlen function


def make_tensors(b: int, n: int) -> list:
    """q, k and v of 16 heads of width 128, random normal bfloat16."""
    import torch

    shape = b, 16, n, 128
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def causal(b, h, i, j):
    """Query i sees the keys up to its own."""
    return i >= j


def make_window() -> Case:
    """Causal, 1024 keys back."""
    import regard

    x = make_tensors(1, 16384)
    ours = lambda **extra: regard.attention(*x, is_causal=True, window=(1024, 0), **extra)  # noqa: E731
    return Case(x, ours, lambda b, h, i, j: (i >= j) & (i - j <= 1024), fa4=dict(causal=True, window_size=(1024, 0)))


def make_softcap() -> Case:
    """Causal, scores capped at 50."""
    import regard

    x = make_tensors(4, 4096)
    ours = lambda **extra: regard.attention(*x, is_causal=True, softcap=50.0, **extra)  # noqa: E731
    return Case(x, ours, causal, softcap=50.0, fa4=dict(causal=True, softcap=50.0))


def make_padding(dense: bool) -> Case:
    """Key padding, as lengths or as a dense bool mask [4, 1, 4096, 4096]."""
    import torch

    import regard

    x = make_tensors(4, 4096)
    lengths = torch.tensor(PADDED, device="cuda")
    given: dict = dict(key_lengths=lengths)
    if dense:
        shown = (torch.arange(4096, device="cuda") < lengths[:, None])[:, None, None].expand(4, 1, 4096, 4096)
        given = dict(attn_mask=shown.contiguous())
    return Case(x, lambda **extra: regard.attention(*x, **given, **extra), lambda b, h, i, j: j < lengths[b])


def make_documents() -> Case:
    """32 documents of unequal length in 16384 tokens, causal within each, through `attention_varlen`."""
    import torch

    import regard

    x = make_tensors(1, 16384)
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(16383, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([16384])]).to(torch.int32).cuda()
    longest = int(ends.diff().max())
    document = torch.searchsorted(ends, torch.arange(16384, device="cuda", dtype=torch.int32), right=True)

    def ours(**extra):
        tokens = [y[0].transpose(0, 1) for y in x]  # [tokens, heads, width]
        found = regard.attention_varlen(*tokens, ends, ends, longest, longest, causal=True, **extra)
        out = found[0] if isinstance(found, tuple) else found
        return out.transpose(0, 1)[None]

    visible = lambda b, h, i, j: (i >= j) & (document[i] == document[j])  # noqa: E731
    return Case(x, ours, visible, fa4=dict(causal=True, max_seqlen_q=longest, max_seqlen_k=longest), cu_seqlens=ends)


def make_alibi() -> Case:
    """ALiBi: −slope·(i − j), causal."""
    import torch

    import regard

    x = make_tensors(4, 4096)
    slopes = 2.0 ** (-8.0 * torch.arange(1, 17, device="cuda") / 16)
    given = regard.bias.alibi(16)
    ours = lambda **extra: regard.attention(*x, given, is_causal=True, **extra)  # noqa: E731
    return Case(x, ours, causal, lambda b, h, i, j: slopes[h] * (j - i))


def make_forgetting() -> Case:
    """Forgetting attention: the sum of the log gates between key and query, causal."""
    import torch

    import regard

    x = make_tensors(4, 4096)
    gates = torch.nn.functional.logsigmoid(torch.randn(4, 16, 4096, device="cuda") + 4.0)
    total, given = gates.cumsum(-1), regard.bias.forgetting(gates)
    ours = lambda **extra: regard.attention(*x, given, is_causal=True, **extra)  # noqa: E731
    return Case(x, ours, causal, lambda b, h, i, j: total[b, h, i] - total[b, h, j])


def make_relative() -> Case:
    """T5: a table by relative position, every key visible."""
    import torch

    import regard

    x = make_tensors(4, 4096)
    table = torch.randn(16, 2 * 4096 - 1, device="cuda")
    given = regard.bias.relative(table)
    everything = lambda b, h, i, j: i >= 0  # noqa: E731
    return Case(
        x, lambda **extra: regard.attention(*x, given, **extra), everything, lambda b, h, i, j: table[h, j - i + 4095]
    )


CASES: dict[str, Callable[[], Case]] = {
    "window 1024, N 16384, causal": make_window,
    "soft cap 50, causal": make_softcap,
    "key padding, lengths": lambda: make_padding(dense=False),
    "key padding, dense bool mask": lambda: make_padding(dense=True),
    "32 documents in 16384 tokens, causal": make_documents,
    "ALiBi, causal": make_alibi,
    "forgetting gates, causal": make_forgetting,
    "T5 relative bias": make_relative,
}


def load_flex(case: Case) -> Callable:
    """FlexAttention of a case, compiled, with its block mask made beforehand."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # backward runs many times
    batch, n, cap, bias = case.tensors[0].shape[0], case.tensors[0].shape[2], case.softcap, case.bias
    mask = create_block_mask(case.visible, batch, None, n, n, device="cuda")
    change = None
    if cap is not None:
        change = lambda s, b, h, i, j: cap * torch.tanh(s / cap)  # noqa: E731
    if bias is not None:
        change = lambda s, b, h, i, j: s + bias(b, h, i, j)  # noqa: E731
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*case.tensors, score_mod=change, block_mask=mask)


def load_fa4(case: Case) -> Callable | None:
    """FlashAttention-4 of a case in its own layout; None if it is not installed or has no such option.

    Wheels installed with `pip --target SITE` need SITE and SITE/nvidia_cutlass_dsl/dsl_packages in PYTHONPATH.
    """
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    if case.fa4 is None:
        return None
    options = case.fa4

    def run():
        turned = [x.transpose(1, 2) for x in case.tensors]
        if case.cu_seqlens is None:
            out = flash_attn_func(*turned, **options)
        else:
            tokens = [x[0] for x in turned]
            out = flash_attn_varlen_func(*tokens, cu_seqlens_q=case.cu_seqlens, cu_seqlens_k=case.cu_seqlens, **options)
        out = out[0] if isinstance(out, tuple) else out
        return (out if case.cu_seqlens is None else out[None]).transpose(1, 2)

    return run


def candidates(case: Case) -> dict[str, Callable]:
    """Every way to compute a case, as functions that return the output alone."""
    found: dict[str, Callable] = {"FlexAttention": load_flex(case)}
    fa4 = load_fa4(case)
    if fa4 is not None:
        found["FA4"] = fa4
    for name, extra in OURS.items():

        def ours(extra=extra):
            result = case.ours(**extra)
            return result[0] if isinstance(result, tuple) else result

        found[name] = ours
    return found


def check(task: tuple[str, str]) -> str:
    """Run one candidate of a case forward and backward, ours against float64: "ok" or what is wrong."""
    import torch

    name, who = task
    try:
        torch.manual_seed(0)
        case = CASES[name]()
        if who == "FA4" and load_fa4(case) is None:
            return "ok"
        out = candidates(case)[who]() if who != "FlexAttention" else load_flex(case)()
        do = torch.randn_like(out)
        dq = torch.autograd.grad(out, case.tensors, do)[0]
        return compare(case, out.detach(), dq, do, OURS.get(who, {}).get("normalizer", "softmax"))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def compare(case: Case, out, dq, do, normalizer: str) -> str:
    """The largest error of 64 rows of two heads, output and dq, relative to the largest entry."""
    import torch

    import regard

    (batch, heads, n, d), worst = out.shape, 0.0
    i, j = torch.arange(n - CHECKED_ROWS - 37, n - 37, device="cuda")[:, None], torch.arange(n, device="cuda")[None]
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        q, k, v = (x[b, h].detach().double() for x in case.tensors)
        q = q[i[:, 0]].requires_grad_()
        s = q @ k.T / math.sqrt(d)
        s = s if case.softcap is None else case.softcap * torch.tanh(s / case.softcap)
        s = s if case.bias is None else s + case.bias(b, h, i, j)
        shown = case.visible(b, h, i, j).expand(s.shape)
        want = regard.reference.normalize(s, normalizer, mask=shown) @ v
        (dq_want,) = torch.autograd.grad(want, q, do[b, h, i[:, 0]].double())
        for ours, truth in ((out, want), (dq, dq_want)):
            error = (ours[b, h, i[:, 0]].double() - truth).abs().max() / truth.abs().max()
            worst = max(worst, error.item()) if math.isfinite(error.item()) else math.inf
    return f"ok {worst:.1e}" if worst < 0.03 else f"WRONG {worst:.1e}"


def time_case(name: str) -> dict[str, list[float]]:
    """{candidate: [forward ms, backward ms]}, medians of three turns."""
    import torch
    from triton.testing import do_bench

    torch._dynamo.reset()  # FlexAttention is compiled for each work; after eight in one process it would not be
    case = CASES[name]()
    runs = candidates(case)
    found: dict[str, list[list[float]]] = {who: [[], []] for who in runs}
    for turn in range(3):
        order = list(runs)
        for who in order if turn % 2 == 0 else reversed(order):
            try:
                with torch.no_grad():
                    found[who][0].append(do_bench(runs[who], warmup=10, rep=20, return_mode="median"))
                out = runs[who]()
                do = torch.randn_like(out)
                back = lambda out=out, do=do: torch.autograd.grad(out, case.tensors, do, retain_graph=True)  # noqa: E731
                found[who][1].append(do_bench(back, warmup=10, rep=20, return_mode="median"))
            except Exception as error:
                found[who] = [[math.nan], [math.nan]]
                print(f"  {name}: {who}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    return {who: [statistics.median(times) for times in pair] for who, pair in found.items()}


def measure_memory() -> str:
    """Bytes per token beyond inputs and outputs of a packed call with statistics, forward and backward, at N 65536."""
    import torch

    import regard

    n = 65536
    x = [torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask = regard.Mask.documents(cu_seqlens=torch.arange(0, n + 1, 2048, dtype=torch.int32, device="cuda"))
    used = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, _ = regard.attention(*x, mask, is_causal=True, return_stats=True)
    forward = torch.cuda.max_memory_allocated() - used
    torch.autograd.grad(out.sum(), x)
    both = torch.cuda.max_memory_allocated() - used
    kept = 4 * n * 64 * 2  # o, dq, dk, dv
    beyond = (both - kept) / n
    return (
        f"B1 H1 N{n} d64, documents, all statistics: forward takes {forward / n:.0f} bytes per token in all; with "
        f"backward {beyond:.0f} beyond o, dq, dk and dv."
    )


def table(times: dict, left_out: list[str], checks: dict) -> str:
    """The results as Markdown: ms forward / backward, and ratios."""
    columns = [*RIVALS, *OURS]
    ratios = "regard ÷ Flex", "regard ÷ FA4", "all statistics ÷ Flex", "all statistics ÷ FA4", "entmax15 ÷ regard"
    lines = ["| work | " + " | ".join([*columns, *ratios]) + " |", "| --- |" + " --- |" * (len(columns) + len(ratios))]

    def pair(values):
        return "–" if values is None else " / ".join("–" if math.isnan(x) else f"{x:.3f}" for x in values)

    def divide(ours, theirs):
        if ours is None or theirs is None:
            return "–"
        return pair([a / b for a, b in zip(ours, theirs, strict=True)])

    for name, found in times.items():
        flex, fa4, ours, measured, entmax = (found.get(who) for who in columns)
        cells = (
            divide(ours, flex),
            divide(ours, fa4),
            divide(measured, flex),
            divide(measured, fa4),
            divide(entmax, ours),
        )
        lines.append(f"| {name} | " + " | ".join([*(pair(found.get(who)) for who in columns), *cells]) + " |")
    wrong = [f"- {name}: {who}: {text}" for (name, who), text in checks.items() if not text.startswith("ok")]
    lines += ["", f"Checked against float64 before timing: {len(checks)} calls, {len(wrong)} failed.", *wrong]
    return "\n".join([*lines, *(f"- not measured, the budget was spent: {name}" for name in left_out)])


def main() -> None:
    started = time.monotonic()
    import torch
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names of cases; all without")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, after which the other rows are skipped")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    names = [case for case in CASES if not arguments.cases or any(part in case for part in arguments.cases)]
    tasks = [(name, who) for name in names for who in (*RIVALS, *OURS)]
    checks = dict.fromkeys(tasks, "not checked within two thirds of the budget")
    with multiprocessing.get_context("spawn").Pool(min(14, len(tasks))) as pool:
        pending = {task: pool.apply_async(check, (task,)) for task in tasks}
        for task, result in pending.items():
            left = started + arguments.budget * 2 / 3 - time.monotonic()
            try:
                checks[task] = result.get(max(left, 0.0))
            except multiprocessing.TimeoutError:
                continue
            print(*task, checks[task], flush=True)
    times, left_out = {}, []
    for name in names:
        if time.monotonic() - started > arguments.budget - 10.0:  # a row takes less
            left_out.append(name)
            continue
        try:
            times[name] = time_case(name)
        except Exception as error:
            checks[name, "timing"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        print(name, {who: [round(x, 3) for x in pair] for who, pair in times[name].items()}, flush=True)
    try:
        memory = measure_memory()
    except Exception as error:
        memory = f"Memory: {type(error).__name__}: {str(error)[:200]}"
    commit = find_revision()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, commit {commit}"
    about = (
        f"{torch.cuda.get_device_name()}, {versions}; ms, forward / backward; bfloat16, B4 H16 N4096 d128 or B1 N16384."
    )
    text = f"# Masks and biases\n\n{about}\n\n{table(times, left_out, checks)}\n\n{memory}\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "h200-masks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
