"""What each rank of `tests/health/test_qk_clip_over_ranks.py` runs."""

import torch
import torch.distributed as dist
from torch import nn

import regard


class Attention(nn.Module):
    """Heads of width 4; `heads` of them on this rank."""

    def __init__(self, heads, width=16):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(width, 4 * heads, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, heads=4, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(heads) for _ in range(layers))
        with torch.no_grad():
            for block in self.blocks:  # each head has its own size
                block.wq.weight.mul_(torch.tensor([40.0, 400.0, 4000.0, 1.0])[:heads].repeat_interleave(4)[:, None])

    def forward(self, x):
        return torch.stack([block(x) for block in self.blocks])


def batch():
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


def clip_once(model, **options):
    rows = []
    clip = regard.QKClip(model, 5.0, log=rows.append if dist.get_rank() == 0 else None, **options)
    model(batch()).square().mean().backward()
    clip.step()
    found = {name: [round(x, 3) for x in tops] for name, tops in clip.last.max_logit.items()}
    model(batch()).square().mean().backward()
    clip.step()
    after = {name: [round(x, 3) for x in tops] for name, tops in clip.last.max_logit.items()}
    heads = [one.head for one in clip.last.heads]
    clip.close()
    return found, after, heads, [{name: round(x, 3) for name, x in row.items()} for row in rows]


def run_whole(rank, world):
    return clip_once(Model())


def run_local_shards(rank, world, **options):
    """Each rank holds half of the heads, in local tensors, as Megatron does."""
    whole, model = Model(), Model(heads=2)
    with torch.no_grad():
        for name, parameter in model.blocks[0].named_parameters():
            parameter.copy_(whole.blocks[0].get_parameter(name)[rank * 8 : rank * 8 + 8])
    try:
        return clip_once(model, **options)
    except ValueError as error:
        return str(error)


def run_local_shards_with_group(rank, world):
    return run_local_shards(rank, world, tensor_group=dist.group.WORLD)


def run_stages(rank, world):
    """Each rank has another layer under the same name; the first alone has a log."""
    model, rows = Model(), []
    with torch.no_grad():
        model.blocks[0].wk.weight.mul_(1.0 + rank)
    alone = dist.new_group([rank], use_local_synchronization=True)
    log = rows.append if rank == 0 else None
    with regard.QKClip(model, 5.0, group=alone, pipeline_group=dist.group.WORLD, log=log) as clip:
        model(batch()).square().mean().backward()
        return max(clip.step().max_logit["blocks.0"]), rows


def run_dtensor_shards(rank, world, named):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",) if named else None)
    model, whole = Model(), Model()
    parallelize_module(model, mesh, {f"blocks.0.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")})
    found = clip_once(model)
    reference = clip_once_alone(whole)
    return found, torch.allclose(model.blocks[0].wq.weight.full_tensor(), reference, rtol=1e-4)


def clip_once_alone(model):
    """The query weights after the same two steps in one process's view."""
    for _ in range(2):
        model(batch()).square().mean().backward()
    clip = regard.QKClip(model, 5.0, group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    for _ in range(2):
        model(batch()).square().mean().backward()
        clip.step()
    clip.close()
    return model.blocks[0].wq.weight.detach()


def run_two_dimensions(rank, world):
    """Data × tensor parallel over four ranks: the data ranks see other batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    parallelize_module(model, mesh["tp"], {f"blocks.0.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")})
    fully_shard(model, mesh=mesh["dp"])
    clip = regard.QKClip(model, 5.0, group=mesh)
    tops = []
    for _ in range(2):
        model(batch() * (1.0 + mesh.get_local_rank("dp"))).square().mean().backward()
        clip.step()
        (largest,) = clip.last.max_logit.values()
        tops.append([round(x, 2) for x in largest])
    clip.close()
    return tops
