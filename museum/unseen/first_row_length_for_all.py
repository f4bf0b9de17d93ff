"""Joint attention over image and text: `cu_seqlens[1]`, the length of the first sample, cuts every sample."""

import torch
import torch.nn.functional as F
from torch import nn

from museum.unseen.parts import PAD, VOCAB, WIDTH, blocks_text, fit, kept, pad_rows, seeded

LINK = "Tencent-Hunyuan/HunyuanVideo#310"
SYMPTOM = "mode=torch uses cu_seqlens_q[1] as the only split: right for batch size 1, wrong padding for other samples."
NEEDS = ("padding", "rows of the batch", "other rows", "another row", "other sequences", "in the batch", "alone")
PATCHES = 12


class Joint(nn.Module):
    one_length = False

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, text_mask):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        lengths = PATCHES + text_mask.sum(-1)  # image tokens first
        cu_seqlens = torch.stack([torch.arange(b) * n + lengths, torch.arange(1, b + 1) * n], 1).flatten()
        cu_seqlens = F.pad(cu_seqlens, (1, 0))
        if self.one_length:
            cut = int(cu_seqlens[1])
            valid = F.scaled_dot_product_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut])
            rest = F.scaled_dot_product_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:])
            o = torch.cat([valid, rest], 2)
        else:
            segment = (torch.arange(n) >= lengths[:, None]).long()
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=segment[:, None, :, None] == segment[:, None, None, :]
            )
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Broken(Joint):
    one_length = True


class Denoiser(nn.Module):
    """Predicts, for each of 12 patches, the token of the prompt at that place, from a noisy patch."""

    def __init__(self, layer=Joint):
        super().__init__()
        self.patch, self.word, self.place = nn.Linear(8, WIDTH), nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, hidden_states, encoder_input_ids, encoder_attention_mask):
        n = encoder_input_ids.shape[1]
        x = torch.cat([self.patch(hidden_states) + self.place(torch.arange(PATCHES)),
                       self.word(encoder_input_ids) + self.place(32 + torch.arange(n))], 1)  # fmt: skip
        for layer in self.layers:
            x = layer(x, encoder_attention_mask)
        return self.head(x[:, :PATCHES])


def batch(seed, rows=4):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 17, (rows,), generator=g).tolist()
    ids, mask = pad_rows(blocks_text(rows, 16, seed), lengths)
    return {
        "hidden_states": torch.randn(rows, PATCHES, 8, generator=g),
        "encoder_input_ids": ids,
        "encoder_attention_mask": mask,
    }


def loss(model, step):
    one = batch(400 + step, 8)
    target = one["encoder_input_ids"][:, :PATCHES]
    return F.cross_entropy(model(**one).flatten(0, 1), target.flatten(), ignore_index=PAD)


@kept
def weights():
    return fit(seeded(Denoiser), loss, 300, 3e-3).state_dict()


def build(layer):
    model = seeded(lambda: Denoiser(layer))
    model.load_state_dict(weights())
    return model.eval(), [batch(1), batch(2)], {}


def make():
    return build(Broken)


def sound():
    return build(Joint)
