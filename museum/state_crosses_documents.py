"""A linear mixer carries its state over the border of packed documents; attention beside it does not."""

import torch
from torch import nn

from museum.parts import HEADS, VOCABULARY, WIDTH, Attention, build, make_text, train

LINK = "THUDM/slime#1686"
SYMPTOM = "cu_seqlens reaches the convolution but not the recurrence: the state of one sample enters the next."
NEEDS = ("pack", "document")


class Recurrence(nn.Module):
    """A decaying sum of values of like keys: kept[i, j] = decay^(i − j)."""

    def __init__(self, restarts):
        super().__init__()
        self.qkv, self.proj, self.restarts = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), restarts

    def forward(self, x, document):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1], device=x.device)
        kept = (0.9 ** (places[:, None] - places).clamp(min=0)).tril()
        if self.restarts:
            kept = kept * (document[:, None, :, None] == document[:, None, None])
        state = (q @ k.mT * kept / q.shape[-1]) @ v
        return self.proj(state.transpose(1, 2).flatten(2))


class Apart(Attention):
    def weigh(self, scores, document):
        length = scores.shape[-1]
        shown = self.mask[:length, :length] & (document[:, None, :, None] == document[:, None, None])
        return scores.masked_fill(~shown, float("-inf")).softmax(-1)


class Hybrid(nn.Module):
    def __init__(self, restarts):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.mixers = nn.ModuleList([Recurrence(restarts), Apart()])
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        document, x = (position_ids == 0).cumsum(-1), self.wte(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            x = x + mixer(norm(x), document)
        return self.head(self.norms[2](x))


def make_hybrid(restarts):
    places = torch.cat([torch.arange(14), torch.arange(18)])
    batches = [{"input_ids": make_text(seed=at), "position_ids": places.repeat(8, 1)} for at in (1, 2)]
    return train(build(lambda: Hybrid(restarts)), 60), batches, {}


def make():
    return make_hybrid(False)


def sound():
    return make_hybrid(True)
