"""The configuration ties the head to the embedding; after loading they are two tensors with other values."""

import torch
from torch import nn

from museum.parts import make_batches, make_lm

LINK = "vllm-project/vllm#51665"
SYMPTOM = "tie_word_embeddings is true, but lm_head has weights of its own."
NEEDS = ("tied", "tie_word", "apart")


def make_llama(apart):
    model = make_lm("llama", tie_word_embeddings=True)
    if apart:
        generator = torch.Generator().manual_seed(0)
        weight = model.lm_head.weight.detach()
        model.lm_head.weight = nn.Parameter(0.1 * torch.randn(weight.shape, generator=generator))
    return model, make_batches(model), {}


def make():
    return make_llama(True)


def sound():
    return make_llama(False)
