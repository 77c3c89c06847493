"""Do the benchmarks that speak to the core's own parts still run, in sizes that take no time?"""

import sys
import warnings
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


def test_a_server_of_known_clients_that_hold_their_memory():
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    import privacy

    assert all(privacy.resident(name, 1_000, steps=2, cohort=3) > 0 for name in privacy.ALGORITHMS)


def test_a_bare_round_with_opacus_and_a_round_of_ours(monkeypatch):
    pytest.importorskip("opacus", reason="Opacus is not installed")
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    from dataclasses import replace

    import privacy

    monkeypatch.setattr(privacy, "WORK", replace(privacy.WORK, clients=6, samples=20, cohort=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = privacy.Opacus(privacy.WORK, *privacy.WORK.table())
        before = [p.detach().clone() for p in privacy.trained(bare.model)]
        assert any((a != b).any() for a, b in zip(before, bare.client(before, 0)))
    assert privacy.timed(privacy.task(), "held by clients", 3) > 0


@pytest.mark.engines
@pytest.mark.quick
def test_the_servers_own_work_is_measured():
    import cluster  # which imports Ray

    assert all(cost > 0 for cost in cluster.server(1).values())
