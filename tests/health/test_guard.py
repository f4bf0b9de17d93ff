"""A failure of ours inside somebody's forward never reaches it: faults at every place where calls are intercepted."""

import contextlib
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.health.capture import fused_call, guard, handwritten, interception, packages, torch_calls


class ByHand(nn.Module):
    """Attention in plain torch, its products called by keyword."""

    def __init__(self, product, weigh=None):
        super().__init__()
        self.qkv, self.product, self.weigh = nn.Linear(8, 24), product, weigh or product

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.weigh(F.softmax(self.product(q, k.mT) / 2, dim=-1), v)


class Fused(ByHand):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def added(a, b):
    flat = a.flatten(0, 1), b.flatten(0, 1)
    out = torch.zeros(len(flat[0]), a.shape[-2], b.shape[-1]).baddbmm(batch1=flat[0], batch2=flat[1], beta=0.0)
    return out.unflatten(0, a.shape[:2])


PRODUCTS = {
    "matmul": lambda a, b: torch.matmul(input=a, other=b),
    "half": lambda a, b: torch.matmul(a, other=b),
    "method": lambda a, b: a.matmul(other=b),
    "bmm": lambda a, b: torch.bmm(input=a.flatten(0, 1), mat2=b.flatten(0, 1)).unflatten(0, a.shape[:2]),
    "baddbmm": added,
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_by_keyword_are_followed(product):
    model, plain = ByHand(product, torch.matmul if product is added else None), ByHand(torch.matmul)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 8)
    report = regard.examine(model, [x], checks=False)
    assert len(report.heads) == 2 and report.unmeasured == []
    with torch.no_grad(), regard.using(model, temperature=2.0) as swap:
        found = model(x)
    with torch.no_grad(), regard.using(plain, temperature=2.0):
        assert swap.calls == 1 and torch.allclose(found, plain(x), atol=1e-6)
    rows = []
    with regard.Monitor(model, every=1, log=rows.append, budget=1.0):
        model(x).sum().backward()
    assert rows


def test_bloom_is_measured_and_changed():
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60)
    model, ids = transformers.BloomModel(config).eval(), torch.arange(4, 13)[None]
    assert len(regard.examine(model, [ids], checks=False).heads) == 8
    assert len(regard.look(model, ids).heads) == 8
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with regard.using(model, temperature=1.0):
            assert torch.allclose(model(ids).last_hidden_state, expected, atol=1e-5)
        with regard.using(model, temperature=4.0):
            assert not torch.allclose(model(ids).last_hidden_state, expected, atol=1e-3)


def test_scores_in_bfloat16_beside_values_in_float32():
    class Mixed(ByHand):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            p = torch.softmax(q.bfloat16() @ k.bfloat16().mT / 2, dim=-1)
            return p.float() @ v

    model, x = Mixed(None), torch.randn(2, 5, 8)
    assert regard.examine(model, [x], checks=False).unmeasured == []
    with regard.using(model, temperature=2.0):
        assert model(x).isfinite().all()


@pytest.mark.parametrize("gain", [0.5, 0.0])
def test_a_learned_number_may_multiply_the_weights(gain):
    class Adapted(ByHand):
        def __init__(self):
            super().__init__(None)
            self.gate = nn.Parameter(torch.full((1,), gain))

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return (self.gate * F.softmax(q @ k.mT / 2, dim=-1)) @ v

    model, x = Adapted(), torch.randn(2, 5, 8)
    report = regard.examine(model, [x], checks=False)
    assert not [one for one in report.findings if one.severity != "note"]
    if not gain:
        assert "a learned number, which is 0" in dict(report.unmeasured)[""]
        return
    q, k, _ = model.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    p = F.softmax(q @ k.mT / 2, dim=-1)
    assert report.heads[1].statistics["max_weight"].mean == pytest.approx(
        float(p.detach()[:, 1].amax(-1).mean()), rel=1e-5
    )
    with torch.no_grad(), regard.using(model, temperature=1.0):
        out = model(x)
    assert torch.allclose(out, model(x), atol=1e-6)


def fail(*_, **__):
    raise RuntimeError("a fault of ours")


FAULTS = {
    "enter": (interception, "is_given_tokens", Fused),
    "a call": (torch_calls, "Call", Fused),
    "bias": (handwritten, "_mask_of", ByHand),
}


@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.filterwarnings("ignore:regard.using intercepted no attention call")
def test_a_fault_of_ours_is_said_once_with_its_place(place, monkeypatch, caplog):
    module, name, kind = FAULTS[place]
    model, x = kind(torch.matmul), torch.randn(2, 5, 8)
    expected = model(x)
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(module, name, fail)
    with caplog.at_level(logging.WARNING, "regard"), regard.using(model, temperature=2.0):
        assert all(torch.equal(model(x), expected) for _ in range(2))
    said = [one.getMessage() for one in caplog.records if "a fault of ours" in one.getMessage()]
    assert said and len(said) == len(set(said)) and ".py:" in said[0]


