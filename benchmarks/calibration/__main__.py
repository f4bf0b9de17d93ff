"""How often findings are right: sound models that get a warning, bugs that are found, bugs that are named.

python -m benchmarks.calibration --data FILE.txt --cache FOLDER [--models 32] [--bugs 66] [--per-bug 2] [--out FILE.md]

Trains small models (10 s each on an idle core, kept in the cache folder), breaks them in every way of bugs.py, and
examines all of them. Models and bugs are split in two halves by their place in the lists: thresholds were set on the
first half, the rates are those of the second. Pretrained models are folders of a configuration and weights.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from benchmarks.calibration.bugs import BUGS, OPTIONS, Bug, suits
from benchmarks.calibration.fresh import fresh_models
from benchmarks.calibration.pretrained import examine_pretrained
from benchmarks.calibration.record import Outcome, write_record
from benchmarks.calibration.training import (
    RECIPES,
    STAGES,
    Recipe,
    examination_batches,
    load_or_train,
    masked_loss,
    read_texts,
)
from benchmarks.calibration.zoo import Options, Zoo
from regard.health import compare, examine

GRAVE = ("critical", "warning")


def examine_zoo(model: Zoo, batches: list):
    """The report of a model of the zoo, by its own loss."""
    loss = masked_loss if model.options.kind == "masked" else None
    causal = None if model.options.kind != "masked" else False
    return examine(model, batches, loss=loss, causal=causal, ablate=False)


def build(recipe: Recipe, weights: dict, *bugs: str) -> Zoo:
    model = Zoo(Options(**recipe.options, bugs=set(bugs))).eval()
    model.load_state_dict(weights)
    return model


def judge_sound(given: argparse.Namespace, texts: dict) -> list[Outcome]:
    """Every sound model at every stage."""
    outcomes = []
    for at, recipe in enumerate(RECIPES[: given.models]):
        kept = load_or_train(recipe, texts, given.cache)
        for step in STAGES:
            model = build(recipe, kept[step]["weights"])
            report = examine_zoo(model, examination_batches(model.options, texts[recipe.text]))
            grave = sorted({one.kind for one in report.findings if one.severity in GRAVE})
            outcomes.append(Outcome(f"{recipe.name}, step {step}", "sound", at % 2, grave))
            print(outcomes[-1], flush=True)
    return outcomes


def judge_bug(bug: Bug, number: int, given: argparse.Namespace, texts: dict) -> list[Outcome]:
    """One bug in a few models of its half."""
    half, outcomes = number % 2, []
    chosen = [recipe for at, recipe in enumerate(RECIPES[: given.models]) if at % 2 == half]
    chosen = [recipe for recipe in chosen if suits(bug, Zoo(Options(**recipe.options)))]
    first = number % max(len(chosen), 1)
    for recipe in (chosen[first:] + chosen[:first])[: 1 if bug.trained else given.per_bug]:
        option = OPTIONS.get(bug.name, bug.name)
        sound = load_or_train(recipe, texts, given.cache)[STAGES[-1]]["weights"]
        trained = bug.trained and load_or_train(recipe, texts, given.cache, frozenset({option}))[STAGES[-1]]["weights"]
        model = build(recipe, trained or sound, *([] if bug.change else [option]))
        if bug.change is not None:
            bug.change(model)
        batches = examination_batches(model.options, texts[recipe.text])
        batches = batches if bug.batches is None else bug.batches(batches)
        report = examine_zoo(model, batches)
        grave = sorted({one.kind for one in report.findings if one.severity in GRAVE})
        notes = sorted({one.kind for one in report.findings} - set(grave))
        named = bool(set(bug.names) & {one.kind for one in report.findings})
        located = None
        if not bug.trained and not bug.is_in_batches:
            found = compare(model, build(recipe, sound), batches)
            located = found.first is not None or found.output > found.tolerance
        outcomes.append(Outcome(f"{bug.name} ({recipe.name})", bug.name, half, grave, notes, named, located))
        print(outcomes[-1], flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--cache", type=Path, required=True, help="a folder for trained models")
    parser.add_argument("--models", type=int, default=len(RECIPES))
    parser.add_argument("--bugs", type=int, default=len(BUGS))
    parser.add_argument("--per-bug", type=int, default=2, help="models that get each bug")
    parser.add_argument("--pretrained", type=Path, nargs="*", default=[], help="folders of pretrained checkpoints")
    parser.add_argument("--half", type=int, choices=[0, 1], help="only this half of the bugs: 0 sets thresholds")
    parser.add_argument("--out", type=Path, help="the record, a Markdown file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.cache.mkdir(parents=True, exist_ok=True)
    started, texts = time.time(), read_texts(given.data)
    outcomes: list[Outcome] = []
    for number, bug in enumerate(BUGS[: given.bugs]):
        if given.half in (None, number % 2):
            outcomes += judge_bug(bug, number, given, texts)
    parts = [partial(examine_pretrained, given.pretrained), fresh_models, partial(judge_sound, given, texts)]
    for judge in parts if given.half is None else []:
        outcomes += judge()
        if given.out is not None:  # after each part, which takes minutes
            write_record(given.out, outcomes, time.time() - started)


if __name__ == "__main__":
    main()
