"""What each rank of `tests/health/test_monitor_over_ranks.py` runs."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

import regard
from regard.health.watching import ranks


class Stack(nn.Module):
    """Layers of attention; `skipped` are not run."""

    def __init__(self, layers=3, heads=4, gain=1.0):
        super().__init__()
        torch.manual_seed(0)
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(make(16, heads, 32, dropout=0.0, batch_first=True) for _ in range(layers))
        self.skipped = set()
        with torch.no_grad():
            for layer in self.layers:
                layer.self_attn.in_proj_weight[:32] *= gain

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = x if at in self.skipped else layer(x)
        return x


def data(step, sequences=8):
    return torch.randn(sequences, 12, 16, generator=torch.Generator().manual_seed(step))


def scalars(log):
    return [row for row in log if "attention/max_logit" in row]


def run_alone(steps=3, gain=1.0, given=data):
    """The scalars of one process over all of the data, and its alarms."""
    rows, model = [], Stack(gain=gain)
    with regard.Monitor(model, every=1, log=rows.append, sequences=None, budget=1.0) as monitor:
        for step in range(steps):
            model(given(step))
    return scalars(rows), [alarm.to_json() for alarm in monitor.alarms]


def share(rank, world, step):
    each = 8 // world
    return data(step)[rank * each : (rank + 1) * each]


def run_data_parallel(rank, world, wrap, gain=1.0, steps=3):
    """The same over ranks, each with its share of the sequences."""
    rows, model = [], Stack(gain=gain)
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with regard.Monitor(wrapped if wrap == "fsdp" else model, every=1, log=rows.append, sequences=None) as monitor:
            for step in range(steps):
                wrapped(share(rank, world, step)).square().mean().backward()
    return scalars(rows), [alarm.to_json() for alarm in monitor.alarms], monitor.samples


def run_in_turns(rank, world):
    """One rank at a time sends its tables."""
    before, ranks.MOST_TABLES = ranks.MOST_TABLES, 1
    try:
        return run_data_parallel(rank, world, "ddp")[0]
    finally:
        ranks.MOST_TABLES = before


def run_with_skipped_layers(rank, world):
    """Rank 1 skips a layer at first, then all of them, then none."""
    rows, model = [], Stack()
    with regard.Monitor(model, every=1, log=rows.append, sequences=None, budget=1.0) as monitor:
        for step, skipped in enumerate([{1}, {0, 1, 2}, set()]):
            model.skipped = skipped if rank == 1 else set()
            model(share(rank, world, step))
    return scalars(rows), monitor.samples, monitor.layers


def run_tensor_parallel(rank, world):
    """Each rank has half of the heads of every layer."""
    rows = []
    whole = nn.MultiheadAttention(16, 4, batch_first=True)
    torch.manual_seed(5)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)

    class Shard(nn.Module):
        def forward(self, x):
            qkv = nn.functional.linear(x, whole.in_proj_weight, whole.in_proj_bias).unflatten(-1, (3, 4, 4))
            q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
            heads = slice(rank * 4 // world, (rank + 1) * 4 // world)
            return nn.functional.scaled_dot_product_attention(q[:, heads], k[:, heads], v[:, heads])

    shard = Shard().train()
    group = dist.group.WORLD if world > 1 else None
    with regard.Monitor(shard, every=1, log=rows.append, heads=True, sequences=None, tensor_group=group):
        shard(data(0))
    return rows


def run_pipeline(rank, world):
    """Each rank has other layers and sends its output to the next: two micro-batches a step, none for its shapes."""
    rows, whole = [], Stack(layers=4)
    mine = whole.layers[rank * 2 : rank * 2 + 2]
    stage = nn.Sequential(*mine)
    with regard.Monitor(
        stage, every=1, log=rows.append, sequences=None, pipeline_group=dist.group.WORLD, budget=1.0
    ) as monitor:
        with torch.no_grad():  # as torch's PipelineStage does
            stage(torch.zeros(8, 12, 16))
        for step in range(2):
            for part in range(2):
                if rank == 0:
                    dist.send(stage(data(2 * step + part)).detach(), 1)
                else:
                    x = torch.empty(8, 12, 16)
                    dist.recv(x, 0)
                    stage(x)
            monitor.step()
    return scalars(rows), monitor.layers


def run_on_one_rank_only(rank, world):
    """Rank 1 forgets to make a monitor."""

    model = Stack()
    if rank == 1:
        next(ranks._NUMBERS)  # the next ones meet again
        return []
    with warnings.catch_warnings(record=True) as seen, regard.Monitor(model, every=1) as monitor:
        warnings.simplefilter("always")
        for step in range(2):
            model(data(step))
    return [str(one.message) for one in seen], monitor.samples


def run_clip(rank, world, wrap):
    """Clips a model whose ranks see other data; returns its largest logits before and after, and its weights."""
    model = Stack(layers=1, gain=40.0)
    if wrap == "fsdp":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model)
        wrapped = model
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    clip = regard.QKClip(model, threshold=20.0)
    clip.hook(optimizer)
    found = []
    for _ in range(2):
        wrapped(share(rank, world, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (largest,) = clip.last.max_logit.values()
        found.append(largest)
    weight = model.layers[0].self_attn.in_proj_weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    clip.close()
    return found, clip.last.skipped, weight.detach()
