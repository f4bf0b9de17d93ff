"""What examining costs on a GPU: a Llama-shaped model of 1B parameters with random weights, 8192 tokens, bfloat16.

PYTHONPATH=. python3 benchmarks/h200_examine.py [--markdown PATH]

First it checks that what is measured is right (a small model against float64 eager weights on the CPU), then times,
interleaved: the model's own sdpa forward, `regard.examine`, and the eager forward with `output_attentions=True`, with
the memory each takes beyond what was there before.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaModel

import regard


def llama(layers: int, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, max_position_embeddings=16384, **sizes)
    with torch.device(device):
        return LlamaModel(config).eval().to(dtype)


def check(dtype: torch.dtype, length: int) -> float:
    """The largest relative difference of a head's mean entropy from the float64 eager weights'."""
    small = llama(2, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2)
    with torch.no_grad():
        for name, weight in small.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(3.0)
    small = small.to(dtype)
    ids = torch.randint(0, 32000, (1, length))
    report = regard.examine(copy.deepcopy(small).cuda(), [dict(input_ids=ids)], checks=False)
    assert report.unmeasured == [], report.unmeasured
    exact = small.double()
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        weights = exact(input_ids=ids, output_attentions=True).attentions
    worst = 0.0
    for head in report.heads:
        expected = regard.statistics.of_weights(weights[head.index][:, head.head].double()).entropy.mean().item()
        worst = max(worst, abs(head.statistics["entropy"].mean - expected) / expected)
    return worst


def timed(run, rounds: int) -> tuple[float, float]:
    """(median milliseconds, GiB at the peak beyond the start)."""
    run()
    torch.cuda.synchronize()
    times = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = [
        f"regard {regard.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.cuda.get_device_name()}",
        "",
    ]
    for dtype, length, limit in ((torch.float32, 300, 1e-3), (torch.bfloat16, 1500, 1e-2)):
        worst = check(dtype, length)
        lines.append(
            f"check, {dtype}, {length} tokens: mean entropy within {worst:.1e} of float64 eager (limit {limit:g})"
        )
        assert worst < limit, lines[-1]
    model = llama(
        16, "cuda", torch.bfloat16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    batch = dict(input_ids=torch.randint(0, 32000, (1, options.length), device="cuda"), use_cache=False)

    def forward():
        with torch.no_grad():
            model(**batch)

    def examine():
        report = regard.examine(model, [batch], checks=False)
        assert report.unmeasured == [], report.unmeasured
        assert len(report.heads) == 16 * 32

    own, own_memory = timed(forward, options.rounds)
    looked, looked_memory = timed(examine, options.rounds)
    again, _ = timed(forward, options.rounds)
    own = min(own, again)
    model.set_attn_implementation("eager")

    def eager():
        with torch.no_grad():
            model(**batch, output_attentions=True)

    try:
        slow, slow_memory = timed(eager, 2)
        told = f"{slow:.1f} | {slow_memory:.2f} | {slow / looked:.1f} × examine's time"
    except torch.cuda.OutOfMemoryError:
        told = "out of memory | > what is there | examine needs no N × N"
    base = torch.cuda.memory_allocated() / 2**30
    growth = (base + looked_memory) / (base + own_memory) - 1.0
    lines += [
        "",
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}B parameters, {options.length} tokens, bfloat16",
        "",
        "| work | ms | GiB beyond the weights | |",
        "| --- | ---: | ---: | --- |",
        f"| sdpa forward | {own:.1f} | {own_memory:.2f} | |",
        f"| regard.examine | {looked:.1f} | {looked_memory:.2f} | {looked / own:.2f} × forward (target 1.25), "
        f"memory {growth:+.1%} (target +10 %) |",
        f"| eager, output_attentions | {told} |",
    ]
    text = "\n".join(lines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
