"""Results of the CPU attention do not depend on strides, blocks, parts, threads or the caller's modes."""

import dataclasses
import re
import threading
from pathlib import Path

import pytest
import torch
from random_problems import close, draw, oracle

from regard import normalizers
from regard._backends.cpu import tasks
from regard._backends.cpu.attention import blocks as attention_blocks
from regard._backends.cpu.attention import launch as attention
from regard._call.problem import Problem, Upstream
from regard.statistics import NAMES


def test_strides_do_not_matter():
    problem, upstream = draw("softmax", 5, torch.float32)
    expected = attention.forward(problem)
    expected_gradients = attention.backward(problem, expected, upstream)
    for layout in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT, spaced):
        changed = dataclasses.replace(problem, q=layout(problem.q), k=layout(problem.k), v=layout(problem.v))
        result = attention.forward(changed)
        gradients = attention.backward(changed, result, dataclasses.replace(upstream, o=layout(upstream.o)))
        torch.testing.assert_close(result.o, expected.o)
        for name in "qkv":
            torch.testing.assert_close(getattr(gradients, name), getattr(expected_gradients, name))


def spaced(x):
    return torch.stack([x, x + 1], -1)[..., 0]


def test_expanded_keys_and_a_constant_gradient():
    problem, _ = draw("softmax", 9, key_lengths=None)
    k = problem.k[:, :, :1, :1].expand(problem.k.shape)
    problem = dataclasses.replace(problem, k=k)
    upstream = Upstream(torch.ones((), dtype=torch.float64).expand(attention.forward(problem).o.shape))
    o, _, exact = oracle(problem, upstream)
    result = attention.forward(problem)
    close(result.o, o, 1e-10, "o")
    close(attention.backward(problem, result, upstream).k, exact["k"], 1e-9, "dk")


@pytest.mark.parametrize("m", [50, 300])
def test_more_blocks_than_one(monkeypatch, m):
    generator = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(2, 6, m, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    bias = torch.randn(1, 6, m, 45, generator=generator, dtype=torch.float64)
    k, v = k[:, :3, :45], v[:, :3, :45]
    problem = Problem(q, k, v, normalizers.get("softmax"), 0.3, causal=True, left=20, stats=NAMES)
    for given in (problem, dataclasses.replace(problem, bias=bias.expand(2, 6, m, 45))):
        upstream = Upstream(do, bias=given.bias is not None)
        whole = attention.forward(given)
        o, stats, exact = oracle(given, upstream)
        monkeypatch.setattr(attention_blocks, "SMALL", 0)
        monkeypatch.setattr(attention.Blocks.__init__, "__defaults__", ((True, True, True), 1))
        blocks = attention.Blocks(given)
        assert blocks.parts > 1 and len(list(blocks.blocks_of(blocks.tasks[0][0]))) > 1
        result = attention.forward(given)
        gradients = attention.backward(given, result, upstream)
        close(result.o, o, 1e-10, "o")
        close(result.stats, stats, 1e-9, "stats")
        torch.testing.assert_close(whole.o, result.o)
        for name, gradient in exact.items():
            close(getattr(gradients, name), gradient, 1e-9, f"d{name}")


def test_parts_count_positions_of_the_whole_sequence():
    """Causal order, window, distance and dropout; sigmoid's weights are independent, so parts add."""
    generator = torch.Generator().manual_seed(6)
    q, k, v, do = (torch.randn(1, 2, 30, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    options = dict(causal=True, left=9, dropout_p=0.3, seed=torch.tensor([12345]), stats=("mass", "distance"))
    whole = Problem(q, k, v, normalizers.get("sigmoid"), 0.5, **options)
    result = attention.forward(whole)
    gradients = attention.backward(whole, result, Upstream(do))
    o, dq, dk, far = (torch.zeros_like(x) for x in (result.o, q, k, result.stats[0]))
    for i in (slice(0, 11), slice(11, 30)):
        for j in (slice(0, 7), slice(7, 19), slice(19, 30)):
            at = dict(first_query=i.start, first_key=j.start, queries=30)
            cut = dataclasses.replace(whole, q=q[:, :, i], k=k[:, :, j], v=v[:, :, j], **at)
            part = attention.forward(cut)
            slopes = attention.backward(cut, part, Upstream(do[:, :, i]))
            o[:, :, i] += part.o
            dq[:, :, i] += slopes.q
            dk[:, :, j] += slopes.k
            far[:, :, i] += part.stats[0] * part.stats[1]
    torch.testing.assert_close(o, result.o)
    torch.testing.assert_close(far, result.stats[0] * result.stats[1])
    torch.testing.assert_close(dq, gradients.q)
    torch.testing.assert_close(dk, gradients.k)


def test_the_same_bits_every_time_and_on_any_number_of_threads():
    generator = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn(1, 2, 700, 16, generator=generator) for _ in range(4))
    problem = Problem(q, k, v, normalizers.get("softmax"), 0.25, causal=True, stats=NAMES)

    def bits():
        result = attention.forward(problem)
        gradients = attention.backward(problem, result, Upstream(do))
        return result.o, result.stats, gradients.q, gradients.k, gradients.v

    first, threads = bits(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    found = []
    callers = [threading.Thread(target=lambda: found.append(bits())) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 3 and all(torch.equal(a, b) for other in found for a, b in zip(first, other, strict=True))


def test_a_failure_in_one_task_reaches_the_caller():
    done = []

    def work(item, own):
        if item == 3:
            raise RuntimeError("task 3")
        done.append(item)

    with pytest.raises(RuntimeError, match="task 3"):
        tasks.run_tasks(range(10_000), work)
    assert len(done) < 10_000


def test_gradients_and_modes_of_the_caller_are_left_alone():
    problem, _ = draw("softmax", 2, torch.float32)
    expected = attention.forward(problem).o
    tracked = dataclasses.replace(problem, q=problem.q.clone().requires_grad_())
    assert not attention.forward(tracked).o.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention.forward(problem).o, expected)
    with torch.inference_mode():
        assert torch.equal(attention.forward(problem).o, expected)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_memory_stays_far_from_the_square():
    n = 16384
    generator = torch.Generator().manual_seed(6)
    q, k, v, do = (torch.randn(1, 1, n, 64, generator=generator) for _ in range(4))

    def run(length):
        short = [x[:, :, :length] for x in (q, k, v, do)]
        problem = Problem(*short[:3], normalizers.get("softmax"), 0.125, stats=NAMES)
        result = attention.forward(problem)
        return result, attention.backward(problem, result, Upstream(short[3]))

    run(64)  # compile first
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    except OSError:
        pytest.skip("the peak of memory cannot be reset here")
    before = _kib("VmRSS")
    result, gradients = run(n)
    given_back = (result.o, result.shift, result.z, result.stats, gradients.q, gradients.k, gradients.v)
    outputs = sum(x.nbytes for x in given_back)
    assert _kib("VmHWM") - before < 256 * 1024 + outputs // 1024


def _kib(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))
