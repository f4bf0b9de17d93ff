"""Checks that public bugs asked for: each on a small model, and the same model without the bug."""

import json
from types import SimpleNamespace

import pytest
import torch
from contract_data import codes, run_check
from torch import nn

from museum import dropout_drawn_again, projection_transposed, scale_missing, scale_of_the_model_width, scale_reversed
from museum import shifted_windows_not_masked as windows
from museum.__main__ import list_bugs, load
from museum.alibi_sign import Falling, Model
from museum.page import make_page
from museum.parts import Attention, TinyGPT, build, make_text
from regard.health.models.inputs import sample_text
from regard.health.models.tiny import checkpoint, encode


@pytest.mark.parametrize("kept", [False, True])
def test_another_dropout_in_the_backward(kept):
    model = build(lambda: dropout_drawn_again.Checkpointed(kept))
    found = run_check("recomputed", model, make_text())
    assert codes(found) == ([] if kept else ["RG622"])
    assert all(p.grad is None and p.requires_grad for p in model.parameters()) and not model.training


class Growing(TinyGPT):
    """Positions are scaled by the longest text so far, or by this one."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.longest = kept, 1

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        self.longest = max(self.longest, length) if self.kept else length
        x = self.wte(input_ids) + self.wpe.weight[0] * torch.arange(length)[:, None] / self.longest
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_longer_text_leaves_behind(kept):
    model = build(lambda: Growing(kept))
    assert codes(run_check("earlier_calls", model, make_text(length=24))) == ["RG218"] * kept
    assert "the limit is 64" in run_check("earlier_calls", build(TinyGPT), make_text(length=64))
    assert model.longest <= 24


class BothWays(Attention):
    def make_mask(self, length):
        return torch.ones(length, length, dtype=torch.bool)


class Distances(BothWays):
    """Scores get the sine, or the cosine, of the distance."""

    wave = staticmethod(torch.sin)

    def score(self, q, k):
        at = torch.arange(q.shape[2])
        return super().score(q, k) + self.wave((at[:, None] - at) / 3.0)


class Even(Distances):
    wave = staticmethod(torch.cos)


class Places(TinyGPT):
    """Without absolute positions."""

    def place(self, input_ids, attention_mask):
        return torch.zeros_like(input_ids)


@pytest.mark.parametrize(("attention", "wanted"), [(Even, ["RG724"]), (Distances, [])])
def test_distances_without_their_sign(attention, wanted):
    model = build(lambda: Places(attention))
    assert codes(run_check("positions", model, make_text())) == wanted


class Pooled(nn.Module):
    """A row's class from the mean of its tokens, the last of them, or the one at the number of tokens."""

    def __init__(self, attention, take):
        super().__init__()
        self.inner, self.take = TinyGPT(attention), take

    def forward(self, input_ids, attention_mask=None):
        x = self.inner(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.take == "mean":
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        last = (torch.arange(x.shape[1]) * mask).argmax(1) if self.take == "last" else mask.sum(1) - 1
        return x[torch.arange(len(x)), last]


@pytest.mark.parametrize(
    ("attention", "take", "wanted"),
    [(Attention, "mean", ["RG116"]), (BothWays, "mean", []), (Attention, "last", [])],
)
def test_a_model_of_both_directions_that_sees_one(attention, take, wanted):
    model = build(lambda: Pooled(attention, take))
    assert codes(run_check("leak", model, make_text(), causal=False)) == wanted


@pytest.mark.parametrize(("attention", "wanted"), [(Attention, ["RG116"]), (BothWays, [])])
def test_a_configuration_for_both_directions(attention, wanted):
    model = build(lambda: Pooled(attention, "mean"))
    model.config = SimpleNamespace(use_bidirectional_attention="all", is_causal=None)
    assert codes(run_check("leak", model, make_text())) == wanted
    model.config.use_bidirectional_attention = "vision"
    assert codes(run_check("leak", model, make_text())) == []


def test_pooling_of_padding_that_no_batch_has():
    """Rows of other lengths, the first too short to be judged: the two longest are padded here."""
    mask = (torch.arange(32) < torch.tensor([[3], [25], [32]])).long()
    batch = dict(input_ids=make_text(3) * mask, attention_mask=mask)
    for take, wanted in (("count", ["RG202"]), ("last", [])):
        found = run_check("padding", build(lambda take=take: Pooled(Attention, take)), batch)
        assert codes(found) == wanted and all("on the left" in one.evidence for one in found)


@pytest.mark.parametrize(("take", "wanted"), [("count", ["RG202"]), ("last", [])])
def test_pooling_of_a_text_that_is_padded_on_the_left(take, wanted):
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[1:, :9] = 0
    batch = dict(input_ids=make_text(4) * mask, attention_mask=mask)
    found = run_check("padding", build(lambda: Pooled(Attention, take)), batch)
    assert codes(found) == wanted and all("the pooling takes padding" in one.evidence for one in found)


class Labelled(TinyGPT):
    config = SimpleNamespace(eos_token_id=3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("hides", "wanted"),
    [
        (lambda ids, mask: mask == 0, []),
        (lambda ids, mask: ids < 0, ["RG807"]),
        (lambda ids, mask: ids == 3, ["RG808"]),
    ],
)
def test_labels_of_padding_and_of_the_end(hides, wanted):
    ids, mask = make_text(4), torch.ones(4, 32, dtype=torch.long)
    mask[:, 20:], ids[:, 19:] = 0, 3
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(hides(ids, mask), -100))
    assert codes(run_check("labels", build(Labelled), batch)) == wanted


