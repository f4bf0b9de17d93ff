"""Heads mixed with time: a wrong reshape gives a head the numbers of other heads and other tokens.

Three tests, none of which needs the code: the number of heads must not follow the length of the text; one changed token
must change q, k and v of the first layer at its own position, in every head; a change of the attention's output at one
position must change the module's output there alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.health.capture.call import Call
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.probe import CapturedCall, Key, StopForward
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG701", "heads mixed with time", "heads and tokens are not mixed by a reshape",
    "critical", needs="token ids and attention calls",
    proves="Proves that a head holds numbers of other tokens before or after its attention.",
    cause="view(B, H, N, d) reads the same numbers in another order, without an error.",
    fix="Split with view(B, N, H, d).transpose(1, 2) and join with transpose(1, 2).reshape(B, N, H·d).",
    explains=("RG101", "RG102", "RG201", "RG206", "RG211", "RG24", "RG736"),
)  # fmt: skip
RULES = (RULE,)
LAYERS = 4  # whose output is tested
REMEDY = (
    "Split with view(B, N, H, d).transpose(1, 2) and join with transpose(1, 2).reshape(B, N, H·d): view(B, H, N, d) "
    "reads the same numbers in another order, without an error."
)


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    if not trial.batches and trial.sample.targets.ndim != 3:
        return outputs_mixed(trial, [one for one in trial.captured[1].values() if one.q.shape[2] == one.k.shape[2]])
    calls = [one for one in trial.captured[1].values() if is_plain_self_attention(trial, one)]
    if over_heads := [one.key for one in trial.captured[1].values() if attends_over_heads(trial, one)]:
        text = "The number of heads follows the length of the text: attention runs over the heads, not over the tokens."
        return trial.find(RULE, "critical", over_heads, text, "heads = tokens, at two lengths", REMEDY)
    if not calls:
        raise NotApplicable("no self-attention call has a row per token")
    mixed = inputs_mixed(trial, calls[0])
    if mixed:
        text = f"One changed token changes {mixed} of the first layer at other positions, not in every head at its own."
        return trial.find(RULE, "critical", [calls[0].key], text, "any other position changed", REMEDY)
    return outputs_mixed(trial, calls)


def outputs_mixed(trial: Trial, calls: list[CapturedCall]) -> list[Finding]:
    """[Finding] if the output of some of these calls reaches other positions of its module's output."""
    if not calls:
        raise NotApplicable("no self-attention call was captured")
    step = max(1, len(calls) // LAYERS)
    wrong = [one.key for one in calls[::step] if output_mixed(trial, one)]
    text = "The attention's output at one position reaches the module's output at other positions."
    return trial.find(RULE, "critical", wrong, text, "any other position changed", REMEDY) if wrong else []


def is_plain_self_attention(trial: Trial, one: CapturedCall) -> bool:
    length = trial.sample.targets.shape[1]
    return one.q.shape[2] == one.k.shape[2] == length and not one.call.is_cross(one.key[0]) and not one.call.three_dims


def attends_over_heads(trial: Trial, one: CapturedCall) -> bool:
    """True if the axis of the heads is as long as the text, at two lengths."""
    length = trial.sample.targets.shape[1]
    if one.q.shape[1] != length or one.q.shape[2] == length or length < 8:
        return False
    _, shorter = trial.probe.capture(trial.sample.cut(trial.sample.ids.shape[0], length - 3))
    return one.key in shorter and shorter[one.key].q.shape[1] == length - 3


def inputs_mixed(trial: Trial, one: CapturedCall) -> str:
    """Which of q, k and v of the first layer hold numbers of other tokens: "q, k and v", "v", … or nothing."""
    ids = trial.sample.targets
    at = ids.shape[1] - 2
    where = torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    where[:, at] = True
    _, after = trial.probe.capture(trial.sample.with_targets(trial.sample.exchange(ids, where)))
    other = after.get(one.key)
    if other is None or other.q.shape != one.q.shape:
        return ""
    names = [name for name in "qkv" if has_moved(getattr(one, name), getattr(other, name), at, trial.tolerance)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def has_moved(a: Tensor, b: Tensor, at: int, tolerance: float) -> bool:
    """True if [B, H, N, D] tensors differ before one position too, and not in every head there.

    What a causal convolution or a shift over time mixes in moves behind it.
    """
    size = a.double().square().mean().sqrt()
    changed = ((a - b).double().abs().amax((0, 3)) > tolerance * size).to("cpu")  # [H, N]
    return bool(changed[:, :at].any()) and not bool(changed[:, at].all())


def output_mixed(trial: Trial, one: CapturedCall) -> bool:
    """True if a change of the call's output at one position moves the module's output at others."""
    name = one.key[0]
    inside = [key for key in trial.captured[1] if key[0] == name or not name or key[0].startswith(f"{name}.")]
    if len(inside) != 1:
        return False  # other attention follows within the module, and mixes positions by right
    module, heads, n = one.call.module, one.q.shape[1], one.q.shape[2]
    at = next((at for at in range(n // 3, n) if all((h * n + at) // heads != at for h in range(heads))), n // 3)
    before, after = (run_until(trial, module, change) for change in (None, change_row(one.key, at)))
    if before is None or after is None or before.shape != after.shape:
        return False
    rows = as_rows(before, one), as_rows(after, one)
    if rows[0] is None or rows[1] is None:
        return False
    moved = (rows[0] - rows[1]).double().abs().amax((0, 2)) > trial.tolerance * rows[0].double().square().mean().sqrt()
    is_convolved = not trial.batches and bool(moved[at])  # what comes after attention in an image's layer, around it
    moved[at] = False
    return bool(moved.any()) and not is_convolved


def change_row(key: Key, at: int):
    """A transform that adds noise of the output's size at one position, in every head."""

    def transform(call: Call, found: Key, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        if found != key:
            return output
        output = output.clone()
        noise = torch.randn(output[:, :, at].shape, generator=torch.Generator().manual_seed(0))
        output[:, :, at] += noise.to(output) * output.square().mean().sqrt()
        return output

    return transform


def run_until(trial: Trial, module: torch.nn.Module, transform) -> Tensor | None:
    """Returns the first output of `module` in a forward that ends there."""
    found: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, Tensor):
            found.append(first.detach().clone())
        raise StopForward

    hook = module.register_forward_hook(keep)
    try:
        trial.probe.run_model(trial.sample, transform)
    except StopForward:
        pass
    finally:
        hook.remove()
    return found[0] if found else None


def as_rows(output: Tensor, one: CapturedCall) -> Tensor | None:
    """[B, N, E] of a module's output, None if its axes cannot be told."""
    batch, length = one.q.shape[0], one.q.shape[2]
    if output.ndim != 3:
        return None
    if output.shape[:2] == (batch, length):
        return output
    return output.transpose(0, 1) if output.shape[:2] == (length, batch) else None
