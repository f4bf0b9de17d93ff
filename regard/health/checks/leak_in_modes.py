"""Sees the future in another way of running: in training, with checkpointing, weights asked, a cache, another kernel.

A branch on self.training, a layer that is run through `checkpoint`, the path that returns weights, several tokens
behind a cache and a registered function each build their mask, or lose it. The model as it is hides later tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, NothingToCheck, Rule
from regard.health.probe.decoding import Decoder, find_decoders, is_recurrent
from regard.health.probe.library import is_library_code
from regard.health.probe.modes import implementations_of
from regard.health.probe.texts import find_leaks
from regard.health.probe.trial import CHECKPOINTING, TRAINING, WEIGHTS, Trial
from regard.health.tokens.text import TokenBatch

IN_TRAINING = Rule(
    "RG103", "sees the future in training", "later tokens do not change earlier outputs in training mode",
    "critical", needs="token ids, and a model that hides later tokens in evaluation",
    proves="Proves that outputs depend on later tokens in training mode, with every dropout at 0, and not in "
    "evaluation. Randomness other than dropout keeps the check from being made.",
    cause="The branch for training calls another kernel or drops the mask.",
    fix="Give the attention call of the training branch the same mask or is_causal=True as in evaluation.",
    explains=("RG104", "RG220", "RG221"),
)  # fmt: skip
CHECKPOINTED = Rule(
    "RG104", "sees the future with checkpointing", "later tokens do not change earlier outputs with checkpointing",
    "critical", needs="a transformers model that has gradient_checkpointing_enable()",
    proves="Proves that outputs depend on later tokens with gradient checkpointing, and not without.",
    cause="The mask is not among the arguments that checkpoint() passes on to the layer.",
    fix="Pass every argument of the layer through checkpoint(), the mask and its flags too.",
    explains=("RG221",),
)  # fmt: skip
ASKED = Rule(
    "RG105", "sees the future with output_attentions", "later tokens do not change earlier outputs with weights asked",
    "critical", needs="a model whose forward takes output_attentions",
    proves="Proves that outputs depend on later tokens with output_attentions=True, and not without.",
    cause="The path that returns weights is another one, and builds its mask otherwise or not at all.",
    fix="Build one mask for both paths.",
    explains=("RG222",),
)  # fmt: skip
CACHED = Rule(
    "RG106", "sees the future with a cache", "later tokens do not change earlier outputs behind a cache",
    "critical", needs="a model that takes a cache",
    proves="Proves that tokens fed together after cached ones change the outputs of those before them.",
    cause="No mask is built for several tokens behind a cache, or it is aligned with the first key.",
    fix="Behind a cache of n keys let query i see keys 0 … n + i: a mask aligned at the lower right.",
)  # fmt: skip
OTHER_KERNEL = Rule(
    "RG107", "sees the future in another kernel", "later tokens do not change earlier outputs in any implementation",
    "critical", needs="a transformers model with several attention implementations",
    proves="Proves that outputs depend on later tokens under one attn_implementation, and not under the model's own.",
    cause="A function that is registered without its mask function receives attention_mask=None.",
    fix="Register a mask function of the same name with AttentionMaskInterface, or let the function build its mask.",
    explains=("RG230",),
)  # fmt: skip


def check(trial: Trial) -> list[Finding]:
    trial.require_causal()
    return trial.ask_each(WAYS)


def in_mode(name: str) -> Callable[[Trial, Rule], list[Finding]]:
    return lambda trial, rule: trial.find_new_leak(rule, name)


def with_weights(trial: Trial, rule: Rule) -> list[Finding]:
    """A note where transformers itself is so: its users ask for weights to look at them, not to train."""
    found = trial.find_new_leak(rule, WEIGHTS)
    if not is_library_code(trial.model):
        return found
    text = " This is the library's own code: do not train or evaluate with output_attentions."
    return [replace(one, severity="note", evidence=one.evidence + text) for one in found]


def with_cache(trial: Trial, rule: Rule) -> list[Finding]:
    text = trial.text
    half = text.targets.shape[1] // 2
    for decoder in find_decoders(trial.probe, text):
        leaks = find_leaks(partial(run_behind, trial, decoder, half), text)[1:]
        worst = max(leaks, key=lambda leak: leak.amount)
        if worst.amount > trial.rounding:
            return trial.find(
                rule, "critical", [], f"With {decoder.name} and {half} cached tokens: {worst}.",
                f"relative change of an earlier row > {trial.rounding:.2g}",
            )  # fmt: skip
    return []


def run_behind(trial: Trial, decoder: Decoder, half: int, batch: TokenBatch) -> torch.Tensor:
    """The outputs of the first tokens, and of the others behind a cache of them."""
    chunks = list(decoder.steps(trial.probe, batch.targets, (half, batch.targets.shape[1])))
    if is_recurrent(chunks[0][3]):
        raise NotApplicable("the cache holds a recurrent state, behind which tokens are fed one by one")
    return torch.cat([output for _, _, output, _ in chunks], 1)


def in_kernels(trial: Trial, rule: Rule) -> list[Finding]:
    reasons = []
    names = implementations_of(trial.model)
    for name in names:
        try:
            if found := trial.find_new_leak(rule, name):
                return found
        except NotApplicable as reason:
            reasons.append(reason)
    if not names:
        raise NothingToCheck("the model has one attention implementation")
    if len(reasons) == len(names):
        raise reasons[0]
    return []


WAYS = (
    (IN_TRAINING, in_mode(TRAINING)), (CHECKPOINTED, in_mode(CHECKPOINTING)), (ASKED, with_weights),
    (CACHED, with_cache), (OTHER_KERNEL, in_kernels),
)  # fmt: skip
RULES = tuple(rule for rule, _ in WAYS)
