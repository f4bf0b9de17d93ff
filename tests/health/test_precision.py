"""Roundings as what-ifs: the numbers that a model with rounded keys, scores or weights really gives."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.health.models import inputs, tiny
from regard.health.what_if import Rounding, parse

pytestmark = pytest.mark.usefixtures("one_thread")
ATTENTION = F.scaled_dot_product_attention


@pytest.fixture(scope="module")
def subject():
    model, _ = tiny.checkpoint("tiny-scaled")
    return model.eval(), tiny.batches(inputs.sample_text(), 64, 8)[:2]


def by_hand(what, rounding):
    """Attention with a rounding, written out."""

    def attention(q, k, v, is_causal, scale):
        if what == "kv":
            return ATTENTION(q, rounding(k), rounding(v), is_causal=is_causal, scale=scale)
        s = scale * q @ k.transpose(-1, -2)
        s = rounding(s) if what == "logits" else s
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        p = s.softmax(-1)
        return (rounding(p) if what == "p" else p) @ v

    return attention


def loss_of(model, batches):
    losses = [F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()) for x in batches]
    return sum(map(float, losses)) / len(losses)


def as_int8(x, axes):
    """x in steps of the largest number over `axes` by 127, as an engine stores it."""
    step = x.abs().amax(axes, keepdim=True) / 127.0
    return (x / step).round().clamp(-127, 127) * step


def as_float8(x, dtype):
    """x in a type of 8 bits, with one scale that makes the largest number the type's largest."""
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


OWN = {
    "kv=int8": lambda x: as_int8(x, (0, 1, 2, 3)), "kv=int8/token": lambda x: as_int8(x, (3,)),
    "kv=fp8_e4m3": lambda x: as_float8(x, torch.float8_e4m3fn), "logits=bf16": lambda x: x.bfloat16().float(),
    "p=bf16": lambda x: x.bfloat16().float(), "p=fp8_e5m2": lambda x: as_float8(x, torch.float8_e5m2),
}  # fmt: skip


@pytest.mark.parametrize("text", OWN)
def test_a_rounding_says_what_running_the_rounded_model_says(subject, text, monkeypatch):
    model, batches = subject
    report = regard.examine(model, batches, what_if=[text], ablate=False)
    change = report.what_if[text].loss
    what = text.partition("=")[0]
    with torch.no_grad():
        own = loss_of(model, batches)
        monkeypatch.setattr(F, "scaled_dot_product_attention", by_hand(what, OWN[text]))
        rounded = loss_of(model, batches)
        expected, seen = {}, []
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda *x, **y: seen.append((x, y)) or ATTENTION(*x, **y)
        )
        model(batches[0][:2])  # the tokens on which errors are taken
        for at, (given, options) in enumerate(seen):
            own_output, changed = ATTENTION(*given, **options), by_hand(what, OWN[text])(*given, **options)
            error, size = ((x.square().sum((0, 2, 3))).sqrt() for x in (changed - own_output, own_output))
            expected.update({(at, head): x for head, x in enumerate((error / size).tolist())})
    assert abs(rounded - own) > 1e-6
    assert change.change == pytest.approx(rounded - own, abs=2e-5)
    errors = report.checks.rounding[text].errors
    assert len(errors) == len(report.heads) and errors == pytest.approx(expected, rel=1e-2)


def test_finer_scales_lose_less_beside_an_outlier():
    x = torch.randn(2, 4, 32, 16, generator=torch.Generator().manual_seed(0))
    x[:, 1, 3] *= 300.0
    errors = []
    for scales in ("tensor", "head", "token"):
        rounded = Rounding.parse("k", "int8" if scales == "tensor" else f"int8/{scales}")(x)
        errors.append(float((rounded - x)[:, 0].norm() / x[:, 0].norm()))
    assert errors[0] > 20 * errors[1] and errors[1] >= errors[2] > 0.0


def test_the_layer_that_a_rounding_harms_is_named(subject):
    """Keys of layer 2 share a large offset, which softmax does not see and 8 bits per tensor do."""
    model, batches = subject
    attention = model.blocks[2].attention
    project = attention.qkv.forward

    def shifted(x):
        q, k, v = project(x).chunk(3, -1)
        return torch.cat([q, k + 100.0 * (torch.arange(k.shape[-1]) % 7), v], -1)

    attention.qkv.forward = shifted
    try:
        report = regard.examine(model, batches, what_if=["k=int8"], ablate=False)
    finally:
        attention.qkv.forward = project
    effect = report.checks.rounding["k=int8"]
    assert effect.keep == ["blocks.2.attention"]
    assert effect.kept.change < report.what_if["k=int8"].loss.change / 3
    worst = max(effect.errors, key=effect.errors.get)
    assert worst[0] == 2 and "blocks.2.attention left as they are" in str(effect)


def test_a_rounding_survives_the_file(subject, tmp_path):
    model, batches = subject
    report = regard.examine(model, batches[:1], what_if=["kv=fp8_e4m3+p=bf16"], ablate=False)
    path = report.save(tmp_path / "report.json")
    again = regard.health.Report.load(path).checks.rounding["kv=fp8_e4m3+p=bf16"]
    assert again.errors == report.checks.rounding["kv=fp8_e4m3+p=bf16"].errors
    assert json.loads(path.read_text())["checks"]["rounding"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv=fp4", "give one of fp8_e4m3"),
        ("p=int8/head", "leave /head out"),
        ("kv=bf16/token", "leave /token out"),
        ("kv=int8+kv=bf16", "sets kv twice"),
        ("kv=", "not understood"),
    ],
)
def test_a_rounding_that_means_nothing_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)
