"""Does a fleet of real processes hold: a broker, a server, nodes with keys, whoever is killed, and whoever attacks?"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedbraid as fb

pytest.importorskip("nats", reason="the extra `nats` is not installed: make test-engines brings it")
from deployments import Deployment, alive, environment, fedbraid
from fleets import LONG, simulated, until, whole
from raw_nats import RawClient

from fedbraid.deploy import credentials, doctor
from fedbraid.deploy.node_nats import answer_chunks
from fedbraid.deploy.transport import OrderVerifier, new_job, pack_answer
from fedbraid.errors import ConfigError
from fedbraid.run.atomic_files import write_atomic

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None,
        reason="nats-server is not installed: make nats-server",
    ),
]
HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "javascript-node"


def layout_views(result):
    return result.task.layout.views(result.x)


def same_bits(model, result):
    for name, v in layout_views(result).items():
        assert torch.equal(model[name], v), (name, float((model[name] - v).abs().max()))


# As documented ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_init_and_trial_run_as_they_are(tmp_path):
    assert fedbraid("deploy", "init", "fleet", cwd=tmp_path).returncode == 0
    words = ["--nodes", "2", "-c", "schedule=rounds(2, clients=2)", "-c", "evaluate_every=1"]
    done = fedbraid("deploy", "trial", *words, "--json", cwd=tmp_path / "fleet")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["steps"], told["nodes"], told["trouble"]) == (2, 2, 0)
    assert told["accuracy"] > 0.5
    assert not alive(tmp_path)
    # the same folder once more, for longer: the run goes on
    words = ["--nodes", "2", "-c", "schedule=rounds(2, clients=2)", "-c", f"out={told['run']}"]
    again = fedbraid("deploy", "trial", "fleet", *words, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["steps"] == 2


def test_a_trial_that_is_stopped_leaves_no_process(tmp_path):
    with Deployment(tmp_path / "fleet") as fleet:
        command = [sys.executable, "-m", "fedbraid", "deploy", "trial", str(fleet.folder), "--nodes", "2"]
        command += ["-c", "schedule=rounds(100000, clients=2)", "-c", "out=run", "-c", "share=0"][:-2]
        with subprocess.Popen(command, env=environment(), start_new_session=True) as trial:
            fleet.until_step(2)
            assert len(alive(fleet.folder)) > 3
            trial.send_signal(signal.SIGTERM)
            trial.wait(LONG)
        until(lambda: not alive(fleet.folder), "an end of its processes")
        assert fleet.status["state"] == "stopped"


def test_trial_says_at_once_what_cannot_be_read(tmp_path):
    def told(*words, cwd=tmp_path):
        done = fedbraid("deploy", "trial", *words, cwd=cwd)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "fedbraid deploy init" in told("nothing")
    fedbraid("deploy", "init", "fleet", cwd=tmp_path)
    assert "did you mean 'deadline'" in told("fleet", "-c", "deadlin=3")
    assert "fedavg" in told("fleet", "-c", "algorithm=fedavgg()")
    (tmp_path / "fleet" / "fleet.py").write_text("import nothing_of_this_name\n")
    assert "line 1: ModuleNotFoundError" in told("fleet")
    (tmp_path / "fleet" / "fleet.py").write_text("import fedbraid as fb\nfleet = 3\n")
    assert "it must be a fedbraid Project" in told("fleet")


OWN = """
from dataclasses import dataclass

from torch import nn

import fedbraid as fb
from fleets import data_for_tests, load, model


@dataclass(frozen=True)
class Half(fb.Rule):
    def step(self, g, y, s, ctx):
        return g / 2, s


fleet = fb.deploy.Project(
    model, "cross_entropy", load, data_for_tests, algorithm=fb.Algorithm(rule=Half()),
    work=fb.Work(lr=0.1, epochs=1, batch=20), schedule=fb.rounds(2, clients=[[0, 1], [1, 0]]),
)
"""


def test_parts_of_ones_own_run_unchanged(tmp_path):
    """The algorithm is the user's own class, which no text names: nodes have the file."""
    own = f"import sys\n\nsys.path.insert(0, {str(HERE)!r})\n{OWN}"
    with Deployment(tmp_path / "fleet", 2, own, work=None) as fleet:
        (fleet.folder / "fleet.toml").write_text('nodes = 2\nminimum = 2\nout = "run"\n')
        fleet.up().node(0).node(1).until_done()
        from fleets import data_for_tests, load, model

        made = {}
        exec(compile(own, "fleet.py", "exec"), made)
        project = made["fleet"]
        task = fb.Task.from_arrays(model, [load({"share": i}) for i in range(2)], data_for_tests())
        result = fb.simulate(task, project.algorithm, project.work, project.schedule, engine="in_process")
        same_bits(fleet.model, result)


