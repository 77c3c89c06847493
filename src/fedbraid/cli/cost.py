"""`fedbraid cost`: what a choice will cost, before anything runs."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.compare import Energy
from fedbraid.cli.options import Option
from fedbraid.cli.reproduce import of_clone
from fedbraid.cli.show import Json, Quiet, facts, give, table
from fedbraid.core.check import integer, number
from fedbraid.errors import ConfigError, unknown
from fedbraid.run.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.layout import Layout
    from fedbraid.data.call import Forward
    from fedbraid.data.tree import Tree
    from fedbraid.privacy.planning import Privacy
    from fedbraid.study.cost import Cost, Federation

WINDOW = 80  # characters that a text model reads, as in LEAF


PRIVACY = (
    Option("privacy", "epsilon", float, "Privacy: budget; prints the noise that keeps it"),
    Option(
        "privacy", "noise", float,
        "Privacy: noise in multiples of the clip; prints its ε, or with --epsilon the rounds within the budget",
    ),
    Option("privacy", "delta", float, "Privacy: δ", "1e-05"),
)  # fmt: skip
OPTIONS = o.some(
    "clients", "partition", "model", "per_round", "rounds", "set", "epochs", "steps", "batch", "optimizer", "momentum",
    "weight_decay",
)  # fmt: skip


@o.with_options((*OPTIONS, *PRIVACY))
def cost(
    what: Annotated[
        str | None,
        typer.Argument(metavar="TASK|MODEL", help="Such as mnist, or lenet5, or 'resnet18_gn(classes=10)'."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Argument(metavar="ALGORITHM", help="Such as fedavg or \"fedadavr(memory='int4')\".")
    ] = None,
    samples: Annotated[
        float | None, typer.Option(help="Samples per client, for a model without a task (100).")
    ] = None,
    sampling: Annotated[
        str,
        typer.Option(
            help="Privacy: how clients are sampled, as in `run`: 'fixed' or 'poisson'; or 'arrivals' (buffered with"
            " --per-round as its buffer; immediate with 1)"
        ),
    ] = "fixed",
    energy: Energy = None,
    paper: Annotated[
        str | None, typer.Option(help="Print a paper's tables beside ours: 'fedgbo' or 'fedadavr'.")
    ] = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate the cost of a round: server memory, traffic, client FLOPs.

    Memory is that of every client's last update in each precision, and of what this algorithm keeps. Bytes
    are those of messages really encoded. FLOPs are FedGBO's eq. 22: torch's count for the model, a
    multiply-add as one, three times for forward and backward, plus the optimizer's arithmetic.

    \b
    Examples:
      fedbraid cost lenet5 "fedadavr(memory='int4')" --clients 100000 --per-round 50
      fedbraid cost mnist scaffold --clients 500 --per-round 5 --epochs 3
      fedbraid cost resnet18_gn "fedpaq(kmeans(4))" --samples 500 --batch 32
      fedbraid cost lenet5 fedavg --clients 10000 --per-round 100 --rounds 500 --epsilon 8 --sampling poisson
      fedbraid cost femnist 'private(fedavg(), epsilon=8.0)' --per-round 20 --sampling poisson
      fedbraid cost lenet5 fedavg --clients 10000 --per-round 100 --rounds 5000 --epsilon 8 --noise 1.1
      fedbraid cost lenet5 fedbuff --clients 10000 --per-round 10 --rounds 500 --epsilon 8 --sampling arrivals
      fedbraid cost --paper fedgbo
      fedbraid cost --paper fedadavr
    """
    if paper is not None:
        return _paper(paper, json, quiet)
    if what is None or algorithm is None:
        raise ConfigError(
            "cost of what? Name a task or model and an algorithm, such as: fedbraid cost lenet5 fedadavr"
        )
    from fedbraid.study.cost import estimate
    from fedbraid.study.energy import profile_of

    rounds, per_round = (sections["schedule"].get(key) for key in ("rounds", "per_round"))
    work = cfg.work_of(sections["work"])
    made = cfg.algorithm_of({"name": algorithm} | cfg.keywords(sections["algorithm"].get("set", [])))
    module, sample, crowd, run, layout = _subject(what, sections["task"], samples, per_round)
    found = estimate(module, sample, made, work, crowd, run, layout)
    joules = None if energy is None else found.energy(profile_of(energy), crowd)
    private = _privacy(made, crowd, rounds, sampling, **{"delta": 1e-5} | sections["privacy"])
    if json:
        give(
            {
                "algorithm": made.name,
                **asdict(crowd),
                **asdict(found),
                "bytes_up": found.bytes_up,
                "bytes_down": found.bytes_down,
                **({} if joules is None else {"energy": joules}),
                **({} if private is None else {"privacy": {**asdict(private), "epsilon": private.epsilon}}),
            }
        )
    elif not quiet:
        _show(made.name, found, crowd, joules)
        if private is not None:
            _show_privacy(private, crowd)


