"""`RankError`, raised where torch.distributed reports that another rank died or stalled."""

from __future__ import annotations

import torch.distributed as dist

LOST = (
    "connection",
    "timed out",
    "timeout",
    "peer",
    "socket",
    "broken pipe",
    "nccl",
)  # gloo raises plain RuntimeErrors


class RankError(RuntimeError):
    """Contact with another rank was lost: it died, stalled past the group's timeout, or left the call after an error.

    Attributes:
        rank: the rank (of the whole job) that this one waited for; None in a collective, where torch names none.
        step: the step that this rank was at.
    """

    def __init__(self, message: str, rank: int | None, step: str) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


def is_lost_contact(error: RuntimeError) -> bool:
    """True if an error of torch.distributed says that another rank is gone or does not answer."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in LOST)
