"""The command line: `regard --help` lists the commands, and those of installed packages.

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
from importlib import metadata
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
    "check": Command("regard.health.commands.check", "check the contract of attention: red or green, with the cause"),
    "rule": Command("regard.health.commands.rule", "explain a code of check, or list them"),
    "look": Command("regard.health.commands.look", "list which tokens a head looks at on one text", "hf"),
    "compare": Command("regard.health.commands.compare", "find where two models, fingerprints or reports differ"),
    "fingerprint": Command("regard.health.commands.fingerprint", "write what a model computes, to compare later", "hf"),
    "timeline": Command("regard.health.commands.timeline", "draw what a Monitor's file says about a training"),
    "replay": Command("regard.health.commands.replay", "show which tokens made the largest logits of a training"),
    "list": Command("regard.listing", "list the normalisers: formula, sum, sparsity, paper"),
}

IN_LAB = ("lab", "explore")  # commands of the package regard-lab, which adds them by the entry point GROUP
GROUP = "regard.commands"  # entry points: each loads {name: (module, help, extra)}


class UsageError(Exception):
    """A bad command line; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a `UsageError`."""
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def all_commands() -> dict[str, Command]:
    """The commands of this package and those that other installed packages add."""
    added = [entry.load() for entry in metadata.entry_points(group=GROUP)]
    return COMMANDS | {name: Command(*one) for commands in added for name, one in commands.items()}


def main(argv: Sequence[str] | None = None, commands: dict[str, Command] | None = None) -> int:
    """Run one command line and return its exit status: 0, 2 for a bad command line, 130 after Ctrl-C.

    `commands` stands for those of `all_commands()`.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without α prints ?, it does not fail
    try:
        known = all_commands() if commands is None else commands
        status = run_command(list(sys.argv[1:] if argv is None else argv), known)
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


def run_command(argv: list[str], commands: dict[str, Command]) -> int:
    """Run the one of `commands` that `argv` names and return its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview(commands))
        return 0
    if argv[0] in ("-V", "--version"):
        import regard

        print(f"regard {regard.__version__}")
        return 0
    name, *rest = argv
    if " ".join(argv[:2]) in commands:  # a command of two words
        name, rest = " ".join(argv[:2]), argv[2:]
    if name not in commands:
        if name in IN_LAB:
            raise UsageError(f"regard {name}: needs regard_lab; pip install 'regard[lab]'")
        near = difflib.get_close_matches(name, commands, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(commands)}"
        raise UsageError(f"regard: no command {name!r}; {hint}")
    command = commands[name]
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


def overview(commands: dict[str, Command]) -> str:
    """Return the list of commands that `regard --help` prints."""
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.help}" for name, command in commands.items()]
    usage = "usage: regard COMMAND [options]     (regard COMMAND --help lists its options)"
    return "\n".join(["regard: look at attention with attention", "", usage, "", *lines])


if __name__ == "__main__":
    sys.exit(main())
