"""The line of progress, and what Ctrl-C leaves behind while checks run."""

import time

import pytest
import torch
from torch import nn

import regard
from regard.health.progress import EVERY, Budget, Progress


class Stopped(nn.Module):
    """A layer that raises KeyboardInterrupt in its forward number `stop`, as Ctrl-C would."""

    def __init__(self, stop):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.calls, self.stop = 0, stop

    def forward(self, x):
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        return self.layer(x)


def test_it_moves_by_itself_names_the_stage_and_leaves_no_line(capsys):
    with Progress("examine") as progress:
        progress.check("RG101", 6, 31)
        progress.since -= 12.0
        time.sleep(3 * EVERY)
        assert "checking 7 of 31" in progress.line() and "s left" in progress.line()
    lines = capsys.readouterr().err.split("\r")
    assert sum("checking 7 of 31" in line for line in lines) >= 3
    assert not lines[-2].strip() and lines[-1] == ""


def test_ctrl_c_in_a_check_leaves_the_report():
    report = regard.examine(Stopped(2), torch.randn(2, 12, 16))
    assert len(report.heads) == 2 and report.interrupted.startswith("KeyboardInterrupt (after")
    assert "stopped by Ctrl-C" in {reason for _, reason in report.checks.skipped}
    assert str(report).splitlines()[1].startswith("✗ NOT FINISHED")


def test_ctrl_c_in_check_gives_no_verdict():
    with pytest.raises(KeyboardInterrupt):
        regard.check(Stopped(2), torch.randn(2, 12, 16))


def test_a_budget_counts_its_own_work_and_other_work_for_a_third(monkeypatch):
    own, clock = [0.0], [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: own[0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    budget, exact = Budget(10.0), Budget(10.0, patience=1.0)
    clock[0] = 29.0  # the machine is busy with other work
    assert not budget.is_spent and exact.is_spent
    own[0] = 10.5
    assert budget.is_spent
    own[0], clock[0] = 1.0, 30.5
    assert budget.is_spent
