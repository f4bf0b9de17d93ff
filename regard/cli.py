"""regard list | bench | demo | …: the command line.

A command is one line of `COMMANDS` and one module with `main(options)` and, if it takes any, `arguments(parser)`. The
module is imported only when its command is typed, and a package that it lacks is named together with the extra that
brings it. `options.fail("what is wrong")` ends a command as a bad command line ends. A command whose module is not in
this package is not offered.

>>> from regard.cli import main
>>> main(["lisst"])
2
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from regard import normalizers

PACKAGE = Path(__file__).parent


class Command(NamedTuple):
    module: str
    help: str
    extra: str | None = None  # the extra that brings what the module imports

    @property
    def exists(self) -> bool:
        path = PACKAGE.parent.joinpath(*self.module.split("."))
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


COMMANDS = {
    "demo": Command("regard.health.commands.demo", "examine two small language models, one of them unhealthy", "hf"),
    "examine": Command("regard.health.commands.examine", "measure every attention head of a model", "hf"),
    "compare": Command("regard.health.commands.compare", "what differs between two reports", "report"),
    "lab": Command("regard.lab.command", "put the claims about attention to the test", "lab"),
    "lab train": Command("regard.lab.training.command", "train models that answer what arithmetic cannot", "lab"),
    "explore": Command("regard.lab.explorer.command", "turn the knobs of attention in the browser", "lab"),
    "bench": Command("regard.bench", "rows and attention against torch, on this machine"),
    "bench accuracy": Command("regard.bench.accuracy", "errors against float64: the budget and what was measured"),
    "list": Command("regard.listing", "the normalisers: formula, sum, sparsity, paper"),
}


class UsageError(Exception):
    """What is wrong with the command line, in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status: 0, 2 for a bad command line, 130 after Ctrl-C."""
    _open_what_is_closed()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without α prints ?, it does not fail
    try:
        status = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except UsageError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    except normalizers.BrokenFile as wrong:
        print(f"regard: {wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `regard list | head -1`; nothing is left to say, not even at exit
        _silence()
        return 0
    except OSError as wrong:
        if wrong.errno != errno.ENOSPC:
            raise
        _silence()
        print(f"regard: the output cannot be written: {wrong.strerror}; make room", file=sys.stderr)
        return 1


def _open_what_is_closed() -> None:
    """`regard list >&-`: what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 – as long as the process lives


def _silence() -> None:
    """What standard output still holds goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(argv: list[str]) -> int:
    offered = {name: command for name, command in COMMANDS.items() if command.exists}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview(offered))
        return 0
    if argv[0] in ("-V", "--version"):
        import regard

        print(f"regard {regard.__version__}")
        return 0
    name, *rest = argv
    if " ".join(argv[:2]) in offered:  # a command of two words
        name, rest = " ".join(argv[:2]), argv[2:]
    if name not in offered:
        near = difflib.get_close_matches(name, offered, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(offered)}"
        raise UsageError(f"regard: no command {name!r}; {hint}")
    command = offered[name]
    parser = Parser(prog=f"regard {name}", description=command.help, allow_abbrev=False)
    parser.set_defaults(fail=parser.error)
    try:
        module = importlib.import_module(command.module)
        if hasattr(module, "arguments"):
            module.arguments(parser)
        return module.main(parser.parse_args(rest)) or 0
    except ModuleNotFoundError as missing:
        if (missing.name or "regard").split(".")[0] == "regard":
            raise
        source = f"'regard[{command.extra}]'" if command.extra else missing.name
        raise UsageError(f"regard {name}: needs {missing.name}; pip install {source}") from None


def overview(offered: dict[str, Command]) -> str:
    width = max(map(len, offered), default=0)
    lines = [f"  {name:{width}}  {command.help}" for name, command in offered.items()]
    usage = "usage: regard COMMAND [options]     (regard COMMAND --help tells its options)"
    return "\n".join(["regard: look at attention with attention", "", usage, "", *lines])


if __name__ == "__main__":  # python -m regard.cli; as the module that commands import, not a second one
    from regard.cli import main as run

    sys.exit(run())
