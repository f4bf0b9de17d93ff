"""On a device without float64 (Apple's MPS) the reference and what takes wide numbers compute in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import regard
from regard import _facts


def take_away_float64(monkeypatch) -> None:
    """Let the CPU be taken for such a device; a float64 tensor made on the way would show in a dtype."""
    monkeypatch.setattr(_facts, "supports_float64", lambda device: False)


def test_mps_and_some_intel_gpus_have_no_float64(monkeypatch):
    assert _facts.supports_float64(torch.device("cpu")) and _facts.supports_float64(torch.device("cuda", 0))
    assert not _facts.supports_float64(torch.device("mps"))
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False))
    assert not _facts.supports_float64(torch.device("xpu", 0))


@pytest.mark.parametrize("name", ["softmax", "relu", "sigmoid", "entmax15", "entmax(alpha=1.002)"])
def test_attention_and_statistics_by_the_reference_stay_in_float32(name, monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    options = dict(is_causal=True, normalizer=name, return_stats=True)
    exact, _, wide = regard.reference.attention(q, k, v, **options)
    take_away_float64(monkeypatch)
    out, weights, stats = regard.reference.attention(q, k, v, **options)
    assert {out.dtype, weights.dtype, *(x.dtype for x in stats.values())} == {torch.float32}
    torch.testing.assert_close(out, exact.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.entropy, wide.entropy.float(), atol=1e-5, rtol=1e-5)
    fused = regard.attention(q, k, v, backend="reference", **options)[0]
    torch.testing.assert_close(fused, out)


def test_rows_and_their_derivatives_stay_in_float32(monkeypatch):
    scores = torch.tensor([[-1.0, 0.3, 2.0]])
    expected = torch.softmax(scores, -1)
    take_away_float64(monkeypatch)
    torch.testing.assert_close(regard.reference.normalize(scores), expected)
    assert regard.jacobian(scores).dtype == regard.vjp(scores, expected).dtype == torch.float32
    online = regard.OnlineSoftmax()
    online.update(scores)
    assert online.sum.dtype == torch.float32
