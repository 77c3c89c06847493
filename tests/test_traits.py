"""Are facts about parts data, merged in one place, and contradictions refused?"""

import logging
from dataclasses import dataclass

import pytest
import torch

import fedbraid as fb
from fedbraid.algorithms.asynchronous import AMSGrad
from fedbraid.algorithms.averaging import EffectiveSteps, Proximal
from fedbraid.algorithms.personal import DittoModel, HeadFirst, LocalOnly, MoreauEnvelope, PersonalLayers
from fedbraid.core.optim import Adam, Optimize
from fedbraid.errors import ConfigError

WORK = fb.Work(lr=0.1, steps=1, batch=4)


@dataclass(frozen=True)
class StartsElsewhere(fb.Rule):
    """A second rule that says where clients start."""

    def traits(self):
        return fb.RuleTraits(personal=fb.PersonalTraining(initial_model=lambda ctx: ctx.x + 1))


@dataclass(frozen=True)
class Noisy(fb.Rule):
    """A second rule that clips gradients of single examples."""

    def traits(self):
        from fedbraid.core.traits import ExamplePrivacy

        return fb.RuleTraits(example_privacy=ExamplePrivacy(1.0, 1.0))


def task(clients=4):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * 6, 3, generator=draw)
    y = torch.randint(0, 2, (clients * 6,), generator=draw)
    parts = [(x[i::clients], y[i::clients]) for i in range(clients)]
    return fb.Task.from_arrays(torch.nn.Linear(3, 2), parts, test=(x, y), loss="cross_entropy")


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (LocalOnly(), StartsElsewhere(), "initial model"),
        (DittoModel(0.1), MoreauEnvelope(15.0, 2, 0.1), "personal model"),
        (HeadFirst(0.5), HeadFirst(0.25), "head steps"),
        (Noisy(), Noisy(), "example privacy"),
    ],
    ids=lambda p: p if isinstance(p, str) else type(p).__name__,
)
def test_two_rules_that_answer_one_question_are_refused(first, second, what):
    with pytest.raises(ConfigError, match=f"both define the {what} of one algorithm; use one of them"):
        fb.chain(first, second).traits()
    with pytest.raises(ConfigError, match=f"both define the {what}"):
        fb.Algorithm(rule=fb.chain(first, second))


def test_a_chain_answers_for_each_of_its_rules():
    chained = fb.chain(Proximal(0.1), EffectiveSteps(), PersonalLayers(), DittoModel(0.1)).traits()
    assert chained.requires_sgd
    assert chained.personal.requires_personal_parameters
    assert chained.personal.personal_model({"v_i": 7}) == 7
    assert not chained.defined_for_async
    assert fb.Rule().traits().defined_for_async
    assert not fb.chain(Proximal(0.1)).traits().requires_sgd


def test_a_local_loop_and_a_bent_gradient_are_refused():
    with pytest.raises(ConfigError, match="replaces the local steps"):
        fb.Algorithm(rule=fb.chain(fb.custom_local_loop(lambda module, batches, ctx: 0.0), Proximal(0.1)))


def test_a_gather_of_updates_refuses_what_is_no_update():
    with pytest.raises(ConfigError, match="reads each client's update x − y"):
        fb.Algorithm(
            rule=fb.fednova().rule, gather=fb.fedasync(form="mixing").gather, server=fb.fednova().server
        )


def test_a_gather_that_returns_a_pair_is_refused_with_what_to_return():
    @dataclass(frozen=True)
    class Pair(fb.Mean):
        def close(self, acc, s, ctx):
            return super().close(acc, s, ctx)[:2]

    with pytest.raises(ConfigError, match=r"return \(update, state, metrics\)"):
        fb.Algorithm(gather=Pair())


DEFINED = [
    fb.fedbuff(),
    fb.fedbuff(momentum=0.9),
    fb.fedasync(form="mixing"),
    fb.qafel(),
    fb.ca2fl(),
    fb.ace(),
    fb.ace(limit=3),
    fb.fadas(),
    fb.with_codecs(fb.ca2fl(), up=fb.codecs.int8()),
    fb.with_codecs(fb.ca2fl()),
    fb.error_feedback(fb.fadas()),
    fb.hidden_state(fb.ace()),
    fb.private(fb.fedbuff(), noise=1.0),
    fb.private(fb.ca2fl(), noise=1.0, where="client"),
]
OTHERS = [
    fb.scaffold(),
    fb.fedadam(),
    fb.fedvarp(),
    fb.fedshift(fb.ca2fl()),
    fb.fedprox(0.1),
    fb.Algorithm(rule=fb.Rule(), gather=fb.Mean(), server=fb.pipeline(Optimize(Adam()))),
]


