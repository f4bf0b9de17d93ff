"""Attention written by hand: each mistake on a small model, and the same model without it."""

import pytest
import torch
from contract_data import codes, run_check
from handwritten_models import AlibiModel, HandModel, random_ids
from torch import nn

from regard.health import examine
from regard.health.probe.trial import Trial

POSITIONS = [
    ("rotary on q only", {}, ["RG720"]),
    ("rotary on k only", {}, ["RG720"]),
    ("q twice", {}, ["RG721"]),
    ("pairs and halves", {}, ["RG721"]),
    ("rotary on v", {}, ["RG722"]),
    ("", {}, []),
    ("", dict(rotary=False, table=True), []),
    ("", dict(rotary=False, causal=False), ["RG723"]),
    ("", dict(rotary=False, causal=False, table=True), []),
    ("", dict(rotary=False), []),
]


@pytest.mark.parametrize(("bug", "more", "wanted"), POSITIONS)
def test_positions(bug, more, wanted):
    assert codes(run_check("positions", HandModel(bug, **more), random_ids())) == wanted


ROWS = [
    ("", None),
    ("softmax over queries", ("RG710", "over the queries")),
    ("softmax over heads", ("RG710", "over the heads")),
    ("softmax over the batch", ("RG710", "over the batch")),
    ("masked late", ("RG711", "rows add up to")),
    ("weights times 2", ("RG711", "rows add up to 2 to 2")),
]


@pytest.mark.parametrize(("bug", "wanted"), ROWS)
def test_weights_that_do_not_add_up_to_1_are_named(bug, wanted):
    report = examine(HandModel(bug), [random_ids()], ablate=False)
    found = {one.code: one.evidence for one in report.findings if one.code in ("RG710", "RG711")}
    assert list(found) == ([] if wanted is None else [wanted[0]])
    assert wanted is None or wanted[1] in found[wanted[0]]


@pytest.mark.parametrize("bug", ["", "divides"])
def test_the_scale_is_that_of_the_code(bug):
    trial = Trial(HandModel(bug).eval(), [random_ids()], [], [], None, None)
    with torch.no_grad(), trial.probe.active():
        calls = [one.call for one in trial.captured[1].values()]
    assert calls and all(call.mask is None or call.mask.dtype == torch.bool for call in calls)
    assert [call.options["scale"] for call in calls] == pytest.approx([call.q.shape[-1] ** -0.5 for call in calls])


class Slots(nn.Module):
    """Slot attention: a softmax over the queries, divided by its sum over the keys. Not a mistake."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        s = self.q(x[:, :4]) @ self.k(x).transpose(-1, -2) / 4
        p = s.softmax(1)
        return (p / p.sum(-1, keepdim=True)) @ self.v(x)


def test_weights_that_are_divided_by_their_sum_are_measured():
    report = examine(HandModel("masked late, divided"), [random_ids()], ablate=False)
    assert report.unmeasured == [] and not [one for one in report.findings if one.code in ("RG710", "RG711", "RG420")]


def test_slot_attention_is_no_finding():
    with pytest.raises(ValueError, match="no attention"):
        examine(Slots(), [torch.randn(2, 12, 16)])


MASKS = [
    ("mask of zeros", ["RG730"]),
    ("adds a bool", ["RG731"]),
    ("small mask", ["RG520"]),
    ("small fill", ["RG520"]),
    ("", []),
    ("finite", []),
]


@pytest.mark.parametrize(("bug", "wanted"), MASKS)
def test_masks_that_hide_too_little_are_named(bug, wanted):
    assert codes(run_check("weak_mask", HandModel(bug), random_ids())) == wanted


def test_a_norm_after_the_rotation_is_noted():
    assert run_check("qk_norm", HandModel("norm first"), random_ids()) == []
    assert [one.code for one in run_check("qk_norm", HandModel("norm after the rotation"), random_ids())] == ["RG419"]


def test_a_norm_that_never_runs_is_named():
    assert codes(run_check("qk_norm", HandModel("norm is idle"), random_ids())) == ["RG417"]


@pytest.mark.parametrize(
    ("bug", "wanted"), [("", []), ("order", ["RG741"]), ("sign", ["RG740"]), ("half", []), ("same", ["RG742"])]
)
def test_biases_by_distance(bug, wanted):
    assert codes(run_check("distance_bias", AlibiModel(bug), random_ids())) == wanted


def test_a_query_that_does_not_see_its_own_key_is_named():
    assert codes(run_check("weak_mask", HandModel("hides self"), random_ids())) == []
    assert "RG732" in codes(run_check("visible_keys", HandModel("hides self"), random_ids()))
    assert codes(run_check("visible_keys", HandModel(), random_ids())) == []


def test_a_mask_that_hides_nothing_is_the_cause_of_the_leak():
    report = examine(HandModel("mask of zeros"), [random_ids()], ablate=False, causal=True)
    (cause,) = [one for one in report.diagnosis if one.severity == "critical"]
    assert cause.code == "RG730" and "RG101" in {one.code for one in cause.symptoms}
