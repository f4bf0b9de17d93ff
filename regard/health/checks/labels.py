"""Labels and what the model predicts: labels that are all ignored, of padding, moved twice, or not moved at all.

A causal model's row i predicts token i + 1. The loss at the offsets 0, 1 and 2 says which token a trained model's rows
predict; the offset at which cross entropy is the model's own loss says which label it is trained on.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.health.checks.finding import Finding
from regard.health.checks.rule import NotApplicable, Rule
from regard.health.probe.labels import IGNORED, each_label, has_no_labels, relate
from regard.health.probe.task import frequency_losses, interval, predicts_next_token
from regard.health.probe.trial import Trial

MOVED = Rule(
    "RG803", "labels at another offset", "row i predicts token i + 1", "critical",
    needs="token ids of a model that predicts the next token, or labels beside them",
    proves="Proves that the model is trained, or was trained, to predict another token than the next.",
    cause="Labels are moved in the data and again in the model, or in neither.",
    fix="Move labels once: give transformers models labels = input_ids, others targets = ids[:, 1:].",
)  # fmt: skip
NONE = Rule(
    "RG804", "no labels", "some labels are not ignored", "critical", needs="labels in the batches",
    proves="Proves that a batch's labels are all −100: its loss is nan or 0, and nothing is learned from it.",
    cause="The collator masks the whole text: the prompt's mask covers the answer, or the template was not found.",
    fix="Print a batch's labels; leave −100 on the prompt and on padding alone.",
)  # fmt: skip
PADDED = Rule(
    "RG807", "labels of padding", "labels of padding are ignored", "warning", needs="labels and an attention_mask",
    proves="Proves that tokens that attention_mask marks as padding count in the loss.",
    cause="Labels are a copy of the ids, padding included.",
    fix="Set labels to −100 where attention_mask is 0.", references=("trl#1625",), explains=("RG802",),
)  # fmt: skip
ENDLESS = Rule(
    "RG808", "the end is never learned", "ends of text have a label", "warning",
    needs="labels, an attention_mask, and an eos_token_id in the configuration",
    proves="Proves that no end of text behind a labelled token has a label: from these batches the model cannot learn "
    "to stop.",
    cause="The padding token is the end of text, and the collator ignores every label of the padding token.",
    fix="Ignore labels by attention_mask, not by the token id; or give padding a token of its own.",
    references=("trl#6357",),
)  # fmt: skip
RULES = (MOVED, NONE, PADDED, ENDLESS)
NAMES = {0: "the token that it reads (labels were not moved)", 2: "the token after the next (labels were moved twice)"}
CLEAR = 0.9  # of the loss at the offset 1: a smaller one at another offset is no chance


def check(trial: Trial) -> list[Finding]:
    given = [batch for batch in trial.inputs if batch.labels is not None]
    empty = [at for at, batch in enumerate(given) if has_no_labels(batch.labels)]
    found = []
    if empty:
        which = "every batch" if len(empty) == len(given) else f"batch {empty[0]} (counted from 0)"
        found += trial.find(NONE, "critical", [], f"All labels of {which} are −100: there is nothing to predict.")
    found += check_padding(trial) + check_ends(trial)
    try:
        return found + (check_given(trial) or check_learned(trial))
    except NotApplicable:
        if found:
            return found
        raise


def check_padding(trial: Trial) -> list[Finding]:
    """Labels that are not ignored where the batch's own mask marks padding."""
    counted = padding = 0
    for batch in trial.batches:
        mask, labels = batch.named.get("attention_mask"), batch.labels
        if batch.has_decoder or not isinstance(mask, Tensor) or labels is None or labels.shape != mask.shape:
            continue
        padding += int((mask == 0).sum())
        counted += int(((mask == 0) & (labels != IGNORED)).sum())
    if not counted:
        return []
    text = f"{counted} of {padding} tokens that attention_mask marks as padding have a label."
    return trial.find(PADDED, "warning", [], text, "a label other than −100 where attention_mask is 0")


