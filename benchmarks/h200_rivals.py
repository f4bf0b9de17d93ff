"""What others take for the same attention, ms: torch's cuDNN and flash backends and FlexAttention.

AdaSplash is not on the machine: its times are those of another run on such a machine, and say so wherever they stand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# (forward, backward) ms of AdaSplash 0.2.2, α = 1.5, and of cuDNN's softmax in that same run; d, causal
ADASPLASH = {
    (128, True): (2.21, 1.99, 0.50, 1.49),
    (64, True): (2.95, 2.24, 0.66, 1.81),
    (128, False): (28.4, 9.76, 0.90, 2.64),
}


def bench(run) -> float:
    """The median in ms, after 0.1 s of this very call: within its 700 W the card's clock depends on what ran before."""
    return triton.testing.do_bench(run, warmup=100, rep=40, return_mode="median")


def ways(run, leaves):
    """Forward and backward of a function of leaves that require gradients, to be timed."""
    o = run()
    do = torch.randn_like(o)
    return run, lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def torch_runs(q, k, v) -> dict:
    """torch's forward and backward of both backends by (who, causal, backward?)."""
    found = {}
    for name in BACKENDS:
        for causal in (True, False):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            run = partial(torch_attention, name, leaves, causal)
            found |= {(name, causal, bool(way)): call for way, call in enumerate(ways(run, leaves))}
    return found


def torch_attention(name: str, leaves, causal: bool) -> torch.Tensor:
    with sdpa_kernel(BACKENDS[name]):
        return sdpa(*leaves, is_causal=causal)


class Flex:
    """FlexAttention on one work, compiled by a process of its own, which times when it is asked to."""

    WORK = ("d 128, N 4096", True)

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def times(self) -> tuple[float, float]:
        """(forward, backward) in ms; it waits for the compiler if it must."""
        told, _ = self.process.communicate("go\n")
        return tuple(json.loads(told.splitlines()[-1]))


def flex() -> tuple[float, float]:
    import torch._functorch.config
    from h200_cases import SHAPES, problem
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # backward runs many times
    shape, causal = Flex.WORK
    p = problem(SHAPES[shape])
    n = p.q.shape[2]
    visible = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda") if causal else None
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    compiled = torch.compile(flex_attention, dynamic=False)
    o = compiled(*leaves, block_mask=visible)
    torch.autograd.grad(o, leaves, torch.randn_like(o))
    torch.cuda.synchronize()
    sys.stdin.readline()
    forward, backward = ways(lambda: compiled(*leaves, block_mask=visible), leaves)
    return bench(forward), bench(backward)


def ceilings() -> tuple[float, float, float]:
    """(copy TB/s, read TB/s, bf16 matrix product TFLOP/s) of this machine, now."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / bench(lambda: y.copy_(x)) / 1e9
    read = x.nbytes / bench(lambda: torch.sum(x)) / 1e9
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copy, read, 2 * 8192**3 / bench(lambda: a @ b) / 1e9


if __name__ == "__main__":
    print(json.dumps(flex()))
