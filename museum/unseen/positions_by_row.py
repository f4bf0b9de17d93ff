"""`torch.arange(x.size(0)).unsqueeze(1)`: the position embedding counts rows of the batch, not tokens."""

import torch
from torch import nn

from museum.unseen.parts import VOCAB, WIDTH, fit_lm, kept, lm_batches, seeded

LINK = "cmu-l3/anlp-fall2025-code#1"
SYMPTOM = "After broadcasting, all tokens of a sequence get the same positional encoding, and it depends on the row."
NEEDS = ("position", "batch", "row")


class LM(nn.Module):
    def __init__(self, by_row=False):
        super().__init__()
        self.by_row = by_row
        self.embed, self.pos_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        if self.by_row:
            pos = torch.arange(x.size(0), device=x.device).unsqueeze(1)
        else:
            pos = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        h = self.embed(x) + self.pos_embed(pos)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(h)


@kept
def good_weights():
    return fit_lm(seeded(LM), 600, 3e-3).state_dict()


@kept
def bad_weights():
    return fit_lm(seeded(lambda: LM(True)), 600, 3e-3).state_dict()


def build(by_row, weights):
    model = seeded(lambda: LM(by_row))
    model.load_state_dict(weights())
    return model.eval(), [one["input_ids"] for one in lm_batches()], {}


def make():
    return build(True, bad_weights)


def sound():
    return build(False, good_weights)
