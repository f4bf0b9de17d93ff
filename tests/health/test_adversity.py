"""Health where it is hard: NaN, Ctrl-C, compiled and shared modules, odd masks, cached and autocast calls."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.capture import interception
from regard.health.capture.call import clean_mask
from regard.health.measure.batches import max_positions
from regard.health.report.page.report_page import render


class Att(nn.Module):
    """q, k, v by a Linear each, and torch's function: the smallest thing that attends."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, mask=None):
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """One shared module, sharp at its first use and flat at its second."""

    def __init__(self):
        super().__init__()
        self.att = Att()

    def forward(self, x):
        return self.att(self.att(x * 200) * 0 + x * 1e-3)


def nothing_is_left():
    return (
        interception.ACTIVE == []
        and not interception.STATE.stack
        and not interception.STATE.scopes
        and torch.overrides._get_current_function_mode_stack() == []
        and torch.backends.mha.get_fastpath_enabled()
    )


def test_nan_is_an_illness_and_no_clean_bill():
    model = nn.Sequential(Att(), Att())
    model[0].q.weight.data.fill_(math.nan)
    report = regard.examine(model, [torch.randn(2, 20, 32)])
    assert report.heads == []
    (finding,) = report.findings
    assert (finding.kind, finding.severity) == ("not finite", "critical")
    assert finding.places[0] == (0, 0) and ("0", 0) in finding.heads
    page = render(report)
    assert "critical findings" in page and "no problem found" not in page.split("<main>")[1]
    assert report.summary()[0] == "Not finite since 0."


@pytest.mark.parametrize("length", [20, 300])  # 300: the output that goes on is the rebuilt one
def test_nan_in_one_head_is_reported_that_head(length, tmp_path):
    model = nn.Sequential(Att())
    model[0].q.weight.data[8 * 2 + 1] = math.nan  # its third head's
    batches = [torch.randn(2, length, 32)] * 2
    report = regard.examine(model, batches)
    (finding,) = report.findings
    assert regard.examine(model, batches, snapshot=tmp_path / "so far").findings == [finding]
    assert (finding.heads, finding.places) == ((("0", 2),), [(0, 2)])
    assert "the first is 0 (1 of its 4 heads)." in finding.evidence
    assert report.summary()[0] == "Not finite since 0."


