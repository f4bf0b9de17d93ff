"""Attends over one sequence that is split over two ranks, and compares outputs and gradients with one process.

python examples/context_parallel.py --length 512 --normalizer entmax15

Two gloo processes on this machine; on GPUs, start with torchrun and use NCCL. `shard` gives each rank a front and a
back chunk, so that causal work is balanced.
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
from regard.parallel.group import record_sent


def run_rank(rank, args, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)  # the same whole tensors on every rank, for the comparison
    q, k, v = torch.randn(3, 1, args.heads, args.length, args.head_dim)
    options = dict(is_causal=True, normalizer=args.normalizer, return_stats=("entropy",))

    mine = [regard.parallel.shard(x).requires_grad_() for x in (q, k, v)]  # this rank's positions
    with record_sent() as sent:
        out, stats = regard.parallel.attention(*mine, **options)
        out.square().sum().backward()
    report = f"rank {rank}: {out.shape[-2]} of {args.length} positions, mean entropy {stats.entropy.mean().item():.3f}"
    print(f"{report}, {sum(size for _, size in sent) / 1024:.0f} KiB sent", flush=True)

    whole = regard.parallel.unshard(out.detach())
    gradient = regard.parallel.unshard(mine[1].grad)
    if rank == 0:
        k.requires_grad_()
        expected, _ = regard.attention(q, k, v, **options)
        expected.square().sum().backward()
        print(f"largest difference of the output {(whole - expected).abs().max().item():.1e}", flush=True)
        print(f"largest difference of the keys' gradient {(gradient - k.grad).abs().max().item():.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(ranks=2, heads=4, length=256, head_dim=32).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--normalizer", default="softmax")
    args = parser.parse_args()
    method = "fork" if sys.platform == "linux" else "spawn"  # a forked rank need not import torch again
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (args, f"{folder}/store"), nprocs=args.ranks, start_method=method)
