"""What must work in every environment that docs/versions.md lists; `tools/matrix.py` runs this file there, alone.

It needs torch, numpy, numba, rich and pytest, and no fixture of this repository. transformers is tested if installed.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

import regard
from regard.cli import main

NAMES = ("softmax", "sigmoid", "entmax15")  # one of each family: every other compiles the same kernels anew


def make_inputs(sharpness: float = 3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 33, 16, generator=generator)
    return [(sharpness * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]


@pytest.mark.parametrize("name", NAMES)
def test_attention_statistics_and_gradients_agree_with_the_reference(name):
    inputs = make_inputs()
    out, stats = regard.attention(*inputs, is_causal=True, normalizer=name, return_stats=True)
    exact, _ = regard.reference.attention(*inputs, is_causal=True, normalizer=name)
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-4)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    expected = torch.autograd.grad(exact.square().sum(), inputs)
    torch.testing.assert_close(gradients, expected, atol=2e-3, rtol=1e-3)
    assert all(torch.isfinite(stats[statistic]).all() for statistic in ("entropy", "gradient_gain", "max_logit"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_first_and_second_derivatives(name):
    scores = torch.tensor([[-1.3, 0.4, 0.9, 2.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: regard.normalize(z, name), scores)
    assert regard.jacobian(scores.detach(), name).shape == (1, 4, 4)
    assert torch.func.vmap(lambda z: regard.normalize(z, name))(scores.detach()).shape == scores.shape


def test_torch_compile_takes_a_call_whole():
    inputs = make_inputs()

    def call(q, k, v):
        return regard.attention(q, k, v, normalizer="entmax15", return_stats=("entropy",))

    (out, stats), (eager, plain) = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs), call(*inputs)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(stats.entropy, plain.entropy)


def test_a_model_is_examined_changed_and_watched(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    batch = torch.randn(2, 12, 32)
    report = regard.examine(model.eval(), [batch], what_if=["temperature=2"])
    assert len(report.heads) == 4 and not report.unmeasured
    report.save(tmp_path / "report.html")
    before = model(batch)
    with regard.using(model, normalizer="sparsemax"):
        assert not torch.allclose(model(batch), before)
    torch.testing.assert_close(model(batch), before)
    logged = []
    with regard.Monitor(model.train(), every=1, log=logged.append):
        model(batch).sum().backward()
        model(batch).sum().backward()
    assert logged


def test_the_layer_of_regard_trains():
    layer = regard.nn.MultiheadAttention(32, 4, normalizer="entmax15")
    x = torch.randn(2, 12, 32, requires_grad=True)
    layer(x, x, x)[0].sum().backward()
    assert torch.isfinite(x.grad).all()


def test_one_rank_attends_as_without_ranks():
    q, k, v = (x.detach() for x in make_inputs())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        out = regard.parallel.attention(q, k, v, is_causal=True)
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(out, regard.attention(q, k, v, is_causal=True), atol=1e-5, rtol=1e-5)


def test_the_command_line_lists(capsys):
    assert main(["list"]) == 0
    assert "softmax" in capsys.readouterr().out


@pytest.mark.slow  # tests/health/test_commands.py shows it too; tools/matrix.py runs all of this file
def test_the_command_line_shows_the_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "report.html")]) == 0
    assert "collapsed" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_transformers_model_is_examined_and_changed(implementation):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    model = LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    report = regard.examine(model, [batch])
    assert len(report.heads) == 8 and not report.unmeasured
    with torch.no_grad(), regard.using(model, normalizer="sparsemax"):
        assert torch.isfinite(model(**batch).logits).all()
