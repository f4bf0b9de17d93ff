"""regard.Monitor raises alarms about heads that are unhealthy or about to be, and not about healthy ones."""

import random
import re
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.watching.alarms import SAMPLES, URGENT, WIDESPREAD, YOUNG, AlarmRules, extrapolate, is_rising


def warnings_in_training(gain: float, rate: float, scale: float | None = None, steps: int = 30) -> list[str]:
    """What a monitor says while a small model learns to add up what it has seen, noisily."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
            with torch.no_grad():
                self.q.weight *= gain

        def forward(self, x):
            q, k, v = (each(x).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            return x + o.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), Attention(), Attention(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    with regard.Monitor(model, every=2, budget=1.0), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(8, 24, 4)
            (model(x) - x.cumsum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in seen if issubclass(one.category, AttentionWarning)]


def test_heads_that_are_beyond_the_limits_from_the_start_are_reported():
    messages = warnings_in_training(gain=3e3, rate=1e-3)
    assert re.match(r"step 2: [12], head [01]: exploding logits in each of the last 2 samples \(largest", messages[0])
    assert "; also 3 more heads" in messages[0]
    for kind in ("collapsed", "dying gradient"):
        assert any(f"{kind} in each of the last" in text for text in messages)


@pytest.mark.parametrize(("gain", "rate", "scale"), [(1.0, 0.3, None), (4.0, 0.1, 1.0)])
def test_noisy_rises_to_large_logits_are_reported(gain, rate, scale):
    assert any("largest logit" in text for text in warnings_in_training(gain, rate, scale))


@pytest.mark.parametrize("rate", [3e-3, 1e-2])
def test_healthy_trainings_get_no_warning(rate):
    assert warnings_in_training(gain=1.0, rate=rate) == []


def rows(tops, ratios=None):
    return [
        dict(step=5 * at, layer="a", head=0, max_logit=top, entropy_ratio=ratios[at] if ratios else 0.5)
        for at, top in enumerate(tops)
    ]


def warnings_for(rows):
    rules = AlarmRules()
    return [alarm.text for row in rows for alarm in rules.add(row["step"], [row], {})]


def test_a_trend_may_have_a_few_steps_back():
    rising = [20, 24, 23, 27, 29, 33, 31, 36, 40, 44]
    assert warnings_for(rows(rising)) == ["a, head 0: largest logit 44, rising towards 131 by step 225"]
    assert warnings_for(rows(rising[::-1])) == warnings_for(rows(rising[5:] + rising[:5])) == []
    assert warnings_for(rows([top / 4 for top in rising])) == []  # far from the limit: healthy trainings begin so
    assert warnings_for(rows([30 + top / 20 for top in rising])) == []  # hardly rising
    falling = [0.2, 0.19, 0.17, 0.18, 0.15, 0.14, 0.12, 0.11, 0.09, 0.08]
    assert [text.split(" by")[0] for text in warnings_for(rows([1.0] * 10, falling))] == [
        "a, head 0: entropy ratio 0.08, falling towards 0"
    ]
    assert warnings_for(rows([1.0] * 10, [2 * ratio for ratio in falling])) == []


def test_a_trend_is_reported_when_it_is_near_the_limit():
    """Healthy trainings begin with long, steep trends too, so the last samples must be near the limit."""
    steep = [1.0, 3.0, 5.0, 7.0, 9.0, 12.0, 15.0, 18.0, 22.0, 24.0]
    assert extrapolate(range(10), steep, 45) > 100.0
    assert warnings_for(rows(steep)) == [] and len(warnings_for(rows([top + 4.0 for top in steep]))) == 1
    falling = [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.12, 0.11]
    assert extrapolate(range(10), falling, 45) < 0.05
    assert warnings_for(rows([1.0] * 10, falling)) == []
    assert len(warnings_for(rows([1.0] * 10, [ratio - 0.04 for ratio in falling]))) == 1


def test_a_head_that_was_reported_beyond_the_limit_is_not_reported_as_rising():
    def kinds(over):
        found = [flags("exploding logits", 0, number=top) if over and top > 100 else {} for top in tops]
        rules = AlarmRules()
        return [alarm.kind for row, one in zip(rows(tops), found, strict=True) for alarm in rules.add(5, [row], one)]

    tops = [110.0 + 10 * at for at in range(SAMPLES)]
    assert kinds(over=True) == ["exploding logits"] and kinds(over=False) == ["rising"]


@pytest.mark.parametrize("metrics", [None, ("max_logit",)])
@pytest.mark.parametrize(
    ("change", "rises"), [(dict(softcap=60.0), 0), (dict(softcap=60.0, temperature=0.5), 1), (dict(softcap=400.0), 1)]
)
def test_logits_that_a_soft_cap_keeps_within_the_limit_are_not_rising(change, rises, metrics):
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True, dropout=0.0), torch.randn(1, 10, 16)
    with (
        warnings.catch_warnings(),
        regard.using(layer, **change),
        regard.Monitor(layer, every=1, budget=1.0, metrics=metrics) as monitor,
    ):
        warnings.simplefilter("ignore", AttentionWarning)
        for _ in range(24):
            layer(x)
            with torch.no_grad():
                layer.self_attn.in_proj_weight[:32] *= 1.1
    assert any(alarm.kind == "rising" for alarm in monitor.alarms) == rises


def test_scatter_is_no_trend():
    draw = random.Random(0)
    assert warnings_for(rows([draw.uniform(30.0, 60.0) for _ in range(300)])) == []
    assert not is_rising([1.0] * 10)
    assert extrapolate([0, 1, 2], [1.0, 2.0, 3.0], 10) == pytest.approx(11.0)
    assert extrapolate([5, 5], [1.0, 3.0], 9) == 2.0


def flags(kind, *heads, number=0.5):
    return {kind: {("a", head): number for head in heads}}


def many(step, heads=4):
    return [dict(step=step, layer="a", head=head, max_logit=1.0, entropy_ratio=0.5) for head in range(heads)]


def alarms_after(found):
    """(step, kind, severity, heads) of the alarms for a list of flags, one sample each."""
    rules, seen = AlarmRules(), []
    for at, one in enumerate(found):
        seen += rules.add(at + 1, many(at + 1), one)
    return [(alarm.step, alarm.kind, alarm.severity, len(alarm.heads)) for alarm in seen]


def test_logits_beyond_the_limit_are_reported_after_two_samples_on_end():
    over, fine = flags("exploding logits", 1, number=130.0), {}
    assert alarms_after([over, fine, over, fine, over]) == []
    assert alarms_after([fine, over, over, over]) == [(3, "exploding logits", "critical", 1)]
    assert URGENT == 2


def test_a_slow_problem_must_last_unless_most_heads_have_it():
    one = flags("collapsed", 1)
    assert alarms_after([*[one] * (SAMPLES - 1), {}, *[one] * (SAMPLES - 1)]) == []
    assert alarms_after([one] * SAMPLES) == [(SAMPLES, "collapsed", "warning", 1)]
    most = flags("collapsed", 0, 1, 2)
    assert alarms_after([most] * 4) == [(WIDESPREAD, "collapsed", "critical", 3)]
    assert alarms_after([flags("scale off", 0, 1, 2)] * 5) == []


def test_an_output_that_is_not_finite_is_critical_at_once():
    assert alarms_after([flags("not finite", 2)]) == [(1, "not finite", "critical", 1)]
    (alarm,) = AlarmRules().add(7, [], flags("not finite", 2))
    assert alarm.text.startswith("a, head 2: its output is NaN or infinite; stop, go back")
    event = dict(step=7, alarm="not finite", severity="critical", heads=(("a", 2),), text=alarm.text, action="")
    assert alarm.to_json() == event and str(alarm) == f"step 7: {alarm.text}"


def test_alarms_of_one_kind_are_raised_again_when_twice_as_many_heads_have_it():
    rules, seen = AlarmRules(), []
    for step in range(1, 12):
        found = flags("exploding logits", *range(min(step, 9)), number=130.0)
        seen += rules.add(step, many(step, heads=9), found)
    assert [(alarm.step, len(alarm.heads)) for alarm in seen] == [(2, 1), (3, 1), (5, 2), (9, 4)]
    assert (
        seen[3].text
        == "a, head 4: exploding logits in each of the last 2 samples (largest logit 130); also 3 more heads"
    )


@pytest.mark.parametrize(
    ("kind", "numbers", "worst"),
    [
        ("exploding logits", (130.0, 900.0, 200.0), 1),
        ("collapsed", (0.01, 0.015, 0.002), 2),
        ("scale off", (9.0, 20.0, 0.001), 2),
    ],
)
def test_an_alarm_of_several_heads_quotes_the_worst(kind, numbers, worst):
    rules, found = AlarmRules(), {kind: {("a", head): number for head, number in enumerate(numbers)}}
    alarms = [alarm for step in range(1, SAMPLES + 1) for alarm in rules.add(step, many(step, heads=7), found)]
    assert alarms[0].heads == (("a", 0), ("a", 1), ("a", 2))
    assert alarms[0].text.startswith(f"a, head {worst}: ") and alarms[0].text.endswith("; also 2 more heads")


def test_diffuse_heads_are_a_note_while_training_is_young():
    rules, seen = AlarmRules(), []
    for step in range(YOUNG - SAMPLES, YOUNG + SAMPLES):
        seen += rules.add(step, many(step), flags("diffuse", 0, 1))
    assert [(alarm.step, alarm.severity) for alarm in seen] == [(YOUNG - 1, "note"), (YOUNG + 1, "warning")]


def test_a_suspicious_head_draws_the_next_sample_closer_until_it_is_reported():
    rules = AlarmRules()
    rules.add(1, many(1), flags("exploding logits", 1, number=130.0))
    assert rules.is_suspicious
    rules.add(2, many(2), flags("exploding logits", 1, number=130.0))
    assert not rules.is_suspicious
    rules.add(3, many(3), {})
    assert not rules.is_suspicious


def test_heads_that_are_sharp_by_design_may_sharpen():
    """Those that look at the token before, which findings exempt, too."""
    falling = rows([1.0] * 10, [0.2, 0.19, 0.17, 0.18, 0.15, 0.14, 0.12, 0.11, 0.09, 0.08])
    for found, count in ((flags("positional", 0, number=1.0), 0), ({}, 1)):
        rules = AlarmRules()
        assert sum(len(rules.add(row["step"], [row], found)) for row in falling) == count


def test_a_head_without_values_is_reported():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True, dropout=0.0)
    with torch.no_grad():
        layer.self_attn.in_proj_weight[32:40] = 0.0  # the values of head 0
    with regard.Monitor(layer, every=1, budget=1.0), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(SAMPLES + 2):
            layer(torch.randn(2, 24, 16))
    (messages,) = (str(one.message) for one in seen)
    assert messages.startswith("step 10: self_attn, head 0: dead in each of the last 10 samples (values differ by 0")
