"""Positions: rotated on one side only, on the values too, by other angles for q than for k, or nowhere.

With one token repeated, q, k and v of a layer without positions are the same at every place, and rotary positions turn
them evenly. What a swap of two tokens leaves unchanged elsewhere knows no order at all.
"""

from __future__ import annotations

import re

import torch

from regard.health.checks.distance_bias import last_bias, slopes_of
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.differences import largest_change, row_changes
from regard.health.probe.library import is_library_code
from regard.health.probe.pixels import require_image, trace_pixels
from regard.health.probe.probe import CapturedCall, Key, relative_change
from regard.health.probe.rotation import Rotation, depends_on_position, recover_mixed, recover_rotation
from regard.health.probe.texts import capture_repeated
from regard.health.probe.trial import Trial

FAINT = 1e3  # times rounding, below which an image changes the output too little to judge by
NEEDS = "token ids and attention calls"
ONE_SIDED = Rule(
    "RG720", "rotary positions on one side", "queries and keys are rotated alike", "warning", NEEDS,
    "with one token repeated, the queries turn with the position and the keys do not, or the other way round",
    "The rotation is applied to q or to k alone, or k was cached before it was rotated.",
    "Rotate q and k, both by their own positions, before the keys are cached.",
    ("arXiv 2104.09864",), explains=("RG206", "RG24", "RG306", "RG310", "RG405"),
)  # fmt: skip
UNEQUAL = Rule(
    "RG721", "queries and keys turn by different angles", "queries and keys are rotated by the same angles", "warning",
    NEEDS, "with one token repeated, a pair of q and the same pair of k advance by different angles per position",
    "q and k use different bases or pairings, or one of them is rotated twice.",
    "Apply one function with the same cos and sin to q and k, once.",
    ("arXiv 2104.09864",), explains=("RG206", "RG24", "RG310", "RG405"),
)  # fmt: skip
VALUES = Rule(
    "RG722", "values are rotated", "values carry no positions", "warning", NEEDS,
    "with one token repeated, the values of a layer turn with the position as its keys do",
    "The rotation is applied to all of q, k, v, for instance to a stacked tensor.",
    "Rotate q and k only.", ("arXiv 2104.09864",),
)  # fmt: skip
MISSING = Rule(
    "RG723", "no positions", "the order of tokens matters", "warning", NEEDS,
    "no layer's queries, keys or scores depend on positions; a causal model can still count the keys it sees, and some "
    "are trained so on purpose",
    "Position embeddings are not added, or rotary positions are not applied.",
    "Add positions to the embeddings, rotate q and k, or add a relative bias.",
    ("arXiv 2305.19466", "annotated_deep_learning_paper_implementations#133"),
)  # fmt: skip
MIRRORED = Rule(
    "RG724", "before is as behind", "a text read backwards has other outputs", "warning", NEEDS,
    "the outputs of the reversed text are the reversed outputs: positions tell how far a token is, and not on which "
    "side; ALiBi in encoders is so by design and does not count",
    "Relative positions are taken without their sign, or sin and cos of the distance lost it.",
    "Give distances before and behind a token different encodings.", ("speechbrain#3073",),
)  # fmt: skip
TWO_ANGLES = Rule(
    "RG725", "pairs turn by two angles", "the two numbers of a rotary pair turn by one angle", "warning", NEEDS,
    "with one token repeated, each number of q follows cos and sin of an angle with its partner, whose own angle is "
    "another: the scores depend on absolute positions",
    "Frequencies are laid out for neighbours (repeat_interleave) and rotate_half pairs halves, or the other way round.",
    "Use cat([freqs, freqs]) with rotate_half, repeat_interleave(2) with pairs of neighbours.",
    ("how-to-train-your-gpt#7",), explains=("RG405", "RG621"),
)  # fmt: skip
RULES = (ONE_SIDED, UNEQUAL, VALUES, MISSING, MIRRORED, TWO_ANGLES)
POSITIONS = re.compile(r"pos|rope|rotary|alibi|freqs|^(cos|sin)(_|$)", re.IGNORECASE)  # in names
ANGLE = 1e-3  # rad per position by which q and k may differ