def check_ends(trial: Trial) -> list[Finding]:
    """Ends of text whose labels are ignored although the token before them has one."""
    given = getattr(getattr(trial.model, "config", None), "eos_token_id", None)
    ends = [one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, int)]
    ignored = learned = 0
    for batch in trial.batches:
        mask, labels, ids = batch.named.get("attention_mask"), batch.labels, batch.targets
        if batch.has_decoder or not isinstance(mask, Tensor) or labels is None or labels.shape != mask.shape:
            continue
        is_end = sum((ids == end for end in ends), torch.zeros_like(ids, dtype=torch.bool))[:, 1:] > 0
        told = labels != IGNORED
        real = is_end & (mask[:, 1:] != 0) & told[:, :-1]
        ignored, learned = ignored + int((real & ~told[:, 1:]).sum()), learned + int((real & told[:, 1:]).sum())
    if not ignored or learned:
        return []
    text = f"All {ignored} ends of text (token {ends[0]}) that follow a labelled token are ignored in the loss."
    return trial.find(ENDLESS, "warning", [], text, "a label of −100 at every end of text that attention_mask shows")


def check_given(trial: Trial) -> list[Finding]:
    """Labels that are moved twice or not at all, by the model's own loss."""
    for batch in trial.batches:
        if batch.labels is None or has_no_labels(batch.labels) or trial.why_causal is None or batch.has_decoder:
            continue
        relation = relate(trial.probe.run_model(batch), batch)
        if relation is None or not relation.is_own or batch.labels.shape != batch.targets.shape:
            continue
        told = batch.labels >= 0
        if relation.offset == 2 and bool((batch.labels == batch.targets)[told].all()):
            return trial.find(
                MOVED, "critical", [],
                "The labels are the ids and the model shifts them twice: row i is trained on token i + 2.",
                "the model's own loss is the cross entropy of labels[i + 2], and labels[i] = ids[i]",
            )  # fmt: skip
        if relation.offset == 1 and predicts_next_token(batch):
            return trial.find(
                MOVED, "critical", [],
                "The labels are the next tokens, and the model moves labels by one itself: row i is trained on token "
                "i + 2.", "the model's own loss is the cross entropy of labels[i + 1], and labels[i] = ids[i + 1]",
            )  # fmt: skip
        if relation.offset == 0 and bool((batch.labels == batch.targets)[told].all()):
            return trial.find(
                MOVED, "critical", [],
                "The labels are the ids and the model does not move them: row i is trained on token i, which it reads.",
                "the model's own loss is the cross entropy of labels[i], and labels[i] = ids[i]",
            )  # fmt: skip
    return []


def check_learned(trial: Trial) -> list[Finding]:
    """The token that a trained model's rows predict, by the loss at three offsets."""
    if trial.why_causal is None or trial.tokens.has_decoder:
        raise NotApplicable("nothing says that the model predicts the next token")
    tokens, output = trial.tokens, trial.require_rows()
    ids = tokens.targets
    if output.shape[-1] <= int(ids.max()) or not trial.names_vocabulary(output):
        raise NotApplicable("the outputs are no logits of the vocabulary")
    text = ids.masked_fill(~tokens.text_mask(trial.pad), -100).long()
    losses = {offset: each_label(output, text, offset) for offset in (0, 1, 2)}
    means = {offset: float(each[each == each].mean()) for offset, each in losses.items()}
    best = min(means, key=lambda offset: means[offset])
    unigram = frequency_losses(ids[:, :-1], ids[:, 1:], output.shape[-1])[0]
    if best == 1 or means[best] > CLEAR * min(means[1], unigram) or ids.numel() < 32:
        return []
    difference = (losses[1][:, : losses[best].shape[1]] - losses[best][:, : losses[1].shape[1]]).flatten()
    if interval(difference[difference == difference].double())[1] <= 0:
        return []
    if best == 0 and any(one is two for one, two in pairs_of_embeddings(trial)):
        return []  # tied embeddings copy before any training
    listed = ", ".join(f"{mean:.3g} at {offset}" for offset, mean in means.items())
    return trial.find(
        MOVED, "critical", [],
        f"The model predicts {NAMES[best]} best: its loss on the token at distance d from the row is {listed}; the "
        f"text's frequencies reach {unigram:.3g}.",
        f"loss at another offset < {CLEAR} of that at 1 and of the frequencies', 95 % interval",
    )  # fmt: skip


def pairs_of_embeddings(trial: Trial) -> Iterator[tuple[Tensor, Tensor]]:
    """(the weight of an embedding, the weight of a linear layer) of one shape."""
    modules = list(trial.model.modules())
    linear = [module.weight for module in modules if isinstance(module, nn.Linear)]
    for module in modules:
        if isinstance(module, nn.Embedding):
            yield from ((module.weight, p) for p in linear if p.shape == module.weight.shape)
