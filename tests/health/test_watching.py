"""The parts of a monitor: its schedule, its series, its writers with the signatures of the real loggers, its events."""

import json
import math
import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.watching.every_step import EveryStep
from regard.health.watching.incidents import Incidents
from regard.health.watching.pulse import Pulse, WeightMoves
from regard.health.watching.sample import AT, LayerSample, empty_table, scalars_of, series_names
from regard.health.watching.sampling import Schedule


def taken(every, steps, suspicious=()):
    schedule, found = Schedule(every), []
    for step in range(1, steps + 1):
        if schedule.is_due(step):
            schedule.take(step)
            schedule.look_closer(step, step in suspicious)
            found.append(step)
    return found


def test_samples_are_dense_at_first_and_then_one_in_every():
    found = taken(100, 3000)
    assert found[:12] == [*range(1, 11), 12, 14] and len(found) < 100
    assert max(b - a for a, b in pairwise(found)) == 100 and set(range(1, 3001, 100)) <= set(found)
    assert found[-10:] == list(range(2001, 3001, 100))[-10:]
    assert len([step for step in found if step <= 200]) > 30  # a short fine-tuning
    assert taken(3, 10) == [1, 4, 7, 10] and taken(1, 3) == [1, 2, 3]


def test_a_suspicious_head_is_sampled_again_at_the_next_step():
    found = taken(100, 3000, suspicious={2001})
    assert {2001, 2002, 2101} <= set(found) and 2003 not in found
    always = taken(100, 30000, suspicious=set(range(30001)))
    assert len([step for step in always if step > 20000]) < 1200  # at most ten in a row


def table(heads, **columns):
    found = empty_table(heads)
    found[:, [AT[name] for name in ("rows", "ratio_rows", "query_rows", "key_rows")]] = 8.0
    for name, value in columns.items():
        found[:, AT[name]] = torch.tensor(value).double()
    return found


def test_a_model_of_80_layers_has_fewer_than_400_series():
    for layers in (2, 32, 48, 80, 126):
        labels = [f"model.layers.{at}.self_attn" for at in range(layers)]
        found = scalars_of([LayerSample(label, table(64, max_logit=1.0)) for label in labels], series_names(labels))
        assert len(found) < 400 and f"attention/layer_{layers - 1:02}/max_logit" in found
        assert layers > 80 or f"attention/layer_{layers - 1:02}/entropy_ratio_mean" in found
    assert "attention/layer_01/v_norm" in scalars_of(
        [LayerSample("a.1", table(2)), LayerSample("a.0", table(2))], {"a.0": "layer_00", "a.1": "layer_01"}
    )


def test_scalars_are_over_heads():
    one = table(2, max_logit=[3.0, 5.0], entropy_ratio=[0.2, 0.6], first_key_mass=[0.5, 0.1], gradient_gain=[0.1, 0.3])
    two = table(2, max_logit=[9.0, 1.0], entropy_ratio=[0.4, 0.4], first_key_mass=[0.2, 0.2], gradient_gain=[0.5, 0.5])
    two[1, AT["rows"]] = 0.0  # sees no key
    found = scalars_of([LayerSample("x", one), LayerSample("y", two)], {"x": "layer_00", "y": "layer_01"})
    assert found["attention/max_logit"] == 9.0 and found["attention/layer_00/max_logit"] == 5.0
    assert found["attention/entropy_ratio_min"] == pytest.approx(0.2)
    assert found["attention/entropy_ratio_mean"] == pytest.approx(0.4)
    assert found["attention/layer_00/sink_rate"] == 0.5 and found["attention/sink_rate"] == pytest.approx(1 / 3)
    assert found["attention/gradient_gain"] == pytest.approx(0.3)


