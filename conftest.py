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

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "tests", "support"))
        from interpreter import speed_up

        speed_up()

import regard  # before pytest imports a module of it for its doctests, which would leave two copies of that module


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(regard=regard, torch=torch)


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
