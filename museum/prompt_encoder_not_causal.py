"""CLIP's text encoder is causal; the port runs it with full attention."""

from museum.parts import attend

LINK = "sgl-project/sglang#14364"
SYMPTOM = (
    "causal=False and the padding mask commented out: prompts get other embeddings than the image model was made for."
)
NEEDS = ("causal", "mask", "later tokens", "future")


def full(module, query, key, value, attention_mask, **more):
    return attend(module, query, key, value, None, **more)


def make_clip(function):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    from museum.parts import make_batches
    from regard.health.models.tiny_architectures import make_model

    model = make_model("clip_text_model")
    registered = f"museum_clip_{function.__name__}"
    AttentionInterface.register(registered, function)
    AttentionMaskInterface.register(registered, eager_mask)
    model.set_attn_implementation(registered)
    return model, make_batches(model), {}


def make():
    return make_clip(full)


def sound():
    return make_clip(attend)
