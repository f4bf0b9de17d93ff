"""regard.Monitor raises alarms about heads that are unhealthy or about to be, and not about healthy ones."""

import math
import random
import re
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.watching.bands import SETTLED, Level, LossBand
from regard.health.watching.incidents import CALM, LARGE, Incidents
from regard.health.watching.symptoms import CONFIRMED, SAMPLES, URGENT, WIDESPREAD, YOUNG, extrapolate, is_rising


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
    assert len(messages) == 1  # that heads are collapsed and have no gradient follows from it


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
    rules, confirming = Incidents(), [{**rows[-1], "step": rows[-1]["step"] + at} for at in range(1, CONFIRMED)]
    for row in confirming:  # what the trend goes on to
        row["max_logit"] += 0.3 * (row["step"] - rows[-1]["step"])
        row["entropy_ratio"] -= 1e-4 * (row["step"] - rows[-1]["step"])
    return [alarm.text for row in [*rows, *confirming] for alarm in rules.add(row["step"], [row], {})]


def test_a_trend_may_have_a_few_steps_back():
    rising = [20, 24, 23, 27, 29, 33, 31, 36, 40, 44]
    (text,) = warnings_for(rows(rising))
    assert text.startswith("a, head 0: largest logit 44.6, rising towards 1")
    assert warnings_for(rows(rising[::-1])) == warnings_for(rows(rising[5:] + rising[:5])) == []
    assert warnings_for(rows([top / 4 for top in rising])) == []  # far from the limit: healthy trainings begin so
    assert warnings_for(rows([30 + top / 20 for top in rising])) == []  # hardly rising
    falling = [0.2, 0.19, 0.17, 0.18, 0.15, 0.14, 0.12, 0.11, 0.09, 0.08]
    assert [text.split(" by")[0] for text in warnings_for(rows([1.0] * 10, falling))] == [
        "a, head 0: entropy ratio 0.0798, falling towards 0"
    ]
    assert warnings_for(rows([1.0] * 10, [2 * ratio for ratio in falling])) == []


def test_a_trend_is_reported_when_it_is_near_the_limit():
    """Healthy trainings begin with long, steep trends too, so the last samples must be near the limit."""
    steep = [1.0, 3.0, 5.0, 7.0, 9.0, 12.0, 15.0, 18.0, 22.0, 23.0]
    assert extrapolate(range(10), steep, 45) > 100.0
    assert warnings_for(rows(steep)) == [] and len(warnings_for(rows([top + 8.0 for top in steep]))) == 1
    falling = [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.14, 0.13]
    assert extrapolate(range(10), falling, 45) < 0.05
    assert warnings_for(rows([1.0] * 10, falling)) == []
    assert len(warnings_for(rows([1.0] * 10, [ratio - 0.07 for ratio in falling]))) == 1


def test_a_trend_takes_two_confirmations():
    """Sound runs have warned of logits of 135 that came to 20."""
    rising = rows([30.0 + 3 * at for at in range(SAMPLES + CONFIRMED)])
    told = [len(incidents_after(rising[: SAMPLES + more]).all) for more in range(CONFIRMED)]
    assert told == [0] * (CONFIRMED - 1) + [1]


def incidents_after(samples, flags_at=lambda at: {}):
    incidents = Incidents()
    for at, row in enumerate(samples):
        incidents.add(row["step"], [row], flags_at(at))
    return incidents


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
    assert any(alarm.kind in ("rising", "exploding logits") for alarm in monitor.alarms) == rises


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
    rules, seen = Incidents(), []
    for at, one in enumerate(found):
        seen += rules.add(at + 1, many(at + 1), one)
    return [(alarm.step, alarm.kind, alarm.severity, len(alarm.heads)) for alarm in seen]