def test_massive_activations_are_logged_beside_the_median():
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0, norm_first=True)
    model, rows = nn.TransformerEncoder(one, 2, enable_nested_tensor=False), []
    with torch.no_grad():
        model.layers[1].linear2.bias[3] = 500.0
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0):
        for _ in range(2):
            hidden = model(torch.randn(2, 12, 16))[:1].detach()
    found = {name.partition("/")[2]: x for name, x in rows[-1].items() if "activation" in name}
    assert found["layer_01/largest_activation"] == found["largest_activation"] == pytest.approx(float(hidden.max()))
    assert found["layer_01/median_activation"] == pytest.approx(float(hidden.abs().median()), rel=0.1)
    assert found["layer_00/largest_activation"] < 10.0 and not model.layers[0]._forward_hooks


def layer(gain=1.0):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_weight[:32] *= gain
    return model


def watched(log, steps=2, gain=1.0, **options):
    model = layer(gain)
    with regard.Monitor(model, every=1, log=log, budget=1.0, **options) as monitor:
        for _ in range(steps):
            model(torch.randn(2, 24, 16))
    return monitor


class Run:
    """A W&B run as wandb 0.2x has it: `log` without a step and with commit adds a row."""

    def __init__(self):
        self.metrics, self.rows, self.row, self.step = [], [], {}, 0

    def define_metric(
        self, name, step_metric=None, step_sync=None, hidden=None, summary=None, goal=None, overwrite=None
    ):
        self.metrics.append((name, step_metric))

    def log(self, data, step=None, commit=None):
        if step is not None and step > self.step:
            self._commit()
            self.step = step
        assert step is None or step == self.step, "the user's row would be dropped"
        self.row.update(data)
        if commit or (commit is None and step is None):
            self._commit()
            self.step += 1

    def _commit(self):
        self.rows.append(self.row)
        self.row = {}


@pytest.mark.parametrize("user", ["every step", "twice a step", "every tenth", "never"])
def test_wandb_has_its_own_axis_and_the_users_steps_are_left_alone(user):
    run, model = Run(), layer()
    with regard.Monitor(model, every=1, log=run, budget=1.0):
        for step in range(20):
            model(torch.randn(2, 24, 16))
            if user in ("every step", "twice a step") or (user == "every tenth" and step % 10 == 9):
                run.log({"loss": float(step)}, step=step)
            if user == "twice a step":
                run.log({"eval": float(step)}, step=step)
    run._commit()
    assert run.metrics == [("attention/step", None), ("attention/*", "attention/step")]
    losses = [row["loss"] for row in run.rows if "loss" in row]
    assert losses == {"every tenth": [9.0, 19.0], "never": []}.get(user, [float(step) for step in range(20)])
    axis = [row["attention/step"] for row in run.rows if "attention/max_logit" in row]
    assert axis == sorted(set(axis)) and len(axis) >= 18


class Board:
    def __init__(self):
        self.scalars, self.texts = [], []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False):
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag, text_string, global_step=None, walltime=None):
        self.texts.append((tag, text_string, global_step))


class MLflow:
    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None):
        self.logged.append((metrics, step))


class Trainer:
    """transformers.Trainer: `log` takes no step."""

    class state:
        global_step = 0

    def __init__(self):
        self.logged = []

    def log(self, logs, start_time=None):
        self.logged.append((logs, logs["attention/step"]))

    def log_metrics(self, split, metrics):
        raise AssertionError("prints a summary of an evaluation")


class Tracker:
    def __init__(self, run=None):
        self.logged, self.tracker = [], run

    def log(self, values, step=None, **kwargs):
        self.logged.append((values, step))


class Accelerator:
    def __init__(self, *trackers):
        self.trackers = list(trackers)

    def log(self, values, step=None, log_kwargs=None):
        pytest.fail("trackers are called one by one, so that W&B keeps its own axis")


class Plain:
    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((values, step))


def test_loggers_get_one_dict_per_sample_by_their_own_protocol():
    tracker, run = Tracker(), Run()
    for log, logged in (
        (one := MLflow(), one), (two := Trainer(), two), (three := Plain(), three),
        (Accelerator(tracker, Tracker(run)), tracker),
    ):  # fmt: skip
        watched(log)
        assert [step for _, step in logged.logged] == [1, 2]
        assert all("attention/max_logit" in numbers for numbers, _ in logged.logged)
    assert run.metrics and [row["attention/step"] for row in run.rows if row] == [1]
    with pytest.raises(TypeError, match="log must have add_scalar"):
        watched(7)


