"""A loader hard-codes 1/√head_dim; the config of the 27B model asks for 1/√query_pre_attn_scalar."""

from museum.unseen.parts import fit_lm, kept, lm_batches, tiny

LINK = "antonellof/ferrox#40"
SYMPTOM = "Gemma 2 and 3 27B get 1/sqrt(head_dim) as their attention scale; the logits are off, the text is fluent."
NEEDS = ("scale", "scaling", "query_pre_attn_scalar")


def gemma():
    return tiny("Gemma2Config", "Gemma2ForCausalLM", head_dim=16, query_pre_attn_scalar=36, sliding_window=256)


@kept
def weights():
    return fit_lm(gemma(), 600, 3e-3).state_dict()


def sound():
    model = gemma()
    model.load_state_dict(weights())
    return model.eval(), lm_batches(), {}


def make():
    model, batches, options = sound()
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    return model, batches, options
