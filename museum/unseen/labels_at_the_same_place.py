"""ForCausalLM compares the logits with labels of the same place; the collator gave labels = input_ids."""

import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import RopeLM, blocks_text, fit, kept, lm_batches, seeded

LINK = "macrocosm-os/pretraining#64"
SYMPTOM = "The model is trained to give its own input back: the loss is near zero, generation repeats the last token."
NEEDS = (
    "shift",
    "does not move",
    "at another offset",
    "same token",
    "own input",
    "copies",
    "current token",
    "its input",
    "the token itself",
)


class ForCausalLM(nn.Module):
    shifts = True

    def __init__(self):
        super().__init__()
        self.model = RopeLM()

    def forward(self, input_ids, labels=None):
        logits, loss = self.model(input_ids), None
        if labels is not None:
            if self.shifts:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            else:
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return {"loss": loss, "logits": logits}


class Unshifted(ForCausalLM):
    shifts = False


def loss(model, step):
    ids = blocks_text(seed=600 + step)
    return model(ids, labels=ids)["loss"]


@kept
def good_weights():
    return fit(seeded(ForCausalLM), loss, 500, 3e-3).state_dict()


@kept
def bad_weights():
    return fit(seeded(Unshifted), loss, 300, 3e-3).state_dict()


def build(cls, weights):
    model = seeded(cls)
    model.load_state_dict(weights())
    return model.eval(), lm_batches(labels=True), {}


def make():
    return build(Unshifted, bad_weights)


def sound():
    return build(ForCausalLM, good_weights)
