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


def test_networks_as_people_bring_them_train():
    """Each gives a loss for each sample of its own data, which is what both sides of the benchmark ask of it."""
    from dataclasses import replace

    import networks

    for name, work in networks.NETWORKS.items():
        small = replace(work, clients=2, samples=2)
        task = small.task(*small.table())
        each = task.per_example(task.run(task.module(), task.inputs[:2]), task.targets[:2])
        assert each.shape == (2,), name
        assert each.isfinite().all(), name


@pytest.mark.engines
@pytest.mark.quick
def test_the_servers_own_work_is_measured():
    import cluster  # which imports Ray

    assert all(cost > 0 for cost in cluster.server(1).values())


@pytest.fixture
def peers(monkeypatch):
    """W4 in a size that takes no time."""
    from dataclasses import replace

    import peers

    small = replace(peers.WORKLOADS["W4"], clients=6, cohort=2)
    monkeypatch.setitem(peers.WORKLOADS, "W4", small)
    peers.table.cache_clear()
    yield peers
    peers.table.cache_clear()


def seen(peers, name, rounds=2):
    job = peers.Job("W4", rounds, check=True)
    start = peers.flat(job.model).clone()
    with peers.counting(job.work.momentum) as steps:
        done = peers.PEERS[name].run(job)
    return {
        "rounds": len(job.stamps.at),
        "clients": done.clients,
        "steps": steps[0] if done.steps is None else done.steps,
        "moved": (peers.flat(done.model) - start).numpy(),
    }


@pytest.mark.parametrize("name", ["fedbraid", "pfl", "fedjax", "fedlab", "fluke", "flsim"])
def test_peers_do_the_work_of_a_loop_by_hand(peers, name):
    pytest.importorskip(peers.PEERS[name].package, reason=f"{name} is not installed")
    by_hand = seen(peers, "bare")["moved"]
    peers.verify(peers.WORKLOADS["W4"], 2, seen(peers, name), by_hand)


def test_peers_that_do_other_work_are_refused(peers):
    by_hand = seen(peers, "bare")
    with pytest.raises(RuntimeError, match="made 3 rounds, not 2"):
        peers.verify(peers.WORKLOADS["W4"], 2, seen(peers, "fedbraid", rounds=3), by_hand["moved"])
    with pytest.raises(RuntimeError, match="from where a loop by hand ends"):
        peers.verify(peers.WORKLOADS["W4"], 2, by_hand | {"moved": 2 * by_hand["moved"]}, by_hand["moved"])


@pytest.mark.parametrize("name", ["W1", "W3", "W5", "W6", "W7", "W8"])
def test_the_models_for_fedjax_answer_as_those_they_are_read_off(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import peers
    import torch
    from peers_fedjax import forward

    work = peers.workload(name, check=True)
    model = work.build()
    x, _ = peers.replace(work, clients=1, samples=2).table()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    given = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
    answer = forward(model, weights, given.numpy(), jax.random.key(0))
    torch.testing.assert_close(torch.tensor(answer.tolist()), model(x).detach(), rtol=1e-3, atol=1e-4)


def test_one_algorithm_under_four_names_is_a_tie():
    import choose_ties

    tries, seeds = choose_ties.race.TRIES, choose_ties.race.SEEDS
    try:
        assert choose_ties.choices(1) == 1
    finally:
        choose_ties.race.TRIES, choose_ties.race.SEEDS = tries, seeds
    assert choose_ties.finals([float(i % 7) for i in range(60)]) > 0.9
