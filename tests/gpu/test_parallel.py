"""Context parallel on a GPU: two processes on one card, told over gloo, and one process over NCCL."""

from parallel_cases import on_the_gpu, over_nccl
from rank_processes import RankProcesses


def test_pieces_give_the_whole():
    with RankProcesses(2) as ranks:
        ranks(on_the_gpu)


def test_one_rank_over_nccl():
    with RankProcesses(1, backend="nccl") as ranks:
        ranks(over_nccl)
