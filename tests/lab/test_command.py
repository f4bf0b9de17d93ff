"""regard lab on the command line, and the page that it writes."""

import errno
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import regard_lab as lab
from regard_lab import page
from regard_lab.claim import NOTES
from regard_lab.run import claims

from regard.cli import main
from regard.health.report import files


def test_one_claim_is_printed_whole(capsys):
    assert main(["lab", "scaled-example"]) == 0  # a wrong claim is no failure
    text = capsys.readouterr().out
    assert "outcome" in text and "✗ disagrees" in text  # in words too: a terminal without UTF-8 prints ? for a mark
    for part in ("✗ wrong", "derivation", "rule", "0.8292", "sum of the printed weights", "no weights"):
        assert part in text


def test_several_claims_make_a_table(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "e24", "power-order"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["claim", "verdict"]
    assert lines[1].startswith("e24") and "✓ holds" in lines[1]
    assert lines[2].startswith("power-order") and "holds if" in lines[2]
    assert not list(tmp_path.iterdir())  # lab.html is for the whole lab, or when asked


def test_a_claim_that_is_named_twice_is_one(capsys):
    assert main(["lab", "--json", "e24", "e24"]) == 0
    assert [record["id"] for record in json.loads(capsys.readouterr().out)] == ["e24"]


def test_json(capsys):
    assert main(["lab", "--json", "e24", "scaled-example", "--seed", "3"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["id"] == "e24" and first["verdict"] == "holds" and first["condition"] is None
    assert set(first) >= {"id", "verdict", "condition", "predicted", "measured", "interval"}
    assert second["verdict"] == "wrong" and second["predicted"] == 0.995 and second["seed"] == 3
    assert second["measured"] == pytest.approx(0.8292, abs=1e-4)


def test_a_run_that_fails_is_told_and_the_others_go_on(capsys, monkeypatch):
    def broken(sampler):
        raise RuntimeError("no more normal numbers")

    monkeypatch.setitem(claims(), "e24", replace(claims()["e24"], measure=broken))
    assert main(["lab", "e24", "power-order"]) == 1
    told = capsys.readouterr()
    assert "failed: e24: RuntimeError: no more normal numbers" in told.err
    assert "power-order" in told.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lab", "no-such-claim"], "claim 'no-such-claim' is unknown"),
        (["lab", "Dot_Mean"], "did you mean 'dot-mean'"),
        (["lab", "e24", "--seed", "-1"], "--seed must lie in"),
        (["lab", "e24", "--html", ""], "'.' is a folder"),
        (["lab", "e24", "--html", "."], "'.' is a folder"),
        (["lab", "e24", "--html", "no/such/lab.html"], "there is no folder 'no/such'"),
    ],
)
def test_bad_command_lines_run_nothing(capsys, argv, message):
    assert main(argv) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.out == ""


def test_a_page_that_is_refused_at_the_end_is_one_line(capsys, monkeypatch, tmp_path):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", refuse)
    path = str(tmp_path / "lab.html")
    assert main(["lab", "e24", "--html", path]) == 2
    assert capsys.readouterr().err.startswith(f"regard lab: --html {path} cannot be written: No space left on device")


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "lab.html"
    path.write_text("an older page")
    files.write(path, page.page([lab.run(name) for name in ("jacobian", "scaled-example", "gradient-norm")]))
    assert [p.name for p in path.parent.iterdir()] == ["lab.html"]  # nothing is left beside it
    return path.read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(written):
    reader = Reader(written)
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "iframe", "object", "embed"}
    policy = next(meta["content"] for meta in reader.all("meta") if "content" in meta and "http-equiv" in meta)
    assert "default-src 'none'" in policy and "script-src" not in policy
    assert all(image["src"].startswith("data:") for image in reader.all("img"))
    assert all(link["href"].startswith("#") for link in reader.all("a"))
    assert "url(" not in written and "@import" not in written


def test_the_page_tells_every_claim(written):
    reader = Reader(written)
    assert {section["id"] for section in reader.all("section")} == {"scaled-example", "gradient-norm"}  # wrong ones
    assert [one["id"] for one in reader.all("details") if "id" in one] == ["jacobian"]
    assert len(reader.all("img")) == 3 and all(len(image["alt"]) > 20 for image in reader.all("img"))
    assert len(reader.all("math")) >= 3
    assert "five study notes" in written  # what "note 000" means
    for number in ("000", "001", "002", "004"):  # the notes of these claims
        assert f"note {number}, <i>{NOTES[number]}</i>" in written
    assert "softmax(−3, −1, 0, 1, 3) = (0.002, 0.015, 0.041, 0.112, 0.829)" in written
    assert re.search(r'class="verdict wrong"', written)
    assert '<th scope="col"></th>' not in written  # every column has a name


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "lab.html"
    path.write_text("an older page")
    monkeypatch.setattr(page, "section", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write(path, page.page([lab.run("e24")]))
    assert path.read_text() == "an older page" and len(list(tmp_path.iterdir())) == 1


def test_a_page_is_not_written_through_what_lies_beside_it(tmp_path):
    """In a folder that others can write to, a link may lie where the page is made."""
    (tmp_path / "theirs").write_text("as it was")
    (tmp_path / f".lab.html.{os.getpid()}").symlink_to(tmp_path / "theirs")
    files.write(tmp_path / "lab.html", page.page([lab.run("e24")]))
    assert (tmp_path / "theirs").read_text() == "as it was" and not (tmp_path / "lab.html").is_symlink()
