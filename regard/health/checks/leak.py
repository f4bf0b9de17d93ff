"""Sees the future: other tokens behind position c change what the model computes before c.

A model that predicts the next token may not see it. No mask need be understood: the tokens from the middle of the text
on are exchanged, and the first layer whose rows before the middle change is where the leak begins.
"""

from regard.health.findings._finding import Finding
from regard.health.probing.probe import relative_change
from regard.health.probing.trial import NotApplicable, Trial

NAME = "later tokens do not change earlier outputs"
KIND = "sees the future"


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    leak = trial.leak
    if leak <= trial.tolerance:
        return []
    why = trial.why_causal
    if why is None:
        raise NotApplicable("nothing says that the model predicts the next token; pass causal=True if it does")
    key, where, remedy = locate(trial)
    return trial.find(
        KIND, "critical", [key] if key else [],
        f"Other tokens in the second half of the text change the output in the first half by {leak:.2g} of its size. "
        f"The leak begins {where}. The model must not see later tokens: {why}.",
        f"relative change of the earlier rows > {trial.tolerance:g}",
        f"{remedy} Losses measured with this leak are too low: in generation the later tokens are not there. Pass "
        "causal=False if the model may see them.",
    )  # fmt: skip


def locate(trial: Trial) -> tuple[tuple[str, int] | None, str, str]:
    """(the layer's key, where the leak begins, what to check)."""
    c, _, after = trial.after_change
    previous = None
    for key, one in trial.captured[1].items():
        other = after.get(key)
        if other is None or one.call.is_cross(key[0]) or one.q.shape[2] != trial.tokens.targets.shape[1]:
            continue
        layer = trial.layer_of(key)
        name = f"layer {layer.index} ({key[0] or 'the model itself'})" if layer is not None else key[0]
        pairs = ((one.q, other.q), (one.k, other.k), (one.v, other.v))
        if any(a.shape[2] > c and relative_change(a[:, :, :c], b[:, :, :c]) > trial.tolerance for a, b in pairs):
            if previous is None:
                return key, f"before the attention of {name}, the first", BEFORE
            return previous[0], f"after the attention of {previous[1]}", AFTER
        if relative_change(one.output[:, :, :c], other.output[:, :, :c]) > trial.tolerance:
            return key, f"in the attention of {name}", INSIDE
        previous = key, name
    return (previous[0], f"after the attention of {previous[1]}", AFTER) if previous else (None, "somewhere", INSIDE)


INSIDE = (
    "Check the mask of this layer's attention call: is_causal=True, or a bool mask with tril(); a float mask must hold "
    "−inf where a key is hidden."
)
BEFORE = (
    "Check what makes q, k and v: view(B, H, N, d) in place of view(B, N, H, d).transpose(1, 2) mixes heads with time; "
    "so do a convolution with padding on both sides and a norm over time."
)
AFTER = (
    "Check what follows the attention call: its output needs transpose(1, 2) before reshape(B, N, H·d); a norm or a "
    "convolution over time mixes tokens too."
)
