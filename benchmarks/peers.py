"""FedAvg through other libraries' simulators and through `fb.simulate`, side by side in one run.

    python benchmarks/peers.py [W1 ... W8] [--repeats 3] [--only fedbraid pfl nvflare] [--rounds N] [--json]

The peers live in an environment of their own, from the top of a clone:

    python3.11 -m venv .venv-peers
    grep '^torch==' constraints.txt > .venv-peers/torch.txt
    .venv-peers/bin/pip install -c .venv-peers/torch.txt -e . -r benchmarks/peers.txt
    .venv-peers/bin/python benchmarks/peers.py --repeats 3

torch alone is pinned, because a plain or newer one pulls gigabytes of CUDA packages; pfl wants an older dp-accounting than
constraints.txt has.
The workloads are those of speed.py: same models and first weights, same tensors, same clients per round, epochs,
batch, momentum and learning rate, no evaluation. Each library runs its own loop in its own process, with its log
put aside, and the processes take turns; the smallest of the median times of a round counts. Before timing, every
library runs two rounds without dropout in which all samples are the same one, so that neither the choice of clients nor the order of
samples matters: its clients and optimiser steps are counted, and its model must end where a loop by hand ends.

How each is used, after its documentation:
- pfl: `FederatedAveraging` on `SimulatedBackend`, in one process, and in one process per core joined by
  PFL_WORKER_ADDRESSES; users in random order without reuse. It does not shuffle a user's samples.
- Flower: `FedAvg` on a `ServerApp`, a `ClientApp` whose local training is speed.py's bare loop (Flower has none of
  its own), `run_simulation` with one CPU per client, hence one Ray actor per core. Its grid polls every 0.1 s.
- NVFlare: `FedAvg` in a `FedJob`, with the same bare loop as the sites' script (peers_nvflare.py), `simulator_run`. It
  keeps a Python process for each site and takes at most 100, so there are as many sites as a round has clients; all of
  them train in every round, each a random one of its share of the workload's clients, on one thread. W4 has too many.
  Sites ask for tasks every 0.1 s and the server looks for results as often, instead of 2 s and 0.5 s, with which a round
  takes about 3 s whatever is trained; two more waits of up to 0.5 s on a site have no setting.
- FedJAX: `federated_averaging` with its jit backend, on models that peers_fedjax.py reads off the modules. XLA compiles
  in the first round, which is not timed. 0.0.17 needs jax before 0.6 (`jax.tree_map`). Its pmap backend on one virtual
  device per core, which needs JAX_PMAP_NO_RANK_REDUCTION=False by now, was no faster here.
- FedLab: `SyncServerHandler`, `SGDSerialClientTrainer` and `StandalonePipeline`. Its trainer has no momentum and
  keeps one optimiser for all clients, so a subclass adds momentum and starts each client with none.
- fluke: `FedAVG` with `FastDataLoader`s, clients that forget their optimiser after a round (`persistency=False`).
- FLSim: `SyncTrainer` with the model and data provider of its tutorials. It shuffles a client's batches, not its samples.
  0.1.0 does not import on Python 3.11, which takes dataclasses as defaults only if they have a hash; `import_flsim` gives them one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from speed import LR, WORKLOADS, Bare, Stamps, Workload, prepare
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fedbraid as fb

CORES = os.cpu_count() or 1
NVFLARE_WAIT = 0.1  # seconds, as Flower waits


@dataclass
class Job:
    """One run to make: a workload, its tensors, a model to start from, and a callback for the end of each round."""

    name: str
    rounds: int
    check: bool

    def __post_init__(self) -> None:
        self.work: Workload = workload(self.name, self.check)
        self.x, self.y = table(self.name, alike=self.check)
        torch.manual_seed(0)
        self.model = self.work.build()
        self.stamps = Stamps()

    def stamp(self) -> None:
        self.stamps.step(None, None)

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        rows = slice(i * self.work.samples, (i + 1) * self.work.samples)
        return self.x[rows], self.y[rows]


def workload(name: str, check: bool) -> Workload:
    """A workload; without its random zeros where models are compared."""
    work = WORKLOADS[name]
    return replace(work, build=functools.partial(without_dropout, work.build)) if check else work


def without_dropout(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@dataclass
class Done:
    model: nn.Module | Tensor
    clients: int  # trained, over all rounds
    steps: int | None = None  # of local optimisers, where the process itself cannot count them
    note: str = ""


@functools.lru_cache(maxsize=1)
def table(name: str, alike: bool) -> tuple[Tensor, Tensor]:
    """A workload's tensors, or as many with one sample in the place of all."""
    work = WORKLOADS[name]
    if not alike:
        return work.table()
    x, y = replace(work, clients=1, samples=1).table()
    total = work.clients * work.samples
    return x.repeat(total, *(1 for _ in work.shape)), y.repeat(total)