def _privacy(
    algorithm: Algorithm, crowd: Federation, rounds: int | None, sampling: str, delta: float,
    epsilon: float | None = None, noise: float | None = None,
) -> Privacy | None:  # fmt: skip
    """The noise and ε of so many rounds, where a budget or a noise is given, or the algorithm has one."""
    from fedbraid.privacy.planning import foresee

    if epsilon is None and noise is None:
        epsilon, noise, delta = _of_algorithm(algorithm, delta)
    if epsilon is None and noise is None:
        if rounds is not None:
            raise ConfigError(f"rounds={rounds} count for privacy alone; give --epsilon or --noise with them")
        return None
    steps = 100 if rounds is None else rounds
    return foresee(crowd.clients, crowd.per_round, steps, epsilon, noise, delta, sampling)


def _subject(
    what: str, shortcuts: cfg.Section, samples: float | None, per_round: float | None
) -> tuple[nn.Module, Tree, Federation, Forward, Layout | None]:
    """The model, one sample for it, who trains it, how it is called, and its layout where that is not the plain one."""
    from fedbraid import models
    from fedbraid.data import call as calling
    from fedbraid.data import tree
    from fedbraid.parse import call
    from fedbraid.study.cost import Federation

    name, args, settings = what, list[Any](), dict[str, Any]()
    if not files.names_file(what):
        name, args, settings = call(what)
    if name not in models.names():
        if not files.names_file(what):
            _check_name(name)
        if samples is not None:
            raise ConfigError(
                f"samples={samples} is given by the task {name}; leave it out, or name a model instead"
            )
        task = cfg.task_of({"name": what} | shortcuts)
        return (
            task.module(),
            tree.take(task.sample, slice(1)),
            Federation(task.clients, _cohort(per_round, task.clients), float(task.sizes.mean())),
            task.run,
            task.full_layout,
        )
    if args:
        raise ConfigError(f"{what!r} has values without names; write {name}(classes=10)")
    for key in ("partition", "model"):
        if key in shortcuts:
            raise ConfigError(
                f"{key}={shortcuts[key]!r} goes with a task, and {name} is a model; leave it out"
            )
    clients = shortcuts.get("clients", 100)
    integer("clients", clients)
    if samples is not None:
        number("samples", samples, "(0, inf)", "leaves nothing to train on")
    module, sample = _model(name, settings)
    crowd = Federation(clients, _cohort(per_round, clients), 100.0 if samples is None else samples)
    return module, sample, crowd, calling.call, None


def _of_algorithm(made: Algorithm, delta: float) -> tuple[float | None, float | None, float]:
    """(epsilon, noise, delta) of `private(…)` with noise on sums, where the algorithm is one."""
    from fedbraid.privacy.parts import Noised

    gather = made.gather
    return (gather.epsilon, gather.noise, gather.delta) if isinstance(gather, Noised) else (None, None, delta)


def _check_name(name: str) -> None:
    from fedbraid import models
    from fedbraid.data import tasks

    if name not in tasks.names():
        raise unknown("task or model", name, [*tasks.names(), *models.names()])


def _cohort(per_round: float | None, clients: int) -> int:
    from fedbraid.schedule import rounds

    return rounds(1, cfg._count(cfg.DEFAULT_PER_ROUND if per_round is None else per_round)).cohort(clients)


_FEATURES = 784  # what linear models get where nobody says


