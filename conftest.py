"""Without a GPU, Triton's kernels run in its interpreter: chosen here, before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    import regard

    doctest_namespace.update(regard=regard, torch=torch)
