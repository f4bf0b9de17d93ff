"""What the wheel of regard leaves out is in the wheel of its data; both have one version."""

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[1]


def read(path):
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["tool"]["hatch"]


def test_the_data_wheel_has_what_the_wheel_leaves_out():
    wheel, data = read("pyproject.toml"), read("tools/data/pyproject.toml")
    included = data["build"]["targets"]["wheel"]["force-include"]
    assert {f"/{place}" for place in included.values()} == set(wheel["build"]["targets"]["wheel"]["exclude"])
    for source, place in included.items():
        given = ROOT / "tools" / "data" / source
        assert given.resolve() == (ROOT / place).resolve()
        assert given.is_file() or any(path.suffix in (".npz", ".json", ".html") for path in given.rglob("*"))
    assert (ROOT / "tools" / "data" / data["version"]["path"]).samefile(ROOT / wheel["version"]["path"])
