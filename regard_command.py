"""The command `regard`, whose Ctrl-C ends it with 130 and no traceback from its first moment to its last.

It lies beside the package because importing that takes seconds, in which nothing inside could catch anything yet.
"""

import os
import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, say by nohup: so it stays
        from regard.cli import main as run

        return run()
    signal.signal(signal.SIGINT, _end)
    from regard.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:  # one more, while the first was being told
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter closes down; the shell reads 130 then too


def _end(number, frame):
    """While importing nothing is open, and an exception might be caught by whoever imports."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
