"""The scale of latent attention is taken from the compressed key's width instead of the key's own."""

from museum.parts import make_batches, make_lm

LINK = "ollama/ollama#13893"
SYMPTOM = "Scores are divided by the root of kv_lora_rank + rotary width, not of the width q and k were trained with."
NEEDS = ("scale", "scaling")


def make_deepseek(latent):
    model = make_lm("deepseek_v3")
    if latent:
        for layer in model.model.layers:
            layer.self_attn.scaling = (model.config.kv_lora_rank + model.config.qk_rope_head_dim) ** -0.5
    return model, make_batches(model), {}


def make():
    return make_deepseek(True)


def sound():
    return make_deepseek(False)