def test_what_was_measured_but_never_compared_has_no_numbers(monkeypatch):
    kept, calls = regard.health.measure.norms.relative_difference, []

    def stops_at_the_second(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return kept(*given)

    monkeypatch.setattr(regard.health.measure.norms, "relative_difference", stops_at_the_second)
    report = regard.examine(nn.Sequential(Att(), Att()), [torch.randn(1, 20, 32)])
    assert "KeyboardInterrupt" in report.interrupted
    assert {head.layer for head in report.heads} == {"0"}


def test_a_model_in_part_unmeasured_is_not_called_healthy():
    class HandmadeAttention(nn.Linear):
        """Attention by its name, in which nothing is caught."""

    model = nn.Sequential(HandmadeAttention(32, 32), Att())
    with torch.no_grad():
        model[1].q.weight *= 8.0  # neither diffuse nor sharp
    report = regard.examine(model, [torch.randn(4, 40, 32)])
    assert report.findings == []
    assert [name for name, _ in report.unmeasured] == ["0"]
    assert "no problem found where measured" in render(report)


def test_findings_of_a_module_used_twice_name_the_use():
    report = regard.examine(Twice(), [torch.randn(2, 64, 32)])
    assert {head.layer for head in report.heads} == {"att"}
    sharp = next(finding for finding in report.findings if finding.kind == "exploding logits")
    assert {index for index, _ in sharp.places} == {0}
    flat = next(finding for finding in report.findings if finding.kind == "diffuse")
    assert {index for index, _ in flat.places} == {1}
    assert report.summary()[0] == "Scale off since att."
    assert report.to_json()["findings"][0]["indices"]


def test_a_monitor_reports_the_uses_of_a_module_apart():
    rows = []
    with regard.Monitor(Twice().train(), every=1, log=rows.append, heads=True, budget=1.0) as monitor:
        monitor.model(torch.randn(1, 20, 32))
    assert [row["layer"] for row in rows[1:]] == ["att"] * 4 + ["att#2"] * 4
    assert "attention/layer_01/max_logit" in rows[0] and monitor.layers == {"layer_00": "att", "layer_01": "att#2"}


class Stopped(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = Att()

    def forward(self, x):
        self.att(x)
        raise KeyboardInterrupt


@pytest.mark.parametrize("watch", ["using", "monitor"])
def test_ctrl_c_in_a_forward_leaves_nothing_open(watch):
    model = Stopped().train()
    context = (
        regard.using(model, normalizer="sparsemax") if watch == "using" else regard.Monitor(model, every=1, budget=1.0)
    )
    with pytest.raises(KeyboardInterrupt), context:
        model(torch.randn(1, 9, 32))
    assert nothing_is_left()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_ctrl_c_then_the_next_step_is_watched_as_usual():
    class Once(Stopped):
        calls = 0

        def forward(self, x):
            self.calls += 1
            out = self.att(x)
            if self.calls == 1:
                raise KeyboardInterrupt
            return out

    model, rows = Once().train(), []
    monitor = regard.Monitor(model, every=1, log=rows.append, budget=1.0)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(1, 9, 32))
    model(torch.randn(1, 9, 32))
    assert [row["step"] for row in rows] == [2]
    monitor.close()
    assert nothing_is_left()


@pytest.mark.parametrize("value", [-1e4, -1e9, -math.inf])
def test_masks_that_hide_by_any_usual_number_give_the_same_reading(value):
    x, keep = torch.randn(2, 40, 32), torch.ones(2, 40, dtype=torch.bool)
    keep[1, 20:] = False
    mask = torch.zeros(2, 1, 1, 40).masked_fill(~keep[:, None, None], value)
    head = regard.examine(Att(), [lambda model: model(x, mask)]).heads[0]
    assert head.statistics["visible_keys"].count == 60
    assert head.statistics["visible_keys"].mean == pytest.approx((40 * 40 + 20 * 20) / 60)
    assert abs(head.statistics["mean_logit"].mean) < 1.0


def test_a_bias_that_falls_far_hides_nothing():
    slope = -torch.arange(40.0) * 400.0  # down to −15 600, in steps: a bias, not a mask
    assert clean_mask(slope).dtype == torch.float32
    assert torch.equal(clean_mask(slope), slope)


def test_rows_that_a_head_does_not_see_do_not_count_for_it():
    x, mask = torch.randn(1, 20, 32), torch.ones(1, 4, 20, 20, dtype=torch.bool)
    mask[:, 0, :5] = False
    first, second, *_ = regard.examine(Att(), [lambda model: model(x, mask)]).heads
    assert [head.statistics["max_logit"].count for head in (first, second)] == [15, 20]
    for name, spread in first.statistics.items():
        assert all(math.isfinite(number) for number in spread.to_json().values()), name
    assert first.statistics["visible_keys"].min == 20


def test_cross_in_the_name_of_the_model_is_not_cross_attention():
    model = nn.Module()
    model.cross_encoder = nn.ModuleList([Att()])
    x, mask = torch.randn(2, 30, 32), torch.ones(2, 1, 1, 30, dtype=torch.bool)
    mask[1, ..., 10:] = False
    report = regard.examine(model, [lambda m: m.cross_encoder[0](x, mask)])
    assert report.heads[0].layer == "cross_encoder.0"
    report = regard.examine(nn.ModuleDict({"cross_encoder": nn.ModuleDict({"deep": nn.ModuleDict({"att": Att()})})}),
                            [lambda m: m["cross_encoder"]["deep"]["att"](x, mask)])  # fmt: skip
    assert report.heads[0].statistics["entropy"].count == 40


def test_the_same_change_twice_is_one():
    report = regard.examine(Att(), [torch.randn(1, 20, 32)], what_if=["temperature=2", "temperature=2"])
    assert list(report.what_if) == ["temperature=2"]
    assert report.what_if["temperature=2"].heads[0].statistics["entropy"].count == 20


def test_functions_that_run_a_part_do_not_multiply_the_layers():
    model = nn.Sequential(nn.Identity(), Att())
    report = regard.examine(model, [lambda m: m[1](torch.randn(1, 20, 32))] * 3)
    assert [head.index for head in report.heads] == [0] * 4
    assert report.heads[0].statistics["entropy"].count == 60


def test_inference_mode_with_an_additive_mask():
    x = torch.randn(1, 20, 32)
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 1, 20).masked_fill(torch.arange(20) > 12, -math.inf)
        report = regard.examine(Att(), [lambda model: model(x, mask)])
    assert report.heads[0].statistics["visible_keys"].max == 13


