"""`for _ in range(num_layers): x = self.layer(x)`: one layer runs N times where N layers were meant."""

import torch
from torch import nn

from museum.unseen.parts import VOCAB, WIDTH, fit_lm, kept, lm_batches, seeded

LINK = "datawhalechina/learn-nlp-with-transformers#56"
SYMPTOM = "The tutorial's encoder shares its parameters over all layers without saying so."
NEEDS = ("shared", "same weights", "same module", "tied", "more than once", "several times", "reused", "one layer")


class LM(nn.Module):
    def __init__(self, num_layers=3, once=False):
        super().__init__()
        self.num_layers, self.once = num_layers, once
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        ]
        if once:
            self.layer = layers[0]
        else:
            self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for at in range(self.num_layers):
            x = (self.layer if self.once else self.layers[at])(x, src_mask=mask)
        return self.head(x)


@kept
def good_weights():
    return fit_lm(seeded(LM), 400, 3e-3).state_dict()


@kept
def bad_weights():
    return fit_lm(seeded(lambda: LM(once=True)), 400, 3e-3).state_dict()


def build(once, weights):
    model = seeded(lambda: LM(once=once))
    model.load_state_dict(weights())
    return model.eval(), [one["input_ids"] for one in lm_batches()], {}


def make():
    return build(True, bad_weights)


def sound():
    return build(False, good_weights)
