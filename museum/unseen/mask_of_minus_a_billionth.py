"""Hidden scores are set to −1e-9, which is 0: nothing is hidden."""

from museum.unseen.parts import Encoder, EncoderAttention, encoder, fit_masked, inputs_only, kept, masked_batch, seeded

LINK = "Shujun-He/RibonanzaNet#5"
SYMPTOM = "The masked value of the scores is −1e-9, so the padding keeps its attention."
NEEDS = ("padding",)


class Attention(EncoderAttention):
    def hide(self, scores, mask):
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e-9)
        return scores


@kept
def weights():
    return fit_masked(seeded(lambda: Encoder(Attention)), 700, 3e-3).state_dict()  # trained with the bug


def batches():
    return [inputs_only(masked_batch(at, rows=4)) for at in (1, 2)]


def make():
    model = seeded(lambda: Encoder(Attention))
    model.load_state_dict(weights())
    return model.eval(), batches(), {}


def sound():
    return encoder(), batches(), {}
