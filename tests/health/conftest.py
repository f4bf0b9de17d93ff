"""Two gloo processes that the tests over ranks share."""

import pytest
from rank_processes import RankProcesses


@pytest.fixture(scope="session")
def two():
    with RankProcesses(2, timeout=60.0) as ranks:
        yield ranks
