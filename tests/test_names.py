"""What `import regard` offers: names that complete, and that `import *` brings."""

import subprocess
import sys

import regard


def test_every_public_name_is_listed_and_there():
    assert set(regard.__all__) <= set(dir(regard))
    assert {"examine", "Monitor", "using", "qk_clip", "parallel"} <= set(regard.__all__)
    assert "importlib" not in dir(regard)
    for name in regard.__all__:
        assert getattr(regard, name) is not None


def test_importing_and_listing_bring_no_health():
    code = "import regard, sys; dir(regard); print('regard.health' in sys.modules, 'regard.parallel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2


def test_import_star_brings_them_all():
    names: dict = {}
    exec("from regard import *", names)
    assert set(regard.__all__) <= set(names)
