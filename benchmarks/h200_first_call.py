"""Seconds until the first forward and backward with statistics are done, in a process of its own.

PYTHONPATH=. TRITON_CACHE_DIR=… python3 benchmarks/h200_first_call.py
"""

import time

import torch

import regard

if __name__ == "__main__":
    q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.synchronize()
    for normalizer in ("softmax", "entmax15"):
        begin = time.perf_counter()
        out, _ = regard.attention(q, k, v, is_causal=True, normalizer=normalizer, return_stats=True)
        out.sum().backward()
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - begin:.2f}")
