"""Finding rules: one file each, discovered in this folder.

A file defines `KIND` (or `KINDS`) and `find(heads) -> list[Finding]`, or `find_in_layers(layers)` if it needs more than
the measured heads. It holds its thresholds; docs/health.md has the table of them and their false-alarm rates.

>>> from regard.health import findings
>>> findings.kinds()[:4]
['causal at the wrong end', 'collapsed', 'dead', 'diffuse']
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

from regard.health.findings._finding import SEVERITIES, Finding, HeadList, Heads, Layers

__all__ = ["SEVERITIES", "Finding", "find_all", "kinds"]


@cache
def _modules() -> list[ModuleType]:
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    return [importlib.import_module(f"{__name__}.{stem}") for stem in stems]


def kinds() -> list[str]:
    """The kinds of findings, in alphabetical order."""
    return sorted(kind for module in _modules() for kind in getattr(module, "KINDS", None) or (module.KIND,))


def find_all(heads: Heads, layers: Layers = ()) -> list[Finding]:
    """Every finding about the measured heads and about the layers, most severe first."""
    found: list[Finding] = []
    heads = HeadList(heads)
    for module in _modules():
        if hasattr(module, "find_in_layers"):
            found += module.find_in_layers(layers)
        elif heads:
            found += module.find(heads)
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), -len(finding.heads), finding.kind))
