"""Write beside, then rename: a report, a snapshot or a checkpoint is there whole, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path`; what stood there stays until the new file is complete.

    Lone surrogates, as in names that are not UTF-8, are written as \\udc80, which is JSON's own form of them.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path: there is no folder {str(path.parent)!r}; make it first")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(beside, "xb") as file:  # with the permissions that the umask leaves
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)  # an interrupt may come when it is renamed already
        raise
    return path


def read_text(path: str | os.PathLike) -> str:
    """A text file, or a ValueError that says in one line why not."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8 text") from None
