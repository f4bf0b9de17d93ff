"""Attention on a sequence that is sharded over the ranks of a torch.distributed process group.

    shard, unshard   a whole tensor to this rank's shard, and back
    attention        regard.attention on shards: every option, normaliser, statistic and gradient
    decode           a few queries that every rank has against sharded keys
    RankError        contact with another rank was lost

docs/developers/parallel.md has the cost of each, in time, bytes and memory.
"""

from regard.parallel.group import RankError
from regard.parallel.layout import shard, unshard
from regard.parallel.sharded import attention, decode

__all__ = ["RankError", "attention", "decode", "shard", "unshard"]
