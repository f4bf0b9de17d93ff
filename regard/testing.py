"""The contract of attention in a test: `assert_contract(model, batch)`.

>>> from regard.testing import assert_contract
>>> layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
>>> assert_contract(torch.nn.Sequential(torch.nn.Embedding(32, 16), layer), torch.randint(32, (2, 24)), select="RG2")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from regard.health.contract.check import check
from regard.health.contract.verdict import ContractError

__all__ = ["ContractError", "assert_contract"]


def assert_contract(
    model: nn.Module, batch: Any, select: str | Iterable[str] | None = None, *, severity: str = "warning",
    **options: Any,
) -> None:  # fmt: skip
    """Raises ContractError, an AssertionError with one line per failure, if `regard.check` finds one.

    Args:
        model: any nn.Module that `regard.check` takes.
        batch: one batch, or an iterable of batches.
        select: codes, beginnings of codes or kinds of what to check; None for everything.
        severity: the least that fails: "warning" or "critical".
        options: those of `regard.check`: `ignore`, `tokenizer`, `loss`, `causal`, …
    """
    check(model, batch, select, **options).raise_on(severity)
