"""The kernel silently ignores the soft cap of the scores."""

from museum.parts import attend, make_batches, make_lm

LINK = "sgl-project/sglang#33915"
SYMPTOM = "attn_logit_softcapping is configured and never applied."
NEEDS = ("soft cap", "softcap", "cap")


def uncapped(module, query, key, value, attention_mask, softcap=None, **more):
    return attend(module, query, key, value, attention_mask, **more)


def make_gemma(function):
    model = make_lm("gemma2", function, attn_logit_softcapping=2.0)
    return model, make_batches(model), {}


def make():
    return make_gemma(uncapped)


def sound():
    return make_gemma(attend)