def test_tensorboard_gets_series_and_alarms_as_text():
    board = Board()
    with pytest.warns(AttentionWarning, match="exploding logits"):
        watched(board, gain=300.0)
    names = {name for name, _, step in board.scalars if step == 1}
    assert {"attention/max_logit", "attention/layer_00/entropy_ratio_min", "attention/alarms"} <= names
    assert any(re.fullmatch(r"attention/layer_00/head_0[01]/max_logit", name) for name in names)  # in trouble
    assert board.texts[0][0] == "attention/alarms" and re.search("exploding logits.* To do: lower", board.texts[0][1])


def test_heads_are_logged_on_request_or_in_trouble():
    board = Board()
    watched(board)
    assert not any("head_" in name for name, _, _ in board.scalars)
    watched(board, heads=True)
    assert {"attention/layer_00/head_00/entropy_ratio", "attention/layer_00/head_01/max_logit"} <= {
        name for name, _, _ in board.scalars
    }


def test_alarms_are_events(tmp_path):
    path, events = tmp_path / "run.jsonl", []
    with pytest.warns(AttentionWarning, match="step 2: self_attn, head 0: exploding logits.*regard.qk_clip") as seen:
        monitor = watched(path, gain=300.0, on_alarm=events.append)
    assert {one.filename for one in seen} == {__file__}  # the line that ran the model, not one of regard
    alarm = next(alarm for alarm in monitor.alarms if alarm.kind == "exploding logits")
    assert (alarm.step, alarm.severity, alarm.heads) == (2, "critical", (("self_attn", 0), ("self_attn", 1)))
    assert events == monitor.alarms
    (incident,) = monitor.incidents
    assert (incident.cause, incident.opened, incident.resolved) == ("scores too large", 2, None)
    assert (incident.code, incident.heads, incident.action) == ("RG301", alarm.heads, alarm.action)
    assert "regard.qk_clip(model, 50)" in repr(alarm) and str(alarm) in [str(one.message) for one in seen]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(line["alarm"], line["action"]) for line in lines if "alarm" in line]
    assert found == [(alarm.kind, alarm.action) for alarm in events]
    with pytest.raises(TypeError, match="on_alarm"):
        watched(None, on_alarm="mail")


@pytest.mark.parametrize(
    ("log_only", "advice"), [(True, "regard.qk_clip(model, 50)"), (False, "a lower threshold of QK-")]
)
def test_an_alarm_does_not_suggest_a_clip_that_is_in_use(log_only, advice):
    model, inside = layer(gain=300.0), []
    clip = regard.QKClip(model, threshold=1e6, log_only=log_only)
    with regard.Monitor(model, every=1, budget=1.0, on_alarm=inside.append):
        model(torch.randn(2, 24, 16)).mean().backward()
        clip.step()
        with pytest.warns(AttentionWarning, match="exploding logits"):
            model(torch.randn(2, 24, 16))
    clip.close()
    (alarm,) = [alarm for alarm in inside if alarm.kind == "exploding logits"]
    assert f"bound them with regard.using(model, qk_norm=True), {advice}" in alarm.action


def test_a_monitor_prints_what_it_watches():
    with pytest.warns(AttentionWarning):
        monitor = watched(None, gain=300.0)
    counts = "2 samples up to step 2, layers watched: 1, not watched: 0, incidents: 1"
    assert str(monitor) == repr(monitor) == f"Monitor(TransformerEncoderLayer, every=1): {counts}"


def test_an_output_that_is_not_finite_is_the_gravest_event():
    model, seen = layer(), []
    with torch.no_grad():
        model.self_attn.in_proj_weight[40:] = math.nan  # values of head 1
    told = pytest.warns(AttentionWarning, match="its output is NaN or infinite; its queries, keys or values already")
    with regard.Monitor(model, every=1, budget=1.0, log=seen.append) as monitor, told:
        model(torch.randn(1, 24, 16))
    (alarm,) = monitor.alarms
    assert (alarm.kind, alarm.severity, alarm.step) == ("not finite", "critical", 1)
    assert seen[0]["attention/alarms"] == 1


