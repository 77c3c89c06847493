"""Do robust gathers and attacks do in whole runs what ALGORITHMS.md part 8 says, with memory, in every engine, after a resume?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.algorithms.attack import Hostile
from fedbraid.core.context import ServerContext, Uploads
from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import DELTA
from fedbraid.errors import ConfigError

WORK = fb.Work(lr=0.05, epochs=1, batch=8)
ROUNDS = fb.rounds(6, clients=5)
BUFFERED = fb.buffered(
    6, buffer=5, concurrency=12, durations=fb.clock.constant(1.0)
)  # which bring no client twice
SCHEDULES = {"rounds": ROUNDS, "buffered": BUFFERED}
RULES: dict[str, dict[str, Any]] = {
    "median": {}, "trimmed_mean": {"f": 1}, "krum": {"f": 1}, "multi_krum": {"f": 1, "q": 3}, "geometric_median": {},
    "centred_clip": {"tau": 0.05}, "norm_bound": {"quantile": 0.5},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "sign_flip": {}, "scale": {"factor": 5.0}, "gaussian": {"sigma": 0.3}, "label_flip": {}, "alie": {"z": 1.2},
    "ipm": {"eps": 0.7}, "mimic": {},
}  # fmt: skip
ALGORITHMS = {
    "fedavg": fb.fedavg, "scaffold": fb.scaffold, "adabest": partial(fb.adabest, mu=0.02), "feddyn": partial(fb.feddyn, mu=0.02),
    "fednova": fb.fednova, "scaffold_m": fb.scaffold_m, "scallion": fb.scallion, "fedgbo": fb.fedgbo, "mfl": fb.mfl,
    "fedvarp": fb.fedvarp, "fedadavr": partial(fb.fedadavr, "adam", lr=0.01), "int4": partial(fb.fedadavr, "sgd", lr=1.0, memory="int4"),
    "held": partial(fb.fedadavr, "adam", lr=0.01, held="client"), "ca2fl": fb.ca2fl,
}  # fmt: skip


def run(task: fb.Task, a: fb.Algorithm, schedule: fb.Schedule = ROUNDS, **options: Any) -> fb.Result:
    return fb.simulate(task, a, options.pop("work", WORK), schedule, seed=options.pop("seed", 1), **options)


@pytest.fixture
def crowd() -> fb.Task:
    """Twelve clients of unequal size, four classes, a linear model."""
    draw = np.random.default_rng(0)
    centres = 2 * draw.normal(size=(4, 5))

    def some(n: int) -> Any:
        y = draw.integers(0, 4, n)
        return (centres[y] + draw.normal(size=(n, 5))).astype(np.float32), y

    torch.manual_seed(0)
    sizes = (20, 25, 33, 21, 28, 40, 22, 30, 24, 26, 35, 23)
    return fb.Task.from_arrays(torch.nn.Linear(5, 4), [some(n) for n in sizes], some(200))


# With f = 0 a trimmed mean is the mean ----------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "ca2fl"])
def test_a_rule_that_trims_nothing_is_the_mean(crowd: fb.Task, name: str, schedule: str) -> None:
    plan = SCHEDULES[schedule]
    plain = run(crowd, ALGORITHMS[name](weights="uniform"), plan)
    assert all(
        len(set(r["clients"])) == len(r["clients"]) for r in plain.history
    )  # a robust gather counts each once
    robust = run(crowd, fb.robust(ALGORITHMS[name](), "trimmed_mean", f=0), plan)
    torch.testing.assert_close(robust.x, plain.x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rule", ["median", "multi_krum", "norm_bound", "centred_clip"])
def test_memory_held_by_clients_is_judged_alike(crowd: fb.Task, rule: str) -> None:
    results = [
        run(crowd, fb.robust(fb.fedvarp(held=held), rule, **RULES[rule])) for held in ("server", "client")
    ]
    torch.testing.assert_close(results[1].x, results[0].x, rtol=2e-4, atol=2e-5)


# ALGORITHMS.md's equations over memory ----------------------------------------------------------------


def context(t: int, N: int, cohort: int, lr: float = 0.1) -> ServerContext:
    layout = Layout.from_shapes([("w", (4, 3))])
    return ServerContext(t, cohort, N, float(N), lr, 1.0, 1.0, 0.0, layout, np.ones(N, np.int64))


def block(clients: list[int], delta: torch.Tensor, lr: float = 0.1) -> Uploads:
    one = torch.ones(len(clients), 1)
    return Uploads(
        np.array(clients), {"delta": delta}, one, one, one, 0 * one, lr * one.double(), {"x": torch.zeros(1, 12)}, {"delta": DELTA}
    )  # fmt: skip


@pytest.mark.parametrize("memory", [None, "int8"])
def test_the_mean_of_the_memory_follows_what_the_rule_lets_through(memory: str | None) -> None:
    """s̃ = median over S of (Δ_i/η − y_i); G = η(s̃ + ȳ); ȳ ← ȳ + (|S|/N)·s̃; y_i ← Δ_i/η."""
    gather = fb.robust(fb.fedadavr("sgd", memory=memory), "median").gather
    x, draw, N = torch.zeros(12), np.random.default_rng(0), 6
    s = gather.init(x, context(0, N, 3).layout)
    y, mean = np.zeros((N, 12)), np.zeros(12)
    for t in range(8):
        clients = np.sort(draw.choice(N, 3, replace=False))
        delta = draw.normal(size=(3, 12)).astype(np.float32)
        acc = gather.add(gather.zero(x), block(clients[:1].tolist(), torch.from_numpy(delta[:1])), s, x)
        acc = gather.add(acc, block(clients[1:].tolist(), torch.from_numpy(delta[1:])), s, x)
        u, s, _ = gather.close(acc, s, context(t, N, 3))
        difference = delta / 0.1 - y[clients]
        np.testing.assert_allclose(u["delta"], 0.1 * (np.median(difference, 0) + mean), rtol=1e-4, atol=1e-5)
        before = y[clients]
        y[clients] = s.table.rows.get(clients)["y"].numpy() if memory else delta / 0.1
        mean = mean + 3 / N * np.median(y[clients] - before, 0)
    assert gather.traits().counts_clients_once


def test_a_hostile_row_never_enters_the_mean_of_the_memory(crowd: fb.Task) -> None:
    """The attack that acting on differences stops: a row of 10⁶ stays in FedVARP's mean, and in none of the robust one's."""
    attacked = fb.attack(fb.fedvarp(), "scale", clients=[0], factor=1e5)
    full = fb.rounds(3, clients=crowd.clients)
    broken = run(crowd, attacked, full, ignore_divergence=True, engine="in_process(backend='loop')")
    safe = run(crowd, fb.robust(attacked, "median"), full, engine="in_process(backend='loop')")
    honest = run(crowd, fb.robust(fb.fedvarp(), "median"), full, engine="in_process(backend='loop')")
    assert broken.x.norm() > 100 * honest.x.norm()
    assert (safe.x - honest.x).norm() < 0.1 * honest.x.norm()
    table = safe.state.gather.table
    assert table.rows.get([0])["y"].abs().max() > 100  # its row is stored as it came
    assert (table.total / crowd.clients).abs().max() < 1


def test_a_client_that_leaves_takes_an_average_share(crowd: fb.Task) -> None:
    class Leaver:
        def step(self, record: Any, run: Any) -> None:
            if record["step"] == 3:
                self.before = run.state.gather.table
                run.leave(0)
                self.after = run.state.gather.table

    leaver = Leaver()
    hostile = fb.attack(fb.robust(fb.fedvarp(), "median"), "scale", clients=[0], factor=1e5)
    run(crowd, hostile, fb.rounds(4, clients=crowd.clients), callbacks=[leaver])
    seen = leaver.before.seen
    assert leaver.after.seen == seen - 1
    torch.testing.assert_close(leaver.after.total / (seen - 1), leaver.before.total / seen)


# Attacks ----------------------------------------------------------------------------------------------


def uploads_of(
    task: fb.Task, a: fb.Algorithm, schedule: fb.Schedule, **options: Any
) -> list[dict[int, torch.Tensor]]:
    """Each step's deltas by client, as the inner gather sees them."""
    steps: list[dict[int, torch.Tensor]] = []

    class Spy(fb.Mean):
        def add(self, acc: Any, up: Any, s: Any, x: Any) -> Any:
            steps[-1].update({int(c): v.clone() for c, v in zip(up.clients, up.vectors["delta"])})
            return super().add(acc, up, s, x)

        def zero(self, x: Any) -> Any:
            steps.append({})
            return super().zero(x)

    spy = Spy("uniform")
    spied = replace(a, gather=replace(a.gather, inner=spy) if hasattr(a.gather, "inner") else spy)
    steps.clear()
    run(task, spied, schedule, **options)
    return [s for s in steps if s]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "engine", ["in_process(backend='loop')", "in_process(backend='vmap', block=2)", "pool(workers=2)"]
)
@pytest.mark.parametrize("kind", ["alie", "ipm", "mimic"])
def test_colluding_clients_see_their_steps_honest_uploads(
    crowd: fb.Task, kind: str, engine: str, schedule: str
) -> None:
    hostile = [1, 3]
    a = fb.attack(fb.fedavg(), kind, clients=hostile, **KINDS[kind])
    seen = uploads_of(crowd, a, SCHEDULES[schedule], engine=engine)
    assert any(set(step) & set(hostile) for step in seen)
    for step in seen:
        honest = torch.stack([step[c] for c in sorted(step) if c not in hostile]).double()
        expected = {
            "alie": honest.mean(0) - 1.2 * honest.std(0, correction=0), "ipm": -0.7 * honest.mean(0), "mimic": honest[0]
        }[kind]  # fmt: skip
        for client in set(step) & set(hostile):
            torch.testing.assert_close(step[client].double(), expected, rtol=1e-4, atol=1e-6)


