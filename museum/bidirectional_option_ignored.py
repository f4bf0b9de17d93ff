"""The configuration asks for attention in both directions, but masks are built from another field and stay causal."""

from types import SimpleNamespace

from museum.parts import Attention, TinyGPT, build, make_texts, torch

LINK = "huggingface/transformers#46077"
SYMPTOM = "An embedding model's tokens see only earlier ones: retrieval is worse, without an error."
NEEDS = ("later key", "both directions", "direction")


class Both(Attention):
    def make_mask(self, length):
        return torch.ones(length, length, dtype=torch.bool)


class Embedder(TinyGPT):
    """The mean over tokens."""

    config = SimpleNamespace(use_bidirectional_attention="all")

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = super().forward(input_ids, attention_mask)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def make():
    return build(lambda: Embedder(Attention)), make_texts(), {}


def sound():
    return build(lambda: Embedder(Both)), make_texts(), {}