@pytest.mark.parametrize(
    "start",
    [
        lambda model: regard.examine(model, [torch.zeros(1, 2)]),
        regard.Monitor,
        regard.qk_clip,
        lambda model: regard.using(model, scale=1.0),
    ],
    ids=["examine", "Monitor", "qk_clip", "using"],
)
def test_data_parallel_is_refused(start):
    with pytest.raises(ValueError, match=r"^model is nn\.DataParallel, .* use DistributedDataParallel$"):
        start(nn.DataParallel(nn.Linear(2, 2)))


def test_weights_on_the_meta_device_are_refused():
    with pytest.raises(ValueError, match="meta device"):
        regard.examine(Att().to("meta"), [torch.randn(1, 9, 32)])


def test_using_reaches_parts_regard_modules_and_recomputation():
    model, x = nn.Sequential(Att(), Att()), torch.randn(1, 9, 32)
    own = model[1](x)
    with regard.using(model, temperature=5.0) as swap:
        other = model[1](x)  # a part, called on its own
    assert swap.calls == 1
    assert not torch.equal(own, other)
    module = regard.nn.MultiheadAttention(32, 4, normalizer="entmax15").eval()
    own = module(x, x, x)
    with regard.using(module, normalizer="softmax", temperature=5.0) as swap:
        other = module(x, x, x)
    assert swap.calls == 1
    assert not torch.allclose(own, other)
    grads = []
    for recompute in (False, True):
        with regard.using(model, normalizer="entmax15"):
            model.zero_grad()
            run = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            run.square().sum().backward()
        grads.append(model[0].q.weight.grad.clone())
    torch.testing.assert_close(*grads)
    assert nothing_is_left()


def test_a_sink_that_cannot_join_is_left_out_in_using_as_in_a_what_if():
    class Sunk(nn.Module):
        def forward(self, x):
            return regard.attention(x, x, x, sink=torch.zeros(2))

    model, x = nn.Sequential(Sunk()), torch.randn(1, 2, 9, 8)
    with regard.using(model, normalizer="entmax15"):
        led = regard.examine(model, [x]).heads[0].statistics["entropy"].mean
        expected = regard.reference.attention(x, x, x, normalizer="entmax15")[0]
        torch.testing.assert_close(model(x), expected.float(), rtol=1e-4, atol=1e-5)
    asked = regard.examine(model, [x], what_if=["normalizer=entmax15"]).what_if["normalizer=entmax15"]
    assert asked.heads[0].statistics["entropy"].mean == pytest.approx(led, rel=1e-6)


def test_using_that_intercepts_nothing_says_so():
    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="intercepted no attention call"), regard.using(model, temperature=2.0):
        pass


def test_compiled_models_are_examined_watched_and_led():
    model, x = nn.Sequential(Att()), torch.randn(1, 9, 32)
    own = model(x)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    rows = []
    with regard.Monitor(compiled.train(), every=2, log=rows.append, budget=1.0):
        for _ in range(3):
            compiled(x)
    assert sorted({row["step"] for row in rows}) == [1, 3]
    assert len(regard.examine(compiled, [x]).heads) == 4
    with pytest.warns(UserWarning, match="as it was written"), regard.using(compiled, temperature=5.0):
        assert not torch.equal(compiled(x), own)
    torch.testing.assert_close(compiled(x), own)
    inner = regard.Monitor(model.train(), every=1)
    compiled(x)
    with pytest.warns(AttentionWarning, match="what torch.compile returned"):
        inner.close()
    in_place = Att()
    in_place.compile(backend="eager")
    assert len(regard.examine(in_place, [x]).heads) == 4
    assert nothing_is_left()