def test_hostile_uploads_by_themselves(crowd: fb.Task) -> None:
    plain = uploads_of(crowd, fb.fedavg(), fb.rounds(1, clients=crowd.clients))[0]
    for kind, options, expected in (
        ("sign_flip", {}, lambda v: -v), ("scale", {"factor": 5.0}, lambda v: 5 * v)
    ):  # fmt: skip
        a = fb.attack(fb.fedavg(), kind, clients=[2], **options)
        made = uploads_of(crowd, a, fb.rounds(1, clients=crowd.clients))[0]
        for client, v in plain.items():
            torch.testing.assert_close(made[client], expected(v) if client == 2 else v)
    drawn = uploads_of(
        crowd, fb.attack(fb.fedavg(), "gaussian", clients=[2], sigma=3.0), fb.rounds(1, clients=crowd.clients)
    )[0][2]
    assert 0.8 < drawn.std() / 3 < 1.2


def test_flipped_labels_are_trained_on_by_hostile_clients_alone(crowd: fb.Task) -> None:
    a = fb.attack(fb.fedavg(), "label_flip", clients=[2])
    full = fb.rounds(1, clients=crowd.clients)
    plain, made = uploads_of(crowd, fb.fedavg(), full)[0], uploads_of(crowd, a, full)[0]
    for client, v in plain.items():
        assert torch.equal(made[client], v) == (client != 2)
    lo, hi = crowd.offsets[2], crowd.offsets[3]
    flipped = crowd.targets.clone()
    rows = crowd.rows[lo:hi]
    flipped[rows] = crowd.classes - 1 - flipped[rows]
    by_hand = uploads_of(replace(crowd, targets=flipped), fb.fedavg(), full)[0]
    assert torch.equal(by_hand[2], made[2])


