"""An adapter trained with use_rslora is merged with scale 1 instead of alpha / sqrt(r)."""

import torch

from museum.unseen.parts import byte_text, fit, kept, next_token_loss, seeded, tiny

LINK = "paiml/aprender#2189"
SYMPTOM = "Every rsLoRA adapter is merged with the wrong magnitude; the merged model is only a little fine-tuned."
NEEDS = ("weight", "lora", "adapter", "projection")
RANK, ALPHA = 16, 16
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def base():
    return tiny("LlamaConfig", "LlamaForCausalLM", vocab_size=128)


def places(model):
    return [(layer.self_attn, name) for layer in model.model.layers for name in NAMES]


@kept
def weights():
    """The base, trained on a text; adapters, trained on another with scale alpha / sqrt(r) = 4."""
    model = fit(base(), lambda m, s: next_token_loss(m, byte_text(seed=s)), 300, 3e-3)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    model.requires_grad_(False)
    adapters = []
    for module, name in places(model):
        linear = getattr(module, name)
        a = seeded(lambda: torch.nn.Parameter(torch.randn(RANK, linear.in_features) * 0.02))
        b = torch.nn.Parameter(torch.zeros(linear.out_features, RANK))
        linear.register_forward_hook(lambda _, x, y, a=a, b=b: y + x[0] @ a.T @ b.T * (ALPHA / RANK**0.5))
        adapters.append((a, b))
    fit(model, lambda m, s: next_token_loss(m, byte_text(seed=9000 + s).flip(1)), 200, 5e-3,
        parameters=[p for pair in adapters for p in pair])  # fmt: skip
    return start, [(a.detach(), b.detach()) for a, b in adapters]


def build(scale):
    model = base()
    start, adapters = weights()
    model.load_state_dict(start)
    with torch.no_grad():
        for (module, name), (a, b) in zip(places(model), adapters, strict=False):
            getattr(module, name).weight += scale * b @ a
    return model.eval(), [{"input_ids": byte_text(4, 48, seed).flip(1)} for seed in (71, 72)], {}


def make():
    return build(1.0)


def sound():
    return build(ALPHA / RANK**0.5)
