"""Which forwards `regard.qk_clip` counts, and that nothing of its watching is left behind."""

import contextlib
import copy
import io
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from qk_clip_data import Self, exploded, logits, ours, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.health import AttentionWarning
from regard.health.capture import interception


def test_masks_and_evaluation_do_not_count():
    model = regard.nn.MultiheadAttention(8, 2)
    x, keys = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    keys[:, 3:] *= 1e5  # only hidden keys are large
    seen = (torch.arange(6) < 3).expand(1, 1, 6, 6)
    hidden = torch.zeros(1, 1, 6, 6).masked_fill(~seen, -math.inf)
    for mask in (seen, hidden):
        model(x, keys, attn_mask=mask).sum().backward()
        assert regard.qk_clip(model, 1e3).heads == []
    model.eval()(x, keys)
    with torch.no_grad():
        model.train()(x, keys)
    assert regard.qk_clip(model, 1e3).max_logit == {}
    model(x, keys)
    assert len(regard.qk_clip(model, 1e3).heads) == 2


@pytest.mark.parametrize("mask", [regard.Mask.causal(), (regard.Mask.causal(), regard.bias.alibi(2))])
def test_masks_that_are_no_tensor_hide_too(mask):
    """In silence nothing was measured beside them."""
    model, x = regard.nn.MultiheadAttention(8, 2), torch.randn(2, 6, 8)
    regard.qk_clip(model)
    model(x, attn_mask=mask).sum().backward()
    (largest,) = regard.qk_clip(model, 1e9).max_logit.values()
    _, stats = model.eval()(x, is_causal=True, return_stats=("max_logit",))
    assert torch.allclose(torch.tensor(largest), stats.max_logit.amax((0, 2)))


def test_the_largest_of_several_forwards_counts_and_nan_is_left_alone():
    model = regard.nn.MultiheadAttention(8, 2)
    regard.qk_clip(model, 1e9)
    x = torch.randn(1, 6, 8)
    tops = []
    for size in (1.0, 30.0, 2.0):
        model(size * x)
        tops.append(logits(model, size * x))
    assert torch.allclose(torch.tensor(regard.qk_clip(model, 1e9).max_logit[""]), torch.stack(tops).amax(0), rtol=1e-4)
    with torch.no_grad():
        model.q_proj.weight[:4] = math.inf
    weight = model.q_proj.weight.clone()
    model(x)
    assert [clip.head for clip in regard.qk_clip(model, 1e-3).heads] in ([], [1])
    assert torch.equal(model.q_proj.weight[:4], weight[:4])


def test_ranks_clip_by_the_largest_of_all(monkeypatch):
    model, x = regard.nn.MultiheadAttention(8, 2), torch.randn(1, 6, 8)
    regard.qk_clip(model)
    model(x)
    asked = []

    def all_reduce(numbers, operation, group):
        asked.append((operation, group))
        numbers[1:] = torch.maximum(numbers[1:], torch.tensor([0.0, 400.0]))  # what another rank saw

    def all_gather_object(said, shapes, group):
        said[:] = [shapes]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    weight = model.q_proj.weight.clone()
    (clip,) = regard.qk_clip(model, 100.0, group="mine").heads
    assert asked == [(torch.distributed.ReduceOp.MAX, "mine")]
    assert clip.head == 1 and clip.factor == 0.25
    assert torch.allclose(model.q_proj.weight[4:], 0.5 * weight[4:]) and torch.equal(
        model.q_proj.weight[:4], weight[:4]
    )


def test_the_first_call_says_that_it_begins_to_observe():
    """`heads=[]` alone would look as if no logit were too large."""
    model = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    assert "observed from now on" in repr(regard.qk_clip(model))
    model(torch.randn(2, 6, 16))
    assert "max_logit={'self_attn': [" in repr(regard.qk_clip(model))


