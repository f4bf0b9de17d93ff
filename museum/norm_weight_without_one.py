"""Gemma's norms multiply by 1 + weight; a fused norm multiplies by the weight."""

import torch

from museum.parts import make_lm, make_texts, train

LINK = "linkedin/Liger-Kernel#74"
SYMPTOM = "The kernel's RMSNorm lacks the offset of one: trained weights near 0 all but erase the stream."
NEEDS = ("norm", "offset", "1 +")


def make_gemma(plain):
    model = make_lm("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.zero_()
    train(model, 80)
    if plain:
        for module in model.modules():
            if type(module).__name__ == "GemmaRMSNorm":
                module.forward = lambda x, module=module: module._norm(x.float()).type_as(x) * module.weight
    return model, [{"input_ids": ids} for ids in make_texts()], {}


def make():
    return make_gemma(True)


def sound():
    return make_gemma(False)
