"""The command line: regard demo | examine | look | compare | timeline | lab | explore | bench | list.

A command is one line of `COMMANDS` and one module with `main(options)` and, if it takes any, `arguments(parser)`. The
module is imported only when its command runs; if it lacks a package, the error names the extra that installs it.
`options.fail("what is wrong")` ends a command with the status of a bad command line.

>>> from regard.cli import main
>>> main(["lisst"])
2
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from regard import normalizers


class Command(NamedTuple):
    """A command's module, its line in the overview, and the extra that installs what the module imports."""

    module: str
    help: str
    extra: str | None = None


COMMANDS = {
    "demo": Command("regard.health.commands.demo", "examine two small language models, one of them unhealthy"),
    "examine": Command("regard.health.commands.examine", "measure every attention head of a model", "hf"),
    "look": Command("regard.health.commands.look", "list which tokens a head looks at on one text", "hf"),
    "compare": Command("regard.health.commands.compare", "list what differs between two reports", "report"),
    "timeline": Command("regard.health.commands.timeline", "draw what a Monitor's file says about a training"),
    "lab": Command("regard.lab.command", "test the claims about attention", "lab"),
    "lab train": Command("regard.lab.training.command", "train the models behind the claims that need training", "lab"),
    "explore": Command("regard.lab.explorer.command", "explore attention interactively in the browser"),
    "bench": Command("regard.bench", "time rows and attention against torch on this machine"),
    "bench accuracy": Command("regard.bench.accuracy", "measure errors against float64 and hold them to the budget"),
    "list": Command("regard.listing", "list the normalisers: formula, sum, sparsity, paper"),
}


class UsageError(Exception):
    """A bad command line; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a `UsageError`."""
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0, 2 for a bad command line, 130 after Ctrl-C."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without α prints ?, it does not fail
    try:
        status = run_command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except normalizers.BrokenFile as error:
        print(f"regard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `regard list | head -1`: what is still in the buffer goes to the null device
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_command(argv: list[str]) -> int:
    """Run the command that `argv` names and return its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        import regard

        print(f"regard {regard.__version__}")
        return 0
    name, *rest = argv
    if " ".join(argv[:2]) in COMMANDS:  # a command of two words
        name, rest = " ".join(argv[:2]), argv[2:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f"regard: no command {name!r}; {hint}")
    command = COMMANDS[name]
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


def overview() -> str:
    """Return the list of commands that `regard --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: regard COMMAND [options]     (regard COMMAND --help lists its options)"
    return "\n".join(["regard: look at attention with attention", "", usage, "", *lines])


if __name__ == "__main__":
    sys.exit(main())
