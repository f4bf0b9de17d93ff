"""`regard examine` over several processes: one report; a lost rank ends it, and a snapshot carries on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_crew import free_port
from parallel_subject import subject

import regard

TESTS = Path(__file__).parent
COMMAND = [sys.executable, "-m", "regard", "examine", "parallel_subject:subject"]


def start(folder: Path, rank: int, world: int, port: int, **more) -> subprocess.Popen:
    """One rank, as torchrun would start it; nobody ends the others when it is lost."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    of_crew = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    if world > 1:
        of_crew["TORCHELASTIC_RUN_ID"] = "test"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **of_crew, **more}
    options = ["--out", "report.json", "--snapshot", "snapshot", "--timeout", "20"]
    return subprocess.Popen(
        COMMAND + options, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture
def expected():
    threads = torch.get_num_threads()
    try:
        return regard.examine(*subject()).to_json()
    finally:
        torch.set_num_threads(threads)


def test_a_lost_rank_leaves_a_snapshot_that_one_process_finishes(tmp_path, expected):
    port = free_port()
    crew = [start(tmp_path, rank, 2, port, PARALLEL_SUBJECT="dies") for rank in range(2)]
    crew[1].communicate(timeout=120)
    _, said = crew[0].communicate(timeout=120)
    assert (crew[0].returncode, crew[1].returncode) == (1, 9), said
    assert "rank 1 died at step 'examine batch" in said
    assert not (tmp_path / "report.json").exists() and (tmp_path / "snapshot").is_file()
    model, batches = subject()
    for given, why in (([2 * x for x in batches], "are not the first 2 of these"), (batches[:1], "these are 1")):
        with pytest.raises(ValueError, match=why):  # other data
            regard.examine(model, given, snapshot=tmp_path / "snapshot")
    rest = start(tmp_path, 0, 1, port)
    _, said = rest.communicate(timeout=120)
    assert rest.returncode == 0, said
    resumed = json.loads((tmp_path / "report.json").read_text())
    whole = json.loads(json.dumps(expected))
    for name in ("how", "title"):
        resumed.pop(name), whole.pop(name)
    assert resumed == whole and not (tmp_path / "snapshot").exists()
