"""What swapping, clipping and watching cost a training step: GPT-2 small, B16 × 1024, autocast bfloat16.

    PYTHONPATH=. python3 benchmarks/h200_training.py [VARIANT …] [--out benchmarks/results]

Each variant trains the same model (random weights, AdamW, torch's sdpa) for a few steps by turns; the table has the
median step and its ratio to the model as it is. A Monitor measures one of the 16 sequences, its default. Writes
h200-training.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import transformers
import triton
from revision import find_revision

import regard

STEPS = 5  # between waits for the GPU: a loop that logs its loss now and then
VARIANTS = {
    "sdpa": None,
    "using(softmax)": dict(normalizer="softmax"),
    "using(entmax15)": dict(normalizer="entmax15"),
    "using(sigmoid)": dict(normalizer="sigmoid(bias=-6)"),
    "using(softcap=50)": dict(softcap=50.0),
    "using(qk_norm)": dict(qk_norm=True),
    "using(ssmax)": dict(temperature="ssmax"),
    "qk_clip after each step": "clip",
    "Monitor(every=1), one sequence": "every 1",
    "Monitor(every=1, metrics=max_logit), one sequence": "every 1 max_logit",
    "Monitor(every=100), between samples": "every 100",
}


def make_model() -> tuple:
    """GPT-2 small with random weights, its optimizer and one batch."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, torch.randint(0, 50257, (16, 1024), device="cuda")


def step(model, optimizer, ids, clip: bool) -> None:
    """One training step."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if clip:
        regard.qk_clip(model, threshold=100.0)


class Variant:
    """A model that is trained one way, and the times of its steps in ms."""

    def __init__(self, name: str) -> None:
        self.model, self.optimizer, self.ids = make_model()
        how = VARIANTS[name]
        self.clips, self.times = how == "clip", []
        if isinstance(how, dict):
            regard.using(self.model, **how)
        elif isinstance(how, str) and how.startswith("every"):
            _, every, *metrics = how.split()
            self.monitor = regard.Monitor(
                self.model, every=int(every), log=lambda values: None, budget=1.0, metrics=metrics or None
            )
            if int(every) > 1:
                self.monitor.at_step(1)  # the first forward is sampled, and no other

    def run(self) -> None:
        """A few steps as a training loop makes them, timed: the mean step, the GPU awaited at the end."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step(self.model, self.optimizer, self.ids, self.clips)
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - start) * 1e3 / STEPS)


def time_variants(names: list[str], rounds: int = 5, warmup: int = 1) -> dict[str, float | str]:
    """The median step of every variant in ms, by turns; or what went wrong."""
    found: dict[str, float | str] = {}
    variants = {}
    for name in names:
        try:
            variants[name] = Variant(name)
            for _ in range(warmup):
                variants[name].run()
            print(f"{name}: ready, {variants[name].times[-1]:.1f} ms", flush=True)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:120]}"
    for turn in range(rounds):
        for name in variants if turn % 2 else reversed(variants):
            if name not in found:
                variants[name].run()
        print(f"turn {turn}: " + ", ".join(f"{name} {x.times[-1]:.1f}" for name, x in variants.items()), flush=True)
    return found | {name: statistics.median(x.times[warmup:]) for name, x in variants.items() if name not in found}


def time_examine() -> tuple[float, float]:
    """(one forward, `examine` of one batch) in ms, medians of five."""
    model, _, ids = make_model()
    model = model.eval().to(torch.bfloat16)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(7):
        for times, run in zip(
            found,
            (model, lambda input_ids: regard.examine(model, [dict(input_ids=input_ids)], checks=False)),
            strict=True,
        ):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                run(input_ids=ids)
            torch.cuda.synchronize()
            if turn >= 2:
                times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("variants", nargs="*", help="parts of names of variants; all without")
    arguments = parser.parse_args()
    chosen, out, rows = arguments.variants, arguments.out, []
    names = [name for name in VARIANTS if name == "sdpa" or not chosen or any(part in name for part in chosen)]
    found = time_variants(names)
    base = found["sdpa"]
    for name in names:
        ms = found[name]
        rows.append(f"| {name} | {ms} | |" if isinstance(ms, str) else f"| {name} | {ms:.1f} | {ms / base:.3f} |")
        print(rows[-1], flush=True)
    forward, examine = time_examine()
    rows.append(f"| examine, one batch (a forward takes {forward:.1f}) | {examine:.1f} | {examine / forward:.2f} |")
    commit = find_revision()
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, commit {commit}"
    text = f"# A training step\n\n{about}. GPT-2 small, B16 × 1024, autocast bfloat16; ms, the mean step of five "
    text += "between waits for the GPU, median of five.\n\n"
    text += "| variant | ms | × sdpa |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "h200-training.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