def steps_per_client(work: Workload) -> int:
    return work.epochs * math.ceil(work.samples / work.batch)


def flat(model: nn.Module | Tensor) -> Tensor:
    return model if isinstance(model, Tensor) else nn.utils.parameters_to_vector(model.parameters()).detach()


@contextmanager
def counting(momentum: float, on: bool = True) -> Iterator[list[int]]:
    """Count the steps of SGD with the workload's rate and momentum."""
    count = [0]

    def note(optimiser: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        group = optimiser.param_groups[0]
        count[0] += group["lr"] == LR and group["momentum"] == momentum

    if not on:
        yield count
        return
    hook = register_optimizer_step_post_hook(note)
    try:
        yield count
    finally:
        hook.remove()


# One function a library. They import it themselves: it may not be installed.


def run_bare(job: Job) -> Done:
    loop = Bare(job.work, job.x, job.y)
    weights = [p.detach().clone() for p in job.model.parameters()]
    for _ in range(job.rounds):
        weights = loop.round(weights)
        job.stamp()
    return Done(nn.utils.parameters_to_vector(weights), job.rounds * job.work.cohort)


def run_fedbraid(job: Job) -> Done:
    work = job.work
    offsets = np.arange(0, len(job.x) + 1, work.samples)
    task = fb.Task.from_table(
        lambda: copy.deepcopy(job.model), job.x, job.y, torch.arange(len(job.x)), offsets
    )
    local = fb.Work(lr=LR, epochs=work.epochs, batch=work.batch, momentum=work.momentum)
    schedule = fb.rounds(job.rounds, clients=work.cohort)
    if not job.check:
        prepare(task, work)
    result = fb.simulate(
        task, fb.fedavg(), local, schedule, evaluate_every=None, progress=False, callbacks=[job.stamps]
    )
    clients = sum(len(record["clients"]) for record in result.history)
    return Done(result.x, clients, clients * steps_per_client(work), result.engine)


def run_pfl(job: Job) -> Done:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        """What pfl asks of a module: the loss of a batch, and metrics."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
            return {"loss": self.loss(x, y).item()}

    class DivergenceGuard(TrainingProcessCallback):
        clients = 0

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            job.stamp()
            named = aggregate_metrics.to_simple_dict()
            self.clients += int(next(v for k, v in named.items() if "number of devices" in str(k)))
            return False, Metrics()

    work, watch = job.work, DivergenceGuard()
    order = np.random.default_rng(0).permutation(work.clients).tolist()  # the same in every worker
    data = FederatedDataset(
        lambda i: PyTorchTensorDataset(job.client(i)), get_user_sampler("minimize_reuse", order)
    )
    model = PyTorchModel(
        net := Net(job.model),
        functools.partial(torch.optim.SGD, momentum=work.momentum),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    never = 10**9  # the first round is always evaluated, and is not timed
    FederatedAveraging().run(
        NNAlgorithmParams(
            job.rounds, evaluation_frequency=never, train_cohort_size=work.cohort, val_cohort_size=None
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=LR),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    return Done(net, watch.clients)


@functools.lru_cache(maxsize=1)
def flower_loop(name: str, check: bool) -> Bare:
    """What a Ray actor keeps between clients: the tensors and a model to train."""
    return Bare(workload(name, check), *table(name, alike=check))


def flower_client(message, context):
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config = message.content["config"]
    loop = flower_loop(config["workload"], config["check"])
    names = [n for n, _ in loop.model.named_parameters()]
    received = message.content["arrays"].to_torch_state_dict()
    with counting(loop.work.momentum, on=config["check"]) as steps:
        trained = loop.client([received[n] for n in names], int(context.node_config["partition-id"]))
    reply = {
        "arrays": ArrayRecord(dict(zip(names, trained))),
        "metrics": MetricRecord({"num-examples": loop.work.samples, "steps": steps[0]}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


def run_flower(job: Job) -> Done:
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    done = Done(job.model, 0, 0)

    def tally(replies, weighted_by):
        done.clients += len(replies)
        done.steps += sum(int(r["metrics"]["steps"]) for r in replies)
        return MetricRecord()

    def after_round(number: int, arrays) -> None:
        if number:
            job.stamp()

    server, client = ServerApp(), ClientApp()
    client.train()(flower_client)

    @server.main()
    def serve_rounds(grid, context) -> None:
        work = job.work
        strategy = FedAvg(
            fraction_train=work.cohort / work.clients, min_train_nodes=work.cohort, fraction_evaluate=0.0,
            min_available_nodes=work.clients, train_metrics_aggr_fn=tally,
        )  # fmt: skip
        result = strategy.start(
            grid, ArrayRecord(job.model.state_dict()), job.rounds,
            train_config=ConfigRecord({"workload": job.name, "check": job.check}), evaluate_fn=after_round,
        )  # fmt: skip
        job.model.load_state_dict(result.arrays.to_torch_state_dict())

    # a cluster of its own, not one that happens to run on the machine
    init = {"address": "local", "num_cpus": CORES}
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": init}
    run_simulation(server, client, num_supernodes=job.work.clients, backend_config=resources)
    return done


def run_nvflare(job: Job) -> Done:
    import peers_nvflare
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner

    work = job.work
    if work.cohort > 100:
        raise RuntimeError("its simulator takes at most 100 clients")
    with tempfile.TemporaryDirectory() as folder:
        torch.save((job.x, job.y), os.path.join(folder, "table.pt"))
        torch.save(job.model.state_dict(), os.path.join(folder, "first.pt"))
        federation = FedJob("fedavg", min_clients=work.cohort)
        federation.to_server(peers_nvflare.Persistor(folder), id="persistor")
        federation.to_server(
            FedAvg(num_clients=work.cohort, num_rounds=job.rounds, task_check_period=NVFLARE_WAIT)
        )
        federation.to_server({"server": {"task_request_interval": NVFLARE_WAIT}})
        federation.to_clients(
            ScriptRunner(peers_nvflare.__file__, script_args=f"{folder} {job.name} {job.check}")
        )
        if federation.simulator_run(os.path.join(folder, "workspace"), n_clients=work.cohort):
            raise RuntimeError("its simulator failed")
        with open(os.path.join(folder, "seen.json")) as file:
            seen = json.load(file)
        job.model.load_state_dict(torch.load(os.path.join(folder, "last.pt")))
    job.stamps.at = seen["at"]
    return Done(job.model, seen["clients"], seen["steps"])


def run_fedjax(job: Job) -> Done:
    import fedjax
    import jax
    import optax
    from fedjax.algorithms import fed_avg
    from peers_fedjax import forward

    work, seen = job.work, Counter()

    def tally(batch):
        seen["steps"] += 1
        return batch

    def loss(weights, batch, key):
        scores = forward(job.model, weights, batch["x"], key)
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])

    x = job.x.permute(0, 2, 3, 1).contiguous() if job.x.dim() == 4 else job.x  # channels last
    x, y = x.numpy(), job.y.numpy()
    rows = [slice(i * work.samples, (i + 1) * work.samples) for i in range(work.clients)]
    data = fedjax.InMemoryFederatedData({i: {"x": x[r], "y": y[r]} for i, r in enumerate(rows)})
    sampler = fedjax.client_samplers.UniformGetClientSampler(
        data.preprocess_batch(tally) if job.check else data, work.cohort, seed=0
    )
    seen.clear()  # the data set has looked at every client
    algorithm = fed_avg.federated_averaging(
        fedjax.grad(loss),
        fedjax.optimizers.sgd(LR, work.momentum or None),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(work.batch, num_epochs=work.epochs),
    )
    state = algorithm.init(
        {name: jax.numpy.array(p.detach().numpy()) for name, p in job.model.named_parameters()}
    )
    for _ in range(job.rounds):
        state, trained = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        job.stamp()
        seen["clients"] += len(trained)
    names = [name for name, _ in job.model.named_parameters()]
    flat = np.concatenate([np.ravel(state.params[name]) for name in names])
    return Done(torch.from_numpy(flat), seen["clients"], seen["steps"])


def run_fedlab(job: Job) -> Done:
    import_torchvision()
    import logging

    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
    from fedlab.core.standalone import StandalonePipeline
    from torch.utils.data import DataLoader

    logging.getLogger().setLevel(logging.WARNING)
    work = job.work

    class Clients(FedDataset):
        def get_dataset(self, id, type="train"):
            return BaseDataset(*job.client(id))

        def get_dataloader(self, id, batch_size, type="train"):
            return DataLoader(self.get_dataset(id), batch_size=batch_size, shuffle=True)

    class Trainer(SGDSerialClientTrainer):
        trained = 0

        def setup_optim(self, epochs, batch_size, lr):
            super().setup_optim(epochs, batch_size, lr)
            self.optimizer = torch.optim.SGD(self._model.parameters(), lr, momentum=work.momentum)

        def train(self, model_parameters, train_loader):
            self.trained += 1
            self.optimizer.state.clear()  # no client inherits another's momentum
            return super().train(model_parameters, train_loader)

    class Pipeline(StandalonePipeline):
        def evaluate(self):
            job.stamp()

    trainer = Trainer(job.model, work.clients)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(work.epochs, work.batch, LR)
    handler = SyncServerHandler(job.model, job.rounds, work.cohort / work.clients)
    Pipeline(handler, trainer).main()
    return Done(handler.model, trainer.trained)


def run_fluke(job: Job) -> Done:
    import_torchvision()
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.utils import FederationObserver

    work = job.work

    class DivergenceGuard(FederationObserver):
        clients = 0

        def selected_clients(self, round, clients):
            self.clients += len(clients)

        def end_round(self, round):
            job.stamp()

    loaders = [
        FastDataLoader(*job.client(i), num_labels=work.classes, batch_size=work.batch, shuffle=True)
        for i in range(work.clients)
    ]
    FlukeENV().set_eval_cfg(server=False)
    client = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR, "momentum": work.momentum},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "persistency": False,
    }
    algorithm = FedAVG(
        work.clients,
        DataSplitter(DummyDataContainer(loaders, [None] * work.clients, None, num_classes=work.classes)),
        DDict(client=client, server={"weighted": True}, model=job.model),
    )
    watch = DivergenceGuard()
    algorithm.set_callbacks(watch)
    algorithm.run(job.rounds, work.cohort / work.clients)
    return Done(algorithm.server.model, watch.clients)


def run_flsim(job: Job) -> Done:
    import_torchvision()
    import_flsim()
    from flsim.clients.base_client import ClientConfig
    from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig
    from flsim.trainers.sync_trainer import SyncTrainer, SyncTrainerConfig
    from flsim.utils.example_utils import DataProvider, FLModel
    from omegaconf import OmegaConf

    work = job.work

    class Clients:
        """What FLSim's tutorials call a data loader: each client's samples in batches."""

        def fl_train_set(self):
            for i in range(work.clients):
                x, y = job.client(i)
                batches = zip(x.split(work.batch), y.split(work.batch))
                features, labels = zip(*((list(a), b.tolist()) for a, b in batches))
                yield {"features": features, "labels": labels}

        def fl_eval_set(self):
            return []

        fl_test_set = fl_eval_set

    class Trainer(SyncTrainer):
        trained = 0

        def _train_one_round(self, timeline, clients, **rest):
            super()._train_one_round(timeline, clients, **rest)
            job.stamp()
            self.trained += len(clients)

    epochs = job.rounds / math.ceil(work.clients / work.cohort)  # of the whole federation
    optimiser = LocalOptimizerSGDConfig(lr=LR, momentum=work.momentum)
    settings = SyncTrainerConfig(
        client=ClientConfig(epochs=work.epochs, optimizer=optimiser, shuffle_batch_order=True),
        users_per_round=work.cohort, epochs=epochs, eval_epoch_frequency=epochs,
        do_eval=False, report_train_metrics=False,
    )  # fmt: skip
    model = FLModel(job.model)
    trainer = Trainer(model=model, cuda_enabled=False, **OmegaConf.structured(settings))
    trainer.train(DataProvider(Clients()), None, work.clients, distributed_world_size=1)
    return Done(model.fl_get_module(), trainer.trained)


def import_flsim() -> None:
    """FLSim's dataclasses have dataclasses as defaults, which Python takes since 3.11 only if they can be hashed."""
    import dataclasses

    plain = dataclasses.dataclass

    def dataclass(cls=None, **options):
        if cls is None:
            return functools.partial(dataclass, **options)
        return plain(cls, **options, unsafe_hash=True) if "flsim" in cls.__module__ else plain(cls, **options)

    dataclasses.dataclass = dataclass
    try:
        import flsim.trainers.sync_trainer  # noqa: F401
    finally:
        dataclasses.dataclass = plain


def import_torchvision() -> None:
    """FedLab and fluke import torchvision, whose CUDA build wants two operators that a CPU torch has not."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


@dataclass(frozen=True)
class Peer:
    title: str
    run: Callable[[Job], Done]
    package: str = "torch"
    workers: int = 1


PEERS = {
    "bare": Peer("bare PyTorch, one process", run_bare),
    "fedbraid": Peer("fedbraid", run_fedbraid),
    "pfl": Peer("pfl, one process", run_pfl, "pfl"),
    "pfl-workers": Peer(f"pfl, {CORES} processes", run_pfl, "pfl", CORES),
    "flower": Peer("Flower", run_flower, "flwr"),
    "nvflare": Peer("NVFlare", run_nvflare, "nvflare"),
    "fedjax": Peer("FedJAX", run_fedjax, "fedjax"),
    "fedlab": Peer("FedLab", run_fedlab, "fedlab"),
    "fluke": Peer("fluke", run_fluke, "fluke"),
    "flsim": Peer("FLSim", run_flsim, "flsim"),
}


def serve(peer: str, descriptor: int) -> None:
    """A library's process: make the runs that are asked for, say what was seen."""
    pipe = Connection(descriptor)
    if PEERS[peer].workers > 1:
        torch.set_num_threads(1)
    while order := pipe.recv():
        try:
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002 (what the libraries draw from)
            job = Job(*order)
            start = flat(job.model).clone()
            with counting(job.work.momentum, on=job.check) as steps:
                done = PEERS[peer].run(job)
            pipe.send({
                "seconds": job.stamps.per_round(),
                "rounds": len(job.stamps.at),
                "clients": done.clients,
                "note": done.note,
                "steps": steps[0] if done.steps is None else done.steps,
                "moved": (flat(done.model) - start).numpy() if job.check else None,
            })  # fmt: skip
        except Exception as error:
            traceback.print_exc()
            pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


class Contestant:
    """The processes of one library, started once; they idle while others have their turn."""

    def __init__(self, name: str, folder: str) -> None:
        workers = PEERS[name].workers
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        environment = os.environ | {
            "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)),
            "PYTHONWARNINGS": "ignore",
        }
        if workers > 1:
            environment["PFL_WORKER_ADDRESSES"] = ",".join(
                f"localhost:{port}" for port in free_ports(workers)
            )
        for rank in range(workers):
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-c", f"import peers; peers.serve({name!r}, {theirs.fileno()})"]
            with theirs, open(os.path.join(folder, f"{name}.{rank}.log"), "wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                    env=environment | ({"PFL_WORKER_RANK": str(rank)} if workers > 1 else {}),
                )  # fmt: skip
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, workload: str, rounds: int, check: bool = False) -> dict[str, Any]:
        """What the first worker saw, with the steps of all; an error as a RuntimeError."""
        try:
            for pipe in self.pipes:
                pipe.send((workload, rounds, check))
            seen = [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError) as gone:
            raise RuntimeError("its process died") from gone
        for answer in seen:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return {**seen[0], "steps": sum(answer["steps"] for answer in seen)}

    def stop(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def verify(work: Workload, rounds: int, seen: dict[str, Any], reference: np.ndarray) -> None:
    """Refuse to time what does not do the same work."""
    clients = rounds * work.cohort
    wanted = {"rounds": rounds, "clients": clients, "steps": clients * steps_per_client(work)}
    for what, count in wanted.items():
        if seen[what] != count:
            raise RuntimeError(f"made {seen[what]} {what}, not {count}")
    off = np.linalg.norm(seen["moved"] - reference) / np.linalg.norm(reference)
    if not off < 0.01:
        raise RuntimeError(f"its model ends {off:.2g} of the way from where a loop by hand ends")


def measure(
    name: str, contestants: dict[str, Contestant], args: argparse.Namespace
) -> dict[str, float | str]:
    """Milliseconds per round of each, or why there are none."""
    work, check_rounds = WORKLOADS[name], 2
    cells: dict[str, float | str] = {}
    rounds: dict[str, int] = {}
    by_hand = contestants["bare"].run(name, check_rounds, check=True)
    for peer, contestant in contestants.items():
        try:
            seen = contestant.run(name, check_rounds, check=True) if peer != "bare" else by_hand
            verify(work, check_rounds, seen, by_hand["moved"])
        except RuntimeError as error:
            cells[peer] = str(error)
            continue
        fitting = min(3 * work.rounds, max(2, int(args.seconds / seen["seconds"])))
        rounds[peer] = args.rounds or fitting
        print(
            f"{name} {peer}: checked, {rounds[peer]} rounds a turn {seen['note']}".rstrip(),
            file=sys.stderr,
        )
    times: dict[str, list[float]] = {peer: [] for peer in rounds}
    for _ in range(args.repeats):
        for peer in list(times):
            try:
                times[peer].append(contestants[peer].run(name, rounds[peer] + 1)["seconds"])
            except RuntimeError as error:
                cells[peer] = str(error)
                del times[peer]
    return cells | {peer: round(1000 * min(taken), 3) for peer, taken in times.items()}


def versions() -> str:
    from importlib.metadata import version

    packages = {
        "fedbraid": "fedbraid",
        "torch": "torch",
        "pfl": "pfl",
        "flwr": "flwr",
        "nvflare": "nvflare",
        "fedjax": "fedjax",
        "jax": "jax",
        "fedlab": "fedlab",
        "fluke": "fluke-fl",
        "flsim": "flsim",
    }
    return ", ".join(f"{p} {version(p)}" for m, p in packages.items() if importlib.util.find_spec(m))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = [name for name in WORKLOADS if name != "W9"]  # whose body is frozen: the others would train it
    parser.add_argument("workloads", nargs="*", default=whole, metavar="W")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long a turn lasts")
    parser.add_argument("--rounds", type=int, help="timed rounds a turn, instead of --seconds")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    parser.add_argument("--logs", help="keep what the libraries print in this folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = [name for name in PEERS if name in {"bare", *args.only}]
    there = [name for name in chosen if importlib.util.find_spec(PEERS[name].package)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or scratch
        os.makedirs(folder, exist_ok=True)
        contestants = {name: Contestant(name, folder) for name in there}
        try:
            table = {name: measure(name, contestants, args) for name in args.workloads}
        finally:
            for contestant in contestants.values():
                contestant.stop()
    if args.json:
        print(json.dumps({"versions": versions(), "milliseconds_per_round": table}))
        return
    print(f"milliseconds per round, smallest of the medians; in brackets, times fedbraid's\n\n{versions()}\n")
    print("| |" + " | ".join(table) + " |\n| --- |" + " ---: |" * len(table))
    for name in chosen:
        cells = [cell(row.get(name, "not installed"), row.get("fedbraid")) for row in table.values()]
        print(f"| {PEERS[name].title} | " + " | ".join(cells) + " |")


def cell(value: float | str, ours: float | str | None) -> str:
    if isinstance(value, str) or not isinstance(ours, float):
        return str(value)
    return f"{value:.3g} ({value / ours:.3g})" if value < 1000 else f"{value:.0f} ({value / ours:.3g})"


if __name__ == "__main__":
    from peers import (
        main,
    )  # under its own name, so that processes and Ray actors can import what they are sent

    main()
