"""Each finding on a head made to have it, and none on heads that are well."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health import checks, examine
from regard.health.checks.large_logits import critical_limit
from regard.health.models.tiny import TinyLM, encode

HEADS, LENGTH, WIDTH = 8, 64, 32
WITHOUT_TEST = {f"RG2{number}" for number in (10, 14, 21, 22)}  # still to be written


class Fixed(nn.Module):
    """Attention with q, k given: [B, H, N, D]."""

    def __init__(self, q, k, **options):
        super().__init__()
        self.q, self.k, self.options = q, k, options

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q, self.k, torch.randn_like(self.k), **self.options)


def healthy(batch=2):
    """Queries of many lengths and keys of unit variance, so that sharp rows and flat rows occur."""
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, HEADS, LENGTH, WIDTH)
    return q * torch.rand(batch, 1, LENGTH, 1).mul(2.5), k


def kinds(q, k, **options):
    report = examine(nn.Sequential(Fixed(q, k, **options)), [torch.zeros(1)])
    assert report.unmeasured == []
    return {finding.kind: finding for finding in report.findings}


def test_no_findings_where_nothing_is_wrong():
    assert kinds(*healthy()) == {}
    assert kinds(*healthy(), is_causal=True) == {}


def test_every_rule_has_its_test():
    here = Path(__file__)
    tests = "".join(path.read_text() for path in here.parent.glob("test_*.py"))
    missing = {code for code, rule in checks.rules().items() if rule.kind not in tests and code not in tests}
    assert missing <= WITHOUT_TEST


def test_the_finding_of_contributing_md():
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    own = {}
    exec(guide.split("```python\n")[2].split("```")[0], own)
    heads = examine(nn.Sequential(Fixed(*healthy())), [torch.zeros(1)]).heads
    assert own["find"](heads) == []
    own["FAR"] = 3.0
    (found,) = own["find"](heads)
    assert found.kind == "far-sighted" and len(found.heads) == HEADS and "> 3" in found.threshold


def test_collapsed_and_dying():
    q, k = healthy()
    q[:, :3] *= 400.0
    found = kinds(q, k)
    for kind in ("collapsed", "dying gradient"):
        assert found[kind].heads == (("0", 0), ("0", 1), ("0", 2))
        assert found[kind].severity == "critical"
    assert "2303.06296" in found["collapsed"].threshold


def test_exploding_logits():
    q, k = healthy()
    q[:, 5] *= 60.0
    found = kinds(q, k)["exploding logits"]
    assert found.heads == (("0", 5),)
    assert found.severity == "warning"
    q[:, 5] *= 100.0
    assert kinds(q, k)["exploding logits"].severity == "critical"
    assert critical_limit("float16") == 1024
    assert critical_limit("bfloat16") == 128
    assert critical_limit("float32") == 1e4


def test_logits_whose_variance_overflows_raise_no_numpy_warning():
    q, k = healthy()
    q[:, 1] *= 1e22
    assert kinds(q, k)["exploding logits"].heads == (("0", 1),)


def test_diffuse():
    q, k = healthy()
    q[:, 2] *= 0.02
    assert kinds(q, k)["diffuse"].heads == (("0", 2),)
    assert kinds(q, k)["diffuse"].severity == "note"
    q[:, 5] *= 0.02
    assert kinds(q, k)["diffuse"].heads == (("0", 2), ("0", 5))
    assert kinds(q, k)["diffuse"].severity == "note"


def test_heads_that_share_a_bias_are_not_twins_and_learned_nothing_by_it():
    """A fresh Swin: −100 added to the scores hides the other side of a shifted window, in every second layer."""
    torch.manual_seed(0)
    q, k = 0.2 * torch.randn(2, 16, HEADS, 16, WIDTH)
    side = torch.arange(16) % 4 < 2
    bias = torch.zeros(16, 1, 16, 16)
    bias[::2] = torch.where(side[:, None] == side, 0.0, -100.0)
    model = nn.Sequential(Fixed(q, k), Fixed(q, k, attn_mask=bias))
    found = {one.kind: one.severity for one in examine(model, [torch.zeros(1)]).findings}
    assert found["diffuse"] == "note" and "duplicate heads" not in found
    q[:, 1], k[:, 1] = q[:, 0], k[:, 0]
    assert kinds(q, k)["duplicate heads"].heads == (("0", 0), ("0", 1))


@pytest.mark.parametrize("temperature", [0.05, torch.full((HEADS, 1, 1), 0.05), regard.temperature.Fixed(0.05)])
def test_a_temperature_is_no_bias(temperature):
    """What it makes of the logits' variance is predicted, and twins under it are twins."""
    q, k = torch.randn(2, 2, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    q[:, 1], k[:, 1] = q[:, 0], k[:, 0]
    model = Fixed(q, k)
    with regard.using(model, temperature=temperature):
        report = examine(model, [torch.zeros(1)])
    for head in report.heads:
        assert head.predicted_variance == pytest.approx(head.statistics["logit_variance"].mean, rel=0.2)
    assert {found.kind: found.heads for found in report.findings}["duplicate heads"] == (("", 0), ("", 1))


def test_a_lone_head_whose_keys_are_all_equal_is_no_design():
    q, k = healthy()
    k[:, 3] = k[:, 3, :1]
    found = kinds(q, k)["diffuse"]
    assert (found.heads, found.severity) == ((("0", 3),), "warning")


def test_diffuse_is_a_note_in_a_model_that_has_learned_nothing():
    torch.manual_seed(0)
    q, k = 0.25 * torch.randn(2, 2, HEADS, LENGTH, WIDTH)
    assert (kinds(q, k)["diffuse"].severity, len(kinds(q, k)["diffuse"].heads)) == ("note", HEADS)
    q[:, 2:4] *= 0.1  # far behind their layer
    found = [one for one in examine(Fixed(q, k), [torch.zeros(1)]).findings if one.kind == "diffuse"]
    assert {"untrained" in one.threshold: len(one.heads) for one in found} == {False: 2, True: HEADS - 2}
    assert kinds(0.0 * q, k)["diffuse"].severity == "warning"  # nothing begins so
    assert kinds(q, k, scale=0.1 / WIDTH**0.5)["scale off"].severity == "warning"
    q, k = 0.1 * torch.randn(2, 2, HEADS, LENGTH, WIDTH)
    q, k = q + 0.5 * q[..., :1], k + 0.5 * k[..., :1]  # along one direction: they know of each other
    assert kinds(q, k)["diffuse"].severity == "note"  # a whole layer may start training so


@pytest.mark.parametrize(
    ("factor", "options", "words", "severity"),
    [
        (6.0, {}, "norms of queries and keys have grown", "note"),  # no logit above 100: trained heads are so
        (24.0, {}, "norms of queries and keys have grown", "warning"),
        (0.04, {}, "Queries and keys are too small", "note"),
        (0.01, dict(scale=1.0), "The scale is 1, which is", "note"),
        (1.0, dict(scale=0.04 / WIDTH**0.5), "Scores are too small: their scale is 0.04", "warning"),
    ],
)
def test_scale_off(factor, options, words, severity):
    q, k = healthy()
    found = kinds(q * factor, k, **options)["scale off"]
    assert len(found.heads) == HEADS
    assert words in found.evidence and found.severity == severity


def narrow(width, **options):
    """What is found in heads of a width whose q and k have unit variance, times what they are multiplied with."""
    torch.manual_seed(1)
    factor = options.pop("factor", 1.0)
    q, k = torch.randn(2, 2, HEADS, LENGTH, width)
    return kinds(factor * q, k, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [8, 16, 32, 128, 256])
def test_a_fresh_model_without_its_scale_is_found_at_any_width(width, causal):
    found = narrow(width, scale=1.0, is_causal=causal)["scale off"]
    assert "too large" in found.evidence and len(found.heads) == HEADS
    assert "scale off" not in narrow(width, is_causal=causal)


def test_norms_that_grew_in_narrow_heads_are_no_scale():
    """Trained with 1/√d, heads of 8 and 16 have variances of 8 to 65 that the norms explain, and learn well."""
    for width in (8, 16, 64):
        assert "scale off" not in narrow(width, factor=5.0)
        assert "have grown" in narrow(width, factor=12.0)["scale off"].evidence


def test_a_layer_whose_scale_is_not_that_of_the_others():
    def found(*scales):
        torch.manual_seed(1)
        layers = [Fixed(*torch.randn(2, 2, HEADS, LENGTH, 16), scale=scale / 4.0) for scale in scales]
        report = examine(nn.Sequential(*layers), [torch.zeros(1)])
        return [set(one.indices) for one in report.findings if one.kind == "scale off"]

    assert found(1.0, 1.0, 1.3) == [{2}]
    assert found(1.0, 1.0, 1.0) == found(1.0, 1.3) == []


def test_a_large_scale_with_variances_of_a_healthy_model_is_a_note():
    """Heads of 32 as torch initialises them, weights of variance 1/3: 32/9 without 1/√d."""
    found = narrow(32, factor=3.6**0.5 / 32**0.5, scale=1.0)["scale off"]
    assert (found.severity, len(found.heads)) == ("note", HEADS) and "5.7/√d" in found.evidence
    assert "scale off" not in narrow(32, factor=3.6**0.5)
    assert "scale off" not in narrow(32, factor=1.0 / 32**0.5, scale=1.0)  # 1/√d in the queries


def test_few_keys_do_not_make_a_variance_that_norms_explain():
    """As in grouped heads of 32, trained: 1.2 times what the norms predict, on rows of 1 to 16 keys."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, HEADS, 16, WIDTH)
    q[..., 0] += 7.0
    k[..., 0] *= 1.2
    q *= 2.5
    (off,) = [head for head in examine(Fixed(q, k, is_causal=True), [torch.zeros(1)]).heads if head.head == 0]
    assert 8.0 < off.statistics.mean("logit_variance") < 1.1 * off.predicted_variance
    assert "scale off" not in kinds(q, k, is_causal=True)


def test_a_layer_that_still_passes_gradients_is_not_off_scale():
    """As long training leaves it: most keys far below, a choice among those that are left."""
    q, k = healthy()
    q[..., 0], k[..., 0] = 18.0, torch.tensor([0.0, -6.0, -6.0, -6.0]).repeat(LENGTH // 4)
    heads = examine(Fixed(q, k), [torch.zeros(1)]).heads
    assert min(head.statistics.mean("logit_variance") for head in heads) > 8.0
    assert min(head.predicted_variance for head in heads) > 8.0
    assert "scale off" not in kinds(q, k)
    assert "scale off" in kinds(16.0 * q, k)


def test_a_sharp_head_is_not_a_scale_that_is_off():
    q, k = healthy()
    q[:, 1] = k[:, 1] * 4.0
    assert "scale off" not in kinds(q, k)


def test_sink_dormant():
    q, k = healthy()
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[:, 6, 0, 0] = 90.0
    found = kinds(q, k)["sink-dormant"]
    assert found.heads == (("0", 6),)
    assert found.severity == "note"


def test_weight_left_to_a_learned_sink_is_dormant_too():
    q, k = healthy()
    sink = torch.full((HEADS,), -30.0)
    sink[6] = 30.0

    class Sunk(Fixed):
        def forward(self, x):
            return regard.attention(self.q, self.k, self.k, sink=sink)

    found = {finding.kind: finding for finding in examine(nn.Sequential(Sunk(q, k)), [torch.zeros(1)]).findings}
    assert found["sink-dormant"].heads == (("0", 6),)
    sink[6] = 6.0
    report = examine(nn.Sequential(Sunk(q, k)), [torch.zeros(1)])
    assert 0.2 < report.heads[6].statistics.mean("mass") < 0.5  # a part of the weight is no dormancy
    assert "sink-dormant" not in {finding.kind for finding in report.findings}


def positions_only(offset, heads):
    """q_i matches k_{i−offset} sharply, in the first `heads` heads."""
    q, k = healthy()
    basis = torch.randn(LENGTH, WIDTH)
    basis = 9.0 * basis / basis.norm(dim=-1, keepdim=True)
    q[:, :heads], k[:, :heads] = basis.roll(offset, 0), basis
    return q, k


def test_positional():
    found = kinds(*positions_only(1, heads=2))["positional"]
    assert found.heads == (("0", 0), ("0", 1))
    assert found.measured == pytest.approx((1.0, 1.0), abs=0.06)


@pytest.mark.parametrize("heads", [4, 8])
def test_one_previous_token_head_is_ordinary_in_small_layers_too(heads):
    q, k = positions_only(1, heads=1)
    found = kinds(q[:, :heads], k[:, :heads])
    assert not {"positional", "collapsed", "dying gradient"} & found.keys()


def test_far_offsets_are_positional_too():
    torch.manual_seed(0)
    basis = torch.randn(300, 64)
    basis = 10.0 * basis / basis.norm(dim=-1, keepdim=True)
    q, k = torch.randn(2, 1, 8, 300, 64)
    q[:, :2], k[:, :2] = basis.roll(60, 0), basis  # four rows of five look 60 back, the others wrap around
    assert kinds(q, k)["positional"].heads == (("0", 0), ("0", 1))


def test_heads_that_look_elsewhere_are_no_twins():
    q, k = healthy()
    basis = torch.randn(LENGTH, WIDTH)
    basis = 4.0 * basis / basis.norm(dim=-1, keepdim=True)
    for head, offset in enumerate((1, 2, 4)):  # equal but for where they look
        q[:, head], k[:, head] = basis.roll(offset, 0), basis
    assert "duplicate heads" not in kinds(q, k)


@pytest.mark.parametrize("scale", [None, 1.0 / WIDTH])
def test_one_finding_names_the_temperature(scale):
    q, k = healthy()
    q *= 0.1
    q[:, 5] = 0.0  # equal logits: a finding of its own, which does not move the temperature of the others
    report = examine(nn.Sequential(Fixed(q, k, scale=scale)), [torch.zeros(1)])
    assert {"diffuse", "scale off"} <= {finding.kind for finding in report.findings}
    named = [finding for finding in report.findings if "temperature=" in finding.remedy]
    assert [finding.kind for finding in named] == ["diffuse", "diffuse"]  # the head of equal logits, and the others
    spread = [head.statistics["logit_variance"].mean ** 0.5 for head in report.heads if head.head != 5]
    number = float(named[-1].remedy.split("temperature=")[1].split("'")[0])
    assert number == pytest.approx(sorted(spread)[3], rel=0.05)  # two digits


@pytest.mark.parametrize("size", [0.0, 1e-5])
def test_uniform_heads_are_no_twins(size):
    q, k = healthy()
    assert set(kinds(q * size, k)) == {"diffuse", "scale off"}


def test_logits_far_below_zero_explode_too():
    q, k = healthy()
    q[..., 0], k[..., 0] = 100.0, 0.0
    k[:, 3, :, 0] = -20.0
    found = kinds(q, k)["exploding logits"]
    assert found.heads == (("0", 3),)
    assert found.measured[0] > 300


def test_one_head_far_off_scale_is_found_in_a_layer_that_is_not():
    q, k = healthy()
    q[:, 2] *= 30.0
    assert kinds(q, k)["scale off"].heads == (("0", 2),)


def test_a_head_on_the_other_side_is_not_reported_with_its_layer():
    q, k = healthy()
    q *= 0.01
    q[:, 3] *= 5000.0
    found = examine(nn.Sequential(Fixed(q, k)), [torch.zeros(1)]).findings
    large, small = (finding for finding in found if finding.kind == "scale off")
    assert large.heads == (("0", 3),) and "too large" in large.evidence
    assert ("0", 3) not in small.heads and len(small.heads) == HEADS - 1
    assert max(small.measured) < 1.0 and "too small" in small.evidence
    q, k = healthy()
    q *= 100.0
    q[:, 3] *= 1e-5
    assert ("0", 3) not in kinds(q, k)["scale off"].heads


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_dropout_that_does_not_ask_for_the_mode(rate):
    found = kinds(*healthy(), dropout_p=rate)
    assert list(found) == (["dropout in evaluation"] if rate else [])
    if rate:
        assert found["dropout in evaluation"].heads == tuple(("0", head) for head in range(HEADS))
        encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=rate, batch_first=True)
        assert examine(encoder, [torch.randn(2, 24, 16)]).findings == []


def test_duplicate_heads():
    q, k = healthy()
    q[:, 7], k[:, 7] = q[:, 4], k[:, 4]
    found = kinds(q, k)["duplicate heads"]
    assert found.heads == (("0", 4), ("0", 7))
    assert "heads 4 and 7" in found.evidence


def test_too_few_rows_are_not_judged():
    q, k = healthy()
    assert kinds(q[:1, :, :4] * 0.02, k[:1, :, :4]) == {}


def test_the_gravest_comes_first():
    q, k = healthy()
    q[:, :3] *= 400.0
    q[:, 4] *= 0.02
    report = examine(nn.Sequential(Fixed(q, k)), [torch.zeros(1)])
    order = [checks.SEVERITIES.index(finding.severity) for finding in report.findings]
    assert order == sorted(order)
    assert all(finding.remedy and finding.evidence and finding.threshold for finding in report.findings)


class Projected(nn.Module):
    """Attention whose values and output come from layers of its own."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(heads * width, 3 * heads * width), nn.Linear(heads * width, heads * width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def dead(model, x=None):
    x = torch.randn(2, 24, 32) if x is None else x
    return [(one.severity, one.heads) for one in examine(nn.Sequential(model), [x, x]).findings if one.kind == "dead"]


@torch.no_grad()
def test_dead_by_its_values():
    model = Projected()
    assert dead(model) == []
    model.qkv.weight[72:80] = 0.0  # of head 1: its bias is left
    assert dead(model) == [("warning", (("0", 1),))]
    model.qkv.weight[64:72] *= 1e-9  # weight decay without a gradient
    model.qkv.bias[64:72] = 0.0
    assert dead(model) == [("warning", (("0", 0), ("0", 1)))]
    assert dead(Projected(), torch.ones(2, 24, 32)) == [("note", tuple(("0", head) for head in range(4)))]  # the text
    assert dead(model, torch.randn(2, 3, 32)) == []  # too few rows to tell


@torch.no_grad()
def test_dead_by_the_output_projection():
    model = Projected()
    model.proj.weight[:, 16:24] = 0.0
    assert dead(model) == [("warning", (("0", 2),))]
    model.proj.weight.zero_()
    assert dead(model) == [("note", tuple(("0", head) for head in range(4)))]  # a block that begins as the identity
    torch.nn.utils.parametrizations.weight_norm(model.proj)  # computed: not looked at
    assert dead(model) == []


@torch.no_grad()
def test_dead_in_the_models_of_the_demo():
    model = TinyLM(layers=1, heads=4, width=32, length=24)
    text = encode("whatever it is, it is a text")[None, :24]
    assert dead(model, text) == []
    model.blocks[0].attention.out.weight[:, 8:16] = 0.0
    assert dead(model, text) == [("warning", (("0.blocks.0.attention", 1),))]


@torch.no_grad()
def test_dead_heads_are_found_in_merged_readings(tmp_path):
    model = Projected()
    model.qkv.weight[64:72] = 0.0
    model.proj.weight[:, 16:24] = 0.0
    same = torch.ones(2, 24, 32)  # where the text makes all values alike, and elsewhere not
    report = examine(nn.Sequential(model), [same, torch.randn(2, 24, 32), same], snapshot=tmp_path / "readings")
    assert [one.heads for one in report.findings if one.kind == "dead"] == [(("0", 0),), (("0", 2),)]


@torch.no_grad()
def test_dead_heads_share_their_values_with_a_group():
    q, k = healthy()
    model = nn.Sequential(Fixed(q, k[:, :4], enable_gqa=True))
    values = torch.randn_like(k[:, :4])
    values[:, 1] = 3.0
    model[0].forward = lambda x: F.scaled_dot_product_attention(q, k[:, :4], values, enable_gqa=True)
    (found,) = (one for one in examine(model, [torch.zeros(1)]).findings if one.kind == "dead")
    assert found.heads == (("0", 2), ("0", 3)) and found.measured == (0.0, 0.0)


@torch.no_grad()
def test_columns_are_not_read_where_several_calls_share_them():
    model = Projected()
    model.proj.weight[:, 16:24] = 0.0
    alone = model.forward
    model.forward = lambda x: alone(alone(x))
    assert dead(model) == []


@pytest.mark.parametrize(("rows", "keys", "enough"), [(16, 4, True), (15, 4, False), (16, 3, False)])
def test_a_head_is_judged_from_sixteen_rows_and_four_keys_on(rows, keys, enough):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, rows, 8), torch.randn(1, 2, keys, 8)
    heads = examine(nn.Sequential(Fixed(q, k)), [torch.zeros(1)]).heads
    assert [head.can_be_judged for head in heads] == [enough, enough]
