"""The collator shifts labels and the model shifts them again: it learns the token after the next."""

import torch

from museum.parts import make_lm, make_texts, train

LINK = "huggingface/transformers#47394"
SYMPTOM = "Labels are shifted by the data and by the model: the loss is for token t + 2."
NEEDS = ("label", "shift")


def make_llama(shift):
    model = train(make_lm("llama"), 80)
    batches = []
    for ids in make_texts():
        labels = torch.cat([ids[:, shift:], torch.full((len(ids), shift), -100)], 1)
        batches.append({"input_ids": ids, "labels": labels})
    return model, batches, {}


def make():
    return make_llama(1)


def sound():
    return make_llama(0)
