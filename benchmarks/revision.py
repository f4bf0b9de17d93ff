"""Which commit a benchmark measures."""

from __future__ import annotations

import os
import subprocess


def find_revision() -> str:
    """The commit: the variable COMMIT, where a copy of the tree has no history of its own, or what git says."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return os.environ.get("COMMIT") or subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
