"""Health on the GPU: readings by the kernels, a model against float64 eager weights, two streams and one result."""

import copy

import pytest
import torch
from health_data import invented, same_reading

import regard
from regard.health.measure import one_pass
from regard.health.measure.layer_reading import LayerReading

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 8192), (3, 5, 777)])
def test_a_reading_is_what_torch_makes_of_it(shape, masked):
    from regard.health.measure import gpu_reading

    batch, heads, queries = shape
    rows = torch.rand(batch, queries, device="cuda") > 0.3 if masked else None
    plain, other, again = (LayerReading(heads, "cuda") for _ in range(3))
    for seed in (0, 1):
        stats = invented(batch, heads, queries, seed, "cuda")
        plain._add(stats, rows, start=5)
        gpu_reading.update(other, stats, rows, start=5)
        gpu_reading.update(again, stats, rows, start=5)
    same_reading(plain, other)
    assert torch.equal(other.flat, again.flat)  # equal bits


@pytest.mark.parametrize(("dtype", "length", "rel"), [(torch.float32, 300, 1e-4), (torch.bfloat16, 1500, 0.02)])
def test_a_model_reads_as_its_eager_weights_in_float64(dtype, length, rel):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=300,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(3.0 if "q_proj" in name or "k_proj" in name else 1.0)
    model, ids = model.to(dtype), torch.randint(0, 300, (1, length))
    reports = [regard.examine(copy.deepcopy(model).cuda(), [dict(input_ids=ids)]) for _ in range(2)]
    assert reports[0].unmeasured == []
    exact = model.double()
    exact.set_attn_implementation("eager")
    with torch.no_grad():
        weights = exact(input_ids=ids, output_attentions=True).attentions
    for head, same in zip(reports[0].heads, reports[1].heads, strict=True):
        expected = regard.statistics.of_weights(weights[head.index][:, head.head])
        for name in ("entropy", "max_weight", "distance"):
            assert head.statistics[name].mean == pytest.approx(expected[name].mean().item(), rel=rel), name
            assert head.statistics[name].mean == same.statistics[name].mean


def test_an_unfaithful_layer_is_found_on_the_second_stream_and_the_batch_runs_again():
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = torch.nn.Sequential(Odd(), Odd()), torch.randn(1, 2, 600, 64, device="cuda", dtype=torch.bfloat16)
    from regard.health.measure import recorder as measure

    kept, calls = measure.Recorder._measure, []

    def wrong_at_first(self, call):
        out, stats = kept(self, call)
        calls.append(call.module)
        return (out * 2, stats) if call.module is model[0] else (out, stats)

    measure.Recorder._measure = wrong_at_first
    try:
        report = regard.examine(model, [x])
    finally:
        measure.Recorder._measure = kept
    assert [name for name, _ in report.unmeasured] == ["0"]
    assert {head.layer for head in report.heads} == {"1"}
    assert calls == [model[0], model[1], model[1]]  # the second time on the first one's own output


@pytest.mark.parametrize("batches", [1, 2])
def test_heads_told_early_are_those_told_late(monkeypatch, batches):
    """While the model is at work on later layers its first ones are told: from readings that are whole by then."""
    torch.manual_seed(3)
    sizes = dict(hidden_size=128, intermediate_size=128, num_attention_heads=8, num_key_value_heads=2, vocab_size=50)
    model = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=6, **sizes)).cuda().bfloat16()
    given = [dict(input_ids=torch.randint(50, (2, 700), device="cuda")) for _ in range(batches)]
    early = regard.examine(model, given, checks=False)  # ablation takes as many heads as its time allows
    monkeypatch.setattr(one_pass, "read_early", lambda recorder: None)
    late = regard.examine(model, given, checks=False)
    assert early.unmeasured == late.unmeasured == []
    for one, other in zip(early.to_json()["heads"], late.to_json()["heads"], strict=True):
        assert {name: (x, other[name]) for name, x in one.items() if x != other[name]} == {}


def test_a_monitor_measures_after_the_forward_what_it_measures_at_once(monkeypatch):
    from regard.health.watching.timed_recorder import TimedRecorder

    config = transformers.GPT2Config(
        n_embd=128, n_head=2, n_layer=3, vocab_size=64, n_positions=300, attn_pdrop=0.0, use_cache=False
    )
    ids, found, shapes, measure = torch.randint(64, (4, 300), device="cuda"), [], [], TimedRecorder._measure

    def count(self, call):
        shapes.append(tuple(call.q.shape))
        return measure(self, call)

    monkeypatch.setattr(TimedRecorder, "_measure", count)
    for at_once in (False, True):
        if at_once:
            monkeypatch.setattr(TimedRecorder, "_can_wait", lambda *_: False)
        torch.manual_seed(0)
        model, rows = transformers.GPT2LMHeadModel(config).cuda().train(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with regard.Monitor(model, every=1, log=rows.append, heads=True, budget=1.0) as monitor:
            for step in range(3):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                assert max((row["step"] for row in rows), default=0) == step  # read when the next forward begins
        assert monitor.unmeasured == {} and monitor.samples == 3
        found.append([row for row in rows if row["step"] == 1])
    assert shapes == [(3, 2, 300, 64)] * 3 + [(1, 2, 300, 64)] * 9
    for ours, theirs in zip(*found, strict=True):
        for name, value in theirs.items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True)
            assert ours[name] == near, name


def test_the_end_of_a_sampled_forward_does_not_wait(monkeypatch):
    from regard.health.watching.timed_recorder import TimedRecorder

    end, ended = TimedRecorder.end_forward, []

    def without_waiting(self):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if ended else before)  # the first one makes its tables
        try:
            end(self)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        ended.append(1)

    monkeypatch.setattr(TimedRecorder, "end_forward", without_waiting)
    layer = torch.nn.TransformerEncoderLayer(128, 2, batch_first=True, dropout=0.0).cuda().train()
    with regard.Monitor(layer, every=1, budget=1.0) as monitor:
        for _ in range(3):
            layer(torch.randn(2, 40, 128, device="cuda"))
    assert monitor.unmeasured == {} and monitor.samples == len(ended) == 3
