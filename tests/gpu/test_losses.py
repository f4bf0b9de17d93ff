"""Losses on a GPU: held to float64 at the sizes of vocabularies, without a wait for the device or a temporary row."""

import math

import pytest
import torch

from regard import losses, normalizers, reference
from regard._backends.gpu.losses import launch

NAMES = ["softmax", "sparsemax", "entmax15", "entmax(alpha=1.3)"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_rows(count, n, dtype, spreads):
    generator = torch.Generator("cuda").manual_seed(n)
    spread = torch.tensor(spreads, device="cuda").repeat(count)[:count, None]
    logits = (torch.randn(count, n, device="cuda", generator=generator) * spread + 1.0).to(dtype)
    target = torch.randint(n, (count,), device="cuda", generator=generator)
    target[0] = logits[0].argmax()
    return logits, target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 10, 1000, 4099, 32000, 50257, 128256, 262144])
def test_losses_and_gradients_are_those_of_float64(name, n, dtype):
    """Flat rows, whose lanes hide scores, and sharp ones."""
    logits, target = make_rows(12, n, dtype, [1.0, 1e-3, 0.1, 0.3, 3.0, 20.0])
    target[5] = -100
    _poisoned = torch.full_like(logits, math.nan)  # freed at once: what the kernel gets for its result
    del _poisoned
    given = logits.clone().requires_grad_()
    found = losses.fenchel_young_loss(given, target, name)
    upstream = torch.linspace(-1.0, 2.0, 12, device="cuda")
    (ds,) = torch.autograd.grad(found, given, upstream)
    exact = reference.fenchel_young_loss(logits, target, name)
    classes = torch.arange(n, device="cuda")
    gradient = (reference.normalize(logits, name) - (classes == target[:, None]).double()) * upstream.double()[:, None]
    gradient[5] = 0.0
    eps = torch.finfo(torch.float32).eps
    assert ((found.double() - exact).abs() <= 32 * eps * (1 + exact.abs() + logits.double().abs().amax(-1))).all()
    weight = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 7e-4}[dtype]
    assert ((ds.double() - gradient).abs().amax(-1) <= weight * upstream.abs()).all()
    assert found[5] == 0 and (ds[5] == 0).all()


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_nothing_waits_for_the_device_and_no_row_is_stored_but_the_gradient(name):
    logits, target = make_rows(512, 32768, torch.bfloat16, [1.0])
    logits.requires_grad_()
    criterion = losses.FenchelYoungLoss(name)
    criterion(logits, target).backward()  # compiles
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = criterion(logits, target)
        forward = torch.cuda.max_memory_allocated() - before
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = logits.numel() * logits.element_size()
    assert forward < row / 100
    assert torch.cuda.max_memory_allocated() - before < 1.01 * row


def test_an_index_that_is_no_class_makes_its_row_nan():
    logits, target = make_rows(4, 1000, torch.float32, [1.0])
    target[1], target[2] = 1000, -1
    logits.requires_grad_()
    loss = losses.fenchel_young_loss(logits, target, "entmax15")
    (ds,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == ds.isnan().all(-1).tolist() == [False, True, True, False]


def test_rows_beyond_two_to_the_31_numbers():
    count = 2**31 // 65536 + 8
    logits = torch.zeros(count, 65536, device="cuda", dtype=torch.bfloat16)
    logits[:, 3] = 4.0
    target = torch.full((count,), 3, device="cuda")
    choice = normalizers.get("entmax15")
    loss, state = launch.forward(logits, target, choice)
    ds = launch.backward(torch.ones(count, device="cuda"), logits, target, state, choice)
    assert (loss.abs() < 1e-6).all() and (ds[-8:].float().abs() < 1e-6).all()


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_second_derivatives_and_compile(name):
    logits, target = make_rows(3, 6, torch.float64, [1.0])
    assert torch.autograd.gradgradcheck(
        lambda z: losses.fenchel_young_loss(z, target, name), logits.requires_grad_(), atol=1e-5
    )
    logits, target = make_rows(64, 5000, torch.bfloat16, [1.0])
    criterion = losses.FenchelYoungLoss(name)
    compiled = torch.compile(criterion, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(compiled(logits, target), criterion(logits, target))
