"""scaled_dot_product_attention drops weights in evaluation too: it does not know the module's mode."""

from torch.nn.functional import scaled_dot_product_attention

from museum.parts import Attention, make_gpt

LINK = "pytorch/pytorch#124464"
SYMPTOM = "dropout_p is passed whatever the mode: two runs in evaluation differ."
NEEDS = ("dropout", "repeat", "random", "twice")


class Always(Attention):
    def rate(self):
        return 0.2

    def forward(self, x, hidden=None):
        q, k, v = self.split(x)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate())
        return self.proj(self.merge(heads))


class InTraining(Always):
    def rate(self):
        return 0.2 if self.training else 0.0


def make():
    return make_gpt(Always)


def sound():
    return make_gpt(InTraining)
