"""Calls that are measured after the forward, and samples that are read before the next one: the same numbers."""

import gc
import importlib
import weakref

import pytest
import torch
import transformers
from health_data import same_reading
from torch import nn

import regard
from regard.health.capture.call import Call
from regard.health.measure import postponed, recorder
from regard.health.measure.postponed import PostponedCall, can_wait, copy_first, measure_together
from regard.health.measure.recorder import Recorder
from regard.health.watching import timed_recorder
from regard.health.watching.timed_recorder import TimedRecorder

SDPA = nn.functional.scaled_dot_product_attention


def gpt2(layers=3):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=layers, vocab_size=20, n_positions=24, attn_pdrop=0.0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).train()


def watched(model, steps=3, **options):
    """The rows that a monitor logs of a model that learns."""
    torch.manual_seed(1)
    rows, optimizer = [], torch.optim.SGD(model.parameters(), 0.1)
    with regard.Monitor(model, every=1, log=rows.append, heads=True, budget=1.0, **options) as monitor:
        for _ in range(steps):
            ids = torch.randint(20, (3, 24))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert monitor.unmeasured == {} and monitor.samples == steps
    return rows


def same_rows(found, expected):
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, nan_ok=True)
            assert ours[name] == near, name


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_numbers_are_those_of_calls_measured_at_once(sequences, monkeypatch):
    found = watched(gpt2(), sequences=sequences)
    monkeypatch.setattr(timed_recorder, "MOST_BYTES", 0)  # each call alone, while the forward runs
    alone = watched(gpt2(), sequences=sequences)
    monkeypatch.setattr(TimedRecorder, "_can_wait", lambda *_: False)
    expected = watched(gpt2(), sequences=sequences)
    same_rows(found, expected)
    same_rows(alone, expected)


def test_layers_of_one_shape_are_measured_by_one_call(monkeypatch):
    shapes, measure = [], TimedRecorder._measure

    def count(self, call):
        shapes.append(tuple(call.q.shape))
        return measure(self, call)

    monkeypatch.setattr(TimedRecorder, "_measure", count)
    watched(gpt2(layers=4), steps=1)
    assert shapes == [(4, 2, 24, 8)]


class Writes(nn.Module):
    """Writes over its queries, its keys and its output after the call."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        q, k = (self.gain * x).detach(), x.clone()
        out = SDPA(q, k, x, is_causal=True)
        result = (self.gain * out).sum()
        for y in (q, k, out):
            y.fill_(7.0)
        return result


def test_what_a_model_writes_over_was_copied():
    x, rows = torch.randn(2, 2, 9, 8), []
    with regard.Monitor(Writes(), every=1, log=rows.append, budget=1.0) as monitor:
        monitor.model(x)
    assert monitor.unmeasured == {}
    _, stats = regard.attention(x[:1], x[:1], x[:1], is_causal=True, return_stats=("max_logit",))
    assert rows[0]["attention/max_logit"] == pytest.approx(stats.max_logit.max().item(), rel=1e-5)


def test_only_copies_of_the_measured_sequences_are_held():
    x = torch.randn(64, 2, 9, 8)
    call = Call(None, x, x, x, own=lambda rows: x, kind="sdpa", causal=True)
    small = copy_first(call, sequences=1)
    assert PostponedCall(("", 0), small, x[:1], None, 0.1).bytes == 4 * 2 * 9 * 8 * 4
    for y in (small.q, small.k, small.v):
        assert y.untyped_storage().nbytes() == 2 * 9 * 8 * 4
    with pytest.raises(RuntimeError, match="does not keep the model's own function"):
        small.own(None)


@pytest.mark.parametrize(
    "change",
    [
        dict(mask=torch.ones(9, 9, dtype=torch.bool)),
        dict(dropout=0.1),
        dict(obstacle="no"),
        dict(cross=True),
        dict(options=dict(softcap=5.0)),
        dict(options=dict(scale=torch.ones(2))),
        dict(k=torch.randn(1, 2, 12, 8)),
        dict(v=torch.randn(1, 2, 9, 8).double()),
    ],
)
def test_other_calls_do_not_wait(change):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    plain = dict(module=None, q=q, k=k, v=v, own=None, kind="sdpa", causal=True)
    assert can_wait(Call(**plain), "attn") and not can_wait(Call(**(plain | change)), "attn")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy takes log2 of 0, as a GPU does
def test_on_a_gpu_layers_read_as_one_by_one():
    """Its kernels in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the same kernels compiled")
    torch.manual_seed(0)
    calls = []
    for at in range(2):
        q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
        own = SDPA(q, k, v, is_causal=True, enable_gqa=True) + 0.01 * torch.randn(1, 4, 20, 8)
        calls.append(PostponedCall((str(at), 0), Call(None, q, k, v, None, "sdpa", causal=True), own, None, 0.1))

    def measure(call):
        return regard.attention(call.q, call.k, call.v, **call.arguments, return_stats=True)

    expected = measure_together(calls, measure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postponed, "_add_layer_by_layer", postponed._add_on_gpu)
        found = measure_together(calls, measure)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.difference, other.difference, rtol=1e-4, atol=0.0)
        same_reading(one.reading, other.reading)
        torch.testing.assert_close(one.reading.predicted, other.reading.predicted, rtol=1e-5, atol=0.0)


