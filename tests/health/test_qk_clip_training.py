"""regard.QKClip: MLA, GQA and stacked projections, master copies, optimizer hook and trainer callbacks."""

import contextlib
import copy
import sys

import pytest
import torch
from qk_clip_data import Self, logits, ours, step
from torch import nn

import regard
from regard.health.capture.sdpa_name import SDPA

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=50)
LATENT = dict(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=2, n_group=1,
              topk_group=1, num_experts_per_tok=1, moe_intermediate_size=16, first_k_dense_replace=2)  # fmt: skip


def small(kind):
    """A tiny model of transformers, the name of its last attention, and the weights that make its queries."""
    transformers = pytest.importorskip("transformers")
    if kind.startswith("deepseek"):
        make = transformers.DeepseekV3Config if "v3" in kind else transformers.DeepseekV2Config
        more = {"topk_method": "greedy"} if "v2" in kind else {}
        config = make(**SIZES, **LATENT, **more, num_key_value_heads=4, q_lora_rank=None if "plain" in kind else 16)
    elif kind == "llama":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, attn_pdrop=0.0,
                                         resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(config).train()
    layer = "h.1.attn" if kind == "gpt2" else "layers.1.self_attn"
    return model, layer


def queries(attention):
    """The weight of the queries with its heads along the first dimension."""
    if hasattr(attention, "c_attn"):
        return attention.c_attn.weight.mT[:32]
    layer = getattr(attention, "q_b_proj", None) or attention.q_proj
    return layer.weight


def batch():
    return dict(input_ids=torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2)))


KINDS = ["deepseek_v3", "deepseek_v3 plain", "deepseek_v2", "llama", "gpt2"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_comes_to_the_threshold_on_the_same_batch(kind):
    model, layer = small(kind)
    attention = model.get_submodule(layer)
    with torch.no_grad():
        for head, size in ((0, 500.0), (2, 5e3)):
            queries(attention).unflatten(0, (4, -1))[head] *= size
    clip = regard.QKClip(model, threshold=2.0)
    step(model, batch())
    before = logits(model.eval(), batch(), layer)
    was = copy.deepcopy(attention)
    clipped = clip.step()
    after = logits(model, batch(), layer)
    assert before[0] > 4.0 and before[2] > 4.0 and clipped.skipped == {}
    torch.testing.assert_close(after, before.clamp_max(2.0), rtol=0.01, atol=0.0)
    assert {one.head for one in clipped.heads if one.layer == layer} == {at for at, top in enumerate(before) if top > 2}
    if kind.startswith("deepseek"):
        for name, value in attention.named_parameters():
            changes = name.startswith(("q_b_proj", "q_proj", "kv_b_proj"))
            assert changes != torch.equal(value, was.get_parameter(name)), name
        factor = 2.0 / before[2]
        new, old = (one.kv_b_proj.weight.unflatten(0, (4, -1))[2] for one in (attention, was))
        torch.testing.assert_close(new[:6], old[:6] * factor.sqrt())  # keys without position
        assert torch.equal(new[6:], old[6:])  # values
        new, old = (queries(one).unflatten(0, (4, -1))[2] for one in (attention, was))
        torch.testing.assert_close(new[:6], old[:6] * factor.sqrt())
        torch.testing.assert_close(new[6:], old[6:] * factor)  # rotary queries
    clip.close()
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(("frozen", "clips"), [("kv_b_proj", True), ("q_b_proj", False)])
def test_latent_attention_with_frozen_weights(frozen, clips):
    """The rotary key has no share of its own, so keys alone cannot hold a head."""
    model, layer = small("deepseek_v3")
    attention = model.get_submodule(layer)
    with torch.no_grad():
        queries(attention).unflatten(0, (4, -1))[1] *= 5e3
    getattr(attention, frozen).requires_grad_(False)
    clip = regard.QKClip(model, threshold=2.0)
    step(model, batch())
    before = logits(model.eval(), batch(), layer)
    clipped = clip.step()
    assert (layer in clipped.skipped) is not clips
    expected = before.clamp_max(2.0) if clips else before
    torch.testing.assert_close(logits(model, batch(), layer), expected, rtol=0.01, atol=0.0)
    clip.close()


def test_latent_attention_of_another_layout_is_skipped():
    model, layer = small("deepseek_v3")
    model.get_submodule(layer).qk_nope_head_dim = 5
    with pytest.raises(regard.nn.projections.NotFound, match="4 heads of 5"):
        regard.nn.projections.projections(model.get_submodule(layer), 4, 10)


def exploding(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), ours(**options))
    with torch.no_grad():
        model[1].q_proj.weight[:4] *= 300
    return model


