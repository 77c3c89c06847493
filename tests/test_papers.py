"""Do the papers' theorems hold, and does the page of their claims name tests and commands that exist?"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import Trial
from test_properties import DivergenceGuard, watch
from torch import nn

import fedbraid as fb
from experiments._lib import hours
from experiments._lib import page as p
from experiments._lib import reproduce as r
from fedbraid.core.context import ServerContext
from fedbraid.run.step import two_strokes
from fedbraid.study.cost import Elements, operations

ROOT = Path(__file__).parents[1]
HOME = ROOT / "experiments"

# AdaBest's Theorems 1 and 2, Tables 4 and 5 ---------------------------------------------------------------------


def test_feddyns_h_can_only_shrink_against_the_update():
    """‖h^t‖ ≤ ‖h^{t−1}‖ exactly where cos(h^{t−1}, ḡ^t) ≤ −(|P|/2|S|)·‖ḡ^t‖/‖h^{t−1}‖ (Theorem 1)."""
    shrank = []
    for seed in range(4):
        trial = Trial(steps=12, lr=0.3, seed=seed)
        seen = watch(trial, fb.feddyn(mu=0.5, weights="uniform"))
        h = [judged - x for judged, x in zip(seen.judged, seen.x)]
        for t in range(1, 12):
            g, share = seen.x[t - 1] - seen.judged[t], 3 / trial.p.task.clients
            norm_h, norm_g = np.linalg.norm(h[t - 1]), np.linalg.norm(g)
            cosine, bound = h[t - 1] @ g / (norm_h * norm_g), -share / 2 * norm_g / norm_h
            if abs(cosine - bound) > 1e-3:
                shrank.append(np.linalg.norm(h[t]) <= norm_h)
                assert shrank[-1] == (cosine <= bound)
    assert 0 < sum(shrank) < len(shrank)


def squares() -> fb.Task:
    """Four clients' least squares, each with an optimum of its own."""
    draw = np.random.default_rng(0)
    clients = [(x := draw.normal(size=(20, 3)), x @ draw.normal(size=3)) for _ in range(4)]
    return fb.Task.from_arrays(nn.Linear(3, 1, bias=False), clients, loss="mse")


@pytest.mark.parametrize(
    "algorithm", [fb.feddyn(mu=0.5), fb.adabest(mu=0.1, beta=0.8)], ids=["feddyn", "adabest"]
)
def test_the_averaged_model_rests_only_where_h_is_zero(algorithm):
    """With S fixed, x̄^t = x̄^{t−1} − (h^{t−1} + ḡ^t), so x̄ comes to rest as h goes to zero (Theorem 2)."""
    seen = DivergenceGuard()
    work, population_weight = fb.Work(lr=0.1, steps=3, batch=None), fb.rounds(150, clients=4)
    fb.simulate(squares(), algorithm, work, population_weight, evaluate_every=None, callbacks=[seen])
    h = [judged - x for judged, x in zip(seen.judged, seen.x)]
    for t in range(1, 150):
        moved = h[t - 1] + (seen.x[t - 1] - seen.judged[t])
        np.testing.assert_allclose(seen.judged[t - 1] - seen.judged[t], moved, atol=1e-5)
    speed = [np.linalg.norm(a - b) for a, b in zip(seen.judged, seen.judged[1:])]
    size = [np.linalg.norm(v) for v in h]
    assert speed[-1] < 0.01 * max(speed)
    assert size[-1] < 0.01 * max(size)


def test_what_adabests_rules_add_to_fedavgs_arithmetic():
    """A step takes no more than Table 4 says, in numbers written: FedAvg 2, SCAFFOLD/m 4, FedDyn 6, AdaBest 3."""
    printed = {fb.fedavg(): 2, fb.scaffold_m(): 4, fb.feddyn(mu=0.1): 6, fb.adabest(): 3}
    counted = {a: operations(a, fb.Work()).per_step for a in printed}
    assert all(counted[a] <= n for a, n in printed.items())
    assert counted[fb.adabest()] == 3


def test_what_adabests_server_adds_to_fedavgs_arithmetic():
    """After the mean a step takes no more than Table 5 says, in numbers written: SCAFFOLD/m 4, FedDyn 4, AdaBest 3."""
    d = 100
    layout, x = fb.Layout.from_shapes([("w", (d,))]), torch.zeros(d)
    ctx = ServerContext(0, 5, 100, 100.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(100), 0)

    def written(a):
        u, server = {name: torch.ones(d) for name in a.gathered}, a.server.init(x, layout)
        with Elements() as counter:
            two_strokes(a, u, server, x, ctx)
        return counter.count / d

    plain = written(fb.fedavg())
    added = {
        n: written(a) - plain
        for n, a in (("SCAFFOLD/m", fb.scaffold_m()), ("FedDyn", fb.feddyn()), ("AdaBest", fb.adabest()))
    }
    assert added["AdaBest"] == 3
    assert added["FedDyn"] <= 4
    assert added["SCAFFOLD/m"] <= 4


# The page ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", r.papers(HOME))
def test_every_claim_has_a_known_status_and_a_command_that_exists(paper):
    parts = {c.part for c in r.every(r.load(HOME, paper))}
    claims = p.claims(HOME, paper)
    own = {"braid": 1, "hostile": 0, "privacy": 1}  # no papers, but our own
    assert len({c.item for c in claims}) >= own.get(paper, 9)
    for claim in claims:
        assert claim.status in r.STATUS
        if named := re.match(r"pytest (tests/\w+\.py)(?:::(\w+))?$", claim.command):
            text = (ROOT / named[1]).read_text()
            assert named[2] is None or f"def {named[2]}(" in text, claim.command
        elif named := re.search(r"--part (\S+)", claim.command):
            assert named[1] in parts
        elif named := re.search(r"--cells '(.*)'", claim.command):
            assert r.choose(r.load(HOME, paper).cells(), pattern=named[1])
        elif named := re.match(r"python (\S+)", claim.command):
            assert (ROOT / named[1]).exists()


@pytest.mark.parametrize("paper", r.papers(HOME))
def test_every_cell_names_an_algorithm_that_builds(paper):
    texts = {c.algorithm for c in r.every(r.load(HOME, paper))}
    assert texts
    for text in texts:
        r.make_algorithm(text)


def test_hours_come_from_cells_that_are_done_or_tried():
    grid = r.load(HOME, "fedshift")
    cells = r.choose(grid.full(), part="full-table2")
    assert hours.hours(cells, {}, {})[cells[0].name] is None
    tried = {"full-table2": {"seconds": 36.0, "effort": 100.0}}
    left = hours.hours(cells, {cells[0].name: {"seconds": 7200.0, "steps": 800}}, {})
    assert set(left) == {c.name for c in cells[1:]}
    assert left[cells[1].name] == pytest.approx(2.0)
    assert hours.hours(cells, {}, tried)[cells[1].name] == pytest.approx(8.0)