def check(trial: Trial) -> list:
    trial.require_repeatable()
    if not trial.batches:
        return find_missing_in_image(trial)
    calls = {key: one for key, one in capture_repeated(trial).items() if is_self_attention(one)}
    if not calls:
        raise NotApplicable("no self-attention call was captured")
    one_sided, unequal, values, mixed = [], [], [], []
    for key, one in calls.items():
        q, k, v = (turn_of(x) for x in (one.q, one.k, one.v))
        if (q is None) != (k is None) and not all(depends_on_position(x[0]) for x in (one.q, one.k)):
            one_sided.append((key, "queries" if k is None else "keys"))
        elif q is not None and k is not None and (text := describe_unequal(q, k)):
            unequal.append((key, text))
        elif q is None and k is None and (text := describe_mixed(one)):
            mixed.append((key, text))
        is_one = one.k.shape == one.v.shape and one.k.equal(one.v)  # one tensor for both, as DeepSeek V4 has it
        if v is not None and not is_one and (q is not None or k is not None):
            values.append((key, ""))
    found = []
    if one_sided:
        (name, _), side = one_sided[0]
        text = f"Only the {side} turn with their positions, in {len(one_sided)} of {len(calls)} layers (first {name})."
        found += trial.find(ONE_SIDED, "warning", [key for key, _ in one_sided], text)
    if unequal:
        (name, _), how = unequal[0]
        text = f"{how}, in {len(unequal)} of {len(calls)} layers (first {name})."
        found += trial.find(UNEQUAL, "warning", [key for key, _ in unequal], text)
    if mixed:
        (name, _), how = mixed[0]
        text = f"{how}, in {len(mixed)} of {len(calls)} layers (first {name})."
        found += trial.find(TWO_ANGLES, "warning", [key for key, _ in mixed], text)
    if values:
        text = (
            f"The values turn with their positions in {len(values)} of {len(calls)} layers (first {values[0][0][0]})."
        )
        severity = "note" if is_library_code(trial.model) else "warning"  # CLVP is made so
        found += trial.find(VALUES, severity, [key for key, _ in values], text)
    try:
        return found + (find_missing(trial, calls) or find_mirrored(trial, calls))
    except NotApplicable:
        if found:
            return found
        raise


def is_self_attention(one: CapturedCall) -> bool:
    return one.q.shape[2] == one.k.shape[2] >= 8 and not one.call.is_cross(one.key[0]) and one.q.shape[0] == 1


def turn_of(x: torch.Tensor) -> Rotation | None:
    """The rotation of one sequence's vectors [1, H, N, D]; None where they do not turn visibly."""
    found = recover_rotation(x[0])
    return found if found is not None and float(found.angles.abs().max()) > 1e-3 else None


def describe_mixed(one: CapturedCall) -> str:
    """How the two numbers of q's pairs turn, in a sentence without its full stop; nothing if not by two angles."""
    if not depends_on_position(one.q[0]) or depends_on_position(one.v[0]):
        return ""
    found = recover_mixed(one.q[0])
    if found is None:
        return ""
    pairing, first, second = found
    at = int((first - second).abs().argmax())
    return (
        f"Numbers are paired as {pairing}, and the two of pair {at} turn by {float(first[at]):.3g} and "
        f"{float(second[at]):.3g} rad per position"
    )


def describe_unequal(q: Rotation, k: Rotation) -> str:
    """How the rotations of q and k differ, in a sentence without its full stop; nothing if they do not."""
    if q.pairing != k.pairing and min(q.width, k.width) > 2:
        return f"Queries pair numbers as {q.pairing}, keys as {k.pairing}"
    if q.first != k.first or q.width != k.width:
        return f"Queries turn {q.width} numbers from {q.first} on, keys {k.width} from {k.first} on"
    off = (q.angles.abs() - k.angles.abs()).abs()
    if float(off.max()) < ANGLE:
        return ""
    seen = k.angles.abs() > 1e-3
    ratio = (q.angles.abs() / k.angles.abs().clamp_min(1e-12))[seen]
    if len(ratio) and float(ratio.max() / ratio.min().clamp_min(1e-12)) < 1.01:
        return f"Queries advance {float(ratio.mean()):.3g} times as fast as keys"
    return f"Queries and keys turn by angles that differ by up to {float(off.max()):.2g} rad per position"


def find_missing(trial: Trial, calls: dict[Key, CapturedCall]) -> list:
    """[Finding] if nothing in the model depends on where a token is."""
    if any(depends_on_position(x[0]) for one in calls.values() for x in (one.q, one.k)):
        return []
    if any(has_bias(one) for one in trial.captured[1].values()):
        return []
    output, targets = trial.captured[0], trial.tokens.targets
    if trial.tokens.has_decoder or output.shape[:2] != targets.shape or targets.shape[1] < 8:
        return []
    causal = all(trial.is_causal_call(one) for one in trial.captured[1].values())
    if not causal and moves_with_order(trial):
        return []
    how = "causal order alone tells places apart" if causal else "a swap of two tokens changes nothing elsewhere"
    severity = "note" if causal and not names_positions(trial) else "warning"
    return trial.find(MISSING, severity, [], f"No query, key or score depends on the position: {how}.")


