"""The docs: their examples run, and what the build makes of claims and normalisers is there."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import regard_lab as lab
import road
import torch

import regard
from regard import normalizers
from regard.cli import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOW_TO = [f"how-to/{name}.md" for name in ("clip", "examine", "measure", "swap", "watch")]


@pytest.mark.parametrize("name", ["index.md", "get-started.md", "why-sqrt-dk.md", *HOW_TO])
def test_examples_in_the_docs_run(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(DOCS / name), module_relative=False, optionflags=flags)
    assert tried and not failed


def test_the_api_page_shows_what_it_names():
    """A member whose module has its own name is a module to the page, and left out; no heading has a private name."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for block in text.split("\n::: ")[1:]:
        path = block.split()[0]
        root = DOCS.parent / "lab" if path.startswith("regard_lab") else DOCS.parent
        folder = root.joinpath(*path.split("."))
        members = re.search(r"members: \[(.*)\]", block)
        for member in members[1].split(", ") if members else ():
            assert not (folder / f"{member}.py").exists(), f"{path}.{member}"
        heading = re.search(r"heading: (\S+)", block)
        shown = heading[1] if heading else path
        assert "._" not in shown
        module, _, name = shown.rpartition(".")
        holder = importlib.import_module(module or name)
        assert not module or hasattr(holder, name) or importlib.util.find_spec(shown), shown


def test_every_link_between_files_leads_to_a_file():
    """Links to claims and normalisers lead to pages that only the build makes."""
    for path in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in link and not link.startswith(
                (
                    "claims/",
                    "normalizers/",
                    "../normalizers/",
                    "rules.md",
                    "../rules.md",
                    "docs/rules.md",
                    "sample-report.html",
                    "../sample-report.html",
                )
            ):
                assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize(
    ("heading", "call"),
    [
        ("`attention(q, k, v)`", lambda q: regard.attention(q, q, q)),
        ("`attention(q, k, v, return_stats=True)`", lambda q: regard.attention(q, q, q, return_stats=True)),
        ('`normalize(scores, "entmax15")`', lambda q: regard.normalize(q[0, 0], "entmax15")),
    ],
)
def test_the_road_page_lists_the_files_of_a_warm_call(heading, call):
    text = (DOCS / "developers" / "road.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}")[1].split("\n## ")[0]
    q = torch.randn(2, 4, 64, 32)
    files = road.trace_files(lambda: call(q))
    assert re.findall(r"^\| `([\w/]+\.py)` \|", section, flags=re.M) == files
    assert f"warm: {len(files)} files" in section.splitlines()[0]


def test_the_api_page_shows_every_public_name():
    """Each function and class of `regard`, by its path or the heading of its entry; modules by one of their names."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?:::: |heading: )(regard\.\S+)", text)
    for name in regard.__all__:
        assert any(path == f"regard.{name}" or path.startswith(f"regard.{name}.") for path in shown), name


def test_the_files_that_developers_pages_name_exist():
    folders = ("regard", "lab", "tests", "tools", "benchmarks", "docs")
    known = ["/" + path.as_posix() for folder in folders for path in (DOCS.parent / folder).rglob("*.py")]
    for path in [*(DOCS / "developers").glob("*.md"), DOCS.parent / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            assert any(file.endswith(f"/{name}") for file in known), f"{path.name}: {name}"


def test_the_citation_has_the_version():
    text = (DOCS.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {regard.__version__}\n" in text


def test_the_statistics_page_defines_each():
    text = (DOCS / "statistics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.M) == list(regard.statistics.NAMES)


def test_the_first_page_names_every_command():
    words = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if not re.search(rf"\| `regard {name}( [A-Z].*)?` \|", words)] == []


@pytest.mark.parametrize("name", regard.normalizers.names())
def test_a_page_per_normaliser_from_its_file(build, name):
    text = build.normalizer_page(name)
    assert text.startswith(f"# {name}\n") and f'name="{name}"' in text and f"]({name}.svg)" in text
    assert f"({name}.md)" in build.normalizers_index()


def test_a_page_of_a_normaliser_whose_file_has_another_name(build, tmp_path, monkeypatch):
    for known in ("_members", "_files"):
        monkeypatch.setattr(normalizers, known, dict(getattr(normalizers, known)))
    text = (Path(__file__).parents[1] / "support" / "squares.py").read_text()
    (tmp_path / "mine.py").write_text(text)
    normalizers.discover(tmp_path)
    page = build.normalizer_page("squares")
    assert page.startswith("# squares\n\nsquares(s)\\_i = s\\_i² /") and text.strip() in page
    assert normalizers.file_of("squares") == tmp_path / "mine.py"


def test_a_claim_with_its_figure(build):
    text = build.claim_section(lab.run("scaled-example"))
    for part in ("## scaled-example", 'class="verdict wrong"', "<math", "](scaled-example.svg)", "**Right:**"):
        assert part in text


def test_a_check_tells_which_part_it_belongs_to(build):
    text = build.claim_section(lab.run("qk-norm"))
    assert "| check | predicted | measured | outcome | part |" in text
    assert "| agrees | the claim |" in text and "| disagrees | beyond the condition |" in text


def test_a_claim_of_several_notes_stands_under_each(build, monkeypatch):
    monkeypatch.setattr(build, "results", lambda: {name: lab.run(name) for name in ("scaled-variance", "e24")})
    assert "## scaled-variance" in build.claims_of("001") and "## e24" in build.claims_of("001")
    assert "## scaled-variance" in build.claims_of("003") and "## e24" not in build.claims_of("003")


def test_mathematics_is_typeset_outside_code_only(build):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="why.md"))
    text = build.on_page_markdown("$a^k$ and `$a^k$`\n\n$$x$$\n\n```\n$y$\n```\n", page, None, None)
    assert text.count("<math") == 2 and "`$a^k$`" in text and "$y$" in text


@pytest.mark.parametrize("name", ["why-sqrt-dk", "remedies", "training", "what-wins"])
def test_a_file_with_marks_says_what_they_are_and_the_site_does_not(build, name, monkeypatch):
    monkeypatch.setattr(build, "_typeset", lambda text, depth: text)
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert "In this file `[[…]]` stands where" in text
    page = SimpleNamespace(file=SimpleNamespace(src_uri=f"{name}.md"))
    made = build.on_page_markdown(text, page, None, None)
    assert "In this file" not in made and "on the site -->" not in made
    assert made.startswith("# ") and len(made) > len(text) - 300


def test_an_experiment_without_a_result_is_told_and_an_unknown_one_refused(build, monkeypatch):
    monkeypatch.setattr(build.training, "has_shipped", lambda name: False)
    assert "`regard lab train scale --preset full` does it" in build.results_table("scale")
    with pytest.raises(ValueError, match="'scales' is unknown"):
        build.results_table("scales")


def test_every_file_with_marks_says_so():
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\[\[\w+: |\]\((claims|normalizers)/", text, flags=re.M):  # pages that only the build makes
            assert "<!-- in the file -->" in text, path


def test_every_table_has_a_head():
    """A blank line inside one makes plain text of the rows below it."""
    for path in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for first in re.finditer(r"(?<!\|\n)^\|.*\n(.*)", text, flags=re.M):
            assert re.fullmatch(r"\|[ :|-]+", first.group(1)), f"{path.name}: {first.group(0)[:60]}"


def test_figures_are_the_lab_s(build):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="deep/why.md"))
    build.results.cache_clear()
    build.results = lambda: {"e24": lab.run("e24")}
    assert "](../claims/e24.svg)" in build.on_page_markdown("[[figure: e24]]", page, None, None)
