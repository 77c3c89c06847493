"""Do the benchmarks that speak to the core's own parts still run, in sizes that take no time?"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


@pytest.fixture
def memory():
    import memory

    return memory


def test_a_server_step_with_many_known_clients(memory):
    assert memory.server_step(1_000, steps=2) > 0


def test_rows_of_many_clients_are_filled_and_committed(memory, tmp_path):
    memory.fill(str(tmp_path), "int4", 200, "disk").close()
    assert (tmp_path / "state.db").stat().st_size > 200 * memory.LAYOUT.size // 2


@pytest.mark.engines
@pytest.mark.quick
def test_the_servers_own_work_is_measured():
    import cluster  # which imports Ray

    assert all(cost > 0 for cost in cluster.server(1).values())