def test_a_model_without_attention_is_reported():
    model = nn.Linear(4, 4)
    regard.qk_clip(model)
    model(torch.randn(2, 4))
    with pytest.raises(ValueError, match="no attention call"):
        regard.qk_clip(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
@pytest.mark.parametrize("way", ["compiled", "compiled in place", "by a part"])
def test_forwards_that_no_hook_sees(way):
    """What was compiled is clipped all the same; of other attentions a step without a clip is an error, no silence."""
    x = torch.randn(2, 6, 16)
    for attention in (ours, Self):
        model, optimizer = exploded(attention)
        called = {
            "compiled": lambda model=model: torch.compile(model, backend="eager"),
            "compiled in place": lambda model=model: model.compile(backend="eager") or model,
            "by a part": lambda model=model: model[1],
        }[way]()
        found = []
        for turn in range(3):
            called(x).square().mean().backward()
            optimizer.step()
            if attention is Self and way == "by a part" and turn == 1:
                with pytest.raises(ValueError, match="saw no training forward of it"):
                    regard.qk_clip(model, 50.0)
                break
            found.append(regard.qk_clip(model, 50.0).max_logit)
        assert found[0] == {}  # watching begins
        name = "1.inner" if attention is Self else "1"
        if len(found) > 1:
            assert found[1][name][0] > 100.0
            assert found[2][name][0] == pytest.approx(50.0, rel=1e-3)
        torch._dynamo.reset()


@pytest.mark.parametrize("attention", [ours, Self])
def test_what_torch_compile_returned_is_clipped_under_the_names_of_what_was_written(attention):
    model, optimizer = exploded(attention)
    compiled, x, found = torch.compile(model, backend="eager"), torch.randn(2, 6, 16), []
    for _ in range(3):
        compiled(x).square().mean().backward()
        optimizer.step()
        found.append(regard.qk_clip(compiled, 50.0))
    name = "1" if attention is ours else "1.inner"
    assert found[1].max_logit.keys() == {name}
    assert found[2].max_logit[name][0] == pytest.approx(50.0, rel=1e-3) and found[2].skipped == {}
    regard.qk_clip.stop(compiled)
    torch._dynamo.reset()


def test_calls_under_vmap_do_not_count():
    model, _ = exploded(ours)
    values = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x[None],)).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.randn(2, 6, 16))
    assert regard.qk_clip(model, 50.0).max_logit == {}


def test_a_fixed_temperature_does_not_count():
    torch.manual_seed(0)
    model = regard.nn.MultiheadAttention(8, num_heads=2, temperature=0.1)
    x, found = torch.randn(2, 6, 8), []
    regard.qk_clip(model)
    for _ in range(3):
        model(x).square().mean().backward()
        found.append(regard.qk_clip(model, threshold=1e6).max_logit[""])
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


