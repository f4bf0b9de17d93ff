"""The attention function builds its own causal mask: documents packed into one row see one another."""

import torch

from museum.parts import attend, keep_causal, make_batches, make_lm

LINK = "huggingface/trl#784"
SYMPTOM = "position_ids restart in a packed row, but attention is plainly causal: documents read their neighbours."
NEEDS = ("pack", "document")


def plain(module, query, key, value, attention_mask, **more):
    return attend(module, query, key, value, keep_causal(query, key), **more)


def make_packed(function):
    model = make_lm("llama", function)
    batches = [{"input_ids": batch["input_ids"]} for batch in make_batches(model)]
    for batch in batches:
        batch["use_cache"] = False  # with a cache transformers itself makes no mask of documents
        batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(14)]).expand_as(batch["input_ids"]).clone()
    return model, batches, {}


def make():
    return make_packed(plain)


def sound():
    return make_packed(attend)
