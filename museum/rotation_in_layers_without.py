"""SmolLM3 has layers without rotary positions; the port, a Llama underneath, rotates in all of them."""

from museum.parts import make_batches, make_lm

LINK = "timtoole02/Camelid#535"
SYMPTOM = "no_rope_layers is not read: every fourth layer, the last among them, is rotated although trained without."
NEEDS = ("no_rope", "use_rope", "nope", "rotat", "rotary")


def make_smollm3(everywhere):
    model = make_lm("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    for layer in model.model.layers:
        layer.self_attn.use_rope = layer.self_attn.use_rope or everywhere
    return model, make_batches(model), {}


def make():
    return make_smollm3(True)


def sound():
    return make_smollm3(False)
