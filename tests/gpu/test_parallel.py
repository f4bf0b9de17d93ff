"""Context parallel on a GPU: two processes on one card, told over gloo, and one process over NCCL."""

from parallel_cases import on_the_gpu, over_nccl
from parallel_crew import Crew


def test_pieces_give_the_whole():
    with Crew(2) as crew:
        crew(on_the_gpu)


def test_one_rank_over_nccl():
    with Crew(1, backend="nccl") as crew:
        crew(over_nccl)
