"""Do real clients give the simulator's numbers, and does the run survive what real clients do?

Real Flower processes on loopback: one SuperLink and three SuperNodes serve all tests but those about TLS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbraid as fb

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedbraid[flower]'")
from safetensors.torch import load_file

from fedbraid.checkpoint import Folder
from fedbraid.deploy import keys
from fedbraid.deploy.project import init
from fedbraid.deploy.roster import Roster
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.trial import Flower, read_status
from fedbraid.errors import ConfigError, WireError

pytestmark = pytest.mark.engines

LONG = 400.0  # seconds that one deployed run may take on a busy machine
WORK = "Work(lr=0.1, steps=3, batch=4)"

FLEET = '''
import json, os, signal, time
from pathlib import Path

import numpy as np
import torch
from flwr.clientapp import ClientApp
from torch import nn

import fedbraid as fb
from fedbraid.codec import frame


def model():
    return nn.Linear(5, 3)


def some(seed, n):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    return (np.random.default_rng(0).normal(size=(3, 5))[y] + draw.normal(size=(n, 5))).astype(np.float32), y


def load(node_config):
    share = int(node_config["share"])
    return some(share + 1, 12 + 9 * share)


def test():
    return some(99, 60)


apps = fb.deploy.apps(model, "cross_entropy", load, test)
server = apps.server


def mischief(message, context):
    """A client that does what the first line of a file says, and is honest when there is none."""
    place = Path(str(context.node_config["mischief"]))
    lines = place.read_text().splitlines() if place.exists() else []
    if not lines:
        return apps.client(message, context)
    place.write_text("\\n".join(lines[1:]))
    kind, _, word = lines[0].partition(" ")
    if kind == "die":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    if kind == "sleep":
        time.sleep(float(word))
    if kind == "raise":
        raise ValueError("a client's own mistake")
    reply = apps.client(message, context)
    answer = reply.content["fedbraid"]
    layout = fb.Layout.of(model())
    d = layout.size
    if kind == "garbage":
        answer["blob"] = os.urandom(100)
    if kind == "layout":
        answer["blob"] = frame(0, 0, bytes(6), np.zeros(d, "<f4").tobytes())
    if kind == "nan":
        answer["blob"] = frame(0, 0, layout.fingerprint, np.full(d, np.nan, "<f4").tobytes())
    if kind == "norm":
        answer["blob"] = frame(0, 0, layout.fingerprint, np.full(d, 1e6, "<f4").tobytes())
    if kind == "loss":
        answer["loss"] = "low"
    if kind == "replay":
        answer["job"] = "0123456789abcdef"
    return reply


client = ClientApp()
client.query()(lambda message, context: apps.client(message, context))
client.train()(mischief)
'''


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """A deployment whose user file is ours, mischief included."""
    folder = tmp_path_factory.mktemp("app") / "fleet"
    init(folder)
    (folder / "fleet.py").write_text(FLEET)
    return folder


@pytest.fixture(scope="module")
def user(app):
    """The user's file as a module."""
    made = {}
    exec(compile(FLEET, "fleet.py", "exec"), made)
    return made


@dataclass
class Fleet:
    flower: Flower
    app: Path
    scratch: Path

    def node(self, i, **about):
        config = {"name": f"node-{i}", "client": i, "share": i, "state": str(self.scratch / "nodes")}
        config["mischief"] = str(self.scratch / f"mischief-{i}")
        self.flower.node(f"node-{i}", config | about)

    def misbehave(self, i, *lines):
        (self.scratch / f"mischief-{i}").write_text("\n".join(lines))

    def submit(self, out, **config):
        config = {"work": WORK, "nodes": 3, "minimum": 3, "deadline": LONG, "poll": 0.2} | config
        run = {key.replace("_", "-"): value for key, value in config.items()}
        self.flower.submit(self.app, run | {"out": str(out)})
        return Folder(out)

    def run(self, out, **config):
        """A deployed run from start to end: its records and its final model."""
        folder = self.submit(out, **config)
        self.wait(folder)
        return list(folder.records()), load_file(out / "model.safetensors")

    def wait(self, folder, step=None):
        """Until the run is done, or has committed this step: its status."""
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            status = read_status(folder)
            assert status.get("state") != "failed", status
            if status.get("state") == "done" or (step is not None and status.get("step", 0) >= step):
                return status
            time.sleep(0.2)
        log = self.flower.log("superlink").read_text(errors="replace")[-3000:]
        pytest.fail(f"the run is not done: {read_status(folder)}\n{log}")