@pytest.mark.parametrize("gain", [1.0, 300.0])
def test_the_largest_logit_alone(gain):
    found = []
    for metrics in (None, ("max_logit",)):
        rows = []
        with pytest.warns(AttentionWarning) if gain > 1.0 else pytest.MonkeyPatch.context():
            monitor = watched(rows.append, gain=gain, metrics=metrics)
        rows = [row for row in rows if "attention/max_logit" in row]
        found.append([row["attention/max_logit"] for row in rows])
        assert any(alarm.kind == "exploding logits" for alarm in monitor.alarms) is (gain > 1.0)
        assert len(monitor.incidents) == (gain > 1.0)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert rows[0].keys() == {"step", "attention/max_logit", "attention/layer_00/max_logit", "attention/alarms"}
    with pytest.raises(ValueError, match="metrics must be"):
        watched(None, metrics=("entropy",))


def test_nan_is_told_within_two_steps_between_samples():
    """It was told 60 steps late at every=100."""
    model, events = layer(), []
    monitor = regard.Monitor(model, every=100, on_alarm=events.append, budget=1.0)
    for _ in range(200):  # beyond the dense start
        monitor._sampler.schedule.take(monitor.steps)
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(1, 60):
            model(torch.randn(2, 24, 16))
            if step == 50:
                with torch.no_grad():
                    model.linear1.weight[0, 0] = math.nan
    assert 50 < events[0].step <= 53 and events[0].kind == "not finite"
    assert "the last finite step was 50" in events[0].text


def test_a_large_logit_between_samples_draws_a_sample():
    model = layer()
    with regard.Monitor(model, every=1000, budget=1.0) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        monitor._sampler.schedule.gap, monitor._sampler.schedule._next = 1000, 1000
        for step in range(2, 60):
            model(torch.randn(2, 24, 16))
            if step == 50:
                with torch.no_grad():
                    model.self_attn.in_proj_weight[:32] *= 300
        (incident,) = monitor.incidents
    assert 50 < incident.opened <= 55 and incident.severity == "critical"


@pytest.mark.parametrize("moves", [True, False])
def test_a_loss_that_jumps_is_an_incident_that_resolves(moves):
    model = layer()
    with regard.Monitor(model, every=2, budget=1.0) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(1, 70):
            model(torch.randn(2, 24, 16))
            if step == 40 and moves:
                with torch.no_grad():
                    model.self_attn.in_proj_weight[:32] *= 2
            monitor.step(loss=torch.tensor(2.0 + 0.01 * (step % 3) + (40 <= step < 50)))
    (incident,) = monitor.incidents
    assert incident.cause == f"loss jumped, attention {'with it' if moves else 'as before'}"
    assert incident.opened <= 44 and 49 <= incident.resolved <= 60


def test_a_loss_that_stays_at_a_new_level_is_settled_and_not_resolved():
    """It was "back in its band" 64 steps later, because the new level was the band then."""
    every, events = EveryStep(incidents := Incidents()), []
    for step in range(1, 500):
        level = 2.0 if step < 60 else 6.0 if step < 200 else 9.0 if step < 300 else 2.0
        every.observe(step, "loss", level + 0.01 * (step % 3))
        events += [(one.event, step) for one in every.judge(step, every.describe())]
        if step == 150:
            (incident,) = incidents.all
            assert incident.resolved is None and not incidents.find_open()
            assert incident.text == "the loss stays at 6 since step 60, 2.01 before"
            again = EveryStep(incidents)
            again.load(json.loads(json.dumps(every.state())), step)
            every = again
    assert [event for event, _ in events] == ["opened", "settled", "reopened", "settled", "resolved"]
    assert [60 <= events[0][1] < 70, 120 <= events[1][1] <= 130, 200 <= events[2][1] < 210] == [True] * 3
    assert incident.resolved >= 300 and incident.text == "the loss is back in its band"


