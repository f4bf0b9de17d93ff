"""Sees the future: other tokens behind position c change what the model computes before c.

A model that predicts the next token may not see it. No mask need be understood: the tokens of the second half, of the
last quarter and the last one alone are exchanged, and the first layer whose earlier rows change is where it begins.
"""

from collections.abc import Callable
from inspect import signature

from torch import Tensor

from regard.health.capture.call import Call
from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.probe import Key, relative_change
from regard.health.probe.texts import Leak, change_later, find_leaks
from regard.health.probe.trial import Trial

RULE = Rule(
    "RG101", "sees the future", "later tokens do not change earlier outputs", "critical", needs="token ids",
    proves="Proves that the outputs before a token depend on it; it cannot tell a model that may see later "
    "tokens from one that may not: causal=True, a class that predicts the next token, labels, or causal layers say so.",
    cause="A mask is missing, shifted, soft or too short in one layer, or something mixes tokens outside attention.",
    fix="Give this layer is_causal=True, or a bool mask with tril() that is as long as the text.",
    explains=("RG103", "RG104", "RG105", "RG106", "RG107", "RG206", "RG211", "RG803"),
)  # fmt: skip
ONE_WAY = Rule(
    "RG116", "sees no later token", "a model that may see later tokens sees them", "warning",
    needs="causal=False, or a configuration for both directions, and attention calls",
    proves="Proves that every self-attention call hides all later keys, of a model that was said to see them.",
    cause="The code does not know the option for both directions, or the checkpoint's configuration leaves it out.",
    fix="Turn the causal mask off (is_causal=False, use_bidirectional_attention), or pass causal=True if it is meant.",
    references=("sentence-transformers#3725", "transformers#46077"),
)  # fmt: skip
RULES = (RULE, ONE_WAY)
BOTH_WAYS = (("use_bidirectional_attention", True), ("use_bidirectional_attention", "all"), ("is_causal", False))


def check(trial: Trial) -> list[Finding]:
    trial.require_repeatable()
    if (said := asks_both_ways(trial)) and (keys := find_one_way(trial)):
        text = f"{said}, and all {len(keys)} self-attention calls hide every later key."
        return trial.find(ONE_WAY, "warning", keys, text, "no later key visible in any self-attention call")
    leaks = [leak for leak in trial.leaks if leak.amount > trial.rounding]
    if not leaks:
        return []
    why = trial.why_causal or trial.why_inconsistent
    if why is None and trial.may_see_later:
        raise NothingToCheck("causal=False: the model may see later tokens")
    if why is None:
        raise NotApplicable("nothing says that the model predicts the next token; pass causal=True if it does")
    worst = max(leaks, key=lambda leak: leak.amount)
    key, where, remedy = locate(trial, worst)
    return trial.find(
        RULE, "critical", [key] if key else [],
        f"{worst}{describe_reach(trial, leaks)}. The leak begins {where}.{describe_cache(trial)} "
        f"The model must not see later tokens: {why}.",
        f"relative change of an earlier row > {trial.rounding:.2g}, which rounding explains",
        f"{remedy} Losses measured with this leak are too low: in generation the later tokens are not there. Pass "
        "causal=False if the model may see them.",
    )  # fmt: skip


def asks_both_ways(trial: Trial) -> str:
    """Who says that tokens see later ones, in a few words; nothing if nobody does."""
    if trial._causal is not None:
        return "" if trial._causal else "causal=False was said"
    own = getattr(trial.model, "config", None)
    for config in [getattr(one.call.module, "config", own) for one in trial.captured[1].values()]:
        for name, wanted in BOTH_WAYS:
            value = getattr(config, name, None)
            if type(value) is type(wanted) and value == wanted:
                return f"The configuration has {name}={value!r}"
    return ""


def find_one_way(trial: Trial) -> list[Key]:
    """The self-attention calls if all are causal; none where the output is that of the last token, which sees all."""
    calls = {key: one for key, one in trial.captured[1].items() if not one.call.is_cross(key[0])}
    if not calls or not all(one.k.shape[2] > 1 and trial.is_causal_call(one) for one in calls.values()):
        return []
    last = list(calls)[-1]

    def forget(call: Call, key: Key, run: Callable[[], Tensor]) -> Tensor:
        output = run().clone()
        if key == last:
            output[:, :, : output.shape[2] // 2] = 0.0
        return output

    return list(calls) if trial.differs(trial.probe.run(trial.sample, forget)) else []


def describe_cache(trial: Trial) -> str:
    """Whether the leak is there only with use_cache=True, which is tried without: FSMT then makes no causal mask."""
    config = getattr(trial.model, "config", None)
    accepts = "use_cache" in signature(trial.model.forward).parameters
    if not accepts or not trial.sample.named.get("use_cache", getattr(config, "use_cache", False)):
        return ""
    before, trial.probe.extra = trial.probe.extra, {**trial.probe.extra, "use_cache": False}
    try:
        is_gone = all(leak.amount <= trial.rounding for leak in find_leaks(trial.probe.run, trial.sample))
    except Exception:  # a forward that needs its cache
        return ""
    finally:
        trial.probe.extra = before
    return " It is there only with use_cache=True, the model's default; use_cache=False hides them." if is_gone else ""


def describe_reach(trial: Trial, leaks: list[Leak]) -> str:
    """Where in the text the leak is, if it is not everywhere."""
    safe = [leak for leak in trial.leaks if leak not in leaks]
    if safe:
        listed = " and ".join(leak.place for leak in safe)
        first = min(leak.first for leak in leaks)
        return f"; those in {listed} do not, so the mask ends before the text does (near position {first})"
    nearest = leaks[-1]
    if nearest.first == nearest.cut - 1 and nearest.place == "the last token":
        return ", the output just before them most"
    return ""


def locate(trial: Trial, leak: Leak) -> tuple[tuple[str, int] | None, str, str]:
    """(the layer's key, where the leak begins, what to check)."""
    c, after = leak.cut, trial.probe.capture(change_later(trial.sample, leak.cut))[1]
    previous = None
    for key, one in trial.captured[1].items():
        other = after.get(key)
        if other is None or one.call.is_cross(key[0]) or one.q.shape[2] != trial.sample.targets.shape[1]:
            continue
        name = key[0] or "the model itself"
        pairs = ((one.q, other.q), (one.k, other.k), (one.v, other.v))
        if any(a.shape[2] > c and relative_change(a[:, :, :c], b[:, :, :c]) > trial.rounding for a, b in pairs):
            if previous is None:
                return key, f"before the attention of {name}, the first", BEFORE
            return previous[0], f"after the attention of {previous[1]}", AFTER
        if relative_change(one.output[:, :, :c], other.output[:, :, :c]) > trial.rounding:
            return key, f"in the attention of {name}", INSIDE
        previous = key, name
    if previous is None:
        return None, "somewhere: no attention was captured", INSIDE
    return previous[0], f"after the attention of {previous[1]}", AFTER


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
