"""`received`, `top_keys(k)` and `return_weights` against the weights of the float64 reference, with every option."""

import pytest
import torch

import regard
from regard import Mask


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


BOOL = torch.rand(2, 1, 9, 13, generator=torch.Generator().manual_seed(3)) > 0.3
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window and sink": dict(window=(3, 1), sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "soft cap": dict(softcap=2.0, temperature=0.7),
    "mask": dict(attn_mask=BOOL),
    "lengths": dict(key_lengths=torch.tensor([5, 13])),
    "documents": dict(attn_mask=Mask.documents([0, 4, 9]) & Mask.causal()),
    "bias": dict(attn_mask=draw(4, 9, 13, seed=5)),
    "entmax15": dict(normalizer="entmax15", is_causal=True),
    "sigmoid": dict(normalizer="sigmoid", window=(4, 4)),
    "policy": dict(temperature=regard.temperature.SSMax()),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_keys_get(name, monkeypatch):
    monkeypatch.setattr("regard._core.key_reading.LARGEST", 2 * 4 * 13 * 4)  # four queries at a time
    options, n = OPTIONS[name], 9 if name == "documents" else 13
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, n, 8, seed=1), draw(2, 2, n, 8, seed=2)
    out, stats = regard.attention(
        q, k, v, enable_gqa=True, return_stats=("entropy", "top_keys(3)", "received"), return_weights=[2, 3, -1],
        **options,
    )  # fmt: skip
    want, p = regard.reference.attention(q, k, v, enable_gqa=True, **options)[:2]
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert set(stats) == {"entropy", "received", "top_keys", "weights"}
    assert stats.received.shape == (2, 4, n) and stats.received.dtype == torch.float32
    torch.testing.assert_close(stats.received.double(), p.sum(2), rtol=1e-5, atol=1e-6)
    index, weight = stats.top_keys
    torch.testing.assert_close(weight.double(), p.topk(3).values, rtol=1e-5, atol=1e-6)
    assert torch.equal(index < 0, weight == 0)
    torch.testing.assert_close(
        p.gather(3, index.clamp_min(0)).where(index >= 0, 0.0), weight.double(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(stats.weights.double(), p[:, :, [2, 3, 8]], rtol=1e-5, atol=1e-6)


def test_the_output_keeps_its_gradients_and_its_shape():
    q, k, v = (draw(3, 5, 4, seed=at).requires_grad_() for at in range(3))
    out, stats = regard.attention(q, k, v, return_stats="received")
    assert out.shape == (3, 5, 4) and stats.received.shape == (3, 5) and not stats.received.requires_grad
    out.sum().backward()
    assert q.grad is not None
    _, stats = regard.attention(q, k, v, return_weights=4)
    assert stats.weights.shape == (3, 1, 5) and list(stats) == ["weights"]


def test_more_keys_asked_for_than_there_are():
    _, stats = regard.attention(*(draw(1, 1, 2, 4) for _ in range(3)), is_causal=True, return_stats=("top_keys(4)",))
    assert stats.top_keys.index[0, 0, 0].tolist() == [0, -1, -1, -1]
    assert stats.top_keys.weight[0, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(return_stats=("top_keys",)), "neither 'received' nor 'top_keys"),
        (dict(return_stats=("top_keys(0)",)), "k from 1 to 1024"),
        (dict(return_stats=("received", "entropie")), "did you mean 'entropy'"),
        (dict(return_stats="received", dropout_p=0.5), "dropout_p=0"),
        (dict(return_weights=[9]), "rows from -3 to 2 exist"),
        (dict(return_weights="all"), "must be rows"),
    ],
)
def test_what_is_refused(options, error):
    q = draw(1, 1, 3, 4)
    with pytest.raises((ValueError, TypeError), match=error):
        regard.attention(q, q, q, **options)


def test_inside_a_transform_it_says_so():
    q = draw(2, 3, 4)
    with pytest.raises(ValueError, match=r"torch.func"):
        torch.func.vmap(lambda x: regard.attention(x, x, x, return_stats="received")[0])(q)
