"""Compiling takes longer than running: REGARD_SHARD=2/12 runs every twelfth test of this folder, from the third on."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    part, parts = map(int, os.environ.get("REGARD_SHARD", "0/1").split("/"))
    items[:] = items[part::parts]
