"""The command line: what it prints to a pipe and to a terminal, and how it fails."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from regard import cli, listing, normalizers
from regard.table import Table

FUSED = [name for name in normalizers.names() if normalizers.get(name).fused]


def test_list_in_a_pipe_is_one_plain_line_per_normalizer(capsys):
    assert cli.main(["list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == normalizers.names()
    at = head.index("paper")
    for line, name in zip(lines, normalizers.names(), strict=True):
        member = normalizers.get(name)
        assert line[at:] == member.paper
        assert member.formula in line
    assert "\x1b" not in head


def test_list_json_holds_the_same(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed == listing.rows()
    assert listed["sparsemax"]["sparse"] is True
    assert listed["sigmoid"]["parameter"] == {"name": "bias", "default": 0.0}


def test_the_docs_say_of_each_normalizer_what_its_file_says():
    readme = (Path(cli.__file__).parents[1] / "docs" / "index.md").read_text().replace("\\|", "¦")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.splitlines() if line.startswith("| ")]
    told = {cells[0].split("(")[0]: cells[1:3] for cells in rows if cells[0].split("(")[0] in normalizers.names()}
    assert len(told) >= 8
    for name, (formula, sums_to) in told.items():
        assert (formula.replace("¦", "|"), sums_to) == (normalizers.get(name).formula, normalizers.get(name).sums_to)


def test_a_terminal_gets_colour_and_lines():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        Table(["map", "ratio"], [["softmax", "0.9 ✓"], ["a[b]", "3 ✗"]]).show(terminal)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\x1b[" in text
    assert "─" in text
    assert "a[b]" in text  # never read as markup


def test_tables_align_and_escape():
    table = Table(["map", "ms"], [["a|b", "1.5"], ["relu", "12.0"]], title="times", numbers=["ms"])
    assert table.plain().splitlines() == ["times", "map     ms", "a|b    1.5", "relu  12.0"]
    assert table.markdown().splitlines()[2:] == ["| map | ms |", "| --- | ---: |", "| a\\|b | 1.5 |", "| relu | 12.0 |"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lisst"], "did you mean list?"),
        (["zzz"], "commands: "),
        (["list", "--wrong"], "--wrong"),
        (["list", "extra"], "extra"),
        (["list", "--js"], "--js"),
    ],
)
def test_a_bad_command_line_is_one_line_and_status_2(words, says, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words, capsys):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_version_has_one_source(capsys):
    import regard

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that offers a command `try` made of the given text."""

    def offer(text, extra=None):
        (tmp_path / "tried_command.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "tried_command", raising=False)
        monkeypatch.setattr(cli, "COMMANDS", {"try": cli.Command("tried_command", "a trial", extra)})

    return offer


def test_a_command_is_one_module(command, capsys):
    command("def arguments(p): p.add_argument('--n', type=int)\ndef main(options): print(options.n + 1)")
    assert cli.main(["try", "--n", "4"]) == 0
    assert capsys.readouterr().out == "5\n"
    assert cli.main(["try", "--n", "four"]) == 2
    assert "'four'" in capsys.readouterr().err


def test_a_status_is_handed_on(command):
    command("def main(options): return 7")
    assert cli.main(["try"]) == 7


def test_a_command_can_refuse_its_arguments(command, capsys):
    command("def main(options): options.fail('no such model')")
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "regard try: no such model; see regard try --help\n"


def test_a_missing_package_names_its_extra(command, capsys):
    command("import surely_not_installed", extra="lab")
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "regard try: needs surely_not_installed; pip install 'regard[lab]'\n"


def test_a_module_of_ours_that_is_missing_is_a_bug_and_shown_as_one(command):
    command("import regard.no_such_part")
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        cli.main(["try"])


def test_ctrl_c_ends_with_130_and_no_traceback(command, capsys):
    command("def main(options): raise KeyboardInterrupt")
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])  # both end in one `except`
def test_a_closed_pipe_is_no_error(unbuffered):
    read, write = os.pipe()
    os.close(read)
    command, env = [sys.executable, "-m", "regard", "list"], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=env, timeout=120)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_terminal_without_greek_still_lists():
    """And `python -m regard.cli` is the command too."""
    command, env = [sys.executable, "-m", "regard.cli", "list"], os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "softmax1" in found.stdout


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "must be an existing directory"),
        ("x = (", "cannot be loaded: SyntaxError"),
        ("from regard.normalizers.relu import normalizer", "the name 'relu' is taken"),
    ],
)
def test_a_broken_normalizer_of_the_environment_is_one_line(tmp_path, monkeypatch, capsys, content, complaint):
    folder = tmp_path / "own"
    if content is not None:
        folder.mkdir()
        (folder / "broken.py").write_text(content)
    monkeypatch.setattr(normalizers, "_waiting", [str(folder)])
    assert cli.main(["list"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1) and complaint in told.err


def test_table_goes_to_the_file_given():
    file = io.StringIO()
    Table(["a"], [["1"]]).show(file)
    assert file.getvalue() == "a\n1\n"


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("check ./modle", 2, "there is no folder './modle'"),
        ("examine nowhere:make", 2, "there is no module 'nowhere'"),
        ("compare lost.regard other.json", 2, "there is no file 'lost.regard'"),
        ("list", 130, "interrupted"),
    ],
)
def test_a_missing_target_and_ctrl_c_end_before_torch_is_there(tmp_path, line, status, words):
    """The torch of this process is one that Ctrl-C meets while it is imported."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])}
    run = "import sys, regard_command; sys.exit(regard_command.main())"
    command = [sys.executable, "-c", run, *line.split()]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=60)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (status, "", 1)
    assert words in found.stderr


@pytest.mark.slow  # test_ctrl_c_ends_with_130_and_no_traceback has the same line of cli.main
def test_ctrl_c_in_a_running_process_is_status_130(tmp_path):
    (tmp_path / "interrupted_command.py").write_text(
        "import os, signal\n"
        "from regard import cli\n"
        "def main(options): os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.COMMANDS['try'] = cli.Command('interrupted_command', 'interrupts itself')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__': raise SystemExit(cli.main(['try']))\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "interrupted_command.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=120)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")