# Kills ------------------------------------------------------------------------------------------------


def expected(steps):
    return simulated(fb.scaffold(), fb.rounds(steps, clients=3))


def test_server_nodes_and_broker_are_killed_and_the_bits_are_those_of_an_undisturbed_run(tmp_path):
    """Each more than once, at moments that a counted draw chooses."""
    steps, draw = 45, random.Random(7)
    with Deployment(
        tmp_path / "fleet", algorithm="scaffold()", schedule=f"rounds({steps}, clients=3)"
    ) as fleet:
        fleet.up().node(0).node(1).node(2)
        victims = ["server", "broker", "node", "all"] * 2
        draw.shuffle(victims)
        for k, victim in enumerate(victims):
            fleet.until_step(5 * (k + 1))
            if victim in ("server", "all"):
                os.kill(fleet.status["pid"], signal.SIGKILL)
            if victim in ("broker", "all"):
                os.kill(fleet.broker_pid(), signal.SIGKILL)
            if victim in ("node", "all"):
                i = draw.randrange(3)
                fleet.kill(f"node-{i}")
                fleet.node(i)
        fleet.until_done()
        result = expected(steps)
        same_bits(fleet.model, result)
        assert [r["clients"] for r in fleet.records] == [r["clients"] for r in result.history]
        assert [r["step"] for r in fleet.records] == list(range(1, steps + 1))


def test_all_is_killed_and_started_again(tmp_path):
    """`up` with its server and broker, and every node, as in a power cut of the processes."""
    with Deployment(tmp_path / "fleet", algorithm="scaffold()", schedule="rounds(12, clients=3)") as fleet:
        fleet.up().node(0).node(1).node(2)
        fleet.until_step(4)
        for name in ("up", "node-0", "node-1", "node-2"):
            fleet.kill(name)
        told = fedbraid("deploy", "status", fleet.folder)
        assert told.returncode == 1
        assert "DEAD: its process has ended" in told.stdout
        fleet.up().node(0).node(1).node(2).until_done()
        same_bits(fleet.model, expected(12))


# Operators --------------------------------------------------------------------------------------------


def test_status_doctor_revoke_and_units_say_what_they_do(tmp_path):
    with Deployment(
        tmp_path / "fleet", schedule="rounds(100000, clients=2)", minimum=2, evaluate_every=0
    ) as fleet:
        before = fedbraid("deploy", "status", fleet.folder)
        assert before.returncode == 2
        assert "fedbraid deploy up" in before.stderr
        found = {one.what: one for one in doctor.examine(fleet.folder)}
        assert not found["broker"].good
        assert found["keys"].good
        fleet.up().node(0).node(1).node(2)
        fleet.until_step(2)
        began = time.monotonic()
        told = fedbraid("deploy", "status", fleet.folder)
        assert told.returncode == 0, told.stdout + told.stderr
        assert "running, last heard of" in told.stdout
        assert all(f"node-{i}: " in told.stdout for i in range(3))
        assert time.monotonic() - began < LONG  # it asks files and one port
        found = {one.what: one for one in doctor.examine(fleet.folder)}
        assert all(one.good for one in found.values()), found
        assert "nats-server" in found["durability"].found
        key = fleet.folder / "keys" / "node-2.nk"
        assert all(one.good for one in doctor.examine_node(key, fleet.url))
        kept = tmp_path / "kept"
        shutil.copytree(fleet.folder / "keys", kept)

        revoked = fedbraid("deploy", "revoke", "node-2", "--dir", fleet.folder)
        assert revoked.stdout == "node-2 is revoked and disconnected\n", revoked.stderr
        last = fleet.records[-1]["step"]
        fleet.until(lambda: fleet.records[-1]["step"] > last + 8, "further steps")
        assert all(2 not in r["clients"] for r in fleet.records if r["step"] > last + 3)
        refused = doctor.examine_node(kept / "node-2.nk", fleet.url)
        assert not refused[-1].good

        os.kill(fleet.status["pid"], signal.SIGSTOP)  # neither dead nor alive
        try:
            fleet.until(lambda: fleet.status["life"] == "silent", "silence")
            told = fedbraid("deploy", "status", fleet.folder)
            assert told.returncode == 1
            assert "SILENT" in told.stdout
        finally:
            os.kill(fleet.status["pid"], signal.SIGCONT)

        for words, limit in (
            (["up", fleet.folder, "-c", "algorithm=fedavg(lr=0.5)"], "LimitNOFILE=1048576"),
            (["node", "--key", key, "--task", f"{fleet.folder}/fleet.py:fleet", fleet.url], "Restart=always"),
        ):
            unit = tmp_path / "x.service"
            done = fedbraid("deploy", *words, "--unit", unit)
            assert done.returncode == 0, done.stderr
            assert limit in unit.read_text()
            assert f"ExecStart={sys.executable} -m fedbraid deploy" in unit.read_text()
            if shutil.which("systemd-analyze"):
                checked = subprocess.run(
                    ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=LONG
                )
                assert str(unit) not in checked.stderr


