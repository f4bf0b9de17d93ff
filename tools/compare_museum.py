"""`regard.compare(sound, bug)` over the museum's bugs: which it finds, and whether the cause is the bug's.

    python tools/compare_museum.py [SLUG …]
    python tools/compare_museum.py --write            # docs/records/compare.md

Models are not trained here. The bug is given the sound twin's weights, unless it is one of loading weights. What only
generation shows is compared in generation, what only training shows in training mode. A bug of data or gradients has
no other output to be found.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import museum.parts
import regard
from museum.__main__ import list_bugs, load
from museum.parts import train

PAGE = Path(__file__).parents[1] / "docs" / "records" / "compare.md"
WEIGHTS = ("biases_not_loaded", "fused_rows_of_groups", "norm_weight_without_one", "projection_transposed",
           "weights_untied")  # fmt: skip
DECODING = ("cache_position_off_by_one", "causal_mask_top_left_with_cache", "positions_restart_in_decoding",
            "window_cache_overwritten")  # fmt: skip
TRAINED = ("finite_mask_too_small",)  # whose logits must be large
TRAINING = ("checkpointing_drops_the_mask", "mask_lost_in_training")
LEFT = ("padding_mask_ignored",)  # in causal order, padding behind the text reaches no token
OUTSIDE = {
    "cache_update_without_gradient": "gradients alone", "query_detached": "gradients alone",
    "dropout_drawn_again": "gradients alone", "labels_shifted_twice": "data", "padding_in_the_labels": "data",
}  # fmt: skip
HEAD = """# Bugs that `regard.compare` finds and names

`regard.compare(sound, bug, batches)` over the {count} bugs of the museum and their sound twins
(`tools/compare_museum.py`): {found} found, {named} named with the bug's cause, {false} named with another one.
Not counted: {outside} bugs of data or of gradients, which change no output.

| bug | public source | result | what was said |
| --- | --- | --- | --- |
{rows}
"""


def decode(ids: torch.Tensor, chunk: int) -> Any:
    """Returns a function that runs a prompt, then `chunk` tokens at a time with the cache."""

    def run(model: Any) -> Any:
        out = model(ids[:, :12], use_cache=True)
        for at in range(12, ids.shape[1], chunk):
            out = model(ids[:, at : at + chunk], past_key_values=out.past_key_values, use_cache=True)
        return out.logits

    return run


def compare(slug: str) -> Any:
    """Returns the comparison of the sound twin (A) with the bug (B)."""
    museum.parts.train = train if slug in TRAINED else lambda model, steps=0: model.eval()
    bug = load(slug)
    (a, batches, _), (b, _, _) = bug.sound(), bug.make()
    own, given = b.state_dict(), a.state_dict()
    if slug not in WEIGHTS and own.keys() == given.keys() and all(own[k].shape == x.shape for k, x in given.items()):
        b.load_state_dict(given)
    if slug in TRAINING:
        for model in (a, b):
            for module in model.train().modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
    if slug in DECODING:
        batches = decode(batches[0]["input_ids"], 3 if "chunk" in bug.NEEDS else 1)
    if slug in LEFT:
        batches = [{name: x.flip(1) for name, x in one.items()} for one in batches]
    return regard.compare(a, b, batches)


def judge(slug: str) -> tuple[str, str, float]:
    """Returns (result, what was said, seconds)."""
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compare(slug)
    said = found.line
    named = found.named and any(word.lower() in said.lower() for word in load(slug).NEEDS)
    state = "MISSED" if found.same else "named" if named else "another cause" if found.named else "found"
    return state, said, time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="bugs; all by default")
    parser.add_argument("--write", action="store_true", help="make the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, states = [], []
    for slug in options.slugs or list_bugs():
        if slug in OUTSIDE and not options.slugs:
            continue
        state, said, seconds = judge(slug)
        states.append(state)
        rows.append(f"| `{slug}` | {load(slug).LINK} | {state} | {said.replace('|', '/')[:240]} |")
        print(f"{slug:38} {state:13} {seconds:5.1f} s\n    {said[:400]}", flush=True)
    named, false, missed = (states.count(word) for word in ("named", "another cause", "MISSED"))
    print(f"{len(states)} bugs: {len(states) - missed} found, {named} named, {false} with another cause")
    if options.write:
        PAGE.write_text(HEAD.format(
            count=len(states), found=len(states) - missed, named=named, false=false, outside=len(OUTSIDE),
            rows="\n".join(rows),
        ), encoding="utf-8")  # fmt: skip
    return int(bool(missed or false))


if __name__ == "__main__":
    sys.exit(main())
