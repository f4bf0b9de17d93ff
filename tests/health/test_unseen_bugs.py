"""Checks that unseen bugs asked for: each on a small model with the bug and without it."""

from types import SimpleNamespace

import pytest
import torch
from contract_data import codes, run_check
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointFunction

from museum.parts import Attention, Block, TinyGPT, build, make_text
from regard.health.probe.rotation import recover_mixed, rotate


class Captions(TinyGPT):
    """Two rows of an image stand before the text's; labels are moved once or twice, in rows or over all rows."""

    def __init__(self, moved):
        super().__init__()
        self.moved = moved

    def forward(self, input_ids, labels):
        logits = torch.cat([torch.zeros(len(input_ids), 2, 64), super().forward(input_ids)], 1)
        given, told = logits[:, 2:-1], labels[:, 1:]
        if self.moved == "in rows":
            given, told = given[:, :-1], told[:, 1:]
        given, told = given.flatten(0, 1), told.flatten()
        if self.moved == "over all":
            given, told = given[:-1], told[1:]
        return SimpleNamespace(loss=cross_entropy(given, told), logits=logits)


@pytest.mark.parametrize("moved", ["once", "in rows", "over all"])
def test_labels_behind_an_image_that_are_moved_twice(moved):
    ids = make_text(3, 20)
    found = run_check("labels", build(lambda: Captions(moved)), dict(input_ids=ids, labels=ids.clone()), causal=True)
    assert codes(found) == ["RG803"] * (moved != "once")
    assert moved == "once" or "token i + 2" in found[0].evidence


class Rotary(Attention):
    """Angles laid out for halves or neighbours, and numbers paired in this or the other way."""

    def __init__(self, layout, pairing):
        super().__init__()
        angles = 100.0 ** -(torch.arange(4) / 4)
        self.angles = torch.cat([angles, angles]) if layout == "halves" else angles.repeat_interleave(2)
        self.pairing = pairing

    def turn(self, x):
        turn = torch.arange(x.shape[2])[:, None] * self.angles
        if self.pairing == "halves":
            partner = torch.cat([-x[..., 4:], x[..., :4]], -1)
        else:
            partner = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        return x * turn.cos() + partner * turn.sin()

    def split(self, x):
        q, k, v = super().split(x)
        return self.turn(q), self.turn(k), v


class RotaryGPT(TinyGPT):
    def __init__(self, *kinds):
        super().__init__()
        self.blocks = nn.ModuleList(Block(Rotary(*kinds)) for _ in range(2))

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_rotations_of_pairs_with_the_angles_of_halves(layout, pairing):
    found = run_check("positions", build(lambda: RotaryGPT(layout, pairing)), make_text(2, 24))
    assert codes(found) == ["RG725"] * (layout != pairing)


def test_a_rotation_and_noise_are_no_mixed_rotation():
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 16, 8)
    angles = torch.tensor([1.0, 0.3, 0.1, 0.01])
    assert recover_mixed(rotate(x, angles, "halves")) is None
    assert recover_mixed(torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))) is None


class HidesToken(TinyGPT):
    """Makes its mask with this token's id, and hides padding only behind the text or wherever the token is."""

    def __init__(self, pad, at_end):
        super().__init__()
        self.pad, self.at_end = pad, at_end

    def forward(self, input_ids):
        x, hidden = self.wte(input_ids), input_ids == self.pad
        if self.at_end:
            hidden = hidden.flip(1).long().cumprod(1).flip(1).bool()
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(self.ln_f(x))


@pytest.mark.parametrize("at_end", [False, True])
def test_a_token_that_is_taken_for_padding(at_end):
    ids = make_text(2, 20)
    ids[0, 7] = ids[1, 11] = ids[1, 19] = 3
    found = run_check("visible_keys", build(lambda: HidesToken(3, at_end)), ids)
    assert codes(found) == ["RG117"] * (not at_end)


class Adapted(nn.Module):
    """A model with a trainable projection in each attention, behind reentrant checkpoints, and frozen embeddings."""

    def __init__(self, frozen):
        super().__init__()
        self.inner = TinyGPT().requires_grad_(False)
        self.inner.wte.requires_grad_(not frozen)
        for block in self.inner.blocks:
            block.attn.proj.requires_grad_(True)
        self.inner.head.requires_grad_(True)

    def forward(self, input_ids):
        x = self.inner.wte(input_ids)
        for block in self.inner.blocks:
            x = CheckpointFunction.apply(block, True, x) if self.training else block(x)
        return self.inner.head(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_that_get_no_gradient_in_training(frozen):
    model = build(lambda: Adapted(frozen))
    model.inner.head.weight.grad = torch.ones(64, 32)
    found = run_check("gradients", model, make_text(2, 20))
    assert codes(found) == ["RG620"] * frozen and (not frozen or "reentrant" in found[0].cause)
    assert model.inner.head.weight.grad.eq(1).all() and model.inner.blocks[0].attn.proj.weight.grad is None


class Tower(nn.Module):
    """A row per patch of an image, in the order of `back`; a class token before or behind the patches."""

    def __init__(self, back, is_last=False):
        super().__init__()
        self.cut, self.qkv = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48)
        self.token, self.back, self.is_last = nn.Parameter(torch.randn(1, 1, 16)), back, is_last

    def forward(self, pixel_values):
        x = self.cut(pixel_values).flatten(2).transpose(1, 2)
        token = self.token.expand(len(x), 1, 16)
        x = torch.cat([x, token] if self.is_last else [token, x], 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x[:, 1:][:, self.back]


ROWS = torch.arange(24)
COLUMNS = torch.arange(24).view(4, 6).T.flatten()
SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("back", "is_last", "says"),
    [(ROWS, False, ""), (COLUMNS, False, ""), (SHUFFLED, False, "in row"), (ROWS, True, "reads none")],
)
def test_rows_of_an_image_are_of_their_patches(back, is_last, says):
    image = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    found = run_check("places", build(lambda: Tower(back, is_last)), dict(pixel_values=image))
    assert codes(found) == ["RG736"] * bool(says) and (not says or says in found[0].evidence)


class Windowed(Attention):
    """A window of eight keys, which training leaves out."""

    loses = True

    def forward(self, x, hidden=None):
        q, k, v = self.split(x)
        n = x.shape[1]
        shown = self.mask[:n, :n] & ~self.mask[:n, :n].tril(-8)
        if self.training and self.loses:
            return self.proj(self.merge(scaled_dot_product_attention(q, k, v, is_causal=True)))
        return self.proj(self.merge(scaled_dot_product_attention(q, k, v, attn_mask=shown)))


class Kept(Windowed):
    loses = False


@pytest.mark.parametrize(("attention", "wanted"), [(Windowed, ["RG220"]), (Kept, [])])
def test_a_window_that_training_loses(attention, wanted):
    assert codes(run_check("training_differs", build(lambda: TinyGPT(attention)), make_text(2, 24))) == wanted