def test_logits_beyond_the_limit_are_a_note_until_they_do_harm():
    """A sound run at a high rate had logits of 119 to 129 while its loss fell."""
    over, fine = flags("exploding logits", 1, number=130.0), {}
    assert alarms_after([over, fine, over, fine, over]) == []
    assert alarms_after([fine, over, over, over]) == [(3, "exploding logits", "note", 1)]
    harm = {**over, **flags("dying gradient", 1, number=0.9)}
    assert alarms_after([fine, over, over, harm, over]) == [
        (3, "exploding logits", "note", 1), (4, "exploding logits", "critical", 1),
    ]  # fmt: skip
    incidents, sharp = Incidents(), many(1)
    incidents.add(1, many(1), fine)
    sharp[1]["entropy_ratio"] = 0.2  # it was 0.5
    for step in (2, 3):
        incidents.add(step, sharp, over)
    assert [(one.severity, one.cause) for one in incidents.all] == [("critical", LARGE)] and URGENT == 2


def test_a_slow_problem_must_last_unless_most_heads_have_it():
    one = flags("collapsed", 1)
    assert alarms_after([*[one] * (SAMPLES - 1), {}, *[one] * (SAMPLES - 1)]) == []
    assert alarms_after([one] * SAMPLES) == [(SAMPLES, "collapsed", "warning", 1)]
    most = flags("collapsed", 0, 1, 2)
    assert alarms_after([most] * 4) == [(WIDESPREAD, "collapsed", "critical", 3)]
    assert alarms_after([flags("scale off", 0, 1, 2)] * 5) == []


@pytest.mark.parametrize(("number", "where"), [(1.0, "were finite"), (2.0, "already were")])
def test_an_output_that_is_not_finite_is_critical_at_once(number, where):
    assert alarms_after([flags("not finite", 2)]) == [(1, "not finite", "critical", 1)]
    (alarm,) = Incidents().add(7, [], flags("not finite", 2, number=number))
    assert alarm.text.startswith("a, head 2: its output is NaN or infinite") and where in alarm.text
    assert alarm.to_json()["alarm"] == "not finite" and str(alarm).startswith(f"step 7: {alarm.text}. To do: stop")


def test_one_cause_is_one_incident_with_all_its_heads_and_symptoms():
    """Six to fourteen alarms were raised for one: rising, exploding, scale off, dying and collapsed."""
    incidents, events = Incidents(), []
    for step in range(1, 20):
        found = {kind: {(f"layers.{head % 3}.attn", head): 500.0 for head in range(min(step, 9))} for kind in
                 ("exploding logits", "scale off", "dying gradient", "collapsed")}  # fmt: skip
        events += incidents.add(
            step, [{**row, "layer": f"layers.{row['head'] % 3}.attn"} for row in many(step, 9)], found
        )
    (one,) = incidents.all
    assert (one.cause, one.severity, one.opened, one.group) == (LARGE, "critical", 2, "layers.*.attn")
    assert len(one.heads) == 9 and len(one.layers) == 3 and one.code == "RG301"
    assert set(one.symptoms) == {"exploding logits", "scale off", "dying gradient", "collapsed"}
    assert [event.event for event in events] == ["opened", *["updated"] * (len(events) - 1)] and len(events) <= 4


def test_an_incident_resolves_and_reopens():
    over = {"exploding logits": {("a", 0): 1650.0}, "dying gradient": {("a", 0): 0.9}}
    sick, fine = dict(layer="a", head=0, max_logit=1650.0, entropy_ratio=0.1), dict(
        layer="a", head=0, max_logit=20.0, entropy_ratio=0.5)  # fmt: skip
    incidents, events = Incidents(), []
    for step in range(1, 30):
        ill = step in range(3, 8) or step > 20
        events += incidents.add(step, [{"step": step, **(sick if ill else fine)}], over if ill else {})
        if step == 7 + CALM:
            assert incidents.all[0].resolved == step and incidents.all[0].text.startswith("below 100 since step 10")
    (one,) = incidents.all
    assert (one.opened, one.resolved, one.reopened) == (4, None, [22])
    assert [event.event for event in events] == ["opened", "resolved", "reopened"]
    again = Incidents()
    again.load(incidents.state())
    assert again.all == incidents.all


def test_a_loss_that_leaves_its_band_for_three_steps_has_jumped():
    draw, band = random.Random(0), LossBand()
    for step in range(400):
        band.add(step, 3.0 - step / 400 + draw.gauss(0, 0.05))
        assert not band.has_jumped
    for step in (400, 401, 402):
        band.add(step, 3.2)
    assert band.has_leapt and band.first_outside == 400
    for step in range(403, 408):
        band.add(step, 2.0)
    assert not band.outside