def test_a_new_key_is_accepted_while_the_broker_runs(tmp_path):
    with Deployment(tmp_path / "fleet", 2, schedule="rounds(100000, clients=2)", evaluate_every=0) as fleet:
        fleet.up().node(0).node(1).until_step(1)
        assert fedbraid("deploy", "keys", fleet.folder, "--nodes", "3").returncode == 0
        fleet.node(2)
        fleet.until(lambda: any(2 in r["clients"] for r in fleet.records), "the newcomer's upload")


# Attacks ----------------------------------------------------------------------------------------------


class Evil:
    """A registered node's key in the hands of a raw client: it reads its orders, and answers what it likes."""

    def __init__(self, fleet, name):
        self.name, keys = name, fleet.folder / "keys"
        key = credentials.read_key(keys / f"{name}.nk")
        self.raw = RawClient(fleet.port, keys / "ca.crt", key.seed)
        self.raw.subscribe(f"fb.o.{name}")
        self.verifier = OrderVerifier(credentials.operator_public_key(keys / "operator.pub"), name)
        self.seen = 0

    def orders(self):
        """The orders that came since the last look."""
        self.raw.read(0.2)
        new, self.seen = self.raw.messages[self.seen :], len(self.raw.messages)
        return [(self.verifier.read(m.body), m.body) for m in new if m.subject == f"fb.o.{self.name}"]

    def answer(self, job, message, **headers):
        for about, part in answer_chunks(job, message):
            self.raw.publish(f"fb.r.{self.name}", part, f"_INBOX.{self.name}.x", about | headers)
        self.raw.flush()


@pytest.mark.quick
def test_a_registered_attacker_changes_nothing_for_the_others(tmp_path):
    """Two honest nodes with one that lies, floods, replays and forges at every order: a round a second goes on."""
    with Deployment(
        tmp_path / "fleet",
        algorithm="scaffold()",
        schedule="rounds(12, clients=3)",
        minimum=2,
        evaluate_every=1,
    ) as fleet:
        fleet.up()
        fleet.until(lambda: fleet.status, "a server")
        evil = Evil(fleet, "node-2")
        fleet.node(0).node(1)
        attacks, old = [], []
        zero = {"lost": False, "version": -1, "forgot": False}
        several = pack_answer(zero | {"loss": 9e29}, b"")
        lies = [
            lambda job: several,
            lambda job: pack_answer(zero | {"loss": 0.5}, whole(1e18)),
            lambda job: pack_answer(zero | {"loss": 0.5}, whole(float("nan"))),
            lambda job: b"\xff" * 1000,
            lambda job: pack_answer({"error": "\x1b[2J" * 100}),
            lambda job: pack_answer(zero | {"loss": 0.5}, bytes(2 * 1024**2)),
        ]
        end = time.monotonic() + LONG
        while fleet.status.get("state") != "done" and time.monotonic() < end:
            for order, message in evil.orders():
                if order.kind == "HELLO":
                    evil.answer(order.job, pack_answer({"samples": 10, "version": 10**15}))
                elif order.kind == "TRAIN":
                    evil.answer(order.job, lies[len(attacks) % len(lies)](order.job))
                    attacks.append(order.job)
                old.append(message)
                for other in (
                    "node-0",
                    "node-1",
                ):  # a replay of its own order, another's answer, a forged acknowledgement
                    evil.raw.publish(f"fb.o.{other}", message)
                    evil.raw.publish(f"fb.r.{other}", several)
                evil.raw.publish("$JS.ACK.UP.server.1.1.1.1.0", b"+ACK")
                # replies that the broker is made to write to another's orders
                evil.raw.publish("fb.r.node-2", b"x", "fb.o.node-0", {"Fb-Job": new_job()})
                evil.raw.publish("$JS.API.DIRECT.GET.MODEL.fb.m.v1.0.0", b"", "fb.o.node-1")
                for job in attacks:  # what it has answered before, and jobs that nobody gave
                    evil.answer(job, several)
                evil.answer(new_job(), several)
                if evil.raw.closed:
                    evil = Evil(fleet, "node-2")
            if evil.raw.closed:
                evil = Evil(fleet, "node-2")
        fleet.until_done()
        assert attacks
        records = fleet.records
        assert [r["step"] for r in records] == list(range(1, 13))
        assert all(2 not in r["clients"] for r in records)
        assert all({0, 1} == set(r["clients"]) for r in records)
        troubles = [t for r in records for t in r.get("trouble", [])]
        assert {t["node"] for t in troubles} <= {"node-2"}
        assert any("Violation" in t["why"] for t in troubles), troubles
        assert all(t["why"].isprintable() for t in troubles)
        assert records[-1]["loss"] < records[0]["loss"]
        evil.raw.close()


