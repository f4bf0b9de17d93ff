"""Chosen before torch and Triton are imported: a worker's threads, and where kernels run without a GPU."""

import gc
import importlib.util
import os
import sys

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # each its share: threads that wait spin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # beside another worker, waits that spin took five times the work

import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "tests", "support"))
import draw_cases

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from interpreter import speed_up

        speed_up()

import regard  # before pytest imports a module of it for its doctests, which would leave two copies of that module


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(regard=regard, torch=torch)


def pytest_configure():
    draw_cases.choose_seed()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Of tests marked `drawn`, leave out the cases that the seed does not draw."""
    kept = draw_cases.draw_cases(items, draw_cases.most_of, os.environ["REGARD_SEED"])
    if len(kept) < len(items):
        ids = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
        items[:] = [item for item in items if id(item) in ids]


def pytest_terminal_summary(terminalreporter):
    """Name the seed, by which the same cases run again."""
    if terminalreporter.stats.get("deselected") and terminalreporter.stats.get("failed"):
        terminalreporter.line(f"REGARD_SEED={os.environ['REGARD_SEED']} draws the same cases of tests marked `drawn`")


def pytest_collection_finish():
    """Collect garbage less often: it took a tenth of the time of numba's compilation."""
    gc.set_threshold(50_000)


def _threads(count: int):
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread():
    """For small samples and models: two workers with a thread each are faster than two that share their threads."""
    yield from _threads(1)


@pytest.fixture
def two_threads():
    """More than one, whatever the worker's share is: for what must not depend on it."""
    yield from _threads(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """End the output with the tests that were skipped because there is no browser, and how to get one."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    count = sum("chromium" in str(report.longrepr) for report in skipped)
    if count:
        reporter.section(f"NO BROWSER: {count} TESTS DID NOT RUN", sep="!", red=True, bold=True)
        reporter.line("reports and pages were not opened; to test them: apt-get install chromium chromium-driver")
    return result