def test_layers_that_cannot_be_measured_are_named(monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(timed_recorder, "measure_together", fail)
    model = gpt2(layers=1)
    with regard.Monitor(model, every=1) as monitor, pytest.warns(regard.health.AttentionWarning, match="no room"):
        model(torch.randint(20, (1, 8)))
    assert list(monitor.unmeasured.values()) == ["measuring failed: MemoryError: no room"]


@pytest.fixture
def on_gpu(monkeypatch):
    """As if calls were on a GPU: samples are read when the next forward begins."""
    monkeypatch.setattr(TimedRecorder, "is_on_gpu", property(lambda self: True))


@pytest.mark.parametrize("metrics", [None, ("max_logit",)])
def test_a_sample_is_read_when_the_next_forward_begins(on_gpu, metrics):
    model, rows, ids = gpt2(), [], torch.randint(20, (1, 8))
    seen = []
    model.transformer.register_forward_pre_hook(lambda *_: seen.append([row["step"] for row in rows]))
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0, metrics=metrics):
        for _ in range(3):
            model(ids)
        assert seen == [[], [1], [1, 2]]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("name", ["alarms", "layers", "unmeasured", "samples", "spent"])
def test_an_attribute_reads_the_sample_that_waits(on_gpu, name):
    model, rows = gpt2(), []
    monitor = regard.Monitor(model, every=1, log=rows.append)
    model(torch.randint(20, (1, 8)))
    assert rows == []
    getattr(monitor, name)
    assert [row["step"] for row in rows] == [1] and monitor.samples == 1
    monitor.close()
    assert len(rows) == 1


def test_the_end_of_a_step_reads_it_too(on_gpu):
    model, rows = gpt2(), []
    with regard.Monitor(model, every=1, log=rows.append) as monitor:
        monitor.at_step(5)
        model(torch.randint(20, (1, 8)))
        monitor.end_step()
        assert [row["step"] for row in rows] == [5]


def test_an_alarm_can_stop_the_run_at_the_next_forward(on_gpu):
    class Stop(BaseException):  # other exceptions of on_alarm are told once and do not end the step
        pass

    def stop(alarm):
        raise Stop(alarm.kind)

    model, ids = gpt2(), torch.randint(20, (1, 8))
    monitor = regard.Monitor(model, every=1, budget=1.0, on_alarm=stop)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[0, 0] = torch.nan
    model(ids)
    with pytest.raises(Stop, match="not finite"):
        model(ids)
    monitor.close()


def llama(layers=2):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=20)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **sizes)).eval()


def generate_text(model):
    model.generate(torch.randint(20, (1, 300)), max_new_tokens=3, do_sample=False, cache_implementation="static")


class Event:
    """A GPU's event that has, or has not yet, come."""

    def __init__(self, has_come):
        self.query = lambda: has_come


@pytest.mark.parametrize(("is_done", "most"), [(True, 4), (False, 2)])
@pytest.mark.parametrize("batch", [torch.randint(20, (2, 300)), generate_text])
def test_statistics_that_are_read_after_the_forward_are_the_same(batch, is_done, most, monkeypatch):
    """All of a forward if the GPU waits for the host, two calls at a time if it is behind."""
    reports, held = [], []
    for room in (0.0, float("inf")):
        monkeypatch.setattr(Recorder, "_most_bytes", lambda self, device, room=room: room)
        monkeypatch.setattr(recorder, "record_event", lambda device: Event(is_done))
        read = Recorder._read_unread
        monkeypatch.setattr(Recorder, "_read_unread", lambda self: (held.append(len(self._unread)), read(self)))
        torch.manual_seed(2)
        reports.append(regard.examine(llama(layers=4), [batch, batch], checks=False))
        monkeypatch.undo()
    assert max(held) == most and reports[0].unmeasured == reports[1].unmeasured == []
    for ours, theirs in zip(reports[1].heads, reports[0].heads, strict=True):
        assert ours.to_json() == theirs.to_json()