def test_a_loss_in_any_number_type_is_followed_and_another_is_told_once():
    """A loss in NumPy's float32 was ignored without a word."""
    model = layer()
    with regard.Monitor(model, every=1000) as monitor, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", AttentionWarning)
        for loss in (np.float32(2.5), [2.0], torch.zeros(3), torch.zeros(3)):
            model(torch.randn(2, 24, 16))
            monitor.step(loss=loss, grad_norm=np.float64(1.5))
            assert monitor._every_step.loss.last == 2.5 and monitor._every_step.gradient.last == 1.5
    (told,) = [str(one.message) for one in seen]
    assert told == "loss is not watched: it must be a number or a tensor of one, got list"


def test_gradients_that_vanish_are_told():
    def told(norms):
        model = layer()
        with regard.Monitor(model, every=1000, budget=1.0) as monitor, warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionWarning)
            for norm in norms:
                model(torch.randn(2, 24, 16))
                monitor.step(loss=1.0, grad_norm=torch.tensor(norm))
            return [(one.cause, one.code) for one in monitor.incidents]

    assert told([1.0] * 14 + [0.0] * 5) == [("no gradient", "RG620")]
    assert told([1.0] * 14 + [0.0, 0.0, 1.0] * 2) == [] == told([0.0] * 8)  # steps that a loss scale skips


def test_values_that_are_lost_from_one_step_to_the_next():
    """Neither the loss nor ten samples of dead heads show it: the optimizer brings them back within a few steps."""
    model = layer()
    with regard.Monitor(model, every=1000, budget=1.0) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        monitor._sampler.schedule.gap, monitor._sampler.schedule._next = 1000, 1000
        for step in range(1, 40):
            if step in (20, 24):
                with torch.no_grad():
                    model.self_attn.in_proj_weight[32:] *= 0.01 if step == 20 else 100.0
                    model.self_attn.in_proj_bias[32:] *= 0.01 if step == 20 else 100.0
            model(torch.randn(2, 24, 16))
            monitor.step(loss=1.0)
        (incident,) = monitor.incidents
    assert incident.cause == "values lost" and incident.opened == 21 and incident.severity == "warning"
    assert "the norm of the values of self_attn fell from" in incident.text or incident.resolved is not None


def test_a_logit_that_jumps_is_a_warning_where_one_beyond_100_is_a_note():
    pulse, incidents = Pulse(layer()), Incidents()
    for top in (2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 400.0, 410.0):
        pulse._follow("self_attn", 0.25, 1.0, top)
    pulse.close()
    (alarm,) = incidents.tell(10, pulse.sudden)
    assert (alarm.cause, alarm.severity) == ("scores too large", "warning")
    assert "the largest logit of self_attn rose from 2.5 to 410 between two steps" in alarm.text


class Causal(nn.Module):
    """One layer of attention whose settings a fault changes."""

    def __init__(self):
        super().__init__()
        self.token, self.qkv, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
        self.causal, self.mask, self.scale = True, None, None

    def forward(self, ids):
        q, k, v = self.qkv(self.token(ids)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal and self.mask is None, scale=self.scale
        )
        return self.out(o.transpose(1, 2).flatten(2))


VISIBLE = torch.ones(12, 12, dtype=torch.bool).tril()


def overwrite(model, step):
    if step == 30:
        model.token.weight.data[:8].normal_()