def _model(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A model by name and one sample of the shape that it takes."""
    import torch

    from fedbraid import models

    takes = inspect.signature(getattr(models, name)).parameters
    if "features" in takes:
        settings = {"features": _FEATURES} | settings
    if "vocab" in takes and takes["vocab"].default is inspect.Parameter.empty:
        settings = {"vocab": 5000} | settings
    module = models.build(name, **settings)
    full = {k: p.default for k, p in takes.items()} | settings
    if "features" in full:
        return module, torch.zeros(1, full["features"])
    if "vocab" in full:
        return module, torch.ones(1, WINDOW, dtype=torch.long)
    return module, torch.zeros(1, full.get("channels", 1), full.get("size", 28), full.get("size", 28))


def _show(name: str, found: Cost, crowd: Federation, joules: dict[str, float] | None) -> None:
    energy = {k: f"{v:.3g} J" for k, v in (joules or {}).items()}
    facts(
        {
            "algorithm": name,
            "parameters": f"{found.parameters:,}",
            "clients": f"{crowd.clients:,}, {crowd.per_round:,} per round, {crowd.samples:g} samples each",
            "up per round": _traffic(found.up, found.bytes_up, crowd.per_round),
            "down per round": _traffic(found.down, found.bytes_down, crowd.per_round),
            "client FLOPs per round": f"{format_count(found.flops)}, {found.steps:g} steps",
            "client energy per round": ", ".join(f"{k} {v}" for k, v in energy.items()) or None,
            "client keeps": format_bytes(found.client_state),
            "server keeps": format_bytes(found.server_state),
        }
    )
    print()
    table(
        f"Server memory for the last update of {crowd.clients:,} clients",
        ["precision", "bytes", ""],
        [[name, format_bytes(size), f"{size:,}"] for name, size in found.server_memory.items()],
    )


_STEPS = {"poisson": "Poisson rounds", "fixed": "rounds", "arrivals": "buffers"}


def _show_privacy(private: Privacy, crowd: Federation) -> None:
    print()
    table(
        f"Privacy: noise {private.noise:.3f} keeps {private.rounds:,} {_STEPS[private.sampling]} of {crowd.per_round:,} clients"
        f" at ε = {private.epsilon:.3g}, δ = {private.delta:g}",
        ["after round", "ε"],
        [[f"{step:,}", f"{spent:.3g}"] for step, spent in private.epsilons.items()],
    )


def _traffic(by_name: dict[str, int], total: int, clients: int) -> str:
    listed = ", ".join(f"{name} {format_bytes(size / clients)}" for name, size in by_name.items())
    return f"{format_bytes(total)} (each client: {listed})"


# Papers -------------------------------------------------------------------------------------------


def _paper(name: str, json: bool, quiet: bool) -> None:
    papers = of_clone("printed")
    if name not in ("fedgbo", "fedadavr"):
        raise unknown("paper", name, ("fedgbo", "fedadavr"))
    if name == "fedadavr":
        rows = papers.fedadavr_memory()
        if json:
            return give({"memory": rows})
        return None if quiet else _show_memory(rows)
    cells, traffic = papers.fedgbo_flops(), papers.fedgbo_traffic()
    if json:
        return give({"flops": cells, "traffic": traffic})
    if not quiet:
        _show_traffic(traffic)
        for steps in papers.FEDGBO_FLOPS:
            _show_flops(steps, [c for c in cells if c["steps"] == steps])
        print("* as printed; eq. 22 gives 0.0335, which Table 10 and the Adam cell confirm")


def _show_memory(rows: list[dict[str, Any]]) -> None:
    lines = []
    for at in range(0, len(rows), 4):
        four = rows[at : at + 4]
        lines.append(
            [
                four[0]["model"],
                f"{four[0]['millions']:g} M",
                *(f"{r['ours']:.3g} ({r['paper']:g})" for r in four),
            ]
        )
    table(
        "Server memory for 1,000 clients in units of 1,000 MiB (FedAdaVR's Table 3 in brackets)",
        ["model", "parameters", *(r["precision"] for r in rows[:4])],
        lines,
    )


def _show_traffic(rows: list[dict[str, Any]]) -> None:
    table(
        "Vectors per client and round (FedGBO's Table 2 in brackets; s is two vectors with Adam, else one)",
        ["algorithm", "optimizer", "down", "up"],
        [
            [
                r["algorithm"],
                r["optimizer"],
                f"{r['down']} ({r['paper_down']})",
                f"{r['up']} ({r['paper_up']})",
            ]
            for r in rows
        ],
        left=2,
    )
    print()


def _show_flops(steps: int, cells: list[dict[str, Any]]) -> None:
    number = {10: 4, 50: 10}[steps]
    lines = [
        [
            c["task"],
            c["algorithm"],
            c["optimizer"],
            f"{c['ours']:.4g}",
            f"{c['paper']:g}{'*' * c['misprint']}",
            f"{100 * c['off']:+.2f} %",
        ]
        for c in cells
    ]
    head = ["task", "algorithm", "optimizer", "ours", "paper", "off"]
    table(f"FLOPs × 10⁸ per client and round, K = {steps} (FedGBO's Table {number})", head, lines, left=3)
    print()
