"""What can be wrong with a head: one file each, found by looking at this folder.

A file has its `KINDS`, or one `KIND`, and `find(heads) -> list[Finding]`, or `find_in_layers(layers)` where it asks for
what was seen beside the heads that were measured. Its thresholds stand in it, with where they come from; docs/health.md
tells how often they cry wolf.

>>> from regard.health import findings
>>> findings.kinds()[:4]
['causal at the wrong end', 'collapsed', 'dead', 'diffuse']
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from regard.health.findings._finding import SEVERITIES, Finding

__all__ = ["SEVERITIES", "Finding", "find_all", "kinds"]


@cache
def _modules() -> list[ModuleType]:
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    return [importlib.import_module(f"{__name__}.{stem}") for stem in stems]


def kinds() -> list[str]:
    return sorted(kind for module in _modules() for kind in getattr(module, "KINDS", None) or (module.KIND,))


def find_all(heads: Sequence, layers: Sequence = ()) -> list[Finding]:
    """Every finding about heads that were measured, and about their layers and those that were not, gravest first."""
    found: list[Finding] = []
    for module in _modules():
        if hasattr(module, "find_in_layers"):
            found += module.find_in_layers(layers)
        elif heads:
            found += module.find(heads)
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), -len(finding.heads), finding.kind))