def repeat_batches(times):
    def act(model, step):
        torch.manual_seed(step if step < 30 else 30 + (step - 30) // times)

    return act


@pytest.mark.parametrize(
    ("act", "cause", "text"),
    [
        (lambda model, step: setattr(model, "causal", step < 30), "sees the future", "lets queries see later keys"),
        (lambda model, step: setattr(model, "mask", VISIBLE if step < 30 else torch.zeros(12, 12)), "sees the future",
         "lets queries see later keys"),
        (lambda model, step: setattr(model, "mask", None if step < 30 else VISIBLE), "", ""),
        (lambda model, step: setattr(model, "causal", step % 4 > 0), "", ""),
        (lambda model, step: setattr(model, "scale", 0.5 if step < 30 else 2.0), "scores too large", "by 2, by 0.5"),
        (lambda model, step: setattr(model, "scale", 0.5 if step < 30 else 0.2), "scores too small", "by 0.2, by 0.5"),
        (lambda model, step: setattr(model, "scale", 0.5 + 0.3 * (step % 2)), "", ""),
        (overwrite, "weights overwritten", "token.weight moved by"),
        (repeat_batches(100), "same batch again", "the same batch"),
        (repeat_batches(2), "", ""),
    ],
)  # fmt: skip
def test_what_changes_besides_the_optimizer_is_told_within_three_steps(act, cause, text):
    torch.manual_seed(0)
    model = nn.Sequential(Causal())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = regard.Monitor(model, every=1000, budget=1.0)
    monitor._sampler.schedule.gap = monitor._sampler.schedule._next = 1000
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(36):
            act(model[0], step)
            ids = torch.randint(32, (2, 12))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=1.0)
        found = [one for one in monitor.incidents if one.severity != "note"]
    assert [one.cause for one in found] == [cause] * bool(cause)
    assert all(text in one.text and 31 <= one.opened <= 34 for one in found)


def test_steps_that_grow_are_told_and_a_warm_up_is_not():
    def told(factor):
        moves, steps = WeightMoves(layer()), []
        for step in range(200):
            found = moves.add({"a": 0.004 * factor(step), "b": 0.006 * factor(step)})
            steps += [(step, one.kind) for one in found]
        return steps[:1]

    assert told(lambda step: 1.05 ** max(0, step - 100)) == [(139, "steps too large")]
    assert told(lambda step: 30.0 if step >= 100 else 1.0) == [(102, "steps too large")]
    assert told(lambda step: min(1.0, (step + 1) / 50)) == told(lambda step: 3.0 if step >= 100 else 1.0) == []
    assert told(lambda step: 1.0 + (step % 50) / 25) == []  # restarts
    assert told(lambda step: 100.0 if step == 100 else 1.0) == [(101, "overwritten")]  # all of them, once


def test_nothing_of_ours_ends_a_step():
    """A rule's KeyError ended a training step once, and so did what on_alarm raised."""
    model = layer(gain=300.0)

    def fail(alarm):
        raise KeyError("no such channel")

    monitor = regard.Monitor(model, every=1, budget=1.0, on_alarm=fail)
    with monitor, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(2, 24, 16))
        monitor._incidents.add = lambda *arguments: {}["collapsed"]
        for _ in range(3):
            model(torch.randn(2, 24, 16))
    messages = [str(one.message) for one in seen]
    assert sum("on_alarm raised at step 2: KeyError" in text for text in messages) == 1
    assert sum("Monitor failed at step 4: KeyError" in text for text in messages) == 1 and len(messages) == 3


def test_a_resumed_monitor_goes_on_where_it_was():
    model, rows = layer(), []
    with regard.Monitor(model, every=16, budget=1.0) as monitor:
        for _ in range(100):
            model(torch.randn(1, 24, 16))
        state = json.loads(json.dumps(monitor.state_dict()))
    with regard.Monitor(model, every=16, budget=1.0, log=rows.append) as resumed:
        resumed.load_state_dict(state)
        for _ in range(20):
            model(torch.randn(1, 24, 16))
    assert resumed.steps == 120 and [row["step"] for row in rows] == [105, 113]  # no dense start


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.parametrize("given", ["as written", "compiled"])
def test_compiled_training_is_watched_without_a_graph_break(given):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, rows = layer(), []
    with torch.no_grad():
        model.self_attn.in_proj_weight[:32] *= 20
    if given == "as written":  # what TrainingArguments(torch_compile=True) leads to
        monitor = regard.Monitor(model, every=1, log=rows.append, metrics=("max_logit",), budget=1.0)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        monitor = regard.Monitor(compiled, every=1, log=rows.append, metrics=("max_logit",), budget=1.0)
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        for _ in range(3):
            compiled(torch.randn(2, 24, 16))
            monitor.step(loss=1.0)
    samples = [row for row in rows if "attention/max_logit" in row]
    tops = [row["attention/layer_00/max_logit"] for row in samples]
    assert len(tops) == 3 and min(tops) > 20.0 and samples[-1]["attention/loss"] == 1.0
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