def test_log_only_leaves_the_weights_and_says_what_would_be_clipped():
    model, x, seen = exploding(), torch.randn(2, 6, 16), []
    clip = regard.QKClip(model, 50.0, log_only=True, log=seen.append)
    step(model, x)
    weights = copy.deepcopy(model.state_dict())
    clipped = clip.step()
    assert [one.head for one in clipped.heads] == [0] and not clipped.applied
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    (row,) = seen
    assert row["attention/max_logit"] == row["attention/layer_00/max_logit"] == clipped.heads[0].max_logit
    assert (row["step"], row["attention/clipped_heads"]) == (1, 1)
    clip.close()


@pytest.mark.parametrize("make", [exploding, Self])
def test_an_optimizer_hook_clips_from_the_first_step_on(make):
    model, x = make(), torch.randn(2, 6, 16)
    name = "1" if make is exploding else "inner"
    if make is Self:
        with torch.no_grad():
            model.inner.in_proj_weight[:4] *= 300
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    clip = regard.QKClip(model, 50.0)
    handle = clip.hook(optimizer)
    model(x).square().mean().backward()
    before = logits(model, x, name)
    optimizer.step()
    assert clip.steps == 1 and [one.head for one in clip.last.heads] == [0]
    torch.testing.assert_close(logits(model, x, name), before.clamp_max(50.0), rtol=0.01, atol=0.0)
    handle.remove()
    model(x).square().mean().backward()
    optimizer.step()
    assert clip.steps == 1
    clip.close()
    with pytest.raises(TypeError, match="optimizer must be"):
        clip.hook("adam")


class Masters(torch.optim.SGD):
    """Steps float32 copies and writes them back, as mixed-precision optimizers do."""

    def __init__(self, parameters, where):
        super().__init__(parameters, lr=1e-3)
        self.where = where
        for parameter in self.param_groups[0]["params"]:
            master = parameter.detach().float().clone()
            if where == "state":
                self.state[parameter]["master_param"] = master
            else:
                parameter.main_param = master

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            found = self.state[parameter]["master_param"] if self.where == "state" else parameter.main_param
            found.sub_(1e-6 * parameter.grad.float())
            parameter.data.copy_(found)


@pytest.mark.parametrize("where", ["state", "attribute"])
def test_master_copies_stay_in_step(where):
    model, x = exploding().bfloat16(), torch.randn(2, 6, 16).bfloat16()
    optimizer = Masters(model.parameters(), where)
    clip = regard.QKClip(model, 50.0)
    clip.hook(optimizer)
    tops = []
    for _ in range(3):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        tops.append(max(clip.last.max_logit["1"]))
    assert tops[0] > 100.0 and tops[1:] == pytest.approx([50.0, 50.0], rel=0.02)
    weight = model[1].q_proj.weight
    master = optimizer.state[weight]["master_param"] if where == "state" else weight.main_param
    torch.testing.assert_close(weight, master.bfloat16(), rtol=0.01, atol=1e-6)
    clip.close()


def test_weights_that_the_optimizer_would_overwrite_are_skipped_by_name():
    model, x = exploding().bfloat16(), torch.randn(2, 6, 16).bfloat16()
    copies = {parameter: parameter.detach().float().clone() for parameter in model.parameters()}
    for masters in (None, copies.get):
        clip = regard.QKClip(model, 50.0, masters=masters)
        clip.follow(torch.optim.SGD(list(copies.values()), lr=1e-9))
        optimizer = torch.optim.SGD(list(copies.values()), lr=1e-9)
        clip.hook(optimizer)
        model(x).float().square().mean().backward()
        with pytest.warns(UserWarning, match="pass masters=") if masters is None else contextlib.nullcontext():
            optimizer.step()
        if masters is None:
            assert "pass masters=" in clip.last.skipped["1"] and clip.last.heads == []
        else:
            assert clip.last.skipped == {} and [one.head for one in clip.last.heads] == [0]
            weight = model[1].q_proj.weight
            torch.testing.assert_close(weight, copies[weight].bfloat16(), rtol=0.01, atol=1e-6)
        clip.close()


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = exploding()

    def forward(self, x, labels=None):
        return {"loss": self.inner(x).square().mean()}


def samples(count):
    torch.manual_seed(3)
    return [{"x": torch.randn(10, 16), "labels": torch.zeros(())} for _ in range(count)]


