"""`python -m bench [rows | attention | small]` and `python -m bench accuracy`, in this folder's parent."""

import sys

from regard.cli import Command, main

COMMANDS = {
    "bench": Command("bench", "time rows and attention against torch on this machine"),
    "bench accuracy": Command("bench.accuracy", "measure errors against float64 and hold them to the budget"),
}

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]], COMMANDS))