@pytest.fixture(scope="module")
def fleet(app, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("flower")
    with Flower(scratch) as flower:
        flower.link()
        made = Fleet(flower, app, scratch)
        for i in range(3):
            made.node(i)
        yield made


def simulated(user, algorithm, schedule, work=WORK, clients=3):
    pairs = [user["load"]({"share": i}) for i in range(clients)]
    task = fb.Task.from_arrays(user["model"], pairs, user["test"]())
    result = fb.simulate(
        task, algorithm, eval(work, {"Work": fb.Work}), schedule, seed=0, engine="in_process"
    )
    return result, dict(result.model().named_parameters())


def same(deployed, simulated_):
    for name, v in simulated_.items():
        assert torch.allclose(deployed[name], v, atol=1e-5, rtol=1e-5), (
            name,
            float((deployed[name] - v).abs().max()),
        )


@dataclass(frozen=True)
class Replay(fb.Schedule):
    """The ticks that a deployment had."""

    clients: tuple = ()
    versions: tuple = ()

    def ticks(self, N, seed, message=(0.0, 0.0)):
        for step in range(self.steps):
            live = {v for later in self.versions[step + 1 :] for v in later if v <= step}
            ids, versions = np.array(self.clients[step]), np.array(self.versions[step])
            yield fb.Tick(step, float(step), ids, versions, np.array([], np.int64), frozenset(live))


ROUNDS = "rounds(2, clients=[[0, 1, 2], [2, 1, 0]])"
TWO = fb.rounds(2, clients=[[0, 1, 2], [2, 1, 0]])

EQUAL = {
    "fedavg": "fedavg()",
    "fedadavr-int8": "fedadavr(lr=0.1, memory='int8')",
    "scaffold": "scaffold()",
    "adabest": "adabest()",
    "fedgbo": "fedgbo(optimizer='sgdm', beta=0.9)",
    "fedshift, mixed precision": "fedshift(fedpaq(mixed(of_weights(kmeans(4)), share=0.5)))",
    "everything": "hidden_state(error_feedback(with_codecs(scaffold(), up=qsgd(4), down=qsgd(8))))",
}


@pytest.mark.parametrize("name", EQUAL)
def test_three_nodes_give_the_simulators_numbers(name, fleet, user, tmp_path):
    from fedbraid.runs import algorithm_from

    records, model = fleet.run(tmp_path / "run", algorithm=EQUAL[name], schedule=ROUNDS)
    result, expected = simulated(user, algorithm_from(EQUAL[name]), TWO)
    same(model, expected)
    assert [r["clients"] for r in records] == [r["clients"] for r in result.history]
    assert [r["bytes_up"] for r in records] == [r["bytes_up"] for r in result.history]
    assert [r["bytes_down"] for r in records] == [r["bytes_down"] for r in result.history]
    assert not any("trouble" in r for r in records)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "steps"),
    [
        ("qafel()", "buffered(steps=3, buffer=2, concurrency=3)", 3),
        ("fedasync()", "immediate(steps=4, concurrency=2)", 4),
    ],
)
def test_asynchronous_schedules_give_the_simulators_numbers(
    algorithm, schedule, steps, fleet, user, tmp_path
):
    from fedbraid.runs import algorithm_from

    records, model = fleet.run(tmp_path / "run", algorithm=algorithm, schedule=schedule)
    clients, versions = (tuple(tuple(r[k]) for r in records) for k in ("clients", "versions"))
    assert len(records) == steps
    assert all(len(c) == (2 if "buffered" in schedule else 1) for c in clients)
    _, expected = simulated(user, algorithm_from(algorithm), Replay(steps, clients, versions))
    same(model, expected)


