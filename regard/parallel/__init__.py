"""Beyond one machine: a sequence sharded over the ranks of a torch.distributed process group.

    shard, unshard   a whole tensor to this rank's piece, and back
    attention        regard.attention on pieces: every option, normaliser, statistic and gradient
    decode           a few queries that every rank has against sharded keys
    traffic          what a rank sends, counted
    RankError        another rank died or stalled, and which

docs/scale.md has the cost of each, in time, bytes and memory.
"""

from regard.parallel import traffic
from regard.parallel.failures import RankError
from regard.parallel.layout import shard, unshard
from regard.parallel.sharded import attention, decode

__all__ = ["RankError", "attention", "decode", "shard", "traffic", "unshard"]
