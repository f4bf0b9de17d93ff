"""Context parallel by the Triton kernels: several processes on one GPU, told over gloo."""

import torch
from parallel_cases import check
from parallel_crew import Crew


def on_the_gpu(rank: int, world: int) -> None:
    def here(name: str, seed: int, shared: bool, **options) -> None:
        check(rank, world, name, seed, shared, None, dict(options, device="cuda"))

    here("softmax", 3, False, is_causal=True, temperature=True, sink=True)
    here("softmax", 4, True, window=(5, 3), lengths=True, layout="contiguous")
    here("entmax15", 7, False, is_causal=True)
    here("softmax", 10, False, is_causal=True, dtype=torch.bfloat16)


def test_pieces_give_the_whole():
    with Crew(2) as crew:
        crew(on_the_gpu)
