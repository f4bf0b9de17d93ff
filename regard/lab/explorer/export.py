"""`render`: the explorer as one HTML file that computes in the browser and needs neither Python nor a network.

>>> from regard.lab.explorer.export import render
>>> page = render()
>>> "<script src" in page, "function entmax" in page
(False, True)
"""

from __future__ import annotations

from importlib import resources

SCRIPTS = ("normalizers.js", "page.js")


def read_part(name: str) -> str:
    """Return a file of the folder `static`."""
    return resources.files("regard.lab.explorer").joinpath("static", name).read_text(encoding="utf-8")


def render() -> str:
    """Return the page with its scripts inside."""
    page = read_part("page.html")
    for name in SCRIPTS:
        page = page.replace(f"/* {name} */", f"\n{read_part(name)}")
    return page
