"""Places of an image: a token reads one patch, a window is as wide as it says, and a block leaves every place its own.

Patches are traced back to pixels by gradients. Then attention passes each token its own value on, so that a block of
layers works on every place alone: a change at one place of its input may change that place of its output alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.health.capture.call import Call
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.library import is_library_code
from regard.health.probe.pixels import TOKENS, Pixels, read_pixels, require_image, run_to_keys, trace_pixels
from regard.health.probe.probe import CapturedCall, Key, main_output
from regard.health.probe.trial import Trial

NEEDS = "images, and attention calls"
PATCHES = Rule(
    "RG734", "patches are mixed", "a token reads one patch of the image", "warning", NEEDS,
    "the pixels that a token reads before any attention are no rectangle, or other ones in each channel",
    "The image was cut by view or reshape alone, which reads its numbers row after row.",
    "Cut with Conv2d(C, width, P, stride=P), or reshape to (B, C, H/P, P, W/P, P) and permute(0, 2, 4, 1, 3, 5) first.",
    ("pytorch-vit#7", "TorchCode#21"),
)  # fmt: skip
WINDOWS = Rule(
    "RG735", "windows have another shape", "windows of attention have the shape that is set", "warning", NEEDS,
    "the tokens of the first window cover a rectangle at least twice as long, against its height, as window_size says",
    "The image is cut into windows by view alone: (B, H/w, w, W/w, w, C) needs permute(0, 1, 3, 2, 4, 5).",
    "Permute the axes of windows together before they are flattened, and back afterwards.",
    ("CMOS#4", "arXiv 2103.14030"), explains=("RG736",),
)  # fmt: skip
MOVED = Rule(
    "RG736", "places are exchanged", "a block returns every place where it was", "warning", NEEDS,
    "with attention passing each token's own value on, a change at one place of a block's input changes its output at "
    "other places; convolutions are left out, a shift of tokens that is meant is not known",
    "Windows are not put back as they were cut, a shift is not undone by its own amount, or a reshape lacks permute.",
    "Undo cut, permutation and shift in the opposite order: join(cut(x)) must be x.",
    ("physicsnemo#1399", "WeatherLearn#4", "mlxcel#1603", "CMOS#4"),
)  # fmt: skip
RULES = (PATCHES, WINDOWS, MOVED)
FILLED = 0.9  # of its rectangle that a token reads, at least
DRAWS = 8  # images of noise, where a token seems to read no rectangle
LAYERS = 4  # whose blocks are tested
MIXED = (-1, -1)  # the place of what reads several patches


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    require_image(trial)
    call, tokens, window = trace_pixels(trial)
    found = find_mixed(trial, call, tokens) and find_mixed(trial, call, trace_pixels(trial, DRAWS)[1])
    if not found and tokens and window is not None:
        found = find_windows(trial, call, tokens[len(tokens) // 2], window)
    return found + (find_moved(trial) or (find_order(trial, tokens[0]) if tokens else []))


def severity_of(trial: Trial) -> str:
    return "note" if is_library_code(trial.model) else "warning"


def find_mixed(trial: Trial, call: CapturedCall, tokens: list[Pixels]) -> list[Finding]:
    """[Finding] if tokens read what is no patch."""
    small = [one for one in tokens if one.share <= 0.5]
    mixed = [one for one in small if is_mixed(one)]
    if not mixed or 4 * len(mixed) < len(small):
        return []
    one = mixed[0]
    (height, width), channels = one.size, int(one.seen.flatten(1).any(1).sum())
    text = (
        f"Before any attention a token reads {int(one.seen.sum())} numbers of {channels} of {len(one.seen)} channels, "
        f"{one.filled:.0%} of a rectangle of {height} × {width} pixels: no patch of the image."
    )
    return trial.find(PATCHES, severity_of(trial), [call.key], text, f"rectangle filled < {FILLED:g}, or by channel")


def is_mixed(one: Pixels) -> bool:
    """True if the pixels are no rectangle, or another one in each channel (one channel alone is so by design)."""
    if one.filled < FILLED:
        return True
    used = one.seen.flatten(1).any(1)
    if int(used.sum()) == 1 < len(used):
        return one.size[1] == one.seen.shape[2]  # rows of the whole image, of one channel
    same = (one.seen == one.seen.any(0)).double().mean()
    return len(used) > 1 and float(1 - same) > (1 - FILLED) * one.share


def find_windows(trial: Trial, call: CapturedCall, token: Pixels, window: Pixels) -> list[Finding]:
    """[Finding] if the first window is not as long and wide as the modules around it say."""
    said = window_size(trial, call)
    if said is None or window.share >= 1.0 or window.filled < 0.5 or call.q.shape[0] <= len(trial.sample.ids):
        return []
    height, width = (a / b for a, b in zip(window.size, token.size, strict=True))
    ratio = height / width * said[1] / said[0]
    if 0.5 < ratio < 2:
        return []
    text = f"A window of {said[0]} × {said[1]} covers {height:.3g} × {width:.3g} patches of the image."
    return trial.find(WINDOWS, severity_of(trial), [call.key], text, "sides' ratio twice the one that is set")


def window_size(trial: Trial, call: CapturedCall) -> tuple[int, int] | None:
    """The window_size of the module of a call, or one around it, if it has as many tokens as the call."""
    names = call.key[0].split(".")
    for end in range(len(names), -1, -1):
        name = ".".join(names[:end])
        try:
            value = getattr(trial.part.get_submodule(name), "window_size", None)
        except AttributeError:
            return None
        sides = (value, value) if isinstance(value, int) else value
        if isinstance(sides, (tuple, list)) and len(sides) == 2 and sides[0] * sides[1] == call.k.shape[2]:
            return sides[0], sides[1]
    return None


def find_moved(trial: Trial) -> list[Finding]:
    """[Finding] about the smallest block that returns what it read at one place at another."""
    widths = {one.q.shape[1] * one.output.shape[3] for one in trial.captured[1].values()}
    blocks = list_blocks(trial)
    kept = {name: module for name, module in blocks.items() if not mixes(module)}
    if blocks and not kept:
        raise NotApplicable("every block holds a convolution, which mixes places")
    for name, (args, named, x, before) in record(trial, kept).items():
        axis = x.ndim - 1 if x.shape[-1] in widths else 1 if x.shape[1] in widths else None
        if axis is None or x.shape != before.shape or x.ndim < 3:
            continue

        def run(changed: Tensor, module=kept[name], args=args, named=named, x=x) -> Tensor:
            args = tuple(changed if one is x else one for one in args)
            named = {key: changed if one is x else one for key, one in named.items()}
            return first_tensor(trial.probe.call(lambda: module(*args, **named), pass_values))

        first, second = (move_place(trial, run, x, axis, part) for part in (3, 2))
        if moved := max(len(first - second), len(second - first)):  # what both move reads the whole image
            text = (
                f"With attention passing each token's own value on, a change at one place of what {name} reads "
                f"changes its output at {moved} other place{'s' if moved > 1 else ''}."
            )
            keys = [key for key in trial.captured[1] if key[0] == name or key[0].startswith(f"{name}.")]
            return trial.find(MOVED, severity_of(trial), keys[:1], text, "any other place changed")
    return []


def find_order(trial: Trial, token: Pixels) -> list[Finding]:
    """[Finding] if the rows of the output are of other patches than their places say.

    By rows, by columns or in the order of the attention's tokens; class tokens may stand before or behind.
    """
    image = require_image(trial)
    (height, width), (h, w) = image.shape[2:], token.size
    down, right = height // h, width // w
    count = down * right
    if (down * h, right * w) != (height, width) or count < 4:
        return []
    given = trial.sample.ids.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        output = main_output(trial.probe.run_model(trial.sample.with_ids(given * 1.0), pass_values))[0]
        rows = output.flatten(0, -2) if output.ndim == 2 or tuple(output.shape[:2]) == (down, right) else None
        if rows is None or len(rows) < count or not rows.requires_grad:
            return []
        step = max(1, len(rows) // (2 * TOKENS))
        places = {at: read_place(trial, given, rows[at], token) for at in (*range(0, len(rows), step), len(rows) - 1)}
        known = {at: place for at, place in places.items() if place is not None}
        if any(place == MIXED for place in known.values()) or len(known) < TOKENS:
            return []
        _, k = run_to_keys(trial, given)
        extra = k.shape[2] - count
        own = {
            at: read_place(trial, given, k[0, :, at + extra], token)
            for at in known if len(k) == len(trial.sample.ids) and 0 <= at + extra < k.shape[2]
        }  # fmt: skip
    orders = (
        [at - (i * right + j) for at, (i, j) in known.items()],
        [at - (j * down + i) for at, (i, j) in known.items()],
    )
    is_even = any(len(set(shifts)) == 1 and 0 <= shifts[0] <= len(rows) - count for shifts in orders)
    absent = [at for at in places if at not in known]
    if len(rows) == count and absent in ([0], [count - 1]):
        text = f"Row {absent[0]} of {count} for as many patches reads none: a class token is taken for a patch."
        return trial.find(
            MOVED, severity_of(trial), [], text, "a row for each patch, and one that reads no pixel",
            cause="The class token stands at the other end than positions and the output expect, or was not left out.",
            fix="Put the class token where its position is, and leave that row out of the patches.",
        )  # fmt: skip
    if is_even or own == known:
        return []
    at, (i, j) = next((at, place) for at, place in known.items() if at != place[0] * right + place[1])
    text = f"Row {at} of the output is of the patch in row {i}, column {j} of {down} × {right}, by its own value."
    return trial.find(MOVED, severity_of(trial), [], text, "rows in no order of the patches")


def read_place(trial: Trial, given: Tensor, part: Tensor, token: Pixels) -> tuple[int, int] | None:
    """(row, column) of the one patch that a vector reads; `MIXED` if it reads more, None if it reads nothing."""
    seen = read_pixels(trial, given, part)
    if not bool(seen.any()):
        return None
    (h, w), rows, columns = token.size, *(seen.any(0).any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    is_one = rows[-1] // h == rows[0] // h and columns[-1] // w == columns[0] // w
    return (rows[0] // h, columns[0] // w) if is_one else MIXED


def list_blocks(trial: Trial) -> dict[str, nn.Module]:
    """Modules around some of the attention calls, the smallest first."""
    names = list(dict.fromkeys(key[0] for key in trial.captured[1]))
    names = [names[round(at * (len(names) - 1) / (LAYERS - 1))] for at in range(LAYERS)] if names else []
    around = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2) if name}
    modules = dict(trial.part.named_modules())
    found = {name: modules[name] for name in sorted(around, key=lambda one: (-one.count("."), one)) if name in modules}
    return {name: one for name, one in found.items() if not isinstance(one, (nn.ModuleList, nn.ModuleDict))}


def mixes(module: nn.Module) -> bool:
    """True if the module holds a convolution or a pool, which mix neighbours, or a norm over places."""
    for one in module.modules():
        size = getattr(one, "kernel_size", 1)
        if isinstance(one, nn.GroupNorm) or max(size if isinstance(size, (tuple, list)) else (size,)) != 1:
            return True
    return False


def pass_values(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
    """Every query gets its own value; nothing where queries and keys are not the same tokens."""
    output = run()
    if call.v.shape[2] != output.shape[2] or call.v.shape[3] != output.shape[3]:
        return torch.zeros_like(output)
    return call.v.repeat_interleave(output.shape[1] // call.v.shape[1], 1).expand_as(output).to(output)


def first_tensor(output: Any) -> Tensor:
    """The tensor, or the first of several, that a module returned."""
    return output[0] if isinstance(output, (tuple, list)) else output


def record(trial: Trial, blocks: dict[str, nn.Module]) -> dict[str, tuple[tuple, dict[str, Any], Tensor, Tensor]]:
    """Per block its arguments, the first tensor among them, and its output, in one forward of one image."""
    found: dict[str, tuple[tuple, dict[str, Any], Tensor, Tensor]] = {}

    def keep(name: str, args: tuple, named: dict[str, Any], output: Any) -> None:
        given = [x for x in (*args, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        if given and isinstance(first_tensor(output), Tensor) and name not in found:
            found[name] = args, named, given[0], first_tensor(output)

    hooks = [
        module.register_forward_hook(lambda _, args, named, output, name=name: keep(name, args, named, output),
                                     with_kwargs=True)
        for name, module in blocks.items()
    ]  # fmt: skip
    try:
        trial.probe.run_model(trial.sample.select(torch.tensor([0], device=trial.device)), pass_values)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found[name] for name in blocks if name in found}


def move_place(trial: Trial, run: Callable[[Tensor], Tensor], x: Tensor, axis: int, part: int) -> set[int]:
    """The other places whose output changes with one place of the input; none if a fourth or more do."""
    changed = x.movedim(axis, -1).clone(memory_format=torch.contiguous_format)
    places = changed[..., 0].numel()
    at = min(places // part + 1, places - 1)
    rows = changed.view(places, -1)
    noise = torch.randn(rows[at].shape, generator=torch.Generator().manual_seed(0))
    rows[at] += noise.to(x) * x.square().mean().sqrt()
    before, after = (run(one).movedim(axis, -1) for one in (x, changed.movedim(-1, axis).contiguous()))
    limit = trial.tolerance * before.double().square().mean().sqrt()
    moved = ((after - before).double().abs().amax(-1) > limit).flatten()
    moved[at] = False
    return set(moved.nonzero().flatten().tolist()) if 4 * int(moved.sum()) < places else set()
