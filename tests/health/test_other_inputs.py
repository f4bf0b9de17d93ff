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


class JoinedHeads(nn.Module):
    """Attention by hand; `turned`: heads are put side by side before they are joined."""

    def __init__(self, turned):
        super().__init__()
        self.qkv, self.leave, self.turned = nn.Linear(32, 96), nn.Linear(32, 32), turned

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.leave((x.transpose(1, 2) if self.turned else x).reshape(x.shape[0], x.shape[2], -1))


class Patches(nn.Module):
    """Patches of an image, attention, their mean."""

    def __init__(self, turned):
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 32, 4, 4), JoinedHeads(turned)

    def forward(self, pixel_values):
        return self.attention(self.patches(pixel_values).flatten(2).mT).mean(1)


@pytest.mark.parametrize(("turned", "codes"), [(True, []), (False, ["RG701"])])
def test_heads_of_patches_that_are_joined(turned, codes):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    verdict = regard.check(build(lambda: Patches(turned)), [images], select="RG7")
    assert [one.code for one in verdict.failures] == codes


@pytest.mark.parametrize(("rows", "codes"), [(1, []), (4, ["RG212"])])
def test_an_image_alone_is_what_it_is_in_its_batch(rows, codes):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    verdict = regard.check(build(lambda: Images(rows)), [{"pixel_values": images}])
    assert [one.code for one in verdict.failures] == codes


class Translator(nn.Module):
    """An encoder and a decoder that learns to copy the source; `masked`: the decoder does not see later tokens."""

    def __init__(self, masked):
        super().__init__()
        self.tokens, self.places, self.masked = nn.Embedding(20, 32), nn.Embedding(32, 32), masked
        self.both = nn.Transformer(32, 4, 1, 1, 32, 0.0, batch_first=True)
        self.leave = nn.Linear(32, 20)

    def forward(self, src, tgt):
        source, target = (self.tokens(ids) + self.places.weight[: ids.shape[1]] for ids in (src, tgt))
        mask = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1) if self.masked else None
        return self.leave(self.both(source, target, tgt_mask=mask, src_key_padding_mask=src == 0))


def make_pairs(seed):
    """(source, target) of texts of other lengths, filled up with 0; the target begins with 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 20, (8, 10), generator=generator)
    ids[torch.arange(10) >= torch.randint(4, 8, (8, 1), generator=generator)] = 0
    return ids, torch.cat([torch.ones(8, 1, dtype=torch.long), ids], 1)


@pytest.mark.parametrize(("masked", "codes"), [(True, []), (False, ["RG101"])])
def test_a_decoder_that_predicts_the_next_token_is_causal_though_it_sees_it(masked, codes):
    model = build(lambda: Translator(masked)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        source, target = make_pairs(step)
        loss = nn.functional.cross_entropy(model(source, target[:, :-1]).mT, target[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source, target = make_pairs(99)
    verdict = regard.check(model, [(source, target[:, :-1])], select="RG1")
    assert [one.code for one in verdict.failures] == codes


class Einsum(nn.Module):
    """Vectors in, one vector out: nothing but the weights' rows shows over which axis the softmax runs."""

    def __init__(self, axis):
        super().__init__()
        self.qkv, self.axis = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), axis

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 4)) for layer in self.qkv)
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 2).softmax(self.axis)
        return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(1)


@pytest.mark.parametrize(("axis", "codes"), [(3, []), (2, ["RG710"])])
def test_the_axis_of_a_softmax_between_einsums(axis, codes):
    verdict = regard.check(build(lambda: Einsum(axis)), [make_vectors()], select="RG7")
    assert [one.code for one in verdict.failures] == codes


class Encoder(Images):
    """Token ids, of which padding is hidden; `hides`: the number of the mask that hides."""

    def __init__(self, hides=0):
        super().__init__(1)
        self.hides = hides

    def forward(self, input_ids, attention_mask):
        x = self.patches.weight.flatten(1).T[input_ids]
        return self.encoder(x, src_key_padding_mask=attention_mask == self.hides)


@pytest.mark.parametrize(("hides", "codes"), [(0, []), (1, ["RG112"])])
def test_padding_at_the_end_does_not_make_an_encoder_causal(hides, codes):
    ids, mask = torch.arange(48).view(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[:, -3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    verdict = regard.check(build(lambda: Encoder(hides)), [batch], select="RG1", causal=False)
    assert [one.code for one in verdict.diagnosis] == codes
    assert "RG101" not in [one.code for one in regard.check(build(Encoder), [batch], select="RG1").failures]
