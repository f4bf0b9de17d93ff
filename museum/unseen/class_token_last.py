"""A port of CLIP's vision tower puts the class token after the patches; positions and indices expect it first."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import fit, kept, seeded

LINK = "ggml-org/llama.cpp#25844"
SYMPTOM = "Each patch gets its neighbour's position, patch 0 is dropped and the class token is taken for a patch."
NEEDS = ("position", "class token", "cls", "order of the tokens", "token order")
D, GRID, COLOURS = 48, 4, 4


class Embeddings(nn.Module):
    last = False

    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(D) * 0.1)
        self.patch_embedding = nn.Conv2d(3, D, 4, 4, bias=False)
        self.position_embedding = nn.Embedding(GRID * GRID + 1, D)

    def forward(self, pixel_values):
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        cls = self.class_embedding.expand(len(patches), 1, -1)
        x = torch.cat([patches, cls] if self.last else [cls, patches], 1)
        return x + self.position_embedding(torch.arange(x.shape[1], device=x.device))


class Last(Embeddings):
    last = True


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (4, D // 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.projector = nn.Linear(D, COLOURS)

    def forward(self, pixel_values):
        x = self.embeddings(pixel_values)
        for layer in self.layers:
            x = layer(x)
        return self.projector(x[:, 1:])  # the tokens of the image


def images(seed, rows=16):
    g = torch.Generator().manual_seed(seed)
    colour = torch.randint(COLOURS, (rows, GRID, GRID), generator=g)
    table = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 1.0]])
    pixels = table[colour].permute(0, 3, 1, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return pixels + 0.1 * torch.randn(pixels.shape, generator=g), colour.flip(-1).flatten(
        1
    )  # each patch: the colour of its mirror image


def loss(model, step):
    pixels, labels = images(1000 + step)
    return F.cross_entropy(model(pixels).flatten(0, 1), labels.flatten())


@kept
def weights():
    return fit(seeded(lambda: Tower(Embeddings)), loss, 400, 3e-3).state_dict()


def build(embeddings):
    model = seeded(lambda: Tower(embeddings))
    model.load_state_dict(weights())
    return model.eval(), [{"pixel_values": images(5, 6)[0]}, {"pixel_values": images(6, 6)[0]}], {}


def make():
    return build(Last)


def sound():
    return build(Embeddings)
