"""regard.Monitor warns of heads that are unhealthy or about to be, and not of healthy ones."""

import random
import warnings

import pytest
import torch
from torch import nn

import regard
from regard.health import AttentionWarning
from regard.health.watching.trends import SAMPLES, Trends, extrapolate, is_rising


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
    for kind in ("exploding logits", "collapsed", "dying gradient"):
        texts = [text for text in messages if f"{kind} in each of the last {SAMPLES} samples" in text]
        assert texts and all(", head " in text for text in texts)
    assert "1, head 0: exploding logits" in messages[0] and "; also 3 more heads" in messages[0]


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
    trends = Trends()
    return [text for row in rows for text in trends.add([row], [], {})]


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


def test_scatter_is_no_trend():
    draw = random.Random(0)
    assert warnings_for(rows([draw.uniform(30.0, 60.0) for _ in range(300)])) == []
    assert not is_rising([1.0] * 10)
    assert extrapolate([0, 1, 2], [1.0, 2.0, 3.0], 10) == pytest.approx(11.0)
    assert extrapolate([5, 5], [1.0, 3.0], 9) == 2.0


def test_a_problem_must_last():
    """One sample in between that is healthy, and the count begins again."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_weight[:32] *= 60.0
    x = torch.randn(1, 24, 16)
    with warnings.catch_warnings(), regard.Monitor(model, every=1, budget=1.0):
        warnings.simplefilter("error")
        for _ in range(2):
            for _ in range(SAMPLES - 1):
                model(x)
            model(1e-3 * x)
        for _ in range(SAMPLES - 1):
            model(x)
        with pytest.raises(AttentionWarning, match="exploding logits in each"):
            model(x)


def test_heads_that_are_sharp_by_design_may_sharpen():
    """Those that look at the token before, which findings exempt, too."""

    class Previous(nn.Module):
        def forward(self, x):
            eye = torch.eye(x.shape[-2]).expand(len(x), 1, -1, -1)
            return nn.functional.scaled_dot_product_attention(
                9.0 * eye.roll(1, -2), eye, x[:, None], is_causal=True, scale=1.0
            )

    heads = regard.examine(Previous(), [torch.randn(2, 24, 8)]).heads
    falling = rows([1.0] * 10, [0.2, 0.19, 0.17, 0.18, 0.15, 0.14, 0.12, 0.11, 0.09, 0.08])
    for seen, count in ((heads, 0), ([], 1)):
        trends = Trends()
        assert sum(len(trends.add([row], seen, {heads[0].index: "a"})) for row in falling) == count


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
    assert messages.startswith("self_attn, head 0: dead in each of the last 10 samples (values differ by 0")
