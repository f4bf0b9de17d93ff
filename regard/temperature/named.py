"""`named` and `unsized`: policies by name, as a configuration file can hold them."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from regard.temperature.policies import Adaptive, ASEntmax, Learned, QueryDependent, SSMax

NAMES = ("learned", "ssmax", "adaptive", "query_dependent", "asentmax")
SIZED = dict(
    learned="Learned(heads)", query_dependent="QueryDependent(heads, head_dim)", asentmax="ASEntmax(heads, head_dim)"
)


def named(
    name: str, heads: int, head_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a policy for `heads` heads of width `head_dim`; all but "adaptive" learn parameters per head.

    >>> import regard
    >>> regard.temperature.named.named("ssmax", heads=2, head_dim=4)
    SSMax(s=[0.43, 0.43], learn=True)
    """
    place: dict[str, Any] = dict(device=device, dtype=dtype)
    _check_name(name)
    if name == "learned":
        return Learned(heads, **place)
    if name == "ssmax":
        return SSMax(torch.full((heads,), 0.43), learn=True).to(**place)
    if name == "adaptive":
        return Adaptive()
    return (QueryDependent if name == "query_dependent" else ASEntmax)(heads, head_dim, **place)


def unsized(name: str) -> nn.Module:
    """Return a policy without parameters, for any number of heads: "ssmax" or "adaptive".

    >>> import regard
    >>> regard.temperature.named.unsized("ssmax")
    SSMax(s=[0.43], learn=False)
    """
    _check_name(name)
    if name in SIZED:
        raise ValueError(
            f"temperature {name!r} has parameters for a module's heads; create regard.temperature.{SIZED[name]} and "
            "pass its parameters to the optimizer"
        )
    return SSMax() if name == "ssmax" else Adaptive()


def _check_name(name: str) -> None:
    if name not in NAMES:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"temperature {name!r} is unknown; {hint}known words: {', '.join(NAMES)}")
