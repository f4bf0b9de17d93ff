"""Stick-breaking by its definition, and what its record states: an order of keys and a trace."""

from pathlib import Path

import pytest
import torch

import regard
from regard import normalizers


def by_definition(s, visible):
    """β_j·∏_{k > j} (1 − β_k) over the visible keys, key by key."""
    p, left = torch.zeros_like(s), 1.0
    for j in reversed(range(len(s))):
        if visible[j]:
            beta = torch.sigmoid(s[j])
            p[j], left = beta * left, left * (1.0 - beta)
    return p


def scores(rows=6, keys=9):
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([0.1, 1.0, 1.0, 5.0, 30.0, 1.0], dtype=torch.float64)
    return size[:rows, None] * torch.randn(rows, keys, generator=generator, dtype=torch.float64)


def test_rows_are_the_definition():
    s = scores()
    visible = torch.rand(s.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    visible[2] = False
    p = regard.normalize(s, "stickbreaking", mask=visible)
    want = torch.stack([by_definition(row, seen) for row, seen in zip(s, visible, strict=True)])
    torch.testing.assert_close(p, want)
    torch.testing.assert_close(p.sum(-1), 1.0 - torch.where(visible, torch.sigmoid(-s), 1.0).prod(-1))


def test_the_last_visible_key_comes_first():
    p = regard.normalize(torch.tensor([3.0, 3.0, 1e4, 0.0]), "stickbreaking")
    assert p.tolist() == [0.0, 0.0, 0.5, 0.5]
    s = torch.full((4,), -torch.inf)
    assert regard.normalize(s, "stickbreaking").tolist() == [0.0] * 4


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (2, -1)}, {"key_lengths": torch.tensor([9, 4])}])
def test_attention_statistics_and_gradients(options):
    if options.get("window") == (2, -1):  # as the paper: a token does not see itself
        options = {"attn_mask": torch.ones(6, 9, dtype=torch.bool).tril(-1)}
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (6, 9, 9))
    out, stats = regard.attention(q, k, v, normalizer="stickbreaking", return_stats=True, **options)
    s = (q @ k.transpose(-1, -2)) / 2.0
    visible = torch.ones(6, 9, dtype=torch.bool)
    if "is_causal" in options:
        visible = visible.tril()
    visible = options.get("attn_mask", visible).expand(s.shape)
    if "key_lengths" in options:
        visible = visible & (torch.arange(9) < options["key_lengths"][:, None, None, None])
    rows = [by_definition(*pair) for pair in zip(s.reshape(-1, 9), visible.reshape(-1, 9), strict=True)]
    p = torch.stack(rows).reshape(s.shape)
    torch.testing.assert_close(out, p @ v)
    torch.testing.assert_close(stats.mass, p.sum(-1).detach())
    torch.testing.assert_close(stats.gradient_gain, (p * torch.sigmoid(-s)).sum(-1).detach())
    found, want = (torch.autograd.grad(o.cos().sum(), (q, k, v)) for o in (out, p @ v))
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_more_query_is_the_last_row():
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3))
    whole = regard.attention(q, k, v, is_causal=True, normalizer="stickbreaking")
    torch.testing.assert_close(regard.attention(q[:, :, -1:], k, v, normalizer="stickbreaking"), whole[:, :, -1:])


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_fused_backend_says_that_it_has_none(backend, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="stickbreaking has no fused form; use backend=None or 'reference'"):
        regard.attention(q, q, q, normalizer="stickbreaking", backend=backend)
    assert regard.attention_path(q, q, q, normalizer="stickbreaking").backend == "reference"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ordered=True", "ordered=False"), "reordering the scores must reorder the weights"),
        (("torch.exp(logsigmoid(s) + left)", "torch.sigmoid(s)"), "ordered=True, but reordering"),
        (("torch.sigmoid(-scores)", "torch.sigmoid(scores)"), "trace ≠ tr ∂p/∂s"),
    ],
)
def test_the_record_checks_what_it_states(tmp_path, change, complaint):
    text = Path(normalizers.file_of("stickbreaking")).read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "wrong.py").write_text(text.replace(*change).replace('"stickbreaking"', '"wrong"'), encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        normalizers.discover(tmp_path)