def test_broken_and_hostile_uploads_are_refused_and_the_rounds_go_on(fleet, user, tmp_path):
    fleet.misbehave(1, "garbage", "nan", "replay")
    fleet.misbehave(2, "layout", "norm", "loss", "raise")
    said = [
        {1: "starts with", 2: "layout"},
        {1: "not finite", 2: "norm"},
        {1: "answers job", 2: "no loss"},
        {2: "own mistake"},
    ]
    cohorts = [[0, 1, 2]] * 4
    records, model = fleet.run(
        tmp_path / "run", schedule=f"rounds(4, clients={cohorts})", minimum=1, max_norm=1000.0
    )
    assert [r["clients"] for r in records] == [[0], [0], [0], [0, 1]]
    for record, words in zip(records, said, strict=True):
        assert {t["client"] for t in record["trouble"]} == words.keys()
        for trouble in record["trouble"]:
            assert int(trouble["node"]) > 0
            assert words[trouble["client"]] in trouble["why"], trouble
    schedule = fb.rounds(4, clients=[[0], [0], [0], [0, 1]])
    same(model, simulated(user, fb.fedavg(), schedule)[1])


def test_the_server_is_killed_and_the_run_goes_on(fleet, user, tmp_path):
    out = tmp_path / "run"
    config = {
        "algorithm": "scaffold()",
        "schedule": "rounds(3, clients=[[0, 1, 2], [0, 1, 2], [0, 1, 2]])",
    }
    folder = fleet.submit(out, **config)
    pid = fleet.wait(folder, step=1)["pid"]
    time.sleep(2)  # until the next round is on its way
    os.kill(pid, signal.SIGKILL)
    committed = list(folder.records())
    assert len(committed) >= 1
    (out / "status.json").unlink()
    records, model = fleet.run(out, **config)
    assert [r["step"] for r in records] == [1, 2, 3]
    assert records[: len(committed)] == committed
    same(model, simulated(user, fb.scaffold(), fb.rounds(3, clients=[[0, 1, 2]] * 3))[1])


def test_nodes_die_or_are_late_and_come_back(fleet, user, tmp_path):
    fleet.misbehave(1, "sleep 80")  # late for the first round
    fleet.misbehave(2, "die")  # in the middle of its task
    out = tmp_path / "run"
    cohorts = [[0, 1, 2]] * 3
    folder = fleet.submit(
        out, algorithm="scaffold()", schedule=f"rounds(3, clients={cohorts})", minimum=1, deadline=60.0
    )
    fleet.wait(folder, step=1)
    assert next(folder.records())["clients"] == [0]
    assert fleet.flower.processes["node-2"].wait(10) == -signal.SIGKILL
    fleet.node(2)  # the same client under another id
    fleet.wait(folder)
    records = list(folder.records())
    assert [r["step"] for r in records] == [1, 2, 3]
    assert set(records[-1]["clients"]) == {0, 1, 2}
    assert sum(r.get("dropped", 0) for r in records) == 1  # node 1's first answer, which came late
    cohorts = [r["clients"] for r in records]
    same(
        load_file(out / "model.safetensors"), simulated(user, fb.scaffold(), fb.rounds(3, clients=cohorts))[1]
    )


def test_too_few_answers_can_stop_the_run(fleet, tmp_path):
    fleet.misbehave(0, "sleep 30")
    folder = fleet.submit(
        tmp_path / "run", schedule="rounds(2, clients=[[0], [0]])", minimum=1, deadline=10.0, too_few="stop"
    )
    until = time.monotonic() + LONG
    while read_status(folder).get("state") != "failed" and time.monotonic() < until:
        time.sleep(0.5)
    assert "can be continued" in read_status(folder)["error"]


# TLS --------------------------------------------------------------------------------------------------