def test_a_trainer_clips_after_each_optimizer_step(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    monkeypatch.delitem(sys.modules, "marimo", raising=False)
    from transformers import Trainer, TrainingArguments

    model = Training()
    clip = regard.QKClip(model, 20.0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", learning_rate=1e-5,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=samples(32), callbacks=[clip.trainer_callback()]).train()
    assert clip.steps == 3 and max(clip.last.max_logit["inner.1"]) < 30.0
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers and much else
def test_lightning_clips_after_each_optimizer_step(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Training()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-5)

    task = Task()
    clip = regard.QKClip(task.model, 20.0)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=3,
        enable_model_summary=False, default_root_dir=str(tmp_path), callbacks=[clip.lightning_callback()],
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(samples(32), batch_size=2))
    assert clip.steps == 3 and max(clip.last.max_logit["inner.1"]) < 30.0
    assert not task.model._forward_hooks


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj))
        return nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("first", ["monitor", "clip"])
def test_a_monitor_beside_it_hides_no_call(first):
    """A sampled step has two captures, one within the other; both must learn that the model calls torch's function."""
    model = nn.Sequential(Functional())
    monitor = regard.Monitor(model, every=4, budget=1.0) if first == "monitor" else None
    with regard.QKClip(model, 100.0) as clip:
        monitor = monitor or regard.Monitor(model, every=4, budget=1.0)
        for _ in range(10):
            model(torch.randn(2, 5, 16))
            assert clip.step().max_logit.keys() == {"0"}
        monitor.close()


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 24)

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.first(x)[:, None].chunk(3, -1))


def test_a_model_of_which_nothing_can_be_clipped_is_reported_once():
    model, x = Unnamed(), torch.randn(2, 5, 8)
    clip = regard.QKClip(model, 1e-3)
    model(x)
    with pytest.warns(UserWarning, match="no attention layer of Unnamed.*q_proj/k_proj"):
        clip.step()
    model(x)
    assert clip.step().skipped.keys() == {""}
    clip.close()
    with regard.QKClip(model, 1e-3, log_only=True) as clip:
        model(x)
        assert clip.step().heads == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["qwen3", "cosine"])
def test_bounded_scores_need_no_clip_and_no_warning(kind):
    if kind == "cosine":
        model = regard.nn.MultiheadAttention(16, 2, score="cosine", batch_first=True)
        x = torch.randn(2, 5, 16)
        given = (x, x, x)
    else:
        transformers = pytest.importorskip("transformers")
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
        given = (torch.arange(10)[None],)
    with regard.QKClip(model.train(), 1e-3) as clip:
        model(*given)
        assert clip.step().skipped and not clip.last.heads


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="model"):
        regard.QKClip("model")
    with pytest.raises(ValueError, match="threshold"):
        regard.QKClip(nn.Linear(2, 2), 0.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.parametrize("way", ["whole", "in place", "blocks, checkpointed"])
def test_compiled_training_is_clipped_without_a_graph_break(way):
    """As TrainingArguments(torch_compile=True) does it: QKClip has the model as written, and what runs is compiled."""
    from torch._dynamo.utils import counters
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Functional()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if way.startswith("blocks") else self.inner(x)

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 16)
    with torch.no_grad():
        model[1].inner.q_proj.weight.mul_(300.0)
    clip, run = regard.QKClip(model, 5.0), model
    if way == "whole":
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        for module in [model] if way == "in place" else model:
            module.compile(fullgraph=True, backend="aot_eager")
    tops = []
    for _ in range(2):
        run(x).square().mean().backward()
        tops.append(clip.step().max_logit)
    assert tops[0].keys() == {"0.inner", "1.inner"} and max(tops[0]["1.inner"]) > 20.0
    assert max(tops[1]["1.inner"]) == pytest.approx(5.0, rel=0.01)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 2
    clip.close()
    assert "regard_logits" not in model[1].inner.__dict__ and not model[1].inner._forward_hooks
    assert nn.functional.scaled_dot_product_attention is SDPA
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.filterwarnings("ignore:The model runs compiled")
def test_a_monitor_beside_it_sees_compiled_steps_by_a_trainers_calls():
    """QKClip reads the taps first, at the optimizer's step; the monitor took them for empty, and watched nothing."""
    torch._dynamo.reset()
    model, x, rows = nn.Sequential(nn.Sequential(Functional())), torch.randn(2, 5, 16), []
    clip, monitor = regard.QKClip(model, 5.0), regard.Monitor(model, every=1, log=rows.append)
    compiled, tops = torch.compile(model, backend="aot_eager"), []
    for number in range(1, 5):
        monitor.at_step(number)
        compiled(x).square().mean().backward()
        tops.append(clip.step().max_logit["0.0"])
        monitor.end_step()
    monitor.close()
    clip.close()
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and monitor.steps == 4
    assert [row["attention/max_logit"] for row in rows] == pytest.approx([max(top) for top in tops])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.parametrize("first", ["monitor", "clip"])
