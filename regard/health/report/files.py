"""Atomic file writing and text reading with errors of one line."""

import os
import secrets
from pathlib import Path


def write(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path`; an existing file stays until the new one is complete.

    Lone surrogates, from names that are not UTF-8, are written as \\udc80, as JSON does.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path: there is no folder {str(path.parent)!r}; create it first")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb") as file:  # permissions follow the umask
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # an interrupt may come after the rename
        raise
    return path


def read_text(path: str | os.PathLike) -> str:
    """Read a UTF-8 file; raise a ValueError of one line if that fails."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} cannot be read: there is no file of that name") from None
    except IsADirectoryError:
        raise ValueError(f"{str(path)!r} is a folder; give a file, such as a report's .json") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8 text") from None
