"""tools/run_gpu_tests.py: processes end together, and one summary tells what failed."""

import subprocess
import sys
import time
from types import SimpleNamespace

import draw_cases
import run_gpu_tests

STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_processes_that_ignore_the_interrupt_are_killed(monkeypatch):
    monkeypatch.setattr(run_gpu_tests, "GRACE", 0.5)
    running = [subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) for _ in range(2)]
    for process in running:
        process.stdout.readline()  # it ignores the interrupt from here on
    assert not run_gpu_tests.wait_for_all(running, time.monotonic())
    assert [process.wait() for process in running] == [-9, -9]
    for process in running:
        process.stdout.close()


def test_the_summary_names_what_failed(capsys):
    lines = [dict(test="a.py::one", outcome="passed", seconds=2.0, text="")]
    lines.append(dict(test="a.py::two[3]", outcome="failed", seconds=1.0, text="E   assert 1 == 2"))
    assert run_gpu_tests.summarise(lines, [], False, 3.0) == 1
    told = capsys.readouterr().out
    assert "E   assert 1 == 2" in told and told.endswith("FAILED a.py::two[3]\n1 passed, 1 failed in 3 s\n")
    assert run_gpu_tests.summarise(lines[:1], [], True, 3.0) == 2
    assert "time ran out" in capsys.readouterr().out
    assert run_gpu_tests.summarise(lines[:1], ["Fatal error"], False, 3.0) == 1


def test_a_seed_draws_the_same_cases_each_time():
    items = [SimpleNamespace(nodeid=f"{name}[{case}]") for name in ("a.py::one", "a.py::two") for case in range(30)]
    drawn = [draw_cases.draw_cases(items, lambda item: 4 if "one" in item.nodeid else None, seed) for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][4:] == drawn[2][4:] == items[30:]
    assert all(len(kept) == 34 and kept[0] is items[0] for kept in drawn)
    assert all(items.index(a) < items.index(b) for a, b in zip(drawn[2], drawn[2][1:], strict=False))
