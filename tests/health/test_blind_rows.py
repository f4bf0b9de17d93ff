"""Queries that see no key: a finding where they are no padding, a reason where a layer has no others."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard

LENGTH = 12
EVEN = (torch.arange(LENGTH) % 2 == 0)[:, None].expand(LENGTH, LENGTH)
NOTHING = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
KIND = "rows that see no key"


class Reader(nn.Module):
    """One attention under a mask, over its own input or another."""

    def __init__(self, mask, length=LENGTH):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.x, self.other = mask, torch.randn(3, 2, length, 8), None

    def forward(self, _=None):
        keys = self.x if self.other is None else self.other
        self.output = F.scaled_dot_product_attention(self.x, keys, keys, self.mask)
        return self.output


def examined(model, **options):
    report = regard.examine(model, [torch.zeros(1)], **options)
    found = {one.kind: one for one in report.findings if "see" in one.kind or "mask" in one.kind}
    return report, found


def additive(mask, hidden):
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


@pytest.mark.parametrize("mask", [EVEN, additive(EVEN, -math.inf), additive(EVEN, -1e9)], ids=["bool", "-inf", "-1e9"])
def test_real_rows_that_see_no_key_are_a_finding(mask):
    model = Reader(mask)
    report, found = examined(model)
    (finding,) = found.values()
    assert (finding.kind, finding.severity, finding.measured, finding.indices) == (KIND, "warning", (0.5, 0.5), (0, 0))
    assert finding.evidence.startswith("50 % of the rows") and report.unmeasured == []
    expected = regard.reference.attention(model.x, model.x, model.x, return_stats=True)[2]
    for head in report.heads:
        assert head.statistics["entropy"].count == 3 * LENGTH / 2
        assert head.statistics["entropy"].mean == pytest.approx(expected.entropy[:, head.head, ::2].mean().item())


@pytest.mark.parametrize("mask", [NOTHING, additive(NOTHING, -1e9)], ids=["bool", "-1e9"])
def test_a_layer_that_sees_nothing_is_not_measured_for_that_reason(mask, tmp_path):
    report, found = examined(Reader(mask))
    assert report.heads == [] and report.unmeasured == [("", "none of its queries sees a key")]
    assert found.keys() == {KIND} and found[KIND].measured == (1.0, 1.0)
    assert "Nothing was measured." in report.summary() and "1 layer could not be measured" in report.summary()[-1]
    report.save(tmp_path / "report.html")


def test_heads_are_told_apart():
    report, found = examined(Reader(torch.stack([EVEN, ~NOTHING])))
    assert found[KIND].heads == (("", 0),) and found[KIND].measured == (0.5,)
    report, found = examined(Reader(torch.stack([~NOTHING, NOTHING])))
    assert [head.head for head in report.heads] == [0] and found[KIND].heads == (("", 1),)
    assert report.unmeasured == [("", "in its heads 1 no query sees a key")]


def test_padding_that_sees_nothing_is_padding():
    text = torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 0])[:, None]
    both = text[:, None, :, None] & text[:, None, None]
    for mask in (both, additive(both, -1e9), both & ~NOTHING.T.tril(-1)):
        report, found = examined(Reader(mask))
        assert found == {} and {head.statistics["entropy"].count for head in report.heads} == {LENGTH + 7}
    model = Reader(both[..., -5:, :])  # five more queries behind a cache of seven: they may be padding too
    model.x, model.other = model.x[:, :, -5:], model.x
    assert examined(model)[1] == {}
    model = Reader(both[1:] & NOTHING[None])
    model.x, given = model.x[1:], dict(input_ids=torch.zeros(2, LENGTH).long(), attention_mask=text[1:] & False)
    model.forward = lambda input_ids, attention_mask: F.scaled_dot_product_attention(*[model.x] * 3, model.mask)
    assert regard.examine(model, [given]).unmeasured == [("", "all of its rows are padding, or it has none")]


def test_cross_attention_that_sees_nothing():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            hidden = torch.zeros(3, 5, dtype=torch.bool)
            hidden[1] = True
            return self.cross_attn(x, x[:, :5], x[:, :5], key_padding_mask=hidden, need_weights=False)[0]

    report = regard.examine(Cross(), [torch.randn(3, LENGTH, 8)])
    (finding,) = [one for one in report.findings if one.kind == KIND]
    assert finding.measured == pytest.approx((1 / 3, 1 / 3))


@pytest.mark.parametrize("hidden", [-1e9, -math.inf])
def test_a_long_call_goes_on_with_the_models_own_output_in_such_rows(hidden):
    length = 300
    mask = torch.zeros(length, length)
    mask[7] = hidden
    model = Reader(mask, length)
    own = model().clone()
    report, found = examined(model)
    assert torch.equal(model.output.nan_to_num(9.0), own.nan_to_num(9.0))
    assert found[KIND].measured == pytest.approx((1 / length,) * 2) and len(report.heads) == 2


@pytest.mark.parametrize("hidden", [None, -1e9])
def test_a_causal_mask_with_true_and_false_exchanged(hidden):
    mask = ~(~NOTHING).tril()
    _, found = examined(Reader(mask if hidden is None else additive(mask, hidden)))
    (finding,) = found.values()
    assert (finding.kind, finding.severity, len(finding.heads)) == ("mask inverted", "warning", 2)


def test_a_monitor_writes_no_numbers_of_heads_that_see_nothing():
    model, rows = Reader(torch.stack([EVEN, NOTHING])), []
    with regard.Monitor(model, every=1, log=rows.append, heads=True):
        model()
    assert [row["head"] for row in rows[1:]] == [0] and math.isfinite(rows[1]["max_logit"])
    model = Reader(NOTHING)
    warns = pytest.warns(regard.health.AttentionWarning, match="not watched: none of its queries sees a key")
    with warns, regard.Monitor(model, every=1, log=rows.append, heads=True):
        model()
    assert len(rows) == 3 and math.isnan(rows[2]["attention/max_logit"])


def test_batches_and_snapshots_add_up(tmp_path):
    model = Reader(EVEN)
    masks = [EVEN, ~NOTHING]
    model.register_forward_pre_hook(lambda module, given: setattr(module, "mask", masks[int(given[0])]))
    batches = [torch.tensor(0), torch.tensor(1)]
    for options in ({}, dict(snapshot=tmp_path / "state")):
        report = regard.examine(model, batches, **options)
        (finding,) = [one for one in report.findings if one.kind == KIND]
        assert finding.measured == (0.25, 0.25) and report.heads[0].statistics["entropy"].count == 3 * LENGTH * 1.5


def test_calls_of_three_dims_say_that_heads_are_not_separated():
    class Folded(nn.Module):
        def __init__(self, dims):
            super().__init__()
            self.dims, self.inner = dims, nn.Linear(8, 8)

        def forward(self, x):
            x = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
            x = x.flatten(0, 1) if self.dims == 3 else x
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(3, LENGTH, 8)
    report = regard.examine(Folded(3), [x])
    assert len(report.heads) == 1 and report.how["three_dims"]["layers"] == ["Folded"]
    assert "does not separate heads from sequences" in report.how["three_dims"]["means"]
    assert "three_dims" not in regard.examine(Folded(4), [x]).how
