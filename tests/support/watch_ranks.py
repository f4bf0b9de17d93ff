"""What each rank of `tests/health/test_watch_failures.py` runs: trainings in which ranks do not do the same."""

import contextlib
import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from monitor_ranks import Stack, data, scalars
from torch import nn

import regard
from regard.health.watching import groups


def train(rank, steps, on_step=None, timeout=1.0, **options):
    """Trains under DistributedDataParallel; returns what the monitor said, the rows that it logged, and itself."""
    model, rows = Stack(layers=1), []
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        monitor = regard.Monitor(model, every=1, log=rows.append, budget=1.0, timeout=timeout, **options)
        clip = regard.QKClip(model, 1.0, strict=False)
        clip.hook(optimizer)
        with monitor, clip, wrapped.join():
            for step in range(steps):
                wrapped(data(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if on_step is not None:
                    on_step(step, model)
                time.sleep(0.01)
    return [str(one.message) for one in seen], scalars(rows), monitor


def run_uneven(rank, world):
    """Rank 1 has less data, under DDP's Join."""
    messages, rows, _ = train(rank, 12 if rank == 0 else 5)
    return messages, len(rows)


def run_other_micro_batches(rank, world):
    """Rank 0 runs three forwards for each step, rank 1 one, without gradients in common."""
    model, rows = Stack(layers=1), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with regard.Monitor(model, every=1, log=rows.append, budget=1.0, timeout=1.0) as monitor:
            for step in range(4):
                for _ in range(3 if rank == 0 else 1):
                    model(data(step))
                monitor.step()
                dist.barrier()
    return [row["step"] for row in scalars(rows)], monitor.steps, [str(one.message) for one in seen]


def run_pause(rank, world):
    """An evaluation that is longer than the time after which a rank is left out; a batch that rank 1 skips."""
    model, rows, store = Stack(layers=1), [], dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with regard.Monitor(model, every=1, log=rows.append, budget=1.0, timeout=0.5):
            for step in range(24):
                if step == 12:
                    time.sleep(1.5 if rank == 0 else 1.2)
                if rank == 1 and step == 4:
                    with contextlib.suppress(AssertionError, RuntimeError):
                        model(data(step)[..., 1:])
                else:
                    model(data(step))
                dist.barrier()
    return len(scalars(rows)), store.num_keys() - before, [str(one.message) for one in seen]


def run_clip_on_one_rank(rank, world):
    wrapped = nn.parallel.DistributedDataParallel(Stack(layers=1))
    if rank == 1:
        return ""
    usual, groups.MEET = groups.MEET, timedelta(seconds=1)
    try:
        regard.QKClip(wrapped)
    except RuntimeError as error:
        return str(error)
    finally:
        groups.MEET = usual


def run_one_that_raises(rank, world):
    model = Stack(layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with regard.Monitor(model, every=1, budget=1.0, timeout=1.0) as monitor:
                for step in range(20):
                    if rank == 1 and step == 3:
                        raise RuntimeError("out of memory")
                    model(data(step))
                    time.sleep(0.2)
        except RuntimeError:
            pass
    return monitor.steps


def run_one_that_dies(rank, world):
    model = Stack(layers=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with regard.Monitor(model, every=1, budget=1.0, timeout=1.0) as monitor:
            for step in range(20):
                if rank == 1 and step == 3:
                    os._exit(1)
                model(data(step))
                time.sleep(0.2)
    return monitor.steps, [str(one.message) for one in seen]


def run_death_in_collective(rank, world, dying):
    """One rank dies while the other reduces gradients; returns the seconds from the other's error to its end."""
    model = Stack(layers=1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    monitor = regard.Monitor(model, every=1, budget=1.0, timeout=30.0)
    try:
        with monitor:
            for step in range(8):
                if rank == dying and step == 3:
                    time.sleep(0.3)  # the other is in the reduction of its gradients
                    os._exit(1)
                try:
                    wrapped(data(step)).square().mean().backward()
                except RuntimeError:
                    failed = time.perf_counter()
                    raise
                monitor.step()
    except RuntimeError:
        return step, time.perf_counter() - failed
    return step, 0.0


def run_pipeline_without_group(rank, world):
    """Each rank has other layers of the same shapes, and sends each micro-batch to the next."""
    stage = Stack(layers=2).layers[rank]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with regard.Monitor(stage, every=1, budget=1.0, timeout=2.0) as monitor:
            for step in range(6):
                if rank == 0:
                    dist.send(stage(data(step)).detach(), 1)
                else:
                    x = torch.empty(8, 12, 16)
                    dist.recv(x, 0)
                    stage(x)
    return monitor.steps, [str(one.message) for one in seen]


def run_heads_without_group(rank, world):
    torch.manual_seed(rank)  # each rank holds other heads
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    try:
        with regard.Monitor(model, every=1, budget=1.0, timeout=2.0):
            for step in range(6):
                model(data(step))
                dist.barrier()
    except ValueError as error:
        return str(error)
    return ""


def run_alarms(rank, world):
    """`on_alarm` lowers the learning rate on every rank, at the same step; the explosion is on rank 1's data alone."""
    told = []

    def explode(step, model):
        if step == 3:
            with torch.no_grad():
                model.layers[0].self_attn.in_proj_weight[:32] *= 300

    _, _, monitor = train(
        rank, 12, explode, timeout=30.0, on_alarm=lambda alarm: told.append((alarm.step, monitor_steps()))
    )
    return told, [(one.cause, one.opened) for one in monitor.incidents]


def monitor_steps():
    from regard.health.monitor import _watching

    return max((monitor.steps for monitor in _watching), default=0)
