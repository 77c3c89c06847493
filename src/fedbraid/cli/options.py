"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Clients = Annotated[int | None, typer.Option("--clients", "-n", help="Task: number of clients.")]
Partition = Annotated[
    str | None,
    typer.Option(
        help="Task: who holds what, e.g. 'iid', 'dirichlet(0.5)', 'label_chunks(1)'; see `fedbraid list partitions`."
    ),
]
Personal = Annotated[
    str | None,
    typer.Option(help="Task: parameters that stay with each client, a glob such as 'head.*' [default: none]"),
]
Model = Annotated[str | None, typer.Option(help="Task: a model by name; see `fedbraid list models`.")]
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
        help="Work: the clients' learning rate (0.01; on digits 0.05; 0.001 with another optimizer than sgd),"
        " or e.g. 'cosine(0.1, 100, warmup=5)', 'warmup(0.1, 5)', '[0.1, 0.05, 0.01]', by version."
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="Work: clients step with 'sgd', 'adam', 'adamw', 'rmsprop', 'adagrad' or 'lion' (sgd)."
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Work: passes over the local data (1).")]
Steps = Annotated[int | None, typer.Option(help="Work: local steps, instead of epochs.")]
Batch = Annotated[
    str | None, typer.Option(help="Work: batch size, or 'full' for the whole local set (20; on digits 5).")
]
Momentum = Annotated[
    float | None, typer.Option(help="Work: sgd's local momentum (0.9, or as the algorithm's paper has it).")
]
WeightDecay = Annotated[float | None, typer.Option(help="Work: weight decay (0).")]
Clip = Annotated[float | None, typer.Option(help="Work: the largest norm of a gradient (none).")]
LrDecay = Annotated[float | None, typer.Option(help="Work: factor on the clients' rate per round (1).")]
Last = Annotated[
    str | None, typer.Option(help="Work: a short last batch is 'keep', 'drop' or 'fill' (keep).")
]
Rounds = Annotated[
    int | None, typer.Option(help="Schedule: rounds, or server steps when asynchronous (100).")
]
PerRound = Annotated[
    float | None, typer.Option(help="Schedule: clients per round, a number or a share such as 0.1 (10).")
]
Over = Annotated[
    float | None, typer.Option(help="Schedule: ask this many times more clients, the first count (1).")
]
Timeout = Annotated[
    float | None, typer.Option(help="Schedule: simulated time after which late clients are dropped.")
]
Buffer = Annotated[
    int | None, typer.Option(help="Schedule: asynchronous, a server step after this many uploads.")
]
Concurrency = Annotated[
    int | None, typer.Option(help="Schedule: asynchronous, clients busy at a time (100).")
]
Arrivals = Annotated[
    str | None, typer.Option(help="Schedule: asynchronous, 'constant', 'poisson' or 'closed' (constant).")
]
Durations = Annotated[
    str | None, typer.Option(help="Schedule: time a client takes, e.g. 'halfnormal(1)', 'lognormal(0, 1)'.")
]
Bandwidth = Annotated[
    str | None, typer.Option(help="Schedule: bytes per unit of time, e.g. 'bandwidth(up=1e6, down=1e7)'.")
]
ClientSelection = Annotated[
    str | None,
    typer.Option(
        help="Schedule: who is asked, by last losses: 'power_of_choice(20)', 'oort()' or FILE.py:NAME."
    ),
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
        help="Schedule: who can be reached when: 'phones', or a JSON file of {client: [[start, end], ...]}."
    ),
]
Clock = Annotated[str | None, typer.Option(help="Schedule: the clock of a run that was, by its folder.")]
Seed = Annotated[int | None, typer.Option(help="Run: seed of everything random (0).")]
Engine = Annotated[
    str | None, typer.Option(help="Run: 'auto', 'in_process', 'pool' or e.g. 'pool(workers=2)'.")
]
Address = Annotated[
    str | None, typer.Option(help="Run: the Ray cluster of --engine ray, e.g. 10.0.0.1:6379 or auto.")
]
Device = Annotated[str | None, typer.Option(help="Run: torch device (cpu).")]
Store = Annotated[
    str | None,
    typer.Option(
        "--client-state",
        help="Run: what is remembered of clients is kept in 'memory', on 'disk', or 'auto', by size (auto).",
    ),
]
Out = Annotated[
    str | None, typer.Option("--out", "-o", help="Run: folder (runs/TASK-ALGORITHM-n, a new one).")
]
EvaluateEvery = Annotated[int | None, typer.Option(help="Run: test the model every this many rounds (1).")]
Metric = Annotated[
    str | None, typer.Option(help="What to go by: 'loss', or a metric of your own task (the accuracy).")
]
Target = Annotated[float | None, typer.Option(help="Run: stop at this test accuracy, e.g. 0.95.")]
MaxBytesUp = Annotated[
    str | None,
    typer.Option(help="Run: stop when clients have uploaded so many bytes in all, e.g. 50MB."),
]
OwnWork = Annotated[
    bool,
    typer.Option(
        "--paper-settings", help="Work: each algorithm starts from its own paper's, not all from the same."
    ),
]
KeepGoing = Annotated[
    bool,
    typer.Option("--ignore-divergence", help="Run: go on when the model grows beyond reason, to look at it."),
]
Track = Annotated[
    str | None,
    typer.Option(help="Run: also log to 'tensorboard', 'mlflow' or 'wandb' (offline), or several: a,b."),
]
Patience = Annotated[
    int | None, typer.Option(help="Run: stop when --metric has not improved for this many evaluations.")
]
KeepBest = Annotated[
    bool,
    typer.Option(
        "--keep-best", help="Run: also keep the model that is best by --metric, as best.safetensors."
    ),
]
AcceptOtherBits = Annotated[
    bool,
    typer.Option(
        "--allow-numeric-changes",
        help="Run: continue a folder where torch, processor or compiler are others than before.",
    ),
]
