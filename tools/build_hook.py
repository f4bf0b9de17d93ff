"""Makes the wheel of regard ask for the wheel of its data, which tools/data/pyproject.toml describes.

An editable install has the data in the source tree and asks for nothing more.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataDependency(BuildHookInterface):
    """Adds `regard-data`, of the same version, to the dependencies of a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["dependencies"].append(f"regard-data=={self.metadata.version}")
