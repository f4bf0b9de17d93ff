"""nn.MultiheadAttention wants masks in the order batch · heads + head; `.repeat(heads, 1, 1)` tiles samples."""

from torch import nn

from museum.unseen.parts import HEADS, WIDTH, Encoder, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "line/lighthouse#77"
SYMPTOM = "Heads attend with another sample's padding mask; a sample's output depends on the rest of the batch."
NEEDS = ("padding", "batch", "row", "sample")


class Attention(nn.Module):
    tiles = False

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, mask=None):
        if mask is not None:
            n = mask.shape[1]
            mask = (mask == 0)[:, None, :].expand(-1, n, n)
            mask = mask.repeat(HEADS, 1, 1) if self.tiles else mask.repeat_interleave(HEADS, dim=0)
        return self.mha(x, x, x, attn_mask=mask, need_weights=False)[0]


class Tiled(Attention):
    tiles = True


@kept
def weights():
    return fit_masked(seeded(lambda: Encoder(Attention)), 700, 3e-3).state_dict()


def build(attention):
    model = seeded(lambda: Encoder(attention))
    model.load_state_dict(weights())
    return model.eval(), [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)], {}


def make():
    return build(Tiled)


def sound():
    return build(Attention)
