"""Do real clients give the simulator's numbers, and does the run survive what real clients do?

Real Flower processes on loopback: one SuperLink and three SuperNodes serve all tests but those about TLS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import fedbraid as fb

pytest.importorskip("flwr", reason="flwr is not installed: make test-engines brings it")
from fleets import (
    LONG,
    WORK,
    Fleet,
    Replay,
    driven,
    in_process,
    make_app,
    make_user,
    same,
    simulated,
)
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.config import get_fused_config_from_fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supernode.fleet_http_connection import http_request_response
from safetensors.torch import load_file

from fedbraid.core.wire import frame
from fedbraid.deploy import keys, leaving
from fedbraid.deploy.project import init
from fedbraid.deploy.roster import Roster
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.trial import Flower, read_status
from fedbraid.errors import ConfigError, WireError
from fedbraid.run.checkpoint import Folder
from fedbraid.run.simulate import algorithm_from

pytestmark = pytest.mark.engines

app = pytest.fixture(scope="module")(make_app)
user = pytest.fixture(scope="module")(make_user)


@pytest.fixture(scope="module")
def flower(app, tmp_path_factory):
    """Three nodes for all tests."""
    with Flower(tmp_path_factory.mktemp("flower")) as made:
        made.link()
        for i in range(3):
            Fleet(made, app, made.scratch).node(i)
        yield made


@pytest.fixture
def fleet(flower, app, tmp_path):
    return Fleet(flower, app, tmp_path)


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


@pytest.mark.parametrize("name", [pytest.param("fedavg", marks=pytest.mark.quick), *list(EQUAL)[1:]])
def test_three_nodes_give_the_simulators_numbers(name, fleet, user):
    fleet.run(algorithm=EQUAL[name], schedule=ROUNDS)
    result, expected = simulated(user, algorithm_from(EQUAL[name]), TWO)
    same(fleet.model, expected)
    for key in ("clients", "bytes_up", "bytes_down"):
        assert [r[key] for r in fleet.records] == [r[key] for r in result.history]
    assert not any("trouble" in r for r in fleet.records)


@pytest.mark.quick
@pytest.mark.parametrize("name", EQUAL)
def test_the_servers_numbers_are_the_simulators(name, user, tmp_path):
    """The same without processes, to the last bit."""
    grid = in_process(user, tmp_path, 3)
    ran = driven(user, grid, tmp_path / "run", algorithm=EQUAL[name], schedule=ROUNDS, minimum=3)
    result, expected = simulated(user, algorithm_from(EQUAL[name]), TWO)
    deployed, records = load_file(tmp_path / "run" / "model.safetensors"), ran.history
    assert all(torch.equal(deployed[k], v) for k, v in expected.items())
    for key in ("clients", "bytes_up", "bytes_down"):
        assert [r[key] for r in records] == [r[key] for r in result.history]
    assert not any("trouble" in r for r in records)


@pytest.mark.quick
def test_a_deployment_is_watched_and_recorded_as_a_simulation_is(user, tmp_path):
    class ClientHistory:
        def __init__(self):
            self.told = []

        def start(self, run):
            self.told.append("start")

        def step(self, record, run):
            self.told.append(record["step"])
            return record["step"] == 2

        def end(self, result):
            self.told.append("end")

    seen = ClientHistory()
    said = {"schedule": "rounds(4, clients=3)", "minimum": 3, "keep_best": True}
    result = driven(user, in_process(user, tmp_path, 3), tmp_path / "run", (seen,), **said)
    assert seen.told == ["start", 1, 2, "end"]
    assert result.state.t == 2
    simulated_, _ = simulated(user, fb.fedavg(), fb.rounds(4, clients=3))
    assert set(result.history[0]) >= set(simulated_.history[0]) | {
        "versions",
        "nodes",
        "came",
        "start_times",
        "end_times",
    }
    assert (tmp_path / "run" / "best.safetensors").exists()
    again = driven(user, in_process(user, tmp_path, 3), tmp_path / "run", **said)
    assert again.state.t == 2  # it had ended, and stays so
    short = driven(
        user, in_process(user, tmp_path, 3), tmp_path / "short", patience=1, metric="nodes", **said
    )
    assert short.state.t == 2  # as many nodes as before are no improvement


@pytest.mark.quick
@pytest.mark.parametrize("algorithm", ["scaffold()", "fedvarp()", "fedvarp(held='client')", "feddyn()"])
def test_who_leaves_for_good_leaves_nothing_behind(algorithm, user, tmp_path):
    class Leave:
        def __init__(self, act):
            self.act = act

        def step(self, record, run):
            if record["step"] == 2:
                self.act(run)

    cohorts = [[0, 1, 2], [0, 1, 2], [0, 2], [2, 0]]
    pairs = [user["load"]({"share": i}) for i in range(3)]
    task = fb.Task.from_arrays(user["model"], pairs, user["test"]())
    alike = fb.simulate(
        task, algorithm_from(algorithm), eval(WORK, {"Work": fb.Work}), fb.rounds(4, clients=cohorts),
        engine="in_process", callbacks=[Leave(lambda run: run.leave(1))],
    )  # fmt: skip
    say = Leave(lambda run: leaving.name(run.folder, "n1"))
    said = {"algorithm": algorithm, "schedule": f"rounds(4, clients={cohorts})", "minimum": 2}
    deployed = driven(user, in_process(user, tmp_path, 3), tmp_path / "run", (say,), **said)
    assert torch.equal(deployed.x, alike.x)
    assert deployed.history[2]["left"] == alike.history[2]["left"] == [1]
    assert leaving.named(Folder(tmp_path / "run")) == []


@pytest.mark.quick
@pytest.mark.parametrize("share", ["no answer", "lost", "garbage", 1e18, float("nan")])
def test_who_cannot_be_asked_leaves_its_share(share, user, tmp_path):
    """Or sends back what nobody can have: refused, and the run goes on."""
    layout = fb.Layout.of(user["model"]())

    def vanish(node, order, reply):
        if "leave" not in order.content["fedbraid"]:
            return reply
        answer = reply.content["fedbraid"]
        if share == "lost":
            answer["lost"] = True
        elif share == "garbage":
            answer["blob"] = b"\x00" * 40
        elif isinstance(share, float):
            answer["blob"] = frame(0, 0, layout.fingerprint, np.full(layout.size, share, "<f4").tobytes())
        return None if share == "no answer" else reply

    class Leave:
        def step(self, record, run):
            if record["step"] == 1:
                leaving.name(run.folder, "n1")

    grid = in_process(user, tmp_path, 3, vanish)
    said = {"algorithm": "scaffold()", "schedule": "rounds(30, clients=2)", "deadline": 0.2, "minimum": 2}
    records = driven(user, grid, tmp_path / "run", (Leave(),), **said).history
    assert [r["unreturned"] for r in records if "left" in r] == [[1]]
    assert all(r["norm"] < 100 for r in records)
    assert all(
        1 not in r["clients"] for r in records[next(i for i, r in enumerate(records) if "left" in r) :]
    )


@pytest.mark.parametrize(
    ("algorithm", "schedule", "steps"),
    [
        ("qafel()", "buffered(steps=3, buffer=2, concurrency=3)", 3),
        ("fedasync()", "immediate(steps=4, concurrency=2)", 4),
    ],
)
def test_asynchronous_schedules_give_the_simulators_numbers(algorithm, schedule, steps, fleet, user):
    fleet.run(algorithm=algorithm, schedule=schedule)
    assert [len(r["clients"]) for r in fleet.records] == [2 if "buffered" in schedule else 1] * steps
    same(fleet.model, simulated(user, algorithm_from(algorithm), Replay.of(fleet.records))[1])


def test_broken_and_hostile_uploads_are_refused_and_the_rounds_go_on(fleet, user):
    fleet.misbehave(1, "garbage", "nan", "replay")
    fleet.misbehave(2, "layout", "norm", "loss", "raise")
    said = [
        {1: "starts with", 2: "layout"},
        {1: "not finite", 2: "norm"},
        {1: "answers job", 2: "no loss"},
        {2: "own mistake"},
    ]
    fleet.run(schedule=f"rounds(4, clients={[[0, 1, 2]] * 4})", minimum=1, max_norm=1000.0)
    counted = [[0], [0], [0], [0, 1]]
    assert [r["clients"] for r in fleet.records] == counted
    for record, words in zip(fleet.records, said, strict=True):
        assert {t["client"] for t in record["trouble"]} == words.keys()
        for trouble in record["trouble"]:
            assert int(trouble["node"]) > 0
            assert words[trouble["client"]] in trouble["why"], trouble
    same(fleet.model, simulated(user, fb.fedavg(), fb.rounds(4, clients=counted))[1])


@pytest.mark.parametrize(
    "algorithm", ["fedadavr(lr=0.1, memory='fp16')", "with_codecs(fedavg(), down=fp16())"]
)
def test_one_finite_upload_of_1e18_stops_nobody(algorithm, fleet):
    fleet.misbehave(1, "huge")
    fleet.run(algorithm=algorithm, schedule=f"rounds(2, clients={[[0, 1, 2]] * 2})", minimum=1)
    assert [r["clients"] for r in fleet.records] == [[0, 2], [0, 1, 2]]
    assert [t["client"] for t in fleet.records[0]["trouble"]] == [1]
    assert all(torch.isfinite(v).all() for v in fleet.model.values())


# Faults -----------------------------------------------------------------------------------------------

ALL = [[0, 1, 2]] * 3
THREE = {"algorithm": "scaffold()", "schedule": f"rounds(3, clients={ALL})"}


@pytest.mark.quick
def test_the_server_is_killed_and_the_run_goes_on(fleet, user):
    fleet.misbehave(1, "honest", "hold")
    fleet.submit(**THREE)
    server = fleet.wait_for(step=1, busy=1)["pid"]  # two uploads of the second round are there, one is not
    os.kill(server, signal.SIGKILL)
    committed = fleet.records
    fleet.let_go(1)
    fleet.run(**THREE)
    assert [r["step"] for r in fleet.records] == [1, 2, 3]
    assert fleet.records[:1] == committed
    same(fleet.model, simulated(user, fb.scaffold(), fb.rounds(3, clients=ALL))[1])


def test_nodes_die_or_are_late_and_come_back(fleet, user):
    fleet.misbehave(1, "hold")  # until the first round is over
    fleet.misbehave(2, "die")  # in the middle of its task
    schedule = f"rounds(4, clients={[[0, 1, 2]] * 4})"
    fleet.submit(algorithm="scaffold()", schedule=schedule, minimum=1, deadline=60.0)
    fleet.wait_for(step=1)
    assert fleet.records[0]["clients"] == [0]
    assert fleet.flower.processes["node-2"].wait(10) == -signal.SIGKILL
    fleet.node(2)  # the same client under another id
    fleet.let_go(1)
    fleet.wait_for(state="done")
    assert [r["step"] for r in fleet.records] == [1, 2, 3, 4]
    cohorts = [r["clients"] for r in fleet.records]
    assert {0, 1, 2} in map(set, cohorts)
    assert sum(r.get("dropped", 0) for r in fleet.records) >= 1  # node 1's first answer, which came late
    same(fleet.model, simulated(user, fb.scaffold(), fb.rounds(4, clients=cohorts))[1])


def test_a_late_asynchronous_upload_counts_from_the_version_it_downloaded(fleet, user):
    fleet.misbehave(0, "honest", "hold")
    fleet.misbehave(1, "hold")
    fleet.misbehave(2, "honest", "hold")
    fleet.submit(algorithm="fedbuff()", schedule="buffered(steps=5, buffer=1, concurrency=3)")
    fleet.wait_for(step=2, busy=3)
    fleet.let_go(1)
    fleet.wait_for(step=3)
    fleet.let_go(0)
    fleet.let_go(2)
    fleet.wait_for(state="done")
    assert sorted(r["clients"][0] for r in fleet.records[:2]) == [0, 2]
    late = fleet.records[2]
    assert (late["clients"], late["versions"], late["staleness"]) == ([1], [0], 2.0)
    same(fleet.model, simulated(user, fb.fedbuff(), Replay.of(fleet.records))[1])


def test_an_asynchronous_job_past_its_deadline_makes_room_for_another(fleet, user):
    for i in range(3):
        fleet.misbehave(i, "hold")
    fleet.submit(algorithm="fedbuff()", schedule="buffered(steps=3, buffer=1, concurrency=1)", deadline=15.0)
    fleet.wait(lambda status: len(status["trouble"]) > 0 and status["busy"] > 1)
    for i in range(3):
        fleet.let_go(i)
    fleet.wait_for(state="done")
    slow = fleet.records[0]["trouble"][0]
    assert int(slow["node"]) > 0
    assert slow["why"] == "no answer within 15 s"
    assert slow["client"] in [c for r in fleet.records for c in r["clients"]]  # late, and counted
    same(fleet.model, simulated(user, fb.fedbuff(), Replay.of(fleet.records))[1])


def test_a_node_joins_and_leaves(fleet, user):
    fleet.misbehave(0, "honest", "hold", "hold")
    fleet.submit(schedule="rounds(4, clients=4)")
    fleet.wait_for(step=1, busy=1)
    fleet.node(3)
    fleet.wait_for(step=1, busy=1, nodes=4)
    fleet.let_go(0)
    fleet.wait_for(step=2, busy=1, nodes=4)  # the newcomer has answered
    fleet.flower.end("node-3")
    fleet.wait_for(step=2, nodes=3)
    fleet.let_go(0)
    fleet.wait_for(state="done")
    cohorts = [r["clients"] for r in fleet.records]
    assert [len(c) for c in cohorts] == [3, 3, 4, 3]
    assert sorted(cohorts[2]) == [0, 1, 2, 3]
    same(fleet.model, simulated(user, fb.fedavg(), fb.rounds(4, clients=cohorts), clients=4)[1])


@contextmanager
def node_by_hand(flower, user, about, answers):
    """A node that sends all that `answers(order, honest reply)` gives: what it has sent."""
    sent, stop = [], threading.Event()

    def serve():
        address = f"127.0.0.1:{flower.port}"
        with http_request_response(address, True) as (
            node, receive, send, get_run, get_fab, pull, push, confirm,
        ):  # fmt: skip
            while not stop.is_set():
                if (got := receive()) is None:
                    stop.wait(0.2)
                    continue
                run, tree = got[0].metadata.run_id, got[1]
                order = pull_and_inflate_object_from_tree(
                    tree, partial(pull, run), partial(confirm, run), return_type=Message
                )
                order.metadata.__dict__["_message_id"] = tree.object_id
                ctx = get_run(run)
                config = get_fused_config_from_fab(get_fab(ctx.fab_hash, run).content, ctx)
                context = Context(run, node, about, RecordDict(), config)
                for reply in answers(order, user["apps"].client(order, context)):
                    reply.metadata.__dict__["_message_id"] = reply.object_id
                    wanted, session = send(reply, get_object_tree(reply), 0.0)
                    push_objects(
                        get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=wanted
                    )
                    sent.append(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()


def test_a_node_that_answers_twice_counts_once(fleet, user, tmp_path):
    sent_before = []

    def answers(order, reply):
        """The honest answer, another to the same order, and that to the order before once more."""
        content = {**reply.content["fedbraid"], "loss": 0.5} if order.metadata.message_type == "train" else {}
        other = Message(RecordDict({"fedbraid": ConfigRecord(content)}), reply_to=order)
        again, sent_before[:] = sent_before[:], [reply]
        return [reply, other, *again]

    about = {"name": "by hand", "client": 3, "share": 3, "state": str(tmp_path / "nodes")}
    cohorts = [[0, 3]] * 3
    with node_by_hand(fleet.flower, user, about, answers) as sent:
        fleet.run(algorithm="scaffold()", schedule=f"rounds(3, clients={cohorts})")
    assert len(sent) > 3 * len(cohorts)  # three a round, and to the server's first question two
    assert [r["clients"] for r in fleet.records] == cohorts
    same(fleet.model, simulated(user, fb.scaffold(), fb.rounds(3, clients=cohorts), clients=4)[1])


@pytest.mark.parametrize("mischief", ["hold", "raise"])
def test_too_few_answers_can_stop_the_run(mischief, fleet):
    fleet.misbehave(0, *[mischief] * 50)
    fleet.submit(schedule="rounds(2, clients=[[0], [0]])", minimum=1, deadline=10.0, too_few="stop")
    status = fleet.wait_for(state="failed")
    assert "can be continued" in status["error"]
    fleet.misbehave(0)
    fleet.let_go(0)


def test_the_superlink_is_killed_and_started_again(fleet, user):
    fleet.misbehave(1, "honest", "hold")
    fleet.submit(**THREE)
    fleet.wait_for(step=1, busy=1)
    fleet.flower.end("superlink", signal.SIGKILL)  # and the server with it
    fleet.let_go(1)
    fleet.flower.link()
    fleet.run(**THREE)
    assert [r["step"] for r in fleet.records] == [1, 2, 3]
    same(fleet.model, simulated(user, fb.scaffold(), fb.rounds(3, clients=ALL))[1])
    for i in range(3):
        fleet.flower.check(f"node-{i}")  # the nodes have lived through it


# TLS --------------------------------------------------------------------------------------------------


def test_only_registered_nodes_over_tls_get_in(app, tmp_path):
    folder, other = tmp_path / "keys", tmp_path / "other"
    keys.make(folder, ["127.0.0.1"], 2)
    keys.make(other, ["127.0.0.1"], 1)
    with Flower(tmp_path / "flower", folder) as flower:
        flower.link()
        with flower.operator as operator:
            operator.register(folder / "node-0.pub")
        about = {"name": "n", "share": 0, "state": str(tmp_path / "nodes")}
        flower.node("good", about, folder / "node-0.key")
        flower.node("unregistered", about, folder / "node-1.key")
        flower.node("wrong key", about, other / "node-0.key")
        flower.node("no key", about)
        flower.node("plain text", about, words=["--insecure"])
        flower.node(
            "another CA", about, folder / "node-0.key", ["--root-certificates", str(other / "ca.crt")]
        )
        fleet = Fleet(flower, app, tmp_path)
        fleet.run(schedule="rounds(2, clients=1)", nodes=1, minimum=1)
        assert [(r["clients"], r["nodes"]) for r in fleet.records] == [([0], 1)] * 2
        with flower.operator as operator:
            assert [n.online for n in operator.nodes()] == [True]
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
        "operator.token",
        "operator.sha256",
        "signing.key",
        "trusted.yaml",
        "node-0.key",
        "node-0.pub",
    }
    for path in made:
        assert path.stat().st_mode & 0o077 == 0 or path.suffix not in (".key", ".token")
    before = {p: p.read_bytes() for p in made}
    more = keys.make(tmp_path / "keys", ["localhost"], 2)
    assert {p.name for p in more} == {"node-1.key", "node-1.pub"}
    assert before == {p: p.read_bytes() for p in made}


# The commands -----------------------------------------------------------------------------------------


def fedbraid(*words):
    return subprocess.run(
        [sys.executable, "-m", "fedbraid", *words], capture_output=True, text=True, timeout=LONG
    )


@pytest.mark.quick
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
    assert {p.name for p in (Path(about["run"]) / "nodes").iterdir()} == {"node-0", "node-1"}


def test_a_trial_that_is_stopped_leaves_no_process_and_goes_on(app, user, tmp_path):
    out = tmp_path / "run"
    words = ["deploy", "trial", str(app), "--nodes", "2", "-c", f"out={out}", "-c", f"work={WORK}", "--json"]
    words += ["-c", "algorithm=scaffold()", "-c", "schedule=rounds(3, clients=[[0, 1], [0, 1], [0, 1]])"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    at_scratch = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-m", "fedbraid", *words], env=at_scratch) as first:
        until = time.monotonic() + LONG
        while read_status(Folder(out)).get("step", 0) < 1 and time.monotonic() < until:
            time.sleep(0.1)
        first.terminate()
    assert first.returncode == 130
    assert not [p for p in psutil.process_iter() if str(scratch) in " ".join(_words(p))]
    assert not list(scratch.glob("fedbraid-trial-*"))
    again = fedbraid(*words)
    assert again.returncode == 0, again.stderr
    assert [r["step"] for r in Folder(out).records()] == [1, 2, 3]
    rounds = fb.rounds(3, clients=[[0, 1]] * 3)
    same(load_file(out / "model.safetensors"), simulated(user, fb.scaffold(), rounds, clients=2)[1])


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.quick
def test_trial_of_nothing_says_what_to_do(tmp_path):
    done = fedbraid("deploy", "trial", str(tmp_path))
    assert done.returncode == 2
    assert "deploy init" in done.stderr


def test_trial_says_at_once_what_cannot_be_read(tmp_path):
    init(tmp_path / "fleet")
    done = fedbraid("deploy", "trial", str(tmp_path / "fleet"), "-c", "algorithm=fedavgg()")
    assert done.returncode == 2
    assert done.stderr.strip() == "fedbraid: unknown algorithm 'fedavgg'; did you mean 'fedavg'?"
    assert not (tmp_path / "fleet" / "runs").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("server = apps.server\nclient = apps.client", "server, client = apps", "server = apps.server"),
        ("client = apps.client", "", "client = apps.client"),
        ("def model():", "def model(:", "cannot be read"),
    ],
)
def test_slips_in_the_users_file_are_said_before_anything_starts(old, new, word, tmp_path):
    init(tmp_path / "fleet")
    file = tmp_path / "fleet" / "fleet.py"
    file.write_text(file.read_text().replace(old, new))
    done = fedbraid("deploy", "trial", str(tmp_path / "fleet"))
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("place", ["\n", "def model():\n"])
def test_trial_says_why_the_server_does_not_start(tmp_path, place):
    init(tmp_path / "fleet")
    file = tmp_path / "fleet" / "fleet.py"
    indent = "    " if "def" in place else ""
    file.write_text(
        file.read_text().replace(place, f"{place}{indent}raise ValueError('no model today')\n", 1)
    )
    done = fedbraid("deploy", "trial", str(tmp_path / "fleet"), "--nodes", "1")
    assert done.returncode == 2
    assert "no model today" in done.stderr
    assert "Traceback" not in done.stderr


def test_trial_shows_what_nodes_complain_of(tmp_path):
    init(tmp_path / "fleet")
    file = tmp_path / "fleet" / "fleet.py"
    load = "def load(node_config):\n"
    mark = tmp_path / "seen"
    fail = f"    import pathlib\n    if not pathlib.Path({str(mark)!r}).exists():\n        pathlib.Path({str(mark)!r}).touch()\n        raise ValueError('no data today')\n"
    file.write_text(file.read_text().replace(load, load + fail))
    done = fedbraid(
        "deploy", "trial", str(tmp_path / "fleet"), "--nodes", "1", "-c", "schedule=rounds(1, clients=1)"
    )
    assert done.returncode == 0, done.stderr
    assert "no data today" in done.stderr


def test_objects_of_ones_own_run_unchanged(tmp_path):
    """The algorithm is the user's own class, which no text names."""
    folder = tmp_path / "fleet"
    init(folder)
    file, config = folder / "fleet.py", folder / "pyproject.toml"
    keys_ = ("algorithm", "work", "schedule")
    config.write_text("".join(x for x in config.read_text().splitlines(True) if not x.startswith(keys_)))
    file.write_text(file.read_text().replace("apps = fb.deploy.apps(model, loss, load, test)\n", OWN))
    done = fedbraid("deploy", "trial", str(folder), "--nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    made = {}
    exec(compile(file.read_text(), "fleet.py", "exec"), made)
    pairs = [made["load"]({"share": i, "shares": 2}) for i in range(2)]
    task = fb.Task.from_arrays(made["model"], pairs, made["test"]())
    result = fb.simulate(task, made["algorithm"], made["work"], made["schedule"], engine="in_process")
    deployed = load_file(Path(json.loads(done.stdout)["run"]) / "model.safetensors")
    same(deployed, dict(result.model().named_parameters()))


OWN = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Half(fb.Rule):
    def step(self, g, y, s, ctx):
        return g / 2, s


algorithm = fb.Algorithm(rule=Half())
work = fb.Work(lr=0.1, epochs=1, batch=20)
schedule = fb.rounds(2, clients=[[0, 1], [1, 0]])
apps = fb.deploy.apps(model, loss, load, test, algorithm=algorithm, work=work, schedule=schedule)
"""


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


def test_what_the_file_makes_is_not_said_twice():
    made = {"algorithm": fb.scaffold(), "work": None}
    assert Settings.read({"seed": 1}, made).what()[0] == fb.scaffold()
    with pytest.raises(ConfigError, match="remove one of the two"):
        Settings.read({"algorithm": "fedavg()"}, made)
    with pytest.raises(ConfigError, match="no algorithm"):
        Settings.read({}, {"algorithm": fb.scaffold}).what()


def test_a_name_belongs_to_one_connected_node():
    roster = Roster()
    about = {"name": "a", "samples": 5, "client": -1, "held": -1}
    assert roster.welcome(11, about, {11: "k"}).client == 0
    with pytest.raises(WireError, match="node 11 does so too"):
        roster.welcome(12, about, {11: "k", 12: "k"})
    assert roster.welcome(12, about, {12: "k"}).client == 0  # it came back under another id
    with pytest.raises(WireError, match="which is 'a'"):
        roster.welcome(13, {**about, "name": "b", "client": 0}, {12: "k", 13: "l"})
    with pytest.raises(WireError, match="claims 0 samples"):
        roster.welcome(13, {**about, "name": "b", "samples": 0}, {12: "k", 13: "l"})
    restored = Roster.restore(roster.note())
    assert restored.members[0].name == "a"
    assert restored.sizes.tolist() == [5]
    with pytest.raises(WireError, match="belongs to the key k"):  # while it is away
        restored.welcome(14, about, {14: "m"})
    with pytest.raises(WireError, match="1000000000 samples, 5 at first"):
        restored.welcome(12, {**about, "samples": 10**9}, {12: "k"})
    assert (
        Roster.restore(roster.note(), any_samples=True)
        .welcome(12, {**about, "samples": 6}, {12: "k"})
        .samples
        == 6
    )
    assert Roster.restore(roster.note(), by_key=False).welcome(14, about, {14: "m"}).client == 0
