"""One version for both packages, and no file of the lab in regard's wheel."""

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[1]


def read(path):
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def test_the_lab_has_the_version_of_regard_and_adds_its_commands():
    wheel, lab = read("pyproject.toml"), read("lab/pyproject.toml")
    version = lab["tool"]["hatch"]["version"]["path"]
    assert (ROOT / "lab" / version).samefile(ROOT / wheel["tool"]["hatch"]["version"]["path"])
    assert wheel["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [
        "regard", "regard_command.py", "regard_pytest.py",
    ]  # fmt: skip
    assert lab["project"]["entry-points"]["regard.commands"] == {"lab": "regard_lab.commands:COMMANDS"}
    assert lab["project"]["name"] in wheel["project"]["optional-dependencies"]["lab"]