def test_a_monitor_sees_attention_in_the_root_module():
    rows = []
    with regard.Monitor(
        nn.MultiheadAttention(16, 2, batch_first=True), every=1, log=rows.append, heads=True, budget=1.0
    ) as monitor:
        monitor.model(*[torch.randn(2, 9, 16)] * 3, need_weights=False)
    assert [row["head"] for row in rows[1:]] == [0, 1]


def test_a_monitor_that_sees_nothing_says_so():
    with (
        regard.Monitor(nn.Linear(4, 4), every=1) as monitor,
        pytest.warns(AttentionWarning, match="nothing is watched"),
    ):
        monitor.model(torch.randn(2, 4))


def test_what_fails_in_measuring_does_not_fail_the_training(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of memory, say")

    model = Att().train()
    monkeypatch.setattr(regard.health.measure.recorder.Recorder, "_measure", broken)
    with regard.Monitor(model, every=1) as monitor, pytest.warns(AttentionWarning, match="out of memory, say"):
        out = model(torch.randn(1, 9, 32))
    assert out.isfinite().all()
    assert "RuntimeError" in monitor.unmeasured[""]


def test_noise_is_no_trend():
    torch.manual_seed(1)
    model = Att().train()
    with regard.Monitor(model, every=1, budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("error", AttentionWarning)
        for _ in range(40):
            model(torch.randn(1, 12, 32) * torch.rand(()) * 8)  # sharp and flat by turns, and nothing learns


def test_autocast_is_judged_by_the_dtype_it_casts_to():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60,
    )  # fmt: skip
    model, ids = transformers.LlamaModel(config).train(), torch.randint(1, 60, (2, 12))
    rows = []
    with torch.autocast("cpu", torch.bfloat16):
        with regard.Monitor(model, every=1, log=rows.append, heads=True, budget=1.0):
            model(input_ids=ids)
        report = regard.examine(model, [dict(input_ids=ids)])
    assert len(rows) == 5
    assert report.unmeasured == []
    assert report.heads[0].dtype == "bfloat16"


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("static", [False, True])
def test_a_cached_query_stands_behind_its_keys(chunk, static):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.LlamaModel(config), torch.randint(1, 60, (2, 15))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(20.0 if "q_proj" in name or "k_proj" in name else 1.0)

    def steps(model):
        past = transformers.StaticCache(config=config, max_cache_len=24) if static else transformers.DynamicCache()
        for start in range(0, 15, chunk):
            model(input_ids=ids[:, start : start + chunk], past_key_values=past, use_cache=True)

    whole, cached = regard.examine(model, [dict(input_ids=ids)]), regard.examine(model, [steps])
    assert cached.unmeasured == []
    for a, b in zip(whole.heads, cached.heads, strict=True):
        for name in ("distance", "entropy", "visible_keys", "first_key_mass"):
            assert b.statistics[name].mean == pytest.approx(a.statistics[name].mean, rel=1e-4), name
            assert b.statistics[name].max == pytest.approx(a.statistics[name].max, rel=1e-4), name
        assert dict(b.curves["distance"]) == pytest.approx(dict(a.curves["distance"]), rel=1e-4, abs=1e-5)


def test_positions_that_a_table_keeps_for_itself_are_not_offered():
    transformers = pytest.importorskip("transformers")
    sizes = dict(max_position_embeddings=130, num_hidden_layers=1, num_attention_heads=1, hidden_size=16, vocab_size=30)
    for kind, room in (("Roberta", 128), ("Bert", 130), ("OPT", 130)):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        assert max_positions(transformers.AutoModel.from_config(config)) == room, kind
