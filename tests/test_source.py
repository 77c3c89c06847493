"""Are the facts of a participation made once, and are steps one stream that any source can make?"""

import numpy as np
import torch

import fedbraid as fb
from fedbraid.core.context import Participation
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.engine import Setup, participate
from fedbraid.engines.in_process import InProcess
from fedbraid.run.run import Options, drive
from fedbraid.run.simulated_source import SimulatedSource
from fedbraid.run.source import ServerStep, StepNotes

WORK = fb.Work(lr=0.1, epochs=2, batch=4, momentum=0.5)


def task():
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw)) for n in (3, 8, 9)
    ]
    return fb.Task.from_arrays(torch.nn.Linear(3, 2), parts, test=parts[0], loss="cross_entropy")


def test_the_facts_of_a_block_are_cut_and_joined_again():
    setup = Setup(fb.fedavg(), task(), WORK, 0)
    whole = participate(setup, np.array([2, 0, 1]), 5)
    assert whole.n[:, 0].tolist() == [9, 3, 8]
    assert whole.K[:, 0].tolist() == [6, 2, 4]
    assert torch.equal(whole.a, WORK.effective(whole.K))
    assert whole.lr.dtype == torch.float64
    assert whole.version.tolist() == [5, 5, 5]
    again = Participation.join(whole.rows())
    for name in ("clients", "version", "n", "K", "a", "lr"):
        assert getattr(again, name).tolist() == getattr(whole, name).tolist()
        assert getattr(whole[1:], name).tolist() == getattr(whole, name).tolist()[1:]


class Recorded:
    """A source that gives a simulation's steps on, and hears which of them were taken."""

    is_live = False

    def __init__(self, setup, engine):
        self.inner, self.sizes, self.heard = SimulatedSource(setup, engine), setup.task.sizes, []

    def steps(self, run):
        for step in self.inner.steps(run):
            assert step.tick.step == run.state.t
            assert run.metadata == ({"counted": run.state.t} if run.state.t else {})
            yield ServerStep(step.tick, step.replies, self.taken)

    def taken(self, record):
        self.heard.append(record["step"])
        return StepNotes({"heard": len(self.heard)}, {"counted": record["step"]})

    def describe(self):
        return "recorded"


def test_any_source_makes_the_steps_of_a_run():
    setup, schedule = Setup(fb.scaffold(), task(), WORK, 3, 2, 8), fb.rounds(4, clients=2)
    engine = InProcess(backend="loop")
    engine.open(setup)
    source = Recorded(setup, engine)
    result = drive(setup, schedule, source, LoopGradient(setup.task), Options(), None)
    engine.close()
    same = fb.simulate(
        setup.task, setup.algorithm, WORK, schedule, seed=3, engine="in_process(backend='loop')"
    )
    assert torch.equal(result.x, same.x)
    assert source.heard == [1, 2, 3, 4] == [r["heard"] for r in result.history]


def test_client_state_counts_among_the_results_that_wait():
    setup = Setup(fb.scaffold(), task(), WORK, 0)
    d = setup.task.layout.size
    each = 4 * (2 * d + d)  # delta and dc go up, and c_i is remembered
    engine = InProcess(backend="loop")
    for budget, ahead in ((3 * each, True), (3 * each - 1, False)):
        source = type("Small", (SimulatedSource,), {"BUDGET": budget})(setup, engine, concurrency=3)
        assert source.ahead == ahead
