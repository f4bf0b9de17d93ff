"""Checkpointing does not keep the random state: the forward is done again with other dropout in the backward."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from museum.parts import Attention, TinyGPT, build, make_texts, train

LINK = "allenai/OLMo-core#828"
SYMPTOM = "preserve_rng_state=False with dropout: gradients belong to another sample than the loss."
NEEDS = ("checkpoint", "dropout", "random state")


class Dropped(Attention):
    def weigh(self, scores, hidden):
        return nn.functional.dropout(super().weigh(scores, hidden), 0.2, self.training)


class Checkpointed(TinyGPT):
    def __init__(self, kept):
        super().__init__(Dropped)
        self.kept = kept

    def forward(self, input_ids, attention_mask=None):
        x = self.wte(input_ids) + self.wpe(self.place(input_ids, attention_mask))
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.kept)
            else:
                x = block(x)
        return self.head(self.ln_f(x))


def make_checkpointed(kept):
    return train(build(lambda: Checkpointed(kept)), 60), make_texts(), {}


def make():
    return make_checkpointed(False)


def sound():
    return make_checkpointed(True)
