"""What `import regard` offers: the names of its contract and no others, few enough to be known."""

import importlib
import pkgutil
import subprocess
import sys

import regard

CONTRACT = [
    "Fingerprint", "Mask", "Monitor", "OnlineSoftmax", "QKClip", "attention", "attention_path", "attention_varlen",
    "bias", "check", "compare", "entmax", "entmax15", "examine", "fingerprint", "gumbel_softmax", "jacobian",
    "log_softmax", "logsumexp", "look", "masks", "nn", "normalize", "normalizers", "parallel", "reference", "relu_norm",
    "sigmoid_norm", "softmax", "softmax1", "softmax_backward", "softpick", "sparsemax", "temperature", "testing",
    "using", "vjp",
]  # fmt: skip
COMMANDS = {"cli", "listing"}  # modules that are run, and offer no name


def public_names() -> set[str]:
    """Every name of `__all__` of regard and its public modules; what regard hands on from health counts once."""
    names = set(regard.__all__)
    for module in pkgutil.iter_modules(regard.__path__):
        if not module.name.startswith("_") and module.name not in COMMANDS:
            own = importlib.import_module(f"regard.{module.name}").__all__
            names |= {f"{module.name}.{name}" for name in own if name not in regard.__all__ or module.name != "health"}
    return names


def test_the_top_level_has_the_names_of_the_contract_and_no_others():
    assert sorted(regard.__all__) == sorted(CONTRACT)
    assert dir(regard) == sorted([*CONTRACT, "__version__"])
    for name in regard.__all__:
        assert getattr(regard, name) is not None


def test_public_names_are_few():
    names = public_names()
    assert len(names) <= 90, sorted(names)
    for name in names:
        owner, _, last = f"regard.{name}".rpartition(".")
        assert hasattr(importlib.import_module(owner), last), name


def test_importing_and_listing_bring_no_health():
    code = "import regard, sys; dir(regard); print('regard.health' in sys.modules, 'regard.parallel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2


def test_health_imports_no_compiler():
    """torch._dynamo takes longer to import than torch: a mistyped folder would wait for it."""
    code = (
        "import regard.health, sys; print([name for name in ('torch._dynamo', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_import_star_brings_them_all():
    names: dict = {}
    exec("from regard import *", names)
    assert set(regard.__all__) <= set(names)
