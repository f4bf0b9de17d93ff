"""A trainer sets rope scaling on model.config after from_pretrained: inv_freq stays what it was."""

from transformers import LlamaConfig, LlamaForCausalLM

from museum.unseen.parts import SIZES, fit_lm, kept, llama, llama_weights, lm_batches, seeded

LINK = "MakazhanAlpamys/Soup#793"
SYMPTOM = '"Long-context enabled" is printed and the model trains with the rotary angles of the base model.'
NEEDS = ("inv_freq", "rope", "rotary", "rope_parameters", "angles")
SCALED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def scaled():
    config = LlamaConfig(**SIZES, rope_parameters=dict(SCALED))
    config._attn_implementation = "sdpa"
    return seeded(lambda: LlamaForCausalLM(config))


@kept
def good_weights():
    model = scaled()
    model.load_state_dict(llama_weights())
    return fit_lm(model, 250, 1e-3).state_dict()


def make():
    model = llama()
    model.set_attn_implementation("sdpa")
    model.config.rope_parameters = dict(SCALED)
    return model, lm_batches(labels=True), {}


def sound():
    model = scaled()
    model.load_state_dict(good_weights())
    return model.eval(), lm_batches(labels=True), {}
