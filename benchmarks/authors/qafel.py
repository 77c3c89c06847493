"""FedBuff and QAFeL with top-k beside the logistic regression of QAFeL's authors, after every server step.

git clone https://github.com/TomasOrtega/FLSim && python benchmarks/authors/qafel.py FLSim

Their experiment runs on data of ours, as FedBuff, as QAFeL and with plain (direct) compression of uploads. Who arrives when, and from
which version, is what fedbraid's run said: a queue of ours trains a client, by their code, when it arrives. Compared are the
server's model and the one that clients hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import torch
from beside import ROUNDS, Verdict, absent, clone
from torch import nn

import fedbraid as fb

sys.path.insert(0, str(clone(__doc__.splitlines()[0]) / "logistic_regression"))
for name in "tqdm", "yaml", "absl", "matplotlib", "sklearn":
    absent(name, tqdm=None, dump=lambda *_: None, app=None)
absent("absl.flags", argparse_flags=None)
absent("matplotlib.pyplot")
absent("sklearn.datasets", load_svmlight_file=None)
program = importlib.import_module("experiment_main")
program.urllib = SimpleNamespace(
    request=SimpleNamespace(urlretrieve=lambda *_: None)
)  # nothing is downloaded

N, EACH, WIDE, K, STEPS, LR, SERVER = 8, 12, 29, 3, 5, 0.5, 0.4
draw = np.random.default_rng(11)
INPUTS = draw.normal(size=(N * EACH, WIDE)).astype(np.float32)
TARGETS = (INPUTS @ draw.normal(size=WIDE) + draw.normal(size=N * EACH) > 0).astype(np.int64)
DATA = [
    (np.hstack([np.ones((EACH, 1), np.float32), x]), y)
    for x, y in zip(np.split(INPUTS, N), np.split(TARGETS, N), strict=True)
]


def model() -> nn.Module:
    """The intercept is the weight of a feature that is always 1, as in theirs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Linear(WIDE + 1, 1, bias=False)


START = model().weight.detach().double().numpy().ravel()


class Watch:
    """Notes the server's model, the clients', and who arrived from which version."""

    def __init__(self) -> None:
        self.server: list[np.ndarray] = []
        self.held: list[np.ndarray] = []
        self.arrivals: list[tuple[int, int]] = []

    def step(self, record: dict, run: object) -> None:
        self.server.append(run.state.x.numpy().copy())
        self.held.append(run.state.sent[run.state.t].vectors["x"].numpy().copy())
        self.arrivals += zip(record["clients"], record["versions"], strict=True)


def ours(algorithm: fb.Algorithm) -> Watch:
    watch = Watch()
    fb.simulate(
        fb.Task.from_arrays(model(), clients=DATA, loss="logistic"),
        algorithm,
        fb.Work(lr=LR, steps=STEPS, batch=None, weight_decay=1 / (N * EACH)),
        fb.buffered(ROUNDS, K, N),
        engine=fb.engines.in_process(),
        evaluate_every=None,
        progress=False,
        callbacks=[watch],
    )
    return watch


class Arrivals:
    """In the place of their queue: the next arrival is trained, from the version it was sent, when it is asked for."""

    def __init__(self, experiment, arrivals: list[tuple[int, int]]) -> None:
        self.train, self.next, self.sent, self.done = experiment.train_client, iter(arrivals), [], None

    def put(self, arrival: tuple) -> None:
        self.done = arrival

    def get(self) -> tuple:
        client, version = next(self.next)
        self.train(self.sent[version].copy(), client, STEPS, LR)
        return self.done


def theirs(
    kind: str, up: int | None, down: int | None, arrivals: list
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Their server's and clients' models after every step; `up` and `down` are the percent that top-k keeps."""
    program.load_svmlight_file = lambda _: (
        SimpleNamespace(toarray=lambda: INPUTS.astype(float)),
        TARGETS + 1,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        experiment = program.Experiment(
            argparse.Namespace(
                **{"algorithm_type": kind, "n_clients": N, "n_local_steps": STEPS, "client_lr": LR},
                **{"server_lr": SERVER, "server_buffer_size": K, "n_global_steps": ROUNDS, "seed": 0},
                **{"client_quantizer_type": up and "top_k", "client_quantizer_value": up},
                **{"server_quantizer_type": down and "top_k", "server_quantizer_value": down},
                **{"results_folder": folder, "baseline_loss": 0.0, "test_run": True, "verbose": False},
            )
        )
    experiment.global_model = START.copy()
    if experiment.hidden_state is not None:
        experiment.hidden_state = START.copy()
    queue = Arrivals(experiment, arrivals)
    experiment.priority_queue, experiment.train_client = queue, lambda *_: None
    server, held = [], []
    for _ in range(ROUNDS):
        now = experiment.global_model if experiment.hidden_state is None else experiment.hidden_state
        queue.sent.append(now.copy())
        experiment.fill_server_buffer()
        server.append(experiment.global_model.copy())
        held.append(
            (experiment.global_model if experiment.hidden_state is None else experiment.hidden_state).copy()
        )
    return server, held


def topk(percent: int) -> fb.Codec:
    return fb.codecs.topk(percent / 100, rounding="down")


verdict = Verdict(5e-6)
rate = {"lr": SERVER, "staleness": "constant"}
for name, kind, up, down, algorithm in (
    ("fedbuff", "FedBuff", None, None, fb.fedbuff(**rate)),
    ("fedbuff, uploads' top 10 %", "Naive", 10, None, fb.with_codecs(fb.fedbuff(**rate), up=topk(10))),
    ("qafel, top 10 % down", "QAFeL", None, 10, fb.qafel(**rate, up=fb.codecs.identity(), down=topk(10))),
    ("qafel, top 50 % up, 10 % down", "QAFeL", 50, 10, fb.qafel(**rate, up=topk(50), down=topk(10))),
):
    watch = ours(algorithm)
    server, held = theirs(kind, up, down, watch.arrivals)
    verdict.compare(name, watch.server, server, start=model)
    if kind == "QAFeL":
        verdict.compare(f"{name}: clients'", watch.held, held, start=model)
weighed = ours(fb.qafel(lr=SERVER, up=topk(50), down=topk(10)))
verdict.compare("control: weighed by staleness", weighed.server, server, control=True, start=model)
verdict.close()