def test_a_share_of_the_clients_is_hostile() -> None:
    assert Hostile(share=0.2)(np.arange(50)).sum() == 10
    assert Hostile(share=0.2)(np.arange(10)).tolist() == [False] * 4 + [True] + [False] * 4 + [True]


# Engines, blocks, resume ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "kind", "name"), [
    ("median", "alie", "fedadavr"), ("multi_krum", "gaussian", "scaffold"), ("centred_clip", "label_flip", "fedavg"),
    ("geometric_median", "mimic", "held"), ("trimmed_mean", "sign_flip", "adabest"),
])  # fmt: skip
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_engine_and_block_gives_the_same(
    crowd: fb.Task, rule: str, kind: str, name: str, schedule: str
) -> None:
    a = fb.robust(fb.attack(ALGORITHMS[name](), kind, share=0.2, **KINDS[kind]), rule, **RULES[rule])
    runs = [
        run(crowd, a, SCHEDULES[schedule], engine=engine)
        for engine in (
            "in_process(backend='loop')",
            "pool(workers=2, backend='loop')",
            "in_process(backend='vmap', block=3)",
        )
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    torch.testing.assert_close(runs[0].x, runs[2].x, rtol=1e-4, atol=1e-5)
    assert [r["suspected"] for r in runs[0].history] == [r["suspected"] for r in runs[1].history]


@pytest.mark.parametrize(
    ("rule", "name"),
    [("centred_clip", "fedavg"), ("median", "fedadavr"), ("krum", "scaffold"), ("median", "int4")],
)
def test_a_resumed_run_has_the_same_bits(crowd: fb.Task, tmp_path: Any, rule: str, name: str) -> None:
    a = fb.attack(fb.robust(ALGORITHMS[name](), rule, before="bucketing", **({} if rule == "krum" else RULES[rule])) if rule != "krum"
                  else fb.robust(ALGORITHMS[name](), rule, **RULES[rule]), "alie", share=0.2)  # fmt: skip

    class Stop:
        def step(self, record: Any, run: Any) -> None:
            if record["step"] == 3 and not run.options.callbacks[0] is not self:
                raise KeyboardInterrupt

    whole = run(crowd, a, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(crowd, a, out=tmp_path / "cut", callbacks=[Stop()])
    again = fb.resume(tmp_path / "cut", task=crowd)
    assert torch.equal(again.x, whole.x)
    assert list(again.history) == list(whole.history)


def test_either_order_of_wrappers_is_the_same_algorithm(crowd: fb.Task) -> None:
    for kind in KINDS:
        one = fb.robust(fb.attack(fb.scaffold(), kind, share=0.2), "median")
        other = fb.attack(fb.robust(fb.scaffold(), "median"), kind, share=0.2)
        assert torch.equal(run(crowd, one).x, run(crowd, other).x), kind


# What it is for ---------------------------------------------------------------------------------------


BEARS = [
    (name, rule)
    for name in ("fedavg", "fedvarp", "scaffold", "held")
    for rule in ("median", "trimmed_mean", "multi_krum", "geometric_median")
    if rule != "geometric_median"
    or name.startswith("fed")  # what hostile clients of the others remember grows without end
]


@pytest.mark.parametrize(("name", "rule"), BEARS)
def test_a_rule_bears_what_breaks_the_mean(crowd: fb.Task, name: str, rule: str) -> None:
    make = {**ALGORITHMS, "held": partial(fb.fedvarp, held="client")}[name]
    many = fb.rounds(15, clients=8)
    attacked = fb.attack(make(), "scale", share=0.2, factor=-20.0)
    full = {"trimmed_mean": {"f": 2}, "multi_krum": {"f": 2}}.get(rule, {})
    safe = run(crowd, fb.robust(attacked, rule, **full), many)
    broken = run(crowd, attacked, many, ignore_divergence=True)
    assert safe.last("accuracy") > broken.last("accuracy") + 0.1


def test_uploads_that_are_not_finite_are_left_out(crowd: fb.Task) -> None:
    attacked = fb.attack(fb.fedvarp(), "scale", clients=[0], factor=1e39)
    result = run(crowd, fb.robust(attacked, "median"), fb.rounds(4, clients=crowd.clients))
    assert all(r["rejected"] == [0] for r in result.history)
    assert all(0 in r["suspected"] for r in result.history)
    assert torch.isfinite(result.x).all()
    assert np.isfinite([r["update_norm"] for r in result.history]).all()


def test_the_record_says_who_was_dropped(crowd: fb.Task) -> None:
    a = fb.robust(fb.attack(fb.fedavg(), "scale", clients=[2, 5], factor=-20.0), "multi_krum", f=2)
    for record in run(crowd, a, fb.rounds(3, clients=crowd.clients)).history:
        assert record["rejected"] == [2, 5]
        assert record["suspected"] == [2, 5]
        judged = record["judged"]
        assert judged["clients"] == list(range(crowd.clients))
        assert judged["norm"][2] > 10 * judged["norm"][0]
        assert judged["cosine"][2] < 0


def test_the_report_says_who_was_suspected_when(crowd: fb.Task, tmp_path: Any) -> None:
    from fedbraid.report import page
    from fedbraid.report.collect import collect

    a = fb.robust(fb.attack(fb.fedavg(), "scale", clients=[2, 5], factor=-20.0), "multi_krum", f=2)
    run(crowd, a, fb.rounds(4, clients=crowd.clients), out=tmp_path / "run")
    (told,) = page.describe(collect([tmp_path / "run"]))["suspects"]
    assert [row["client"] for row in told["rows"][:2]] == [2, 5]
    assert told["rows"][0]["suspected"] == [1, 2, 3, 4]
    assert told["rows"][0]["rejected"] == 4
    assert len(told["rows"][0]["norm"]) == len(told["rows"][0]["steps"]) == 4
    assert not any(row["suspected"] for row in told["rows"][2:])
    run(crowd, fb.fedavg(), fb.rounds(2, clients=4), out=tmp_path / "plain")
    assert page.describe(collect([tmp_path / "plain"]))["suspects"] == []


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "said"), [
    (lambda: fb.robust(fb.fedavg(), "krumm", f=1), "did you mean 'krum'"),
    (lambda: fb.robust(fb.mifa(), "median"), "mifa"),
    (lambda: fb.robust(fb.mifa(held="client"), "median"), "mifa"),
    (lambda: fb.robust(fb.ace(), "median"), "ace"),
    (lambda: fb.robust(fb.cluster_fedvarp(2), "median"), "no mean"),
    (lambda: fb.robust(fb.robust(fb.fedavg(), "median"), "median"), "no mean"),
    (lambda: fb.robust(fb.private(fb.fedavg(), noise=1.0), "median"), "no mean"),
    (lambda: fb.private(fb.robust(fb.fedavg(), "median"), noise=1.0), "use"),
    (lambda: fb.robust(fb.fedasync(form="mixing"), "median"), "no mean"),
    (lambda: fb.attack(fb.fedavg(), "aliee", share=0.1), "did you mean 'alie'"),
    (lambda: fb.attack(fb.fedavg(), "alie"), "clients= .ids. or share="),
    (lambda: fb.attack(fb.fedavg(), "alie", share=0.1, clients=[1]), "clients= .ids. or share="),
    (lambda: fb.attack(fb.fedavg(), "alie", share=0.1, eps=1.0), "takes no eps=1.0"),
    (lambda: fb.attack(fb.fedavg(), "scale", share=1.5), "share must be"),
    (lambda: fb.attack(fb.fedavg(), "scale", clients=[-1]), "client ids"),
    (lambda: fb.attack(fb.fednova(), "alie", share=0.2), "rescale"),
    (lambda: fb.attack(fb.private(fb.fedavg(), noise=1.0), "alie", share=0.2), "single uploads"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(build: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


def test_too_many_hostile_clients_are_refused_before_anything_runs(crowd: fb.Task) -> None:
    with pytest.raises(ConfigError, match=r"more than 2f \+ 2 = 6 vectors, got 5 clients"):
        run(crowd, fb.robust(fb.fedavg(), "krum", f=2))
    with pytest.raises(ConfigError, match="more than 2f = 6 vectors, got 5 clients"):
        run(crowd, fb.robust(fb.fedavg(), "trimmed_mean", f=3), BUFFERED)


def test_a_cohort_that_turns_out_too_small_is_refused(crowd: fb.Task) -> None:
    a = fb.robust(fb.fedavg(), "trimmed_mean", f=2)
    with pytest.raises(ConfigError, match=r"got \d clients"):
        run(crowd, a, fb.rounds(60, clients=5, sampling="poisson"))


def test_flipped_labels_need_classes_of_ones_own() -> None:
    x = torch.zeros(6, 2)
    task = fb.Task.from_arrays(torch.nn.Linear(2, 1), [(x, torch.zeros(6))] * 3, loss="mse")
    with pytest.raises(ConfigError, match="class numbers"):
        run(task, fb.attack(fb.fedavg(), "label_flip", clients=[0]), fb.rounds(1, clients=2))