def test_a_monitor_of_a_compiled_model_runs_steps_as_written_and_they_are_clipped(first):
    """QKClip waited for the graph, which a sampled step does not run, and said that the attention was unknown."""
    torch._dynamo.reset()
    compiled, rows = torch.compile(nn.Sequential(nn.Sequential(Functional())), backend="aot_eager"), []
    x, options = torch.randn(2, 5, 16), dict(every=2, log=rows.append, budget=1.0)
    monitor = regard.Monitor(compiled, **options) if first == "monitor" else None
    clip = regard.QKClip(compiled, 5.0)
    monitor = monitor or regard.Monitor(compiled, **options)
    for _ in range(4):
        compiled(x).square().mean().backward()
        assert clip.step().max_logit.keys() == {"0.0"}
    monitor.close()
    clip.close()
    assert [row["step"] for row in rows] == [1, 3]
    torch._dynamo.reset()


def test_steps_that_see_no_logits_warn_and_then_raise():
    model, x = exploding(), torch.randn(2, 6, 16)
    with regard.QKClip(model, 50.0) as clip:
        with pytest.warns(UserWarning, match="saw no training forward"):
            clip.step()
        for _ in range(8):  # said once
            clip.step()
        with pytest.raises(RuntimeError, match=r"at 10 of the last 10 steps.*strict=False"):
            clip.step()
        for _ in range(2):
            model(x)
            clip.step()
        assert clip.failed == 0
    with regard.QKClip(model, 50.0, strict=False) as clip:
        with pytest.warns(UserWarning, match="saw no training forward"):
            clip.step()
        for _ in range(12):
            clip.step()


def test_a_clip_that_an_optimizer_undoes_is_reported():
    """bf16 weights whose float32 copies the optimizer keeps to itself, and QKClip was given no optimizer."""
    model, x = exploding().bfloat16(), torch.randn(2, 6, 16).bfloat16()
    copies = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    with regard.QKClip(model, 50.0) as clip:
        model(x)
        clip.step()
        for parameter, copy_ in copies.items():
            parameter.data.copy_(copy_)
        model(x)
        with pytest.warns(UserWarning, match=r"has no effect.*pass masters="):
            clip.step()
        for step in range(17):  # written back after the clip was seen to hold: it shows at every second step
            for parameter, copy_ in copies.items() if step % 2 else ():
                parameter.data.copy_(copy_)
            model(x)
            clip.step()
        for parameter, copy_ in copies.items():
            parameter.data.copy_(copy_)
        model(x)
        with pytest.raises(RuntimeError, match=r"has no effect.*at 10 of the last 19 steps"):
            clip.step()


def test_layers_are_logged_by_number_and_steps_go_on_after_a_resume():
    torch.manual_seed(0)
    model, rows = nn.Sequential(*[ours() for _ in range(11)]), []
    with torch.no_grad():
        model[10].q_proj.weight.mul_(100.0)
    with regard.QKClip(model, 5.0, log=rows.append) as clip:
        model(torch.randn(2, 6, 16))
        clip.step()
        state = clip.state_dict()
        tops = clip.last.max_logit
    assert all(rows[0][f"attention/layer_{at:02}/max_logit"] == max(tops[str(at)]) for at in range(11))
    with regard.QKClip(model, 5.0, log=rows.append) as clip:
        clip.load_state_dict(state)
        model(torch.randn(2, 6, 16))
        clip.step()
    assert rows[1]["step"] == 2


@pytest.mark.parametrize(("margin", "most"), [(0.0, 2.0), ("auto", 1.02)])
def test_a_margin_holds_the_threshold_between_steps(margin, most):
    """One optimizer step in eight raises the logits by a tenth; without a margin they pass the threshold by that."""
    model, x, tops = exploding(), torch.randn(2, 6, 16), []
    with regard.QKClip(model, 5.0, margin=margin) as clip:
        for step in range(28):
            model(x)
            with torch.no_grad():
                model[1].q_proj.weight.mul_(1.0 if step % 8 else 1.1)  # the step
            tops.append(max(clip.step().max_logit["1"]) / 5.0)
    assert max(tops[4:]) < most and (margin == "auto" or max(tops[4:]) > 1.05)
    with pytest.raises(ValueError, match="margin must be"):
        regard.QKClip(model, margin=-1)


def test_an_optimizer_that_accelerate_prepared_clips_once_per_accumulation():
    """Its hook raised: the wrapper is an Optimizer without the hooks of one."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, x = exploding(), torch.randn(2, 6, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model, optimizer = accelerator.prepare(model, optimizer)
    with regard.QKClip(model, 50.0) as clip:
        clip.hook(optimizer)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert clip.steps == 2 and max(clip.last.max_logit["1"]) == pytest.approx(50.0, rel=0.01)
