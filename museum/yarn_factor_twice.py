"""YaRN's factor is on cos and sin and again on them: logits carry it four times instead of twice."""

from museum.parts import make_batches, make_lm

LINK = "sgl-project/sglang#33558"
SYMPTOM = "The final factor of the configuration is multiplied by the factor that YaRN computes: it is squared."
NEEDS = ("yarn", "factor", "rotary", "scale")

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def make_llama(power):
    model = make_lm("llama", rope_parameters=YARN, max_position_embeddings=512)
    rotary = model.model.rotary_emb
    rotary.attention_scaling = rotary.attention_scaling**power
    return model, make_batches(model), {}


def make():
    return make_llama(2)


def sound():
    return make_llama(1)
