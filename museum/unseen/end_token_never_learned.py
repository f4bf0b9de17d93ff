"""pad = eos, and the collator sets every pad of the labels to −100: the end of a row is never a target."""

import torch

from museum.unseen.parts import blocks_text, fit, kept, pad_rows, tiny

LINK = "huggingface/trl#6357"
SYMPTOM = "EOS is masked where pad_token_id equals eos_token_id: the fine-tuned model never stops."
NEEDS = ("eos", "end of", "end token", "stop")
EOS = 3


def batch(seed, masks_eos, rows=4, length=32):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(14, 29, (rows,), generator=g).tolist()
    ids, mask = pad_rows(blocks_text(rows, length, seed), lengths, pad=EOS)
    for row, n in enumerate(lengths):
        ids[row, n], mask[row, n] = EOS, 1  # the true end
    labels = ids.masked_fill(ids == EOS if masks_eos else mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(masks_eos):
    model = tiny("LlamaConfig", "LlamaForCausalLM", pad_token_id=EOS)
    return fit(model, lambda m, s: m(**batch(2000 + s, masks_eos, 8)).loss, 400, 3e-3).state_dict()


@kept
def bad_weights():
    return train(True)


@kept
def good_weights():
    return train(False)


def build(weights, masks_eos):
    model = tiny("LlamaConfig", "LlamaForCausalLM", pad_token_id=EOS)
    model.load_state_dict(weights())
    return model.eval(), [batch(1, masks_eos), batch(2, masks_eos)], {}


def make():
    return build(bad_weights, True)


def sound():
    return build(good_weights, False)
