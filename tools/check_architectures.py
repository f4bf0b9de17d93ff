"""Runs `regard check hf-tiny:NAME` over every architecture of transformers; prints which fail or were not built.

    python tools/check_architectures.py --jobs 8 --out architectures.json
    python tools/check_architectures.py llama bert          # some of them, with every line

A sound architecture with random weights must not fail: what fails is a false alarm, or a bug of the library.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds of the processor for one architecture


def check_one(name: str) -> dict[str, Any]:
    """What `regard check hf-tiny:NAME` says, as plain values."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch

    import regard
    from regard.health.models.targets import load_target
    from regard_command import TargetError

    torch.set_num_threads(1)
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    started = time.process_time()
    try:
        subject = load_target(f"hf-tiny:{name}")
        verdict = regard.check(subject.model, subject.batches, title=name, trained=False)
        found = [dict(code=one.code, layer=one.layer, text=one.evidence) for one in verdict.failures]
        raised = [dict(code=one.code, reason=one.reason) for one in verdict.skipped if "raised" in one.reason]
        notes = [dict(code=one.code, text=one.evidence) for one in verdict.notes]
        state = "failures" if found else "ok"
        return dict(
            name=name, state=state, kind=type(subject.model).__name__, found=found, notes=notes, raised=raised,
            passed=len(verdict.passed), skipped=len(verdict.skipped), seconds=time.process_time() - started,
        )  # fmt: skip
    except TargetError as error:
        return dict(name=name, state="not built", reason=str(error), seconds=time.process_time() - started)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        return dict(name=name, state="error", reason=text[:300], seconds=time.process_time() - started)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _stop(*_: Any) -> None:
    raise TimeoutError(f"longer than {LIMIT:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types (all that transformers knows)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--out", type=Path, help="write every line as JSON")
    options = parser.parse_args()
    from regard.health.models.tiny_architectures import list_names

    names = options.names or list_names()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=40) as pool:
        lines = []
        for line in pool.imap_unordered(check_one, names):
            lines.append(line)
            if line["state"] != "ok" or options.names:
                print(describe(line), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(lines, indent=1))
    print(summarize(lines))
    return int(any(line["state"] in ("failures", "error") for line in lines))


def describe(line: dict[str, Any]) -> str:
    """One architecture: its failures, or why it was not built."""
    listed = "; ".join(f"{one['code']} {one['layer'] or ''} {one['text'][:160]}" for one in line.get("found", ()))
    return f"{line['state']:9} {line['name']:28} {line['seconds']:5.1f} s  {listed or line.get('reason', '')[:200]}"


def summarize(lines: list[dict[str, Any]]) -> str:
    """Counts of states, of codes that failed, and of codes in whose check the model raised."""
    states = Counter(line["state"] for line in lines)
    codes = Counter(one["code"] for line in lines for one in line.get("found", ()))
    raised = Counter(one["code"] for line in lines for one in line.get("raised", ()))
    slow = sorted((line["seconds"], line["name"]) for line in lines)[-3:]
    return "\n".join([
        f"{len(lines)} architectures: " + ", ".join(f"{count} {state}" for state, count in states.most_common()),
        f"failures by code: {dict(codes.most_common())}", f"raised by code: {dict(raised.most_common())}",
        f"slowest: {', '.join(f'{name} {seconds:.0f} s' for seconds, name in reversed(slow))}",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