def test_only_registered_nodes_over_tls_get_in(app, tmp_path):
    folder = tmp_path / "keys"
    keys.make(folder, ["127.0.0.1"], 2)
    other = tmp_path / "other"
    keys.make(other, ["127.0.0.1"], 1)
    with Flower(tmp_path / "flower", folder) as flower:
        flower.link()
        flower.register(folder / "node-0.pub")
        fleet = Fleet(flower, app, tmp_path)
        about = {
            "name": "n",
            "share": 0,
            "state": str(tmp_path / "nodes"),
            "mischief": str(tmp_path / "none"),
        }
        flower.node("good", about, folder / "node-0.key")
        flower.node("unregistered", about, folder / "node-1.key")
        flower.node("wrong key", about, other / "node-0.key")
        flower.node("no key", about)
        flower.node("plain text", about, words=["--insecure"])
        flower.node(
            "another CA", about, folder / "node-0.key", ["--root-certificates", str(other / "ca.crt")]
        )
        records, _ = fleet.run(tmp_path / "run", schedule="rounds(2, clients=1)", nodes=1, minimum=1)
        assert [r["clients"] for r in records] == [[0], [0]]
        assert all(r["nodes"] == 1 for r in records)
        listed = json.loads(flower.flwr("supernode", "list", "trial", "--format", "json"))
        online = [n for n in listed["nodes"] if n["status"] == "online"]
        assert len(online) == 1, listed
        for name in ("unregistered", "wrong key", "no key", "plain text", "another CA"):
            log = flower.log(name).read_text(errors="replace")
            assert "SuperNode ID" not in log, (name, log)


def test_keys_are_private_and_never_overwritten(tmp_path):
    made = keys.make(tmp_path / "keys", ["localhost", "127.0.0.1"], 1)
    assert {p.name for p in made} == {
        "ca.crt",
        "ca.key",
        "server.crt",
        "server.key",
        "node-0.key",
        "node-0.pub",
    }
    for path in made:
        assert path.stat().st_mode & 0o077 == 0 or path.suffix in (".crt", ".pub")
    before = {p: p.read_bytes() for p in made}
    more = keys.make(tmp_path / "keys", ["localhost"], 2)
    assert {p.name for p in more} == {"node-1.key", "node-1.pub"}
    assert before == {p: p.read_bytes() for p in made}


# The commands -----------------------------------------------------------------------------------------


def fedbraid(*words):
    return subprocess.run(
        [sys.executable, "-m", "fedbraid", *words], capture_output=True, text=True, timeout=LONG
    )


def test_init_and_trial_run_as_they_are(tmp_path):
    folder = tmp_path / "my fleet"
    assert fedbraid("deploy", "init", str(folder)).returncode == 0
    again = fedbraid("deploy", "init", str(folder))
    assert again.returncode == 2
    assert "already there" in again.stderr
    done = fedbraid(
        "deploy", "trial", str(folder), "--nodes", "2", "-c", "schedule=rounds(2, clients=2)", "--json"
    )
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert about["steps"] == 2
    assert about["accuracy"] > 0.3
    assert about["trouble"] == 0
    assert len(list(Folder(about["run"]).records())) == 2


def test_trial_of_nothing_says_what_to_do(tmp_path):
    done = fedbraid("deploy", "trial", str(tmp_path))
    assert done.returncode == 2
    assert "deploy init" in done.stderr


# Small parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"deadlin": 1.0}, "did you mean 'deadline'"),
        ({"deadline": "soon"}, "type float"),
        ({"deadline": 0}, "no time"),
        ({"minimum": 0}, "too small"),
        ({"too-few": "panic"}, "'wait' or 'stop'"),
        ({"max-norm": -1.0}, "refuses everything"),
    ],
)
def test_settings_are_checked(config, word):
    with pytest.raises(ConfigError, match=word):
        Settings.read(config)


def test_a_name_belongs_to_one_connected_node():
    roster = Roster()
    about = {"name": "a", "samples": 5, "client": -1, "held": -1}
    assert roster.welcome(11, about, {11}).client == 0
    with pytest.raises(WireError, match="node 11 does so too"):
        roster.welcome(12, about, {11, 12})
    assert roster.welcome(12, about, {12}).client == 0  # it came back under another id
    with pytest.raises(WireError, match="which is 'a'"):
        roster.welcome(13, {**about, "name": "b", "client": 0}, {12, 13})
    with pytest.raises(WireError, match="claims 0 samples"):
        roster.welcome(13, {**about, "name": "b", "samples": 0}, {12, 13})
    restored = Roster.restore(roster.note())
    assert restored.members[0].name == "a"
    assert restored.sizes.tolist() == [5]
