"""Gloo processes on this machine, started once, that run one function after another on every rank."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT = 240  # seconds that a function may take on a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, world: int, port: int, timeout: float, backend: str, pipe) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(rank, world, *arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankProcesses:
    """`ranks(function, …)` runs function(rank, world, …) on every rank and returns what each returned."""

    def __init__(self, world: int, timeout: float = 180.0, backend: str = "gloo"):
        if torch.cuda.is_available():  # a context of CUDA does not survive a fork
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch.distributed", "regard.parallel"])
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, timeout, backend, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function, *arguments) -> list:
        answers = self.answers(function, *arguments)
        for rank, (fine, value) in answers.items():
            assert fine, f"rank {rank}: {value}"
        return [value for _, value in answers.values()]

    def answers(self, function, *arguments, ranks=None, wait: float = WAIT) -> dict[int, tuple[bool, object]]:
        """{rank: (True, result) or (False, error)} of the ranks that answer in time."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        found, deadline = {}, time.monotonic() + wait
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise TimeoutError(f"rank {rank} did not answer within {wait} s")
            found[rank] = self.pipes[rank].recv()
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self.kill()
            return
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
            assert process.exitcode == 0
