"""Models that are given vectors or images: the same mistakes are found as with token ids, and sound ones pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
from museum.parts import Attention, Block, build


class Stack(nn.Module):
    """Two layers on vectors [B, N, 8]; `forgets`: checkpointed layers get no padding mask."""

    def __init__(self, attention, forgets=False):
        super().__init__()
        self.enter, self.leave, self.forgets = nn.Linear(8, 32), nn.Linear(32, 3), forgets
        self.places = nn.Parameter(0.3 * torch.randn(64, 32))
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))

    def forward(self, x, hidden=None):
        x = self.enter(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, None if self.forgets else hidden, use_reentrant=False)
            else:
                x = block(x, hidden)
        return self.leave(x)


class MergedByView(Attention):
    def merge(self, heads):
        return heads.contiguous().view(heads.shape[0], heads.shape[2], -1)


class MaskTooShort(Attention):
    def make_mask(self, length):
        mask = super().make_mask(length)
        mask[20:] = True
        return mask


class BatchForTime(Attention):
    def forward(self, x, hidden=None):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class MaskLostInTraining(Attention):
    """A rate that is written in the code: no attribute says how much is dropped."""

    def weigh(self, scores, hidden):
        weights = scores.softmax(-1) if self.training else super().weigh(scores, hidden)
        return nn.functional.dropout(weights, 0.1, self.training)


class Dropped(Attention):
    def weigh(self, scores, hidden):
        return nn.functional.dropout(super().weigh(scores, hidden), 0.1, self.training)


def make_vectors():
    return torch.randn(4, 24, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("attention", "code"),
    [(Dropped, None), (MergedByView, "RG701"), (MaskTooShort, "RG101"), (BatchForTime, "RG201"),
     (MaskLostInTraining, "RG103")],
)  # fmt: skip
def test_vectors(attention, code):
    verdict = regard.check(build(lambda: Stack(attention)), [make_vectors()])
    assert [one.code for one in verdict.diagnosis] == ([] if code is None else [code])


@pytest.mark.parametrize(("forgets", "codes"), [(False, []), (True, ["RG220"])])
def test_layers_that_are_checkpointed_in_training(forgets, codes):
    hidden = torch.zeros(4, 24, dtype=torch.bool)
    hidden[:, -5:] = True
    verdict = regard.check(build(lambda: Stack(Attention, forgets)), [(make_vectors(), hidden)], select="RG2")
    assert [one.code for one in verdict.failures] == codes


class Images(nn.Module):
    """A class token and two layers; with `rows` parameters have an entry for each row of the batch."""

    def __init__(self, rows):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(rows, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).mT
        return self.encoder(torch.cat([self.token[: len(x)].expand(len(x), -1, -1), x], 1))[:, 0]


@pytest.mark.parametrize(("rows", "codes"), [(1, []), (4, ["RG212"])])
def test_an_image_alone_is_what_it_is_in_its_batch(rows, codes):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    verdict = regard.check(build(lambda: Images(rows)), [{"pixel_values": images}])
    assert [one.code for one in verdict.failures] == codes


def test_padding_at_the_end_does_not_make_an_encoder_causal():
    class Encoder(Images):
        def forward(self, ids, attention_mask):
            x = self.patches.weight.flatten(1).T[ids]
            return self.encoder(x, src_key_padding_mask=attention_mask == 0)

    ids, mask = torch.arange(48).view(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[:, -3:] = 0
    verdict = regard.check(build(lambda: Encoder(1)), [{"ids": ids, "attention_mask": mask}], select="RG1")
    assert verdict.failures == []
