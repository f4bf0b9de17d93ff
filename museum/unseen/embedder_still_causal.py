"""An embedding model whose config asks for bidirectional attention runs on code that does not know the option."""

import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import SIZES, fit, inputs_only, kept, masked_batch, seeded

LINK = "huggingface/sentence-transformers#3725"
SYMPTOM = "embeddinggemma silently uses causal attention on an older transformers: retrieval falls to chance."
NEEDS = ("causal", "bidirectional", "later tokens", "both directions", "one direction")


class Embedder(nn.Module):
    """Mean over tokens of a Gemma 3 text model, as sentence-transformers runs it, and logits for its training."""

    def __init__(self, bidirectional):
        super().__init__()
        from transformers import Gemma3TextConfig, Gemma3TextModel

        config = Gemma3TextConfig(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=64,
                                  use_bidirectional_attention=bidirectional)  # fmt: skip
        config._attn_implementation = "sdpa"
        self.model = Gemma3TextModel(config)
        self.head = nn.Linear(64, SIZES["vocab_size"])

    def tokens(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    def forward(self, input_ids, attention_mask):
        h, m = self.tokens(input_ids, attention_mask), attention_mask[..., None].float()
        return F.normalize((h * m).sum(1) / m.sum(1), dim=-1)


def loss(model, step):
    batch = masked_batch(7000 + step)
    logits = model.head(model.tokens(batch["input_ids"], batch["attention_mask"]))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@kept
def weights():
    return fit(seeded(lambda: Embedder(True)), loss, 300, 3e-3).state_dict()


def build(bidirectional):
    model = seeded(lambda: Embedder(bidirectional))
    model.load_state_dict(weights())
    return model.eval(), [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)], {"causal": False}


def make():
    return build(False)  # the old code ignores the option of the config


def sound():
    return build(True)
