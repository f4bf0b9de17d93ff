"""Each script of examples/ runs at its default size and prints the result that its docstring promises."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NOT_RUN = {"train_tiny.py"}  # needs a text file; tests/health/test_commands.py reads its checkpoints
NEEDS = {
    "generate_with_statistics.py": ("safetensors",),
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_module.py": ("lightning",),
    "mismatch.py": ("transformers",),
}


def run(name: str, *arguments: str) -> str:
    """Returns what an example printed; skips where a package that it needs is not installed."""
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(paths), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, str(FOLDER / name), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "Traceback" not in found.stderr
    assert "Warning" not in found.stderr, found.stderr[-2000:]
    return found.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """Returns the numbers that `pattern` captures, at least one."""
    found = [float(one) for one in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in:\n{text}"
    return found


@pytest.mark.slow
def test_nanogpt_learns_with_the_normalizer_that_was_swapped_in():
    printed = run("nanogpt.py")
    losses = numbers(r"iter \d+: loss ([\d.]+)", printed)
    assert losses[-1] < 3.5 < math.log(256) - 0.5 < losses[0]
    assert "of 8 heads" in printed
    (swapped,), (own,) = (numbers(rf"([\d.]+) with {name}", printed) for name in ("entmax15", "the model's own"))
    assert max(swapped, own) < 3.5 and swapped != own


@pytest.mark.slow
def test_hf_trainer_measures_every_head_at_the_trainers_steps():
    printed = run("hf_trainer.py", "--max_steps", "7", "--every", "3")
    assert "over 7 steps; 3 of them measured" in printed
    ratios = numbers(r"self_attn head \d +([\d.]+)", printed)
    assert len(ratios) == 8 and all(0.0 < ratio <= 1.0 for ratio in ratios)


@pytest.mark.slow
def test_lightning_module_measures_every_head_at_the_trainers_steps():
    printed = run("lightning_module.py", "--max_steps", "21")
    assert numbers(r"step (\d+): entropy ratio of 8 heads", printed) == [1, 11, 21]
    (loss,) = numbers(r"train_loss ([\d.]+) after 21 steps", printed)
    assert loss < math.log(256) - 1.0


@pytest.mark.slow
def test_torchtitan_loop_clips_heads_and_learns():
    printed = run("torchtitan_loop.py")
    losses, clipped = numbers(r"loss: ([\d.]+)", printed), numbers(r"clipped_heads: (\d+)", printed)
    assert losses[-1] < losses[0] - 2.0
    assert clipped[0] == 0 and clipped[-1] > 0
    assert max(numbers(r"max_logit\S+ ([\d.]+)", printed)) < 16.0  # of a threshold of 8


@pytest.mark.slow
def test_torchtitan_loop_keeps_heads_below_the_threshold():
    printed = run("torchtitan_loop.py", "--threshold", "1000", "--steps", "20")
    assert numbers(r"clipped_heads: (\d+)", printed) == [0, 0, 0]


def test_generation_prints_statistics_of_each_token_and_agrees_with_a_forward_without_a_cache():
    printed = run("generate_with_statistics.py", "--tokens", "6", "--prompt", "To be")
    keys = numbers(r"(?m)^'.+?' +([\d.]+) ", printed)
    assert len(keys) == 6 and all(1.0 <= count <= 11.0 for count in keys)
    assert max(numbers(r"without a cache: (\S+)", printed)) < 1e-4


@pytest.mark.slow  # tests/parallel has the calls
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_context_parallel_agrees_with_one_process(normalizer):
    printed = run("context_parallel.py", "--normalizer", normalizer)
    assert sorted(re.findall(r"rank \d: \d+ of \d+", printed)) == ["rank 0: 128 of 256", "rank 1: 128 of 256"]
    differences = numbers(r"largest difference of [a-z' ]+ (\S+)", printed)
    assert len(differences) == 2 and max(differences) < 1e-4


@pytest.mark.slow
def test_mismatches_are_traced_to_their_cause():
    same, scaled, sound, paired = run("mismatch.py").splitlines()
    assert "the same" in same and "logits × 2.0000" in scaled
    assert "the same" in sound and "pairs (2j, 2j + 1)" in paired


def test_every_script_is_listed_tested_and_short():
    scripts = {path.name: path.read_text().splitlines() for path in FOLDER.glob("*.py")}
    listed, tests = (FOLDER / "README.md").read_text(), Path(__file__).read_text()
    for name, lines in scripts.items():
        assert f"[{name}]({name})" in listed
        if name == "regard_tap.py":  # to be copied, not run: tests/health/test_dumps.py
            continue
        assert name in NOT_RUN or f'run("{name}"' in tests
        assert len(lines) < (130 if name in NOT_RUN else 100) and any(
            f"python examples/{name}" in line for line in lines[:4]
        )