@pytest.mark.parametrize("algorithm", DEFINED, ids=lambda a: a.name or "composed")
def test_what_a_paper_defines_for_stale_updates_stays_defined_under_wrappers(algorithm, caplog):
    assert algorithm.defined_for_async


@pytest.mark.parametrize("algorithm", OTHERS, ids=lambda a: a.name or "composed")
def test_the_rest_is_not(algorithm):
    assert not algorithm.defined_for_async


@pytest.mark.parametrize(
    ("algorithm", "warned"), [(fb.with_codecs(fb.ca2fl()), False), (fb.with_codecs(fb.scaffold()), True)]
)
def test_a_run_warns_of_what_no_paper_defines(algorithm, warned, caplog):
    with caplog.at_level(logging.WARNING, "fedbraid"):
        fb.simulate(task(), algorithm, WORK, fb.buffered(1, buffer=2, concurrency=3), engine="in_process")
    assert any("no paper defines" in r.getMessage() for r in caplog.records) == warned
    assert AMSGrad().defined_for_async


def test_server_data_are_bound_for_those_that_need_them_only():
    seen = []

    @dataclass(frozen=True)
    class Look(fb.Transform):
        needs: bool = False

        def traits(self):
            return fb.TransformTraits(needs_server_data=self.needs)

        def update(self, u, s, x, ctx):
            seen.append(ctx.server_data is not None)
            return u, s

    for needs in (False, True):
        server = fb.pipeline(Look(needs), fb.Scale())
        fb.simulate(task(), fb.Algorithm(server=server), WORK, fb.rounds(1, clients=2), engine="in_process")
    assert seen == [False, False, False, True]  # a dry run, then a step, of either


@dataclass(frozen=True)
class Declares(fb.Rule):
    """Declares some uploads and returns others."""

    declared: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()

    def uploads(self):
        return (*super().uploads(), *(fb.Upload(name, width=1) for name in self.declared))

    def finish(self, y, s, ctx):
        return dict.fromkeys(self.returned, ctx.a)


def test_uploads_that_are_not_those_declared_are_refused_both_ways():
    fb.Algorithm(rule=Declares(("q",), ("q",)))
    with pytest.raises(
        ConfigError, match=r"uploads 'q' but uploads\(\) does not declare it; add fb.Upload\('q', …\)"
    ):
        fb.Algorithm(rule=Declares((), ("q",)))
    with pytest.raises(ConfigError, match=r"uploads\(\) declares 'q' but finish\(\) does not return it"):
        fb.Algorithm(rule=Declares(("q",), ()))


@pytest.mark.parametrize(("sends", "declares"), [(True, False), (False, True)])
def test_downloads_that_are_not_those_declared_are_refused_both_ways(sends, declares):
    @dataclass(frozen=True)
    class Sends(fb.Transform):
        def sends(self):
            return (fb.Download("q"),) if declares else ()

        def send(self, s, x, N):
            return {"q": x} if sends else {}

    wanted = r"declares 'q' but send\(\)" if declares else r"sends 'q' but sends\(\) does not declare it"
    with pytest.raises(ConfigError, match=wanted):
        fb.Algorithm(server=fb.pipeline(Sends()))


def test_metrics_of_a_gather_are_in_the_record():
    @dataclass(frozen=True)
    class Counted(fb.Mean):
        def close(self, acc, s, ctx):
            u, s, metrics = super().close(acc, s, ctx)
            return u, s, {**metrics, "counted": float(acc.count)}

    result = fb.simulate(
        task(), fb.Algorithm(gather=Counted()), WORK, fb.rounds(2, clients=3), engine="in_process"
    )
    assert [r["counted"] for r in result.history] == [3.0, 3.0]


def test_the_context_of_a_rule_answers_its_former_names():
    @dataclass(frozen=True)
    class Former(fb.Rule):
        def init(self, x):
            return {"a_i": torch.ones(1)}

        def step(self, g, y, s, ctx):
            assert ctx.memory is ctx.client_state
            assert ctx.down is ctx.download
            return ctx.memory["a_i"] * g, s

        def remember(self, received, s, ctx):
            return {"a_i": ctx.memory["a_i"]}

    fb.Algorithm(rule=Former())
