"""nn.Softmax(dim=1) on scores [B, H, N, N]: normalised over the heads, not the keys."""

from museum.unseen.parts import Encoder, EncoderAttention, encoder, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "CAMMA-public/rendezvous-in-time#3"
SYMPTOM = "self.soft = nn.Softmax(dim=1) in multi-head attention, where dimension 1 is heads."
NEEDS = ("softmax", "sum to", "normalis", "over heads", "axis", "dimension")


class Attention(EncoderAttention):
    def normalise(self, scores):
        return scores.softmax(dim=1)

    def hide(self, scores, mask):
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        return scores


@kept
def weights():
    return fit_masked(seeded(lambda: Encoder(Attention)), 400, 3e-3).state_dict()  # trained with the bug


def batches():
    return [masked_batch(at, rows=4) for at in (1, 2)]


def plain():
    return [inputs_only(one) for one in batches()]


def make():
    model = seeded(lambda: Encoder(Attention))
    model.load_state_dict(weights())
    return model.eval(), plain(), {}


def sound():
    return encoder(), plain(), {}
