"""Judges architectures of transformers, made small, one after another, each within a limit; writes a line for each."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class TimeIsUp(BaseException):
    """Raised by the alarm."""


def prepare() -> list[str]:
    """The names of all model types, with everything quiet and on one thread."""
    os.environ["REGARD_CACHE"] = tempfile.mkdtemp()
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import regard.hf  # noqa: F401
    from regard.health.models.tiny_architectures import list_names

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    return list_names()


def judge_each(
    judge: Callable[[str], dict[str, Any]], names: Iterable[str], out: Path, limit_s: int, add: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields and writes what `judge` says of each model type; TimeIsUp is raised in it after so many CPU seconds."""

    def stop(*_: object) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGVTALRM, stop)
    with out.open("a" if add else "w", encoding="utf-8") as file:
        for name in names:
            start = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
            try:
                line = judge(name)
            except TimeIsUp:
                line = dict(reason=f"it takes more than {limit_s} s")
            except Exception as error:  # of the library, while the model is made
                line = dict(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            line = dict(name=name, seconds=round(time.process_time() - start, 1)) | line
            print(json.dumps(line), file=file, flush=True)
            yield line
