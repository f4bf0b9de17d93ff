"""GPU readings and norms under Triton's interpreter equal those of torch on the same inputs."""

import math

import pytest
import torch

pytest.importorskip("triton")
from health_data import invented, same_reading

from regard.health.capture.call import Call
from regard.health.measure import gpu_norms, gpu_reading, norms
from regard.health.measure.layer_reading import LayerReading

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy takes log2 of 0, as a GPU does
]


@pytest.mark.parametrize("masked", [False, True])
def test_a_reading_is_what_torch_makes_of_it(masked):
    batch, heads, queries = 2, 2, 11
    rows = torch.arange(batch * queries).reshape(batch, queries) % 3 != 1 if masked else None
    plain, other = LayerReading(heads), LayerReading(heads)
    for seed in (0, 1):
        stats = invented(batch, heads, queries, seed)
        plain._add(stats, rows, start=12)
        gpu_reading.update(other, stats, rows, start=12)
    same_reading(plain, other)


@pytest.mark.parametrize("masked", [False, True])
def test_layers_that_are_read_together_read_as_each_alone(masked):
    layers, batch, heads, queries = 3, 2, 2, 11
    stats = invented(layers * batch, heads, queries, seed=3)
    rows = torch.arange(layers * batch * queries).reshape(-1, queries) % 3 != 1 if masked else None
    alone = [LayerReading(heads) for _ in range(layers)]
    flat = torch.stack([reading.flat for reading in alone])
    histogram = torch.stack([reading.histogram for reading in alone])
    packed = torch.stack([stats[name] for name in gpu_reading.KEPT])
    gpu_reading.update_layers(flat, histogram, packed, rows, start=4)
    for layer, reading in enumerate(alone):
        own = slice(layer * batch, (layer + 1) * batch)
        gpu_reading.update(reading, {name: x[own] for name, x in stats.items()}, rows[own] if masked else None, start=4)
        same_reading(reading, LayerReading.from_sums(heads, flat[layer], histogram[layer]))


def test_samples_of_long_rows_are_compared():
    plain, other = LayerReading(1), LayerReading(1)
    stats = invented(1, 1, 2100, seed=2)  # every second row
    plain._add_features(_stacked(stats)[..., ::2])
    gpu_reading.update(other, stats, None, start=0)
    for name in ("products", "totals", "compared"):
        torch.testing.assert_close(getattr(other, name), getattr(plain, name), rtol=1e-5, atol=1e-6)


def _stacked(stats):
    from regard.health.measure.histogram import NAMES
    from regard.health.measure.layer_reading import _derived

    values = {**stats, **_derived(stats)}
    return torch.stack([values[name] for name in NAMES]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [False, True])
def test_the_difference_of_two_outputs(masked):
    torch.manual_seed(0)
    own = torch.randn(2, 40, 3, 24).transpose(1, 2)
    rebuilt = own + 0.01 * torch.randn(2, 3, 40, 24)
    rows = torch.rand(2, 40) > 0.5 if masked else None
    difference = gpu_norms.relative_difference(own, rebuilt, rows)
    torch.testing.assert_close(difference, norms.relative_difference(own, rebuilt, rows), rtol=1e-5, atol=0.0)
    rebuilt[0, 1, 3, 2] = math.nan
    assert gpu_norms.relative_difference(own, rebuilt, None).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("masked", [False, True])
def test_the_norms_that_predict_a_variance(masked):
    torch.manual_seed(0)
    q, k = 3.0 * torch.randn(2, 4, 40, 24), torch.randn(2, 2, 40, 24) + 4.0
    rows = torch.rand(2, 40) > 0.4 if masked else None
    call, flat = Call(None, q, k, k, None, "sdpa"), torch.ones(9, dtype=torch.float64)
    gpu_norms.add_predicted_variance(flat, 2, 7, q, k, rows, (1, 1), masked, scale=0.25)
    expected = norms.predicted_variance(call, rows, 0.25).double()
    torch.testing.assert_close(flat[2:6] - 1.0, expected, rtol=1e-5, atol=0.0)
    assert flat[[0, 1, 6, 7, 8]].tolist() == [1.0, 1.0, 1.0, 2.0, 1.0]
    gpu_norms.add_predicted_variance(flat, 2, 7, q, k, torch.zeros(2, 40, dtype=torch.bool), (1, 1), True, scale=0.25)
    assert flat[7] == 2.0  # no row counts, so it is no call


@pytest.mark.parametrize("masked", [False, True])
def test_norms_of_several_layers_are_those_of_each(masked):
    torch.manual_seed(0)
    q, k = torch.randn(6, 4, 70, 24), torch.randn(6, 2, 70, 24) + torch.arange(6.0)[:, None, None, None]
    rows = torch.rand(6, 70) > 0.4 if masked else None
    flat = torch.zeros(3, 9, dtype=torch.float64)
    gpu_norms.add_predicted_variance(flat, 2, 7, q, k, rows, (1, 1), masked, scale=0.25)
    rebuilt = q + 0.1 * torch.randn_like(q)
    differences = gpu_norms.relative_difference(q, rebuilt, rows, layers=3).view(3, 4)
    for layer in range(3):
        own = slice(2 * layer, 2 * layer + 2)
        counted, call = rows[own] if masked else None, Call(None, q[own], k[own], k[own], None, "sdpa")
        expected = norms.predicted_variance(call, counted, 0.25).double()
        torch.testing.assert_close(flat[layer, 2:6], expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(differences[layer], norms.relative_difference(q[own], rebuilt[own], counted))
    assert flat[:, 7].tolist() == [1.0] * 3