def test_a_layer_that_is_not_faithful_is_found_after_the_forward(monkeypatch):
    monkeypatch.setattr(Recorder, "_most_bytes", lambda self, device: float("inf"))
    model, measure = llama(), Recorder._measure

    def wrong_in_the_first(self, call):
        out, stats = measure(self, call)
        return (2.0 * out if call.module is model.model.layers[0].self_attn else out), stats

    monkeypatch.setattr(Recorder, "_measure", wrong_in_the_first)
    ids = torch.randint(20, (1, 300))
    report = regard.examine(model, [ids], checks=False)
    assert [name for name, _ in report.unmeasured] == ["model.layers.0.self_attn"]
    monkeypatch.undo()
    expected = [head for head in regard.examine(model, [ids], checks=False).heads if head.index == 1]
    assert len(report.heads) == len(expected) == 2
    for head, want in zip(report.heads, expected, strict=True):  # its inputs are the faithful ones
        for name in ("entropy", "logit_variance", "distance"):
            assert head.statistics[name].mean == pytest.approx(want.statistics[name].mean, rel=1e-4)


def test_autocast_holds_for_what_is_read_of_its_forward(monkeypatch):
    """Queries of float32 beside values of bfloat16, which only autocast lets torch's attention take."""
    monkeypatch.setattr(Recorder, "_most_bytes", lambda self, device: float("inf"))

    class Mixed(nn.Module):
        def forward(self, x):
            return SDPA(x, x, x.bfloat16(), is_causal=True)

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(1, 2, 300, 8))

    report = regard.examine(Mixed(), [run], checks=False)
    assert report.unmeasured == [] and len(report.heads) == 2


class SharedKeys(nn.Module):
    """Self-attention whose keys and values are one sequence, for all of a batch."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return SDPA(q, q[:1], q[:1]).transpose(1, 2).flatten(-2)


def test_keys_that_are_broadcast_over_a_batch_are_measured():
    torch.manual_seed(0)
    model = nn.Sequential(SharedKeys(), SharedKeys()).train()
    with regard.Monitor(model, every=1, budget=1.0, sequences=3) as monitor:
        model(torch.randn(3, 12, 16))
    assert monitor.samples == 1 and monitor.unmeasured == {}


def test_a_sample_is_read_when_the_process_ends(monkeypatch):
    monkeypatch.setattr(TimedRecorder, "is_on_gpu", True)
    rows, model = [], gpt2()
    monitor = regard.Monitor(model, every=1, log=rows.append, budget=1.0)
    model(input_ids=torch.randint(20, (2, 24)))
    assert rows == []
    importlib.import_module("regard.health.monitor")._read_last_samples()
    assert len(rows) == 1 and monitor.samples == 1
    monitor.close()


def test_an_unread_sample_keeps_no_input_of_the_model_alive(monkeypatch):
    monkeypatch.setattr(TimedRecorder, "is_on_gpu", True)
    model, inputs = gpt2(), []
    model.transformer.h[-1].attn.register_forward_pre_hook(lambda module, given: inputs.append(weakref.ref(given[0])))
    monitor = regard.Monitor(model, every=1, budget=1.0)
    model(input_ids=torch.randint(20, (2, 24)))
    gc.collect()
    assert inputs[0]() is None
    monitor.close()


def test_an_incident_is_kept_where_on_alarm_stops_the_run():
    model = gpt2()

    def stop(alarm):
        raise KeyboardInterrupt("stop")

    with regard.Monitor(model, every=1, budget=1.0, on_alarm=stop) as monitor:
        nn.init.constant_(model.transformer.h[0].attn.c_attn.weight, float("nan"))
        with pytest.raises(KeyboardInterrupt, match="stop"):
            model(input_ids=torch.randint(20, (2, 24)))
        assert len(monitor.incidents) == 1


def test_a_float64_model_is_watched():
    rows = watched(gpt2().double(), steps=1)
    assert rows[0]["attention/max_logit"] == rows[0]["attention/max_logit"]
