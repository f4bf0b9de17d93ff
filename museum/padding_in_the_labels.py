"""Labels are a copy of the ids: the loss is also taken for padding."""

import torch

from museum.parts import make_lm, make_texts, train

LINK = "huggingface/trl#1625"
SYMPTOM = "Pad tokens are not set to −100: most of the loss of short rows is for predicting padding."
NEEDS = ("label",)


def make_llama(masked):
    model = train(make_lm("llama"), 80)
    batches = []
    for ids in make_texts():
        mask = torch.ones_like(ids)
        for row in range(len(ids)):
            mask[row, 32 - 3 * row :] = 0
        ids = ids * mask
        labels = ids.masked_fill(mask == 0, -100) if masked else ids.clone()
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return model, batches, {}


def make():
    return make_llama(False)


def sound():
    return make_llama(True)
