"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Clients = Annotated[int | None, typer.Option("--clients", "-n", help="Task: number of clients")]
Partition = Annotated[
    str | None,
    typer.Option(
        help="Task: how data is split across clients, e.g. 'iid', 'dirichlet(0.5)', 'label_chunks(1)'; see `fedbraid list partitions`."
    ),
]
Personal = Annotated[
    str | None,
    typer.Option(help="Task: parameters that stay with each client, a glob such as 'head.*' [default: none]"),
]
Model = Annotated[str | None, typer.Option(help="Task: model by name; see `fedbraid list models`")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "-a",
        "--set",
        metavar="KEY=VALUE",
        help="Algorithm: set a keyword, e.g. -a optimizer=lamb -a lr=0.01.",
    ),
]
Lr = Annotated[
    str | None,
    typer.Option(
        help="Local training: learning rate of clients, or by round e.g. 'cosine(0.1, 100, warmup=5)', 'warmup(0.1, 5)',"
        " '[0.1, 0.05, 0.01]' [default: 0.01; digits 0.05; 0.001 with an optimizer other than sgd]"
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="Local training: optimizer: sgd, adam, adamw, rmsprop, adagrad or lion [default: sgd]"),
]
Epochs = Annotated[int | None, typer.Option(help="Local training: passes over the local data [default: 1]")]
Steps = Annotated[int | None, typer.Option(help="Local training: number of local steps, in place of epochs")]
Batch = Annotated[
    str | None,
    typer.Option(help="Local training: batch size, or 'full' for the full local set [default: 20; digits 5]"),
]
Momentum = Annotated[
    float | None, typer.Option(help="Local training: momentum of sgd [default: 0.9, or the paper's]")
]
WeightDecay = Annotated[float | None, typer.Option(help="Local training: weight decay [default: 0]")]
Clip = Annotated[
    float | None, typer.Option(help="Local training: clip gradients to this norm [default: off]")
]
LrDecay = Annotated[
    float | None, typer.Option(help="Local training: factor on the learning rate per round [default: 1]")
]
Last = Annotated[
    str | None,
    typer.Option(
        help="Local training: what to do with a short last batch: keep, drop or fill [default: keep]"
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(help="Schedule: number of rounds, or of server steps when asynchronous [default: 100]"),
]
PerRound = Annotated[
    float | None,
    typer.Option(help="Schedule: clients per round, a number or a fraction such as 0.1 [default: 10]"),
]
Over = Annotated[
    float | None,
    typer.Option(help="Schedule: over-select clients by this factor; the first to finish count [default: 1]"),
]
Timeout = Annotated[
    float | None, typer.Option(help="Schedule: drop clients that take longer than this (simulated time)")
]
Buffer = Annotated[int | None, typer.Option(help="Schedule: asynchronous, uploads per server step")]
Concurrency = Annotated[
    int | None,
    typer.Option(help="Schedule: asynchronous, clients that train at the same time [default: 100]"),
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        help="Schedule: asynchronous, arrivals of clients: constant, poisson or closed [default: constant]"
    ),
]
Durations = Annotated[
    str | None,
    typer.Option(
        help="Schedule: distribution of local training time, e.g. 'halfnormal(1)', 'lognormal(0, 1)'"
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option(help="Schedule: bytes per unit of time, e.g. 'bandwidth(up=1e6, down=1e7)'")
]
ClientSelection = Annotated[
    str | None,
    typer.Option(help="Schedule: client selection by last loss: power_of_choice(20), oort() or FILE.py:NAME"),
]
Sampling = Annotated[
    str | None,
    typer.Option(
        help="Schedule: cohorts of a 'fixed' size, or 'poisson': each client by its own draw, which privacy favors"
        " [default: fixed]"
    ),
]
Availability = Annotated[
    str | None,
    typer.Option(
        help="Schedule: when clients are available: 'phones' (bundled trace), or a JSON file of {client: [[start, end], ...]}"
    ),
]
Clock = Annotated[str | None, typer.Option(help="Schedule: replay the timing of an earlier run (its folder)")]
Seed = Annotated[int | None, typer.Option(help="Run: random seed [default: 0]")]
Engine = Annotated[
    str | None,
    typer.Option(help="Run: engine: auto, in_process, pool or e.g. 'pool(workers=2)' [default: auto]"),
]
Address = Annotated[
    str | None, typer.Option(help="Run: Ray cluster of --engine ray, e.g. 10.0.0.1:6379 or auto")
]
Device = Annotated[str | None, typer.Option(help="Run: torch device [default: cpu]")]
Store = Annotated[
    str | None,
    typer.Option(
        "--client-state",
        help="Run: where to store client state: memory, disk or auto [default: auto]",
    ),
]
Out = Annotated[
    str | None, typer.Option("--out", "-o", help="Run: folder [default: a new runs/TASK-ALGORITHM-n]")
]
EvaluateEvery = Annotated[
    int | None, typer.Option(help="Run: evaluate the model every this many rounds [default: 1]")
]
Metric = Annotated[
    str | None, typer.Option(help="Metric for early stopping and the best model [default: accuracy]")
]
Target = Annotated[float | None, typer.Option(help="Run: stop at this test accuracy, e.g. 0.95")]
MaxBytesUp = Annotated[
    str | None,
    typer.Option(help="Run: stop when clients have uploaded so many bytes in all, e.g. 50MB."),
]
OwnWork = Annotated[
    bool,
    typer.Option(
        "--paper-settings",
        help="Local training: start from each paper's settings instead of one common default",
    ),
]
KeepGoing = Annotated[
    bool,
    typer.Option("--ignore-divergence", help="Run: do not stop when the model diverges"),
]
Track = Annotated[
    str | None,
    typer.Option(help="Run: also log to tensorboard, mlflow or wandb (offline), or several: a,b"),
]
Patience = Annotated[
    int | None, typer.Option(help="Run: stop when --metric has not improved for this many evaluations")
]
KeepBest = Annotated[
    bool,
    typer.Option(
        "--keep-best", help="Run: also store the model that is best by --metric, as best.safetensors"
    ),
]
AcceptOtherBits = Annotated[
    bool,
    typer.Option(
        "--allow-numeric-changes",
        help="Run: resume even if torch, CPU or compiler changed (results may differ in the last bits)",
    ),
]