# Other languages, other transports --------------------------------------------------------------------


SOFTMAX = """
import torch
from torch import nn

import fedbraid as fb
from fleets import data_for_tests, load, some


def model():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


fleet = fb.deploy.Project(model, "cross_entropy", load, data_for_tests)
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
@pytest.mark.skipif(not (EXAMPLE / "node_modules").is_dir(), reason="make javascript brings its packages")
def test_a_node_in_javascript_takes_part_and_computes_the_same(tmp_path):
    """The written wire is enough: the run equals the Python nodes' to float32 rounding."""
    from fleets import load

    head = f"import sys\n\nsys.path.insert(0, {str(HERE)!r})\n"
    config = {"schedule": "rounds(4, clients=3)", "work": "Work(lr=0.1, steps=5, batch=None)"}
    with Deployment(tmp_path / "a", fleet=head + SOFTMAX, **config) as fleet:
        fleet.up().node(0).node(1).node(2).until_done()
        python, records = fleet.model, fleet.records
    with Deployment(tmp_path / "b", fleet=head + SOFTMAX, **config) as fleet:
        inputs, targets = load({"share": 2})
        data = {"inputs": inputs.tolist(), "targets": targets.tolist(), "classes": 3, "steps": 5, "lr": 0.1}
        (tmp_path / "data.json").write_text(json.dumps(data))
        fleet.up().node(0).node(1)
        fleet.until(lambda: fleet.status, "a server")
        key = fleet.folder / "keys" / "node-2.nk"
        fleet._start(
            "node-2", ["node", str(EXAMPLE / "client.mjs"), fleet.url, str(key), str(tmp_path / "data.json")]
        )
        fleet.until_done()
        for name, v in python.items():
            torch.testing.assert_close(fleet.model[name], v, rtol=1e-5, atol=1e-6)
        assert [r["clients"] for r in fleet.records] == [r["clients"] for r in records]
        assert not any("trouble" in r for r in fleet.records)


PUBLIC = {
    "flwr.app": {"ConfigRecord", "Context", "Message", "MessageType", "RecordDict"},
    "flwr.clientapp": {"ClientApp"},
    "flwr.serverapp": {"Grid", "ServerApp"},
}


def test_no_private_name_of_flower_is_imported():
    found = []
    for path in (HERE.parent / "src").rglob("*.py"):
        for line in ast.walk(ast.parse(path.read_text())):
            if isinstance(line, ast.Import):
                found += [(path.name, one.name, "*") for one in line.names if one.name.startswith("flwr")]
            elif isinstance(line, ast.ImportFrom) and (line.module or "").startswith("flwr"):
                found += [(path.name, line.module, one.name) for one in line.names]
    assert found
    assert {name for name, _, _ in found} == {"transport_flower.py"}
    assert all(name in PUBLIC.get(module, ()) for _, module, name in found), found


# Small parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["fl.example.org:4222", "tls://:1", "tls://h:0", "tls://h:99999", "nats://h:1"]
)
def test_a_brokers_address_is_checked(url, tmp_path):
    done = fedbraid("deploy", "node", "--key", "x.nk", url, cwd=tmp_path)
    assert done.returncode == 2
    assert "tls://HOST:PORT" in done.stderr


def test_samples_json_is_checked(tmp_path):
    from fedbraid.deploy.project import Deployment as Read
    from fedbraid.deploy.project import init

    init(tmp_path / "fleet")
    assert dict(Read.read(tmp_path / "fleet").settings.vouched) == {}
    write_atomic(tmp_path / "fleet" / "samples.json", b'{"node-0": 7}')
    assert Read.read(tmp_path / "fleet").settings.vouched == {"node-0": 7}
    write_atomic(tmp_path / "fleet" / "samples.json", b'{"node-0": "7"}')
    with pytest.raises(ConfigError, match=r"samples\.json cannot be read"):
        Read.read(tmp_path / "fleet")


# Secure sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["invitation", "shares", "unmask"])
def test_secure_sums_go_on_without_a_node_that_is_killed_at_a_stage(stage, tmp_path):
    """The stage `masked` is in tests/test_secure_round.py, which is quick."""
    from test_secure_round import killed_at

    killed_at(stage, tmp_path)