class LikeT5(scale_missing.NoScale):
    """No 1/√d beside a bias by distance, as T5 was trained: its weights hold the factor."""

    def score(self, q, k):
        places = torch.arange(q.shape[-2])
        return (
            super().score(q, k)
            + torch.linspace(-1, 1, self.heads)[:, None, None] * (places[:, None] - places).abs().sqrt()
        )


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (Attention, None), (LikeT5, None),
        (scale_missing.NoScale, "is 1: they are not divided"), (scale_reversed.Reversed, "is 1/d, as muP asks"),
        (scale_of_the_model_width.ModelWidth, "is 1/√width"),
    ],
)  # fmt: skip
def test_scales_of_another_formula(attention, says):
    found = run_check("scale_of_config", build(lambda: TinyGPT(attention)), make_text())
    assert (found[0].code == "RG421" and says in found[0].evidence) if says else not codes(found)
    assert codes(found) == ["RG421"] * (bool(says) and attention is not scale_reversed.Reversed)  # muP means 1/d


class TwoRanks(Falling):
    def score(self, q, k):
        at = torch.arange(q.shape[-2])
        slopes = torch.tensor([0.25, 0.0625, 0.25, 0.0625])
        return Attention.score(self, q, k) - slopes[:, None, None] * (at[:, None] - at)


@pytest.mark.parametrize(("attention", "wanted"), [(Falling, []), (TwoRanks, ["RG741"])])
def test_slopes_that_begin_anew(attention, wanted):
    assert codes(run_check("distance_bias", build(lambda: Model(attention)), make_text())) == wanted


@pytest.mark.parametrize("masked", [False, True])
def test_windows_that_reach_round_the_edge(masked):
    model, batches, _ = windows.make_swin(masked)
    assert codes(run_check("shifted_windows", model, batches)) == ([] if masked else ["RG733"])


def test_one_layer_read_otherwise_and_norms_that_were_not_loaded():
    model, batches, _ = projection_transposed.make()
    (found,) = run_check("weight_repairs", model, batches)
    assert "attn.proj.weight is transposed, in blocks.1 alone" in found.evidence
    model, _ = checkpoint("tiny-scaled")
    text = encode(sample_text()[: 8 * 96]).view(8, 96)
    assert codes(run_check("constant_vectors", model, text)) == []
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.data.fill_(float(name.endswith("weight")))
    assert "are trained" in run_check("constant_vectors", model, text)[0].evidence


def test_every_bug_of_the_museum_is_complete_and_on_its_page():
    rows, rival = [], dict(says=[], false_alarms=["y"], stopped=[])
    for slug in list_bugs():
        bug = load(slug)
        owner, _, number = bug.LINK.partition("#")
        assert owner.count("/") == 1 and number.isdigit() and bug.NEEDS and bug.SYMPTOM.endswith(".")
        rows.append(dict(slug=slug, title=bug.__doc__, link=bug.LINK, symptom=bug.SYMPTOM, found=True, named=False,
                         says=["RG101 `x`"], false_alarms=[], rivals={"torchtest2": rival}))  # fmt: skip
    page = make_page(json.loads(json.dumps(rows)))
    assert all(f"/issues/{row['link'].partition('#')[2]}" in page for row in rows)
    assert f"| torchtest2 | 0 of {len(rows)} (0%) | – | {len(rows)} of {len(rows)} (100%) | 0 |" in page
