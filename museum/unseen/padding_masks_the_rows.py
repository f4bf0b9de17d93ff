"""`.unsqueeze(1).unsqueeze(3)`: the padding mask has shape [B, 1, N, 1] and blanks queries, not keys."""

from museum.unseen.parts import Encoder, EncoderAttention, encoder, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "hyunwoongko/transformer#40"
SYMPTOM = "make_pad_mask unsqueezes the wrong dimension; with −10000 nothing is NaN, and padding is attended to."
NEEDS = ("padding",)


class Attention(EncoderAttention):
    def hide(self, scores, mask):
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1).unsqueeze(3) == 0, -10000)
        return scores


@kept
def weights():
    return fit_masked(seeded(lambda: Encoder(Attention)), 600, 3e-3).state_dict()  # trained with the bug


def batches():
    return [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)]


def make():
    model = seeded(lambda: Encoder(Attention))
    model.load_state_dict(weights())
    return model.eval(), batches(), {}


def sound():
    return encoder(), batches(), {}
