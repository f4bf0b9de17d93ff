"""LoRA with reentrant gradient checkpointing and frozen embeddings, without enable_input_require_grads()."""

from torch import nn

from museum.unseen.parts import llama, lm_batches, seeded

LINK = "locuslab/open-unlearning#178"
SYMPTOM = "No adapter inside a checkpointed layer gets a gradient: all lora_B stay zero after training."
NEEDS = ("gradient",)


class LoraLinear(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.base_layer = linear
        self.lora_A, self.lora_B = (
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(reentrant_bug):
    model = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, seeded(lambda: LoraLinear(getattr(layer.self_attn, name))))
    model.lm_head.requires_grad_(True)  # as in modules_to_save, so that the loss has a gradient
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if reentrant_bug:
        model.disable_input_require_grads()  # before transformers 5, nothing asked for gradients of the embeddings
    return model.train(), lm_batches(labels=True), {}


def make():
    return adapted(True)


def sound():
    return adapted(False)
