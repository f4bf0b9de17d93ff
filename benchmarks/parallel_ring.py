"""The ring on two CPU processes against one process that does half the keys for all queries: wall time and memory.

    python benchmarks/parallel_ring.py [--markdown benchmarks/results/parallel.md]

Half the keys for all queries is what each of two ranks has to compute when nothing is causal; for causal calls the
comparison is with causal attention of all queries to their keys, halved by heads. One thread per process. Both sides
run in turn, between barriers, in the same processes: on the two sides a rank has the same work, and what differs is
the transfer, the merging and the waiting. The figure is the ratio of the minima over the rounds: of wall time, and of
the processor time of all threads of a rank, which leaves the waiting out but means something on a busy machine too.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
import regard.parallel as parallel

SHAPE = dict(batch=1, heads=4, length=4096, width=64)
CASES = [
    ("softmax", dict()),
    ("softmax, causal", dict(is_causal=True)),
    ("softmax, all statistics", dict(return_stats=True)),
    ("sigmoid", dict(normalizer="sigmoid")),
    ("entmax15", dict(normalizer="entmax15")),
    ("entmax15, causal", dict(normalizer="entmax15", is_causal=True)),
]
ROUNDS = 9


def make(seed: int, length: int, heads: int):
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPE["batch"], heads, length, SHAPE["width"]
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def one_process(options: dict, backward: bool):
    """Half the keys for all queries; half the heads where causal order makes half the keys another problem."""
    n, heads = SHAPE["length"], SHAPE["heads"]
    causal = options.get("is_causal", False)
    q, k, v = make(0, n, heads // 2 if causal else heads)
    k, v = (x if causal else x[:, :, : n // 2] for x in (k, v))
    return lambda: run(regard.attention, q, k, v, dict(options, backend="cpu"), backward)


def sharded(options: dict, backward: bool):
    q, k, v = (parallel.shard(x) for x in make(0, SHAPE["length"], SHAPE["heads"]))
    return lambda: run(parallel.attention, q, k, v, options, backward)


def run(attention, q, k, v, options: dict, backward: bool) -> None:
    if backward:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, **options)
    out = out[0] if isinstance(out, tuple) else out
    if backward:
        out.sum().backward()


def timed(work) -> tuple[float, float]:
    """(wall seconds until both are done, processor seconds of this process, all its threads)."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    work()
    used = time.process_time() - used
    dist.barrier()
    return time.perf_counter() - start, used


def worker(rank: int, world: int, port: int, length: int, queue) -> None:
    torch.set_num_threads(1)
    SHAPE["length"] = length
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name, options in CASES:
        for backward in (False, True):
            ours, single = sharded(options, backward), one_process(options, backward)
            timed(ours), timed(single)
            best = [1e9] * 4
            for _ in range(ROUNDS):
                for at, measured in enumerate((*timed(ours), *timed(single))):
                    best[at] = min(best[at], measured)
            slowest = torch.tensor(best, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            best = slowest.tolist()
            if rank == 0:
                queue.put((name, backward, *best))
                print(name, "backward" if backward else "forward", *(f"{x * 1e3:.1f} ms" for x in best), flush=True)
    dist.barrier()


def memory(rank: int, world: int, port: int, queue) -> None:
    """Peak bytes of a rank over what it had before the call, forward and backward, of a fixed whole sequence."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    n = 8192
    small = [torch.randn(1, 4, 1024, 64) for _ in range(3)]
    run(parallel.attention, *small, dict(is_causal=True), True)  # kernels, libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    q, k, v = (torch.randn(1, 16, n // world, 64) for _ in range(3))
    run(parallel.attention, q, k, v, dict(is_causal=True), True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    everyone = [None] * world
    dist.all_gather_object(everyone, peak)
    if rank == 0:
        queue.put((world, max(everyone)))
    dist.barrier()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", help="write the tables here")
    parser.add_argument("--length", type=int, default=SHAPE["length"], help="tokens in all (4096)")
    parser.add_argument("--only", choices=("time", "memory"))
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    lines = []
    if arguments.only != "memory":
        queue = context.Queue()
        mp.spawn(worker, (2, free_port(), arguments.length, queue), nprocs=2)
        lines += ["| call | pass | ring, 2 ranks, ms | half the work, ms | ratio | ring, processor ms | half | ratio |",
                  "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        for _ in range(2 * len(CASES)):
            name, backward, ours, used, single, half = queue.get()
            kind = "forward + backward" if backward else "forward"
            lines.append(f"| {name} | {kind} | {ours * 1e3:.0f} | {single * 1e3:.0f} | {ours / single:.2f} | "
                         f"{used * 1e3:.0f} | {half * 1e3:.0f} | {used / half:.2f} |")  # fmt: skip
            print(lines[-1], flush=True)
    if arguments.only != "time":
        lines += ["", "| ranks | peak memory of a rank over its start, MiB | × ranks |", "| --- | --- | --- |"]
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # what is freed leaves the process, so that peaks are true
        for world in (1, 2, 4, 8):
            queue = context.Queue()
            mp.spawn(memory, (world, free_port(), queue), nprocs=world)
            _, peak = queue.get()
            lines.append(f"| {world} | {peak / 1024:.0f} | {world * peak / 1024:.0f} |")
            print(lines[-1], flush=True)
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as file:
            shape = ", ".join(f"{name} {value}" for name, value in (SHAPE | dict(length=arguments.length)).items())
            file.write(f"# The ring on two CPU processes\n\n{shape}, float32, one thread each; "
                       f"torch {torch.__version__}. `python benchmarks/parallel_ring.py`\n\n")  # fmt: skip
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
