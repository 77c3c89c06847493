"""Do parts compose, and is an algorithm its own configuration: repr, equality, hash, pickle, name?"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.algorithms import BUILDERS
from fedbraid.algorithms.registry import algorithm_from
from fedbraid.errors import ConfigError

WORK = fb.Work(lr=0.1, batch=8)
c = fb.codecs
MADE = [
    *(b() for n, b in BUILDERS.items() if n not in ("cluster_fedvarp", "fedpaq", "fedef")),
    fb.cluster_fedvarp(2),
    fb.cluster_fedvarp([0, 1, 1, 0, 2, 2], lr=0.5),
    fb.fedavg(0.5, "uniform"),
    fb.fedprox(1),
    fb.fedadavr("lamb", lr=0.1, memory="int4", normalise="population", layerwise=False),
    fb.fedgbo("adam", beta1=0.8),
    fb.fedpaq(c.uniform(4)),
    fb.fedef(c.topk(0.25)),
    fb.fedasync(form="mixing", staleness="polynomial"),
    fb.qafel(up=c.qsgd(3), down=c.qsgd(5)),
    fb.fedshift(fb.fedpaq(c.mixed(c.uniform(4), share=0.5))),
    fb.fedshift(fb.with_codecs(fb.scaffold(), up=c.mixed(c.of_weights(c.kmeans(3)), clients=[0, 3]))),
    fb.hidden_state(fb.error_feedback(fb.with_codecs(fb.adabest(beta=0.5), up=c.int4(), down=c.qsgd(4)))),
    fb.with_codecs(fb.fedef(c.int8()), c.int4()),
    fb.hidden_state(fb.fedshift(fb.error_feedback(fb.fednova()))),
]


@pytest.mark.parametrize("algorithm", MADE, ids=lambda a: a.name)
def test_an_algorithm_is_its_configuration(algorithm):
    copy = pickle.loads(pickle.dumps(algorithm))
    assert copy == algorithm
    assert hash(copy) == hash(algorithm)
    assert repr(copy) == repr(algorithm)
    again = algorithm_from(algorithm.name)
    assert again == algorithm
    assert again.name == algorithm.name
    assert repr(again) == repr(algorithm)
    layout = fb.Layout.from_shapes([("w", (3, 2))])
    assert copy.widths(layout) == algorithm.widths(layout)
    assert copy.uploads == algorithm.uploads


def test_algorithms_that_differ_are_not_equal():
    assert len(set(MADE)) == len(MADE) - 1  # FedAsync is FedBuff with a buffer of one
    assert fb.fedavg() != fb.fedavg(lr=0.5)
    assert fb.fedpaq(c.uniform(4)) != fb.fedpaq(c.uniform(5))
    assert fb.fedavg() == fb.fedavg(1) == fb.fedavg(lr=1.0)


def test_names_read_like_the_call():
    assert fb.fedavg().name == "fedavg()"
    assert fb.fedadavr("lamb", 0.1).name == "fedadavr(optimizer='lamb', lr=0.1)"
    assert fb.fedshift(fb.fedpaq(c.uniform(4))).name == "fedshift(fedpaq(uniform(bits=4)))"


# Parts of the user's own -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shrink(fb.Rule):
    """Halve every gradient, remember how often, and upload it."""

    def init(self, x):
        return {"visits": torch.zeros(1)}

    def start(self, ctx):
        return {"taken": torch.zeros_like(ctx.K)}

    def step(self, g, y, s, ctx):
        return 0.5 * g, {**s, "taken": s["taken"] + 1}

    def uploads(self):
        return (*super().uploads(), fb.Upload("visits", width=1), fb.Upload("taken", width=1))

    def finish(self, y, s, ctx):
        return {"visits": ctx.client_state["visits"] + 1, "taken": s["taken"]}

    def remember(self, received, s, ctx):
        return {"visits": received["visits"]}


@dataclass(frozen=True)
class Median(fb.Gather):
    """The median of the deltas; what else comes up is averaged."""

    def zero(self, x):
        return {"all": [], "rest": fb.Mean().zero(x)}

    def add(self, acc, up, s, x):
        return {
            "all": [*acc["all"], up.vectors["delta"]],
            "rest": fb.Mean("uniform").add(acc["rest"], up, s, x),
        }

    def close(self, acc, s, ctx):
        rest, _, metrics = fb.Mean("uniform").close(acc["rest"], {}, ctx)
        return {**rest, "delta": torch.cat(acc["all"]).median(0).values}, s, metrics


@dataclass(frozen=True)
class Momentum(fb.Transform):
    beta: float = 0.5

    def init(self, x, layout):
        return {"b": torch.zeros_like(x), "visits": 0.0}

    def update(self, u, s, x, ctx):
        b = self.beta * s["b"] + u["delta"]
        return {**u, "delta": b}, {"b": b, "visits": float(u.get("visits", torch.zeros(1)))}


OWN = fb.Algorithm(
    fb.chain(Shrink(), fb.scaffold().rule), Median(), fb.pipeline(fb.scaffold().server, Momentum())
)


@pytest.mark.parametrize(
    "schedule", [fb.rounds(4, clients=3), fb.buffered(4, 2, 3)], ids=["rounds", "buffered"]
)
def test_parts_of_ones_own_compose_with_all_others(blobs, schedule):
    for algorithm in (
        OWN,
        fb.fedshift(fb.with_codecs(OWN, up=c.int8())),
        fb.hidden_state(fb.error_feedback(OWN)),
    ):
        results = [
            fb.simulate(blobs, algorithm, WORK, schedule, seed=1, engine=engine)
            for engine in (
                "in_process(backend='loop')",
                "in_process(block=2, backend='vmap')",
                "pool(workers=2)",
            )
        ]
        for other in results[1:]:
            assert torch.allclose(results[0].x, other.x, atol=1e-5)
        assert set(results[0].history[0]["up"]) == {"delta", "visits", "taken", "dc"}


def test_a_rule_of_ones_own_is_followed(blobs):
    shrunk = fb.simulate(blobs, fb.Algorithm(Shrink()), WORK, fb.rounds(3, clients=6), engine="in_process")
    halved = fb.simulate(
        blobs, fb.fedavg(), fb.Work(lr=0.05, batch=8), fb.rounds(3, clients=6), engine="in_process"
    )
    assert torch.allclose(shrunk.x, halved.x, atol=1e-6)
    assert shrunk.state.clients.get(range(6))["visits"].tolist() == [[3.0]] * 6


def test_an_algorithm_of_ones_own_asks_for_itself_on_resume(blobs, tmp_path):
    class Stop:
        def step(self, record, run):
            if record["step"] == 2:
                raise KeyboardInterrupt

    for i, algorithm in enumerate((OWN, fb.fedshift(OWN))):
        whole = fb.simulate(
            blobs, algorithm, WORK, fb.rounds(4, clients=3), engine="in_process(backend='vmap')"
        )
        assert algorithm.name == ""
        out = tmp_path / str(i)
        with pytest.raises(KeyboardInterrupt):
            fb.simulate(
                blobs, algorithm, WORK, fb.rounds(4, clients=3), engine="in_process(backend='vmap')", out=out,
                callbacks=[Stop()],
            )  # fmt: skip
        with pytest.raises(fb.errors.RunError, match="pass it again"):
            fb.resume(out, task=blobs)
        assert torch.equal(fb.resume(out, task=blobs, algorithm=algorithm).x, whole.x)


def test_given_cohorts_are_kept_on_resume(blobs, tmp_path):
    cohorts = [[0, 1], [2], [5, 3]]
    first = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3, clients=cohorts), out=tmp_path / "run")
    assert [r["clients"] for r in first.history] == cohorts
    assert torch.equal(fb.resume(tmp_path / "run", task=blobs).x, first.x)
    times = fb.buffered(2, buffer=2, concurrency=2, arrivals=list(np.arange(9.0)))
    first = fb.simulate(blobs, fb.fedbuff(), WORK, times, out=tmp_path / "trace")
    assert torch.equal(fb.resume(tmp_path / "trace", task=blobs).x, first.x)


# Rehearsal ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wants(fb.Transform):
    name: str = "dc"

    def update(self, u, s, x, ctx):
        return {"delta": u[self.name]}, s


@dataclass(frozen=True)
class Forgets(fb.Rule):
    def init(self, x):
        return {"h": torch.zeros_like(x)}


@dataclass(frozen=True)
class Drops(fb.Rule):
    """Loses what other rules keep for the round."""

    def step(self, g, y, s, ctx):
        return g, {}


@dataclass(frozen=True)
class Keeps(fb.Rule):
    def start(self, ctx):
        return {"b": torch.zeros(len(ctx.K), ctx.x.shape[1])}


def test_halves_that_do_not_fit_are_told_what_to_add():
    with pytest.raises(
        ConfigError, match=r"rule part needs 'c', which is not among what the server sends; add"
    ):
        fb.Algorithm(fb.scaffold().rule)
    with pytest.raises(ConfigError, match=r"needs 'dc', which is not among what the clients upload; add"):
        fb.Algorithm(server=Wants())
    with pytest.raises(ConfigError, match=r"remembers \[\] but starts with \['h'\]; name the same"):
        fb.Algorithm(Forgets())
    with pytest.raises(ConfigError, match=r"keeps \[\] in step but starts with \['b'\]"):
        fb.Algorithm(fb.chain(Keeps(), Drops()))
    with pytest.raises(ConfigError, match=r"each remembers 'h_i'; rename it"):
        fb.Algorithm(fb.chain(fb.feddyn().rule, fb.adabest().rule))
    with pytest.raises(ConfigError, match=r"both send 'c'; rename it"):
        fb.Algorithm(fb.scaffold().rule, server=fb.pipeline(fb.scaffold().server, fb.scaffold().server))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"rule": fb.Mean()}, "rule=.* is a Mean; give a Rule there"),
        ({"gather": fb.Rule()}, "gather=.* is a Rule; give a Gather there"),
        ({"server": fb.fedavg()}, "server=.* is a Algorithm; give a Transform there"),
        ({"up": "int8"}, "up='int8' is a str; give a Codec there"),
        ({"down": c.of_weights(c.int8())}, "is for uploads"),
    ],
)
def test_parts_in_the_wrong_place_are_refused(parts, said):
    with pytest.raises(ConfigError, match=said):
        fb.Algorithm(**parts)


@pytest.mark.parametrize(
    ("hook", "gives", "said"),
    [
        ("step", torch.zeros(()), r"the rule's step returns a tensor of shape \[\]; return \(direction, state\)"),
        ("step", (torch.zeros(3), {}), r"makes of a gradient \[m, d\] = \[2, 4\] a tensor of shape \[3\]; return one"),
        ("init", torch.zeros(4), r"the rule's init returns a tensor of shape \[4\]; return a dict"),
        ("start", None, "the rule's start returns a NoneType; return a dict"),
        ("finish", torch.zeros(2, 4), r"the rule's finish returns a tensor of shape \[2, 4\]; return a dict"),
        ("remember", torch.zeros(2, 4), r"the rule's remember returns a tensor of shape \[2, 4\]; return a dict"),
    ],
)  # fmt: skip
def test_hooks_that_return_something_else_are_named(hook, gives, said):
    odd = type("Odd", (fb.Rule,), {hook: lambda self, *_: gives})
    with pytest.raises(ConfigError, match=said):
        fb.Algorithm(rule=odd())


def test_neutral_parts_are_fedavg(blobs):
    xs = [
        fb.simulate(blobs, a, WORK, fb.rounds(3), engine="in_process").x
        for a in (fb.Algorithm(), fb.fedavg())
    ]
    assert torch.equal(*xs)


def test_a_rule_that_holds_on_to_y_finds_it_as_it_was():
    """The update takes y's place in memory only where nobody else has it."""
    found = []

    class Holds(fb.Rule):
        def start(self, ctx):
            return {"held": ctx.x.expand(len(ctx.K), -1)}

        def step(self, g, y, s, ctx):
            return g, {"held": y}

        def remember(self, received, s, ctx):
            found.append((s["held"].clone(), ctx.x - received["delta"]))
            return {}

    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(4, 3)).astype(np.float32), draw.integers(0, 2, 4)) for _ in range(3)]
    task = fb.Task.from_arrays(torch.nn.Linear(3, 2), data)
    fb.simulate(
        task,
        fb.Algorithm(rule=Holds()),
        fb.Work(lr=0.1, batch=None),
        fb.rounds(1),
        engine="in_process(backend='vmap')",
    )
    trained = [pair for pair in found if pair[0].shape[1] == task.layout.size]  # without the rehearsal
    assert trained
    for held, y in trained:
        assert torch.allclose(held, y, atol=1e-6)
