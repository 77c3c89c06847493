"""Engine selection: which engine and backend `engine="auto"` takes, as a pure function of declared facts.

No clock, no file and no cache: the same command takes the same plan on the same machine, whatever ran before. What is not
measured is estimated, so a plan is cautious: compiled code is taken where it surely saves more than compiling costs, and plain
autograd trains the whole run where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbraid.engines.cost_model import CostModel, Model

COST = CostModel()


@dataclass(frozen=True)
class Machine:
    """What of a machine decides."""

    cores: int = 1
    lanes: int = 16  # samples to a vector of compiled code
    capability: str = "AVX512"  # the instructions that PyTorch uses
    compiler: bool = True
    forks: bool = True


@dataclass(frozen=True)
class Facts:
    """Facts about a run before it begins."""

    model: Model
    batch: int  # samples of a local step
    steps: int  # local steps of a participation
    cohort: int
    participations: int  # of the whole run
    machine: Machine
    runs: int = 1  # of this model by one command, which compiles it once
    engine: str = "auto"  # or the requested one
    device: str = "cpu"
    plain: str | None = None  # why only plain autograd in one process is possible
    no_native: str | None = None  # why there is no compiled code
    vmap: bool = False  # whether vmap may follow the model
    per_example: bool = False
    frozen: bool = False  # whether the outputs of frozen layers are cached
    wide_recurrent: bool = False  # whether a recurrent net's weights leave a core's cache
    mean_length: float = (
        1.0  # of batches that are cut to their longest sample, relative to the longest of all
    )


@dataclass(frozen=True)
class EnginePlan:
    """An engine, its backend, and why."""

    engine: str
    backend: str
    reason: str


def choose(facts: Facts, cost: CostModel = COST) -> EnginePlan:
    """The plan of a run.

    >>> long = Facts(Model(12, 423e3, 15e3, 0, 61706), batch=20, steps=6, cohort=5, participations=5000, machine=Machine(2))
    >>> choose(long)
    EnginePlan(engine='in_process', backend='native', reason='...')
    """
    home = "in_process" if facts.engine == "auto" else facts.engine
    if facts.plain is not None:
        return EnginePlan(home, "loop", f"plain autograd, because {facts.plain}")
    if facts.device != "cpu":
        if facts.vmap:
            return EnginePlan(home, "vmap", f"vmap trains blocks of clients at once on {facts.device}")
        return EnginePlan(
            home, "loop", f"plain autograd, because vmap cannot follow the model on {facts.device}"
        )
    step = _Step.of(facts, cost)
    total = step.seconds * facts.steps * facts.participations
    wall = facts.runs * total / max(1, min(facts.machine.cores, facts.cohort))
    why = _without_native(facts, cost, step, wall)
    if why is None:
        return EnginePlan(
            home, "native", f"compiled gradients: {_about(wall)} of autograd are worth a compiler"
        )
    small = total < cost.processes
    if facts.vmap and (facts.per_example or (wall > cost.vmap and not small)):
        return EnginePlan(home, "vmap", f"vmap, and no compiled gradients: {why}")
    if facts.engine == "auto" and not small and not facts.per_example and _processes_pay(facts, cost, step):
        return EnginePlan("pool", "loop", f"plain autograd in worker processes: {why}")
    return EnginePlan(home, "loop", f"plain autograd: {why}")


@dataclass(frozen=True)
class _Step:
    """Estimated seconds of one local step of one client by plain autograd on one core."""

    calls: float
    arithmetic: float
    times: float  # slowdown of per-example gradients

    @staticmethod
    def of(facts: Facts, cost: CostModel) -> _Step:
        times = cost.per_example if facts.per_example else 1.0
        arithmetic = cost.arithmetic(facts.model, facts.batch, facts.machine.capability)
        return _Step(cost.calls(facts.model), arithmetic, times)

    @property
    def seconds(self) -> float:
        return (self.calls + self.arithmetic) * self.times


def _without_native(facts: Facts, cost: CostModel, step: _Step, wall: float) -> str | None:
    """Why compiled code does not pay, or None."""
    if facts.frozen:
        return "the outputs of frozen layers are cached"
    if facts.wide_recurrent:
        return "a recurrent net's weights leave the cache, so that PyTorch's own code is as fast"
    if facts.mean_length < cost.cut:
        return f"cutting batches leaves {facts.mean_length:.0%} of the longest sample, which compiled code pads to"
    fill = facts.batch / (-(-facts.batch // facts.machine.lanes) * facts.machine.lanes)
    if fill < cost.filled and 6 * facts.model.multiply_adds * facts.batch > cost.heavy:
        return f"batches of {facts.batch} fill too little of vectors of {facts.machine.lanes} samples"
    saved = cost.saves_calls * step.calls + cost.saves_arithmetic * fill * step.arithmetic
    saved *= wall / (step.calls + step.arithmetic)
    costs = cost.compiling(facts.model, facts.machine.cores) + facts.runs * cost.loading(facts.model)
    if saved < cost.margin * costs:
        what = "the run takes" if facts.runs == 1 else f"the {facts.runs} runs take"
        return f"{what} {_about(wall)}, of which compiled gradients would save no more than compiling costs"
    if not facts.machine.compiler:
        return "no C++ compiler was found; install g++ or set CXX"
    return facts.no_native


def _processes_pay(facts: Facts, cost: CostModel, step: _Step) -> bool:
    """Whether a process a core is faster than one process whose arithmetic has all cores."""
    forks = min(facts.machine.cores, facts.cohort) if facts.machine.forks else 1
    if forks == 1:
        return False
    fraction = -(-facts.cohort // forks) / facts.cohort  # of the cohort, trained by one process
    hauled = (cost.message + cost.number * facts.model.parameters) / max(1, facts.steps)
    threads = cost.thread * min(facts.machine.cores, cost.threads)
    together = step.calls + step.arithmetic / max(1.0, threads)
    if step.seconds < cost.thread_gain * together:
        return True
    return step.seconds < cost.long_step and fraction * step.seconds + hauled < together


def _about(seconds: float) -> str:
    """A duration to one digit.

    >>> _about(0.04), _about(34.0), _about(7300)
    ('about 0.04 s', 'about 30 s', 'about 2 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"about {float(f'{seconds / size:.0e}'):g} {unit}"
    return f"about {float(f'{seconds:.0e}'):g} s"
