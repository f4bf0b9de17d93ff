"""`regard examine` over several processes: one report; a lost rank ends it, and a snapshot carries on."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel_subject import subject
from rank_processes import free_port

import regard
from regard.health.distributed.rounds import checksum_batch, checksum_weights

TESTS = Path(__file__).parents[1] / "support"
COMMAND = [sys.executable, "-m", "regard", "examine", "parallel_subject:subject"]


def start(folder: Path, rank: int, world: int, port: int, **more) -> subprocess.Popen:
    """One rank, as torchrun would start it; nobody ends the others when it is lost."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parents[1])])
    rank_variables = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    if world > 1:
        rank_variables["TORCHELASTIC_RUN_ID"] = "test"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **rank_variables, **more}
    options = ["--out", "report.json", "--snapshot", "snapshot", "--timeout", "12"]
    return subprocess.Popen(
        COMMAND + options, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture
def expected():
    threads = torch.get_num_threads()
    try:
        return regard.examine(*subject(), checks=False).to_json()
    finally:
        torch.set_num_threads(threads)


def test_a_lost_rank_leaves_a_snapshot_that_one_process_finishes(tmp_path, expected):
    port = free_port()
    processes = [start(tmp_path, rank, 2, port, PARALLEL_SUBJECT="dies") for rank in range(2)]
    processes[1].communicate(timeout=120)
    _, said = processes[0].communicate(timeout=120)
    assert [process.returncode for process in processes] == [2, 9], said
    assert "rank 0 lost contact with" in said and "at step 'examine batch" in said
    assert not (tmp_path / "report.json").exists() and (tmp_path / "snapshot").is_file()
    refuses_what_does_not_fit(tmp_path)
    resumed = regard.examine(*subject(), checks=False, snapshot=tmp_path / "snapshot").to_json()
    whole = expected
    for name in ("how", "title"):
        resumed.pop(name), whole.pop(name)
    assert resumed == whole and not (tmp_path / "snapshot").exists()


def test_rank_0_alone_tells_of_a_batch_that_failed(tmp_path):
    """torchrun ends all others at the first status that is not 0, and rank 0 has a report to write."""
    port = free_port()
    processes = [start(tmp_path, rank, 2, port, PARALLEL_SUBJECT="fails") for rank in range(2)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 0], said
    assert "not finished: RoundError: rank 0, batch 4: RuntimeError: batch of 13" in said[0]
    assert json.loads((tmp_path / "report.json").read_text())["how"]["batches"] == 4


def refuses_what_does_not_fit(folder: Path) -> None:
    """Other data, other weights, a file that is none, a folder that is not there."""
    model, batches = subject()
    other = subject()[0]
    next(other.parameters()).data.add_(1.0)
    (folder / "damaged").write_bytes((folder / "snapshot").read_bytes()[:100])
    for examined, given, name, why in (
        (model, [2 * x for x in batches], "snapshot", "are not the first 2 of these"),
        (model, batches[:1], "snapshot", "these are 1"),
        (other, batches, "snapshot", "weights differ"),
        (model, batches, "damaged", "'.*damaged' is not one of regard's, or is damaged; remove it"),
        (model, batches, "missing/snapshot", "there is no folder '.*missing'; make it first"),
    ):
        with pytest.raises(ValueError, match=why):
            regard.examine(examined, given, snapshot=folder / name)


def test_a_snapshot_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    model, batches = subject()
    monkeypatch.setattr(os, "replace", full)
    report = regard.examine(model, batches, snapshot=tmp_path / "snapshot")
    assert "No space left" in report.interrupted and list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        regard.examine(model, batches, snapshot=tmp_path)


def test_a_mark_sees_any_weight_and_any_array():
    model = torch.nn.Linear(64, 64)
    before = checksum_weights(model)
    with torch.no_grad():
        model.weight[30] = 0.0
    assert checksum_weights(model) != before
    assert checksum_batch(np.arange(5)) != checksum_batch(np.arange(5) + 1)