def find_missing_in_image(trial: Trial) -> list:
    """[Finding] if two patches of an image can be exchanged and nothing else changes."""
    patches = trace_pixels(trial)[1]
    image = require_image(trial)
    if any(p.ndim > 1 and not bool(p.any()) for p in trial.model.parameters()):
        raise NotApplicable("a table of positions may be at its start: a parameter is 0 everywhere")
    if not patches or any(2 * side > whole for side, whole in zip(patches[0].size, image.shape[2:], strict=True)):
        raise NothingToCheck("the image holds less than four patches")
    height, width = patches[0].size
    down, right = (whole // side * side - side for side, whole in zip((height, width), image.shape[2:], strict=True))
    ids = trial.sample.ids.clone()
    swapped = require_image(trial, ids)  # the same numbers
    first = ..., slice(0, height), slice(0, width)
    last = ..., slice(down, down + height), slice(right, right + width)
    swapped[first], swapped[last] = image[last], image[first]
    before, after = (one if one.ndim > 2 else one[:, None] for one in (trial.captured[0], run_image(trial, ids)))
    changed = int((row_changes(before, after) > trial.rounding).any(0).sum())
    flipped = run_image(trial, trial.sample.ids.flip(2, 3))
    if changed > 2 * (before.shape[1] > 2) or not trial.differs(flipped):
        return []
    if largest_change(trial.captured[0], flipped) < FAINT * trial.rounding:
        raise NotApplicable("the output depends so little on the image that the effect of places would be rounding")
    severity = "note" if is_library_code(trial.model) or not names_positions(trial) else "warning"
    return trial.find(MISSING, severity, [], "Two patches of an image can be exchanged, and nothing else changes.")


def run_image(trial: Trial, image: torch.Tensor) -> torch.Tensor:
    return trial.probe.run(trial.sample.with_ids(image))


def find_mirrored(trial: Trial, calls: dict[Key, CapturedCall]) -> list:
    """[Finding] if a text read backwards gives the outputs backwards, in a model that knows an order."""
    text = trial.text
    output = trial.probe.run(text)
    if text.has_decoder or output.shape[:2] != text.targets.shape or any(map(trial.is_causal_call, calls.values())):
        return []
    turned = trial.probe.run(text.with_targets(text.targets.flip(1)))
    if largest_change(output, turned.flip(1)) > trial.rounding or not moves_with_order(trial):
        return []
    biases = [bias for one in trial.captured[1].values() if (bias := last_bias(one)) is not None]
    if biases and all(slopes_of(bias) is not None for bias in biases):
        return []
    words = (
        "The text read backwards gives the same outputs backwards: what stands before a token is as what follows it."
    )
    return trial.find(MIRRORED, "note" if is_library_code(trial.model) else "warning", [], words)


def has_bias(one: CapturedCall) -> bool:
    """True if something is added to the scores besides what hides keys."""
    return (one.call.mask is not None and one.call.mask.dtype != torch.bool) or "score_mod" in one.call.options


def moves_with_order(trial: Trial) -> bool:
    """True if a swap of two different tokens changes the output at a third place."""
    ids = trial.tokens.targets
    row = ids[0].tolist()
    a = len(row) // 3
    b = next((at for at in range(len(row) - 1, a, -1) if row[at] != row[a]), None)
    if b is None:
        return True
    swapped = ids.clone()
    swapped[0, a], swapped[0, b] = ids[0, b], ids[0, a]
    other = [at for at in range(len(row)) if at not in (a, b)]
    after = trial.probe.run(trial.tokens.with_targets(swapped))
    return relative_change(trial.captured[0][0, other], after[0, other]) > trial.tolerance


def names_positions(trial: Trial) -> bool:
    """True if the configuration, or the name of a module, buffer or parameter, says that there are positions."""
    config = getattr(trial.model, "config", None)
    named = any(getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "max_position_embeddings"))
    part = trial.part
    known = [name for name, _ in (*part.named_modules(), *part.named_buffers(), *part.named_parameters())]
    return named or any(POSITIONS.search(name.rpartition(".")[2]) for name in known)