@pytest.mark.filterwarnings("error")
def test_the_models_own_exception_comes_through():
    model, _ = exploded(ours)
    x = torch.randn(2, 6, 16)
    model(x).sum().backward()
    regard.qk_clip(model, 50.0)
    hooks = dict(model._forward_hooks)
    for wrong in (torch.randn(2, 6, 15), "text"):
        with pytest.raises((RuntimeError, TypeError)) as plain:
            copy.deepcopy(model).eval()(wrong)
        with pytest.raises(plain.type) as raised:
            model(wrong)
        assert str(raised.value) == str(plain.value) and "mutated" not in str(raised.value)
    model[0] = nn.Identity()
    with pytest.raises(ValueError, match="query must have shape"):
        model(torch.randn(2, 6, 15))
    assert interception.ACTIVE == interception.STATE.stack == []
    assert dict(model._forward_hooks) == hooks and not model[1]._forward_hooks
    model(x).sum().backward()
    assert regard.qk_clip(model, 50.0).max_logit["1"]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("way", [saved, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_watched_model_is_saved_and_copied(way, attention):
    model, _ = exploded(attention)
    x, layer = torch.randn(2, 6, 16), "1" if attention is ours else "1.inner"
    regard.qk_clip(model, 50.0)
    step(model, x)
    other = way(model)
    assert torch.equal(other(x), model(x))
    regard.qk_clip(other, 50.0)
    step(other, 2 * x)
    assert regard.qk_clip(other, 50.0).max_logit[layer][0] > 50.0
    step(other, x)
    assert regard.qk_clip(other, 50.0).max_logit[layer][0] <= 50.1
    assert regard.qk_clip(model, 50.0).max_logit[layer][0] > 50.0  # the first is watched as before
    regard.qk_clip.stop(model)
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_hooks_always_called


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("shape", [(0, 6, 16), (2, 0, 16)])
def test_an_empty_batch_has_no_logits(shape, attention):
    model, _ = exploded(attention)
    layer = "1" if attention is ours else "1.inner"
    regard.qk_clip(model, 50.0)
    model(torch.zeros(shape)).sum().backward()
    clipped = regard.qk_clip(model, 50.0)
    assert clipped.heads == [] and clipped.max_logit == {layer: [-math.inf] * 4}
    model(torch.randn(2, 6, 16)).sum().backward()
    model(torch.zeros(shape)).sum().backward()
    assert [clip.head for clip in regard.qk_clip(model, 50.0).heads] == [0]


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("first", ["qk_clip", "using"])
def test_beside_using_nothing_is_left_open(first, attention):
    model, _ = exploded(attention)
    x, depth = torch.randn(2, 6, 16), torch._C._len_torch_function_stack()
    if first == "qk_clip":
        regard.qk_clip(model, 50.0)
    with regard.using(model, temperature=2.0):
        regard.qk_clip(model, 50.0)
        for _ in range(2):
            step(model, x)
            with pytest.raises((RuntimeError, TypeError)):
                model("text")
            assert torch._C._len_torch_function_stack() == depth
        assert [clip.head for clip in regard.qk_clip(model, 50.0).heads] == [0]
    assert interception.ACTIVE == interception.STATE.stack == interception.STATE.scopes == []


class Hit(nn.Module):
    """Ctrl-C, when it is armed."""

    armed = False

    def forward(self, x):
        if self.armed:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("beside", ["alone", "under using"])
def test_ctrl_c_in_a_forward_leaves_nothing_open(beside, attention):
    """torch calls no hook then: the next forward, call, examination or stop closes what was left."""
    model, _ = exploded(attention)
    model.append(Hit())
    x, depth = torch.randn(2, 6, 16), torch._C._len_torch_function_stack()

    def interrupted():
        model[2].armed = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[2].armed = False

    def closed():
        assert interception.ACTIVE == interception.STATE.stack == interception.STATE.scopes == []
        assert torch._C._len_torch_function_stack() == depth and torch.backends.mha.get_fastpath_enabled()
        assert not model[1]._forward_hooks and not model[1]._forward_pre_hooks
        assert len(model._forward_hooks) == len(model._forward_pre_hooks)

    regard.qk_clip(model, 50.0)
    with regard.using(model, temperature=2.0) if beside == "under using" else contextlib.nullcontext():
        interrupted()
        interrupted()
        model(x).sum().backward()
        if beside == "alone":
            closed()
        assert [clip.head for clip in regard.qk_clip(model, 50.0).heads] == [0]
        interrupted()
    interrupted()
    regard.qk_clip(model, 50.0)
    closed()
    interrupted()
    model.eval()(100 * x)
    closed()
    assert max(regard.qk_clip(model.train(), 1e9).max_logit.popitem()[1]) < 100.0  # the evaluation does not count
    interrupted()
    regard.examine(model, [x])
    closed()
    interrupted()
    regard.qk_clip.stop(model)
    closed()
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_step_is_counted():
    model, optimizer = exploded(Self)
    regard.qk_clip(model, 50.0)
    model(torch.randn(2, 6, 16)).square().mean().backward()
    regard.qk_clip(model, 50.0)
    torch.compile(optimizer.step, backend="eager")()
    with pytest.raises(ValueError, match="saw no training forward of it"):
        regard.qk_clip(model, 50.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("attention", [ours, Self])
@pytest.mark.parametrize("first", ["monitor", "qk_clip"])
def test_beside_a_monitor_both_see_every_step(first, attention):
    model, optimizer = exploded(attention)
    x, layer, rows = torch.randn(1, 6, 16), "1" if attention is ours else "1.inner", []
    if first == "qk_clip":
        regard.qk_clip(model, 50.0)
    with regard.Monitor(model, every=1, log=rows.append, heads=True, budget=1.0), warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)  # its logits are beyond the limit
        regard.qk_clip(model, 50.0)
        for turn in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            tops = regard.qk_clip(model, 1e9).max_logit[layer]
            told = [row for row in rows if row["step"] == turn + 1 and "head" in row]
            assert [row["max_logit"] for row in told] == pytest.approx(tops, rel=1e-4)
    assert interception.ACTIVE == interception.STATE.stack == interception.STATE.scopes == []


def reentrant(function, x):
    return checkpoint(function, x.requires_grad_(), use_reentrant=True)


def offloaded(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.mark.parametrize(
    "run", [lambda model, x: model(x), partial(checkpoint, use_reentrant=False), reentrant, offloaded]
)
def test_queries_and_keys_are_kept_only_for_who_clips(run):
    model, x = regard.nn.MultiheadAttention(8, 2), torch.randn(2, 6, 8)
    with torch.no_grad():
        model.q_proj.weight[:4] *= 1e4
    run(model, x).sum().backward()
    assert not model._last
    assert regard.qk_clip(model, 1.0).max_logit == {}  # from the next step on
    run(model, x).sum().backward()
    assert 0 in [clip.head for clip in regard.qk_clip(model, 1.0).heads]
    assert bool((model(x, return_stats=("max_logit",))[1].max_logit[:, 0] < 1.001).all())
    regard.qk_clip.stop(model)
    run(model, x).sum().backward()
    assert not model._last


def test_a_layer_that_is_taken_out_is_asked_for_no_more():
    model = nn.Sequential(regard.nn.MultiheadAttention(8, 2), regard.nn.MultiheadAttention(8, 2))
    x = torch.ones(1, 3, 8)
    regard.qk_clip(model)
    model(x)
    assert regard.qk_clip(model).max_logit.keys() == {"0", "1"}
    del model[1]
    model(x)
    assert regard.qk_clip(model).max_logit.keys() == {"0"}
    regard.qk_clip.stop(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
def test_a_graph_is_made_anew_once_for_who_clips():
    model, x, graphs = regard.nn.MultiheadAttention(8, 2), torch.ones(1, 3, 8), []

    def made(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=made)
    compiled(x)
    before = len(graphs)
    regard.qk_clip(model)
    for _ in range(2):
        compiled(x)
        assert len(graphs) == before + 1 and regard.qk_clip(model).max_logit
    regard.qk_clip.stop(model)