class AllWays(nn.Module):
    """Attention by hand, by einsum, by sdpa, by torch's module and by regard's op."""

    def __init__(self):
        super().__init__()
        self.plain, self.fused, self.several = ByHand(torch.matmul), Fused(None), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        q, k, v = self.plain.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhid,bhjd->bhij", q, k).div(2) + torch.zeros(5, 5)
        summed = torch.einsum("bhij,bhjd->bhid", F.dropout(s.softmax(-1), 0.0), v)
        own = regard.attention(q, k, v, is_causal=True, softcap=5.0)
        return self.plain(x) + self.fused(x) + summed + own + self.several(x, x, x)[0].sum()


# what catches a fault, and what is computed in the place of the model's own: its errors are the user's
CATCHES = {"_enter_forward", "_leave_forward", "_observe", "_swap", "_run_swapped", "in_torch_layout"}


def places_of_faults():
    """(module, name) of every function and class that the modules of capture call."""
    for module in (fused_call, handwritten, interception, packages, torch_calls):
        for name, found in vars(module).items():
            own = str(getattr(found, "__module__", "")).startswith("regard.") and callable(found)
            if own and found.__module__ != guard.__name__ and name not in CATCHES:
                yield module, name


@pytest.mark.filterwarnings("ignore:regard.using intercepted no attention call")
@pytest.mark.filterwarnings("ignore::regard.health.monitor.AttentionWarning")
def test_no_fault_of_ours_reaches_a_forward_wherever_it_is(monkeypatch):
    monkeypatch.setattr(guard, "_log", logging.getLogger("faults that nobody reads"))
    model, x = AllWays(), torch.randn(2, 5, 8)
    expected = model(x)
    monitor = regard.Monitor(model, every=1, log=lambda row: None, budget=1.0)
    for module, name in places_of_faults():
        with contextlib.ExitStack() as stack:
            stack.enter_context(regard.using(model, temperature=1.0))
            with monkeypatch.context() as fault:
                fault.setattr(module, name, fail)
                out = model(x)  # the Monitor looks on, too
                assert torch.allclose(out, expected, atol=1e-5), name
                out.sum().backward()
        left = {key: value for key, value in vars(interception.STATE).items() if key != "sdpa_calls" and value}
        assert interception.ACTIVE == [] and left == {}, name
        assert torch.equal(model(x), expected), name
    monitor.close()


@pytest.mark.parametrize("name", ["_lacks_attention", "run_as_written"])
def test_a_fault_at_the_start_leaves_nothing_behind(name, monkeypatch):
    model = Fused(None)
    monkeypatch.setattr(interception, name, fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        regard.using(model, temperature=2.0)
    assert interception.ACTIVE == interception.STARTED == [] and not model._forward_pre_hooks


@pytest.mark.parametrize("role", ["swap", "observe"])
@pytest.mark.parametrize("after", [False, True])
def test_a_fault_of_a_swap_or_an_observer(role, after, monkeypatch, caplog):
    monkeypatch.setattr(guard, "_said", set())
    model, x, runs = Fused(None), torch.randn(2, 5, 8), []
    expected = model(x)

    def observe(call, name, run):
        runs.append(call.obstacle)
        if call.obstacle is not None:
            return run()
        if after:
            run()
        fail()

    with interception.Interception(model, **{role: fail if role == "swap" else observe}) as one, one.torch_calls():
        assert torch.equal(model(x), expected)
    assert "a fault of ours" in caplog.text
    if role == "observe":
        assert runs == [None, "regard failed on it: RuntimeError: a fault of ours"]


def test_functions_of_packages_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(guard, "_said", set())
    passing = packages._pass_by_name(lambda q, dropout_p=0.0: q + 1, fail)
    assert passing(1) == 2 and "a fault of ours" in caplog.text
    with pytest.raises(TypeError, match="unexpected"):
        passing(1, other=2)


def test_the_models_own_errors_and_what_was_asked_for_come_through():
    class Wrong(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x[..., :3], x)

    model = Wrong()
    one = interception.Interception(model, observe=lambda call, name, run: run())
    with one, one.torch_calls(), pytest.raises(RuntimeError) as raised:
        model(torch.randn(1, 2, 4, 8))
    with pytest.raises(RuntimeError) as plain:
        model(torch.randn(1, 2, 4, 8))
    assert str(raised.value) == str(plain.value)
    model = Fused(None)
    with regard.using(model, temperature=torch.ones(7)), pytest.raises(ValueError, match="temperature"):
        model(torch.randn(2, 5, 8))
