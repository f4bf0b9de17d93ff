"""Before anything imports Triton: without a GPU its kernels run in the interpreter. Doctests know `regard` and `torch`."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    import regard

    doctest_namespace.update(regard=regard, torch=torch)
