"""Imports point one way, from facts over the data of a call, the backends and the pipeline to health: see LAYERS."""

import ast
from pathlib import Path

import pytest

import regard

PACKAGE = Path(regard.__file__).parent

# Lower layers first; a module may import its own layer and those before it. Longest prefix counts.
LAYERS = [
    ["regard._facts", "regard.normalizers", "regard.table"],
    [
        "regard._call",
        "regard.bias",
        "regard.masks",
        "regard._call.score_function",
        "regard._call.scores",
        "regard.statistics",
        "regard.temperature",
    ],
    ["regard.reference"],
    ["regard._backends.cpu", "regard._backends.gpu", "regard._backends"],
    ["regard._core.derivatives.autograd", "regard._core.ops"],
    ["regard._core"],
    ["regard"],  # __init__: the public names
    ["regard.losses", "regard.nn", "regard.parallel", "regard.listing"],
    ["regard.health", "regard.hf", "regard.testing"],
    ["regard.cli"],
    ["regard.__main__"],
]
LEVEL = {prefix: level for level, layer in enumerate(LAYERS) for prefix in layer}
APART = {"regard._backends.cpu", "regard._backends.gpu"}  # one layer, but neither may know of the other
# What __init__ hands out from above its own layer.
PUBLIC_FROM_ABOVE = {"regard.nn", "regard.parallel", "regard.health"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(name: str) -> str:
    """The entry of LAYERS that a module belongs to: its longest prefix there, `regard` only for itself."""
    parts = name.split(".")
    for length in range(len(parts), 1 if len(parts) > 1 else 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LEVEL:
            return prefix
    raise LookupError(f"{name} has no layer; give it one in LAYERS of {Path(__file__).name}")


def imported(name: str, path: Path, tree: ast.Module) -> set[str]:
    """The modules of regard that a file imports, at the top or inside functions."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {module if module in MODULES else base for module in inner}
    return {module for module in found if module.split(".")[0] == "regard"}


def violations(name: str, imports: set[str]) -> list[str]:
    mine = layer_of(name)
    wrong = []
    for module in imports:
        theirs = layer_of(module)
        if mine == "regard" and theirs in PUBLIC_FROM_ABOVE:
            continue
        if LEVEL[theirs] > LEVEL[mine] or {mine, theirs} == APART:
            wrong.append(f"{name} imports {module}")
    return wrong


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    path = MODULES[name]
    assert violations(name, imported(name, path, ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("regard.normalizers.softmax", "from regard.statistics import NAMES"),
        ("regard._backends.cpu.rows.launch", "import regard._backends.gpu.rows.launch"),
        ("regard._core.ops", "def f():\n    from regard._core import attention"),
        ("regard.reference", "from regard import softmax"),
        ("regard.statistics", "import regard"),
        ("regard.parallel.group", "def f():\n    from regard.health.capture.call import Call"),
    ],
)
def test_an_import_that_points_up_is_found(name, text):
    assert violations(name, imported(name, Path("module.py"), ast.parse(text)))


def test_the_lab_uses_no_private_module():
    lab = PACKAGE.parent / "lab" / "regard_lab"
    names = {name for path in lab.rglob("*.py") for name in imported("regard_lab", path, ast.parse(path.read_text()))}
    assert names and not [name for name in names if "._" in name]
