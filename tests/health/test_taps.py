"""Taps: what they read of calls of every shape, and what they leave as it was."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from regard.health.capture import guard
from regard.health.watching import taps


def look(q, k, mask, whole):
    seen = torch.full((taps.FIRST + taps.MOST_HEADS,), -math.inf)
    seen[:2] = 0.0
    taps.note(q, k, None, mask, False, None, whole, seen)
    return seen[taps.FIRST : taps.FIRST + int(seen[0])]


@pytest.mark.parametrize(
    ("queries", "keys", "masks"),
    [
        ((8, 12, 4), (8, 12, 4), (8, 12, 12)),
        ((3, 12, 4), (3, 12, 4), (1, 12, 12)),
        ((2, 3, 5, 12, 4), (2, 3, 5, 12, 4), (2, 1, 1, 12, 12)),
        ((2, 3, 5, 12, 4), (2, 3, 5, 12, 4), (3, 1, 12, 12)),
        ((2, 3, 5, 12, 4), (2, 3, 5, 12, 4), (5, 12, 12)),
        ((2, 5, 12, 4), (5, 12, 4), (12, 12)),
        ((12, 4), (12, 4), (12, 12)),
        ((2, 5, 7, 4), (2, 5, 12, 4), "causal"),
    ],
)
def test_every_shape_that_torch_takes_is_read(queries, keys, masks):
    """A mask of three or five dims ended the user's step with a RuntimeError, or was read as one of other heads."""
    torch.manual_seed(0)
    q, k = torch.randn(queries), torch.randn(keys)
    mask = causal_lower_right(7, 12) if masks == "causal" else torch.rand(masks) > 0.5
    visible = torch.ones(7, 12, dtype=torch.bool).tril(5) if masks == "causal" else mask
    heads = queries[-3] if len(queries) > 3 else 1
    s = (q @ k.mT / 2.0).masked_fill(~visible, -math.inf).reshape(-1, heads, queries[-2], keys[-2])
    torch.testing.assert_close(look(q, k, mask, whole=True), s.amax((0, 2, 3)))
    torch.testing.assert_close(look(q, k, mask, whole=False), s[0].amax((1, 2)))


class Attends(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.project, self.inner, self.fails = nn.Linear(16, 16), inner, False

    def forward(self, x):
        h = self.project(x if self.inner is None else self.inner(x))[:, None]
        if self.fails:
            raise ValueError("the model's own")
        return F.scaled_dot_product_attention(h, h, h)[:, 0]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Attends(Attends()))


def test_a_failure_of_a_tap_does_not_end_the_step(model, monkeypatch, caplog):
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setattr(taps, "largest_of_few_rows", lambda *arguments: torch.zeros(2, 3))
    tapped = taps.Taps(model, whole=True, eagerly=True)
    model(torch.randn(2, 12, 16))
    tapped.close()
    assert "regard failed at taps.py" in caplog.text and not tapped.read()


def test_a_call_after_an_error_or_an_inner_module_is_booked_to_who_makes_it(model):
    """A call that no layer makes was booked to the layer in which an error was raised before."""
    tapped = taps.Taps(model, whole=True, eagerly=True)
    model(torch.randn(2, 12, 16))
    assert set(tapped.read()) == {"0", "0.inner"}  # the outer call comes after the inner module has ended
    model[0].inner.fails = True
    with pytest.raises(ValueError, match="the model's own"):
        model(torch.randn(2, 12, 16))
    far = torch.full((1, 1, 4, 16), 134.0)
    F.scaled_dot_product_attention(far, far, far)
    largest = {name: float(held[1:].amax()) for name, held in tapped.read().items()}
    assert largest == {"0": -math.inf, "0.inner": -math.inf}
    model[0].inner.fails = False
    taps.STATE.running.append(model[0])  # Ctrl-C in its forward
    assert tapped.read() and taps.STATE.running == []
    checkpoint(model, torch.randn(2, 12, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert taps.STATE.running == []  # torch ends what it computes anew by an error
    tapped.close()
    assert not any(module._forward_hooks or module._forward_hooks_always_called for module in model.modules())


def test_taps_that_are_dropped_are_gone_at_once(model):
    """What they fetch must not hold them: the next model's settings would be theirs until garbage is collected."""
    tapped = taps.Taps(model, whole=True)
    tapped.read()
    gone = weakref.ref(tapped)
    del tapped
    assert gone() is None


def test_compiled_models_that_are_not_watched_keep_their_graphs(model, monkeypatch):
    """Every graph of the process was dropped, and torch's answer to side effects under a checkpoint stayed another."""
    from torch._dynamo import config

    monkeypatch.setattr(taps, "_TAPPED", weakref.WeakSet())  # other tests' models may not be collected yet
    monkeypatch.setattr(taps.STATE, "allowed", None)
    monkeypatch.setattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)
    traced = []

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x):
            return self.project(x)

    torch._dynamo.reset()
    x = torch.randn(2, 12, 16)
    others = torch.compile(Other(), backend=lambda graph, _: traced.append("other") or graph)
    wrapped = torch.compile(lambda x: model(x), backend=lambda graph, _: traced.append("model") or graph)
    others(x), wrapped(x)
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    tapped = taps.Taps(model, whole=True)
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint is True
    others(x), wrapped(x)
    assert traced == ["other", "model", "model"] and set(tapped.read()) == {"0", "0.inner"}
    tapped.close()
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint is before is False
