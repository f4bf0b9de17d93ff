"""GPT-NeoX stores [head, (q, k, v), d]; a loader wrote the fused rows as [(q, k, v), head, d]."""

import torch

from museum.unseen.parts import fit_lm, kept, lm_batches, tiny

LINK = "awslabs/slapo#46"
SYMPTOM = "A flat split gives q, k and v from the wrong channels; the text is fluent, the attention scrambled."
NEEDS = ("fused", "qkv", "query_key_value", "split", "rows", "layout", "heads in another order", "order of")


def neox():
    return tiny("GPTNeoXConfig", "GPTNeoXForCausalLM", rotary_pct=0.5)


@kept
def weights():
    return fit_lm(neox(), 700, 3e-3).state_dict()


def sound():
    model = neox()
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    model, batches, options = sound()
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            for one in layer.attention.query_key_value.parameters():
                one.copy_(one.view(4, 3, 16, -1).transpose(0, 1).reshape(one.shape))
    return model, batches, options