@pytest.mark.parametrize(("deviations", "steps"), [(4.5, 4), (3.5, 6)])
def test_a_smaller_jump_of_the_loss_takes_more_steps(deviations, steps):
    draw, band = random.Random(1), LossBand(share=0.0)
    for step in range(100):
        band.add(step, draw.gauss(3.0, 0.05))
    spread = band._describe()[1]
    for step in range(100, 100 + steps):
        assert not band.has_leapt
        band.add(step, band.middle + deviations * spread)
    assert band.has_leapt and band.first_outside == 100


def test_a_loss_that_rises_slowly_within_its_noise_is_found():
    draw, band = random.Random(2), LossBand()
    for step in range(300):
        band.add(step, draw.gauss(3.0, 0.1))
        assert not band.has_jumped and band.rise < 1.5
    for step in range(300, 380):
        band.add(step, draw.gauss(3.0 + 0.005 * (step - 300), 0.1))
        if band.has_jumped:
            break
    assert band.is_rising and step < 375 and not band.has_leapt


def test_noise_that_is_correlated_or_has_heavy_tails_is_no_rise():
    """A plateau of 3,000 steps: the spread of steps alone took its own waves for a rise."""
    draw = random.Random(0)
    for correlation, tails in ((0.4, False), (0.0, True)):
        band, wave = LossBand(), 0.0
        for step in range(3000):
            noise = draw.gauss(0, 1) / (math.sqrt(draw.gammavariate(1.5, 2 / 3)) if tails else 1.0)
            wave = correlation * wave + math.sqrt(1 - correlation**2) * noise
            band.add(step, 3.0 + 0.05 * wave)
            assert not band.is_rising


def test_a_loss_that_stays_at_a_new_level_may_jump_again():
    draw, band, jumps = random.Random(3), LossBand(), []
    for step in range(400):
        band.add(step, draw.gauss(2.0 + (step >= 100) + (step >= 300), 0.03))
        jumps += [step] if band.has_jumped else []
    assert jumps[0] == 102 and max(step for step in jumps if step < 300) < 100 + SETTLED + 1
    assert min(step for step in jumps if step >= 300) == 302


def test_a_level_finds_changes_between_two_steps_alone():
    grown, fallen = Level(8.0), Level(1 / 3)
    assert not any(grown.add(1.3**step) for step in range(30))  # 8 steps of it make 8.2, no two do
    assert [grown.add(x) is not None for x in (1.3**30 * 20, 1.3**31 * 20)] == [False, True]
    assert not any(fallen.add(x) for x in [1.0, 0.4] * 6 + [0.0] + [1.0] * 10)  # once is no level
    assert [fallen.add(x) for x in (0.01, 0.02)] == [None, (1.0, 0.02)]


def test_diffuse_heads_are_a_note_while_training_is_young():
    rules, seen = Incidents(), []
    for step in range(YOUNG - SAMPLES, YOUNG + SAMPLES):
        seen += rules.add(step, many(step), flags("diffuse", 0, 1))
    assert [(alarm.step, alarm.severity) for alarm in seen] == [(YOUNG - 1, "note"), (YOUNG + 1, "warning")]


def test_a_suspicious_head_draws_the_next_sample_closer_until_it_is_reported():
    rules = Incidents()
    rules.add(1, many(1), flags("exploding logits", 1, number=130.0))
    assert rules.is_suspicious
    rules.add(2, many(2), flags("exploding logits", 1, number=130.0))
    assert not rules.is_suspicious


def test_heads_that_are_sharp_by_design_may_sharpen():
    """Those that look at the token before, which findings exempt, too."""
    falling = rows([1.0] * 13, [0.2, 0.19, 0.17, 0.18, 0.15, 0.14, 0.12, 0.11, 0.09, 0.08, 0.075, 0.07, 0.065])
    for found, count in ((flags("positional", 0, number=1.0), 0), ({}, 1)):
        assert len(incidents_after(falling, lambda at, found=found: found).all) == count


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
