"""How the tests of this folder share several processes, and which cases of a test run.

Set by tools/run_gpu_tests.py:

    REGARD_GPU_CLAIMS   a folder in which a process claims each test before it runs it
    REGARD_SHARD        2/12: begin at the third twelfth of the tests, because neighbours share compiled kernels
    REGARD_GPU_RESULTS  a file that gets one line of JSON per test as it ends
    REGARD_GPU_CASES    at most so many cases of each test function run, drawn by REGARD_SEED; 0: all
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from draw_cases import draw_cases

CLAIMS, RESULTS = os.environ.get("REGARD_GPU_CLAIMS"), os.environ.get("REGARD_GPU_RESULTS")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    most = int(os.environ.get("REGARD_GPU_CASES", "0")) or None
    items[:] = draw_cases(items, lambda item: most, os.environ.get("REGARD_SEED", "0"))
    part, parts = map(int, os.environ.get("REGARD_SHARD", "0/1").split("/"))
    first = len(items) * part // parts
    items[:] = items[first:] + items[:first]


def pytest_runtestloop(session):
    """Run the tests that no other process has claimed."""
    if not CLAIMS or session.config.option.collectonly:
        return None
    claimed = (item for item in session.items if claim(item.nodeid))
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)  # pytest keeps the fixtures that the next test needs
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    return True


def claim(nodeid):
    """True for the one process that claims the test first."""
    name = hashlib.sha1(nodeid.encode()).hexdigest()
    try:
        os.close(os.open(os.path.join(CLAIMS, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if RESULTS and (report.when == "call" or report.outcome != "passed"):
        line = dict(test=report.nodeid, outcome=report.outcome, seconds=report.duration)
        line["text"] = report.longreprtext if report.failed else ""
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")
    return report
