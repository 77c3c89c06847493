"""Is a fleet the simulator's run, whoever fails, lies, leaves or comes back? Nodes in this process, a broker in memory."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch
from fleets import (
    LAYOUT,
    LONG,
    PROJECT,
    LocalFleet,
    Replay,
    data_for_tests,
    driven,
    load,
    model,
    same,
    simulated,
    until,
    whole,
)
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.algorithms.registry import algorithm_from
from fedbraid.cli import app
from fedbraid.deploy import admissions, departures, status_file
from fedbraid.deploy.node_state import NodeMemory
from fedbraid.deploy.node_table import EVENTS, Node, NodeState, NodeTable
from fedbraid.deploy.norm_limit import LossLimit, NormLimit
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.transport import NodeIdentity, pack_answer, unpack_answer
from fedbraid.deploy.troubles import Troubles, Wait
from fedbraid.errors import ConfigError, RunError, WireError
from fedbraid.links.wire import MAGIC, frame, pack_message, unpack_message
from fedbraid.run.atomic_files import make_folder
from fedbraid.run.checkpoint import Folder

pytestmark = [pytest.mark.engines, pytest.mark.quick]

ROUNDS = "rounds(2, clients=[[0, 1, 2], [2, 1, 0]])"
TWO = fb.rounds(2, clients=[[0, 1, 2], [2, 1, 0]])
EQUAL = [
    "fedavg()",
    "fedadavr(lr=0.1, memory='int8')",
    "scaffold()",
    "adabest()",
    "fedgbo(optimizer='sgdm', beta=0.9)",
    "fedshift(fedpaq(mixed(of_weights(kmeans(4)), share=0.5)))",
    "hidden_state(error_feedback(with_codecs(scaffold(), up=qsgd(4), down=qsgd(8))))",
]

# The simulator's numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EQUAL)
def test_three_nodes_give_the_simulators_bits(name, tmp_path):
    ran = driven(tmp_path, algorithm=name, schedule=ROUNDS, minimum=3)
    expected = simulated(algorithm_from(name), TWO)
    assert torch.equal(ran.x, expected.x)
    for key in ("clients", "bytes_up", "bytes_down"):
        assert [r[key] for r in ran.history] == [r[key] for r in expected.history]
    assert not any("trouble" in r for r in ran.history)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "steps"),
    [
        ("qafel()", "buffered(steps=3, buffer=2, concurrency=3)", 3),
        ("fedasync()", "immediate(steps=4, concurrency=2)", 4),
    ],
)
def test_asynchronous_schedules_give_the_simulators_numbers(algorithm, schedule, steps, tmp_path):
    ran = driven(tmp_path, algorithm=algorithm, schedule=schedule)
    assert [len(r["clients"]) for r in ran.history] == [2 if "buffered" in schedule else 1] * steps
    same(ran, simulated(algorithm_from(algorithm), Replay.of(ran.history)))


def test_uploads_that_do_not_fit_in_memory_are_read_again_in_the_same_order(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbraid.deploy.inbox.HELD_BYTES", 0)
    monkeypatch.setattr("fedbraid.deploy.inbox.BLOCK_BYTES", 0)
    reads = []
    from fedbraid.deploy import inbox

    monkeypatch.setattr(inbox, "unpack_answer", lambda m: reads.append(len(m)) or unpack_answer(m))
    ran = driven(tmp_path, algorithm="scaffold()", schedule=ROUNDS, minimum=3)
    assert torch.equal(ran.x, simulated(fb.scaffold(), TWO).x)
    assert len([n for n in reads if n > 200]) == 2 * 6  # each upload: to check it, and to fold it


def test_a_deployment_is_watched_and_recorded_as_a_simulation_is(tmp_path):
    class Watcher:
        def __init__(self):
            self.told = []

        def start(self, run):
            self.told.append("start")

        def step(self, record, run):
            self.told.append(record["step"])
            return record["step"] == 2

        def end(self, result):
            self.told.append("end")

    watcher = Watcher()
    said = {"schedule": "rounds(4, clients=3)", "minimum": 3, "keep_best": True}
    result = driven(tmp_path, callbacks=(watcher,), **said)
    assert watcher.told == ["start", 1, 2, "end"]
    assert result.state.t == 2
    expected = set(simulated(fb.fedavg(), fb.rounds(4, clients=3)).history[0])
    assert set(result.history[0]) >= expected | {"versions", "nodes", "came", "start_times", "end_times"}
    assert sorted(c for c, _ in result.history[0]["came"]) == [0, 1, 2]
    for record in result.history:
        spans = zip(record["start_times"], record["end_times"], strict=True)
        assert all(b <= e <= record["time"] for b, e in spans)
        assert sum(record["node_up"]) == record["bytes_up"]
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert driven(tmp_path, **said).state.t == 2  # it had ended, and stays so
    short = driven(tmp_path, out=tmp_path / "short", patience=1, metric="nodes", **said)
    assert short.state.t == 2  # as many nodes as before are no improvement


def test_the_first_step_of_a_process_may_not_be_affordable(tmp_path):
    """A record of the source's was missing then, and the server ended in an AttributeError."""

    class Spent:
        def can_afford(self, clients, sizes):
            return False

        def recall(self, cohorts):
            pass

    from fedbraid.deploy import serve

    real = serve.attach_privacy
    try:
        serve.attach_privacy = lambda algorithm, setup: (real(algorithm, setup)[0], Spent())
        result = driven(tmp_path, schedule="rounds(2, clients=3)")
    finally:
        serve.attach_privacy = real
    assert result.state.t == 0
    assert len(result.history) == 0


# Who leaves, who comes back ---------------------------------------------------------------------------


class At:
    """Does something after a step."""

    def __init__(self, step, act):
        self.at, self.act = step, act

    def step(self, record, run):
        if record["step"] == self.at:
            self.act(run)


@pytest.mark.parametrize(
    "algorithm",
    ["scaffold()", "fedvarp()", "fedvarp(held='client')", "feddyn()", "feddyn(weights='progressive')"],
)
def test_who_leaves_for_good_leaves_nothing_behind(algorithm, tmp_path):
    cohorts = [[0, 1, 2], [0, 1, 2], [0, 2], [2, 0]]
    task = fb.Task.from_arrays(model, [load({"share": i}) for i in range(3)], data_for_tests())
    expected = fb.simulate(
        task, algorithm_from(algorithm), fb.Work(lr=0.1, steps=3, batch=4), fb.rounds(4, clients=cohorts),
        engine="in_process", callbacks=[At(2, lambda run: run.leave(1))],
    )  # fmt: skip
    say = At(2, lambda run: departures.name(run.folder, "node-1"))
    said = {"algorithm": algorithm, "schedule": f"rounds(4, clients={cohorts})", "minimum": 2}
    ran = driven(tmp_path, callbacks=(say,), **said)
    assert torch.equal(ran.x, expected.x)
    assert ran.history[2]["left"] == expected.history[2]["left"] == [1]
    assert departures.named(Folder(tmp_path / "run")) == []


def test_an_upload_of_who_leaves_while_a_buffer_fills_is_not_in_the_step(tmp_path):
    """SCAFFOLD's c kept its share for good."""
    fleet = LocalFleet(tmp_path)
    go = threading.Event()

    def hold(order, head, upload):  # so that the buffer cannot fill without it
        if order.kind == "TRAIN":
            go.wait(LONG)
        return head, upload

    def once(order, head, upload):
        again = order.kind == "TRAIN" and fleet.trained().count("node-1") > 1
        return None if again else (head, upload)

    def leave_while_it_fills():
        until(lambda: fleet.trained().count("node-1") > 1, "an upload of node-1")
        departures.name(Folder(tmp_path / "run"), "node-1")
        until(lambda: "node-1" not in [n["name"] for n in fleet.status["fleet"]], "a departure")
        go.set()

    fleet.rewrite |= {"node-0": hold, "node-1": once}
    fleet.start("node-0", "node-1")
    helper = threading.Thread(target=leave_while_it_fills, daemon=True)
    helper.start()
    said = {"schedule": "buffered(steps=2, buffer=2, concurrency=2)", "nodes": 2, "deadline": LONG}
    ran = fleet.serve(algorithm="scaffold()", **said)
    fleet.stop()
    helper.join(LONG)
    assert [1 in r["clients"] for r in ran.history] == [False, False]
    assert ran.history[0]["left"] == [1]


@pytest.mark.parametrize("share", ["no answer", "lost", "garbage", 1e18, float("nan")])
def test_who_cannot_be_asked_leaves_its_contribution(share, tmp_path):
    """Or sends back what nobody can have: refused, and the run goes on."""

    def vanish(order, head, upload):
        if order.kind != "LEAVE":
            return head, upload
        if share == "lost":
            head["lost"] = True
        elif share == "garbage":
            upload = b"\x00" * 40
        elif isinstance(share, float):
            upload = whole(share)
        return None if share == "no answer" else (head, upload)

    say = At(1, lambda run: departures.name(run.folder, "node-1"))
    said = {"algorithm": "scaffold()", "schedule": "rounds(6, clients=2)", "deadline": 0.5, "minimum": 2}
    records = driven(tmp_path, rewrite=vanish, callbacks=(say,), **said).history
    assert [r["unreturned"] for r in records if "left" in r] == [[1]]
    assert all(r["norm"] < 100 for r in records)
    left = next(i for i, r in enumerate(records) if "left" in r)
    assert all(1 not in r["clients"] for r in records[left:])


def test_a_node_that_is_killed_gets_its_order_again_while_the_deadline_lasts(tmp_path):
    """It lost what it was at; the round waits for it, and closes with all three."""
    fleet = LocalFleet(tmp_path)
    killed = threading.Event()

    def dies(order, head, upload):
        if order.kind == "TRAIN" and not killed.is_set():
            killed.set()
            threading.Thread(target=again, daemon=True).start()
            return None
        return head, upload

    def again():
        fleet.stop("node-1")
        time.sleep(0.6)  # the server sees it gone
        fleet.start("node-1")

    fleet.rewrite["node-1"] = dies
    fleet.start("node-0", "node-1", "node-2")
    ran = fleet.serve(algorithm="scaffold()", schedule=ROUNDS, minimum=2, deadline=LONG)
    fleet.stop()
    assert torch.equal(ran.x, simulated(fb.scaffold(), TWO).x)
    jobs = [job for _, name, kind, job in fleet.orders if (name, kind) == ("node-1", "TRAIN")]
    assert len(jobs) == 3  # the first order twice, under one job
    assert jobs[0] == jobs[1] != jobs[2]
    assert ran.history[0].get("dropped") is None


class Killed(BaseException):
    """The server's process, as far as this test is concerned."""


@pytest.mark.parametrize("algorithm", ["scaffold()", EQUAL[-1]])
@pytest.mark.parametrize(
    "moment", ["before the commit", "before the acknowledgement", "while uploads arrive"]
)
def test_a_server_that_is_killed_and_started_again_ends_with_the_undisturbed_bits(
    algorithm, moment, tmp_path
):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1", "node-2")
    said = {"algorithm": algorithm, "schedule": "rounds(4, clients=2)", "nodes": 3, "minimum": 2}
    expected = driven(tmp_path / "other", **said)
    kills = []

    class Deadly(type(fleet.transport())):
        def acknowledge(self, answers):
            if (
                moment == "before the acknowledgement"
                and any(a.size > 90 for a in answers)
                and len(kills) < 2
            ):
                kills.append(1)
                raise Killed
            super().acknowledge(answers)

        def receive(self, limit, wait):
            found = super().receive(1, wait)
            if moment == "while uploads arrive" and any(a.size > 90 for a in found) and len(kills) < 2:
                kills.append(1)
                raise Killed
            return found

    class AtCommit:
        def step(self, record, run):
            if moment == "before the commit" and len(kills) < 2:
                kills.append(1)
                raise Killed

    while True:
        try:
            result = fleet.serve(transport=Deadly(fleet.broker), callbacks=(AtCommit(),), **said)
            break
        except Killed:
            continue
    fleet.stop()
    assert len(kills) == 2
    assert torch.equal(result.x, expected.x)
    for key in ("clients", "train_loss", "bytes_up", "norm"):
        assert [r[key] for r in result.history] == [r[key] for r in expected.history], key
    assert not fleet.broker.answers  # all were acknowledged in the end


def test_a_server_that_starts_again_waits_for_the_nodes_it_had_or_says_who_is_missing(tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1", "node-2")
    said = {"schedule": "rounds(3, clients=3)", "nodes": 3, "minimum": 2}

    class Dies(type(fleet.transport())):
        def acknowledge(self, answers):
            if len(answers) == 3:  # after a commit
                raise Killed
            super().acknowledge(answers)

    with pytest.raises(Killed):
        fleet.serve(transport=Dies(fleet.broker), **said)
    fleet.stop("node-2")
    threading.Timer(1.0, lambda: fleet.start("node-2")).start()
    with pytest.raises(Killed):
        fleet.serve(transport=Dies(fleet.broker), deadline=LONG, **said)
    records = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    assert [sorted(r["clients"]) for r in records] == [[0, 1, 2]] * 2
    assert "missing" not in records[1]
    fleet.stop("node-2")
    result = fleet.serve(deadline=1.0, **said)
    fleet.stop()
    assert result.history[-1]["missing"] == [2]
    assert sorted(result.history[-1]["clients"]) == [0, 1]


@pytest.mark.parametrize("schedule", ["rounds(1, clients=2)", "buffered(steps=1, buffer=1, concurrency=2)"])
def test_a_run_never_starts_with_fewer_nodes_than_it_says(schedule, tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0")
    threading.Timer(1.0, lambda: fleet.start("node-1")).start()
    ran = fleet.serve(schedule=schedule, nodes=2, deadline=0.3)
    fleet.stop()
    first = min(at for at, _, kind, _ in fleet.orders if kind == "TRAIN")
    assert first > max(at for at, _, kind, _ in fleet.orders if kind == "HELLO")
    assert ran.history[0]["nodes"] == 2


def test_a_newcomer_takes_part_and_keeps_its_number(tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1")
    joined = At(1, lambda run: fleet.start("node-7"))
    until_three = fb.deploy.Project(
        model, "cross_entropy", load, data_for_tests, callbacks=[joined]
    )  # fmt: skip
    fleet.project = until_three
    ran = fleet.serve(schedule="rounds(40, clients=3)", nodes=2, minimum=2)
    fleet.stop()
    came = [c for r in ran.history for c, _ in r.get("came", ())]
    assert came[:2] in ([0, 1], [1, 0])
    if 7 in came:  # forty rounds take longer than a hello, but nothing says so
        assert fleet.trained().count("node-7") == sum(7 in r["clients"] for r in ran.history)


def test_a_node_that_lost_its_state_says_so(tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1")

    def lose(run):
        for file in (tmp_path / "nodes" / "node-1").rglob("memory.safetensors"):
            file.unlink()

    ran = fleet.serve(
        algorithm="scaffold()", schedule="rounds(3, clients=2)", nodes=2, minimum=2, callbacks=(At(2, lose),)
    )
    fleet.stop()
    troubles = [t for r in ran.history for t in r.get("trouble", [])]
    assert [(t["node"], t["client"]) for t in troubles] == [("node-1", 1)]
    assert "no longer had its state" in troubles[0]["why"]


def test_a_node_that_does_not_hold_the_model_gets_all_of_it_in_the_same_round(tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1")

    def lose(run):
        for file in (tmp_path / "nodes" / "node-1").rglob("memory.safetensors"):
            file.unlink()

    algorithm = "hidden_state(with_codecs(fedavg(), up=qsgd(4), down=qsgd(8)))"
    ran = fleet.serve(
        algorithm=algorithm, schedule="rounds(3, clients=2)", nodes=2, minimum=1, callbacks=(At(2, lose),)
    )
    fleet.stop()
    assert [sorted(r["clients"]) for r in ran.history] == [[0, 1]] * 3
    assert "gets all of it" in ran.history[2]["trouble"][0]["why"]


def test_another_task_is_refused_by_the_node(tmp_path):
    fleet = LocalFleet(tmp_path).start("node-0", "node-1")
    other = fb.deploy.Project(lambda: torch.nn.Linear(5, 4), "cross_entropy", load, data_for_tests)
    fleet.project = other
    fleet.start("node-2")  # with other code than the two before and the server
    fleet.project = PROJECT
    ran = fleet.serve(schedule="rounds(2, clients=2)", nodes=2, minimum=2)
    fleet.stop()
    assert all(2 not in r["clients"] for r in ran.history)
    told = [t["why"] for r in ran.history for t in r.get("trouble", [])] + [
        t["why"] for t in fleet.status["trouble"]
    ]
    assert any("task is another than the server's" in why for why in told), told


# What one node can do to the others -------------------------------------------------------------------


def huge(size):
    def rewrite(order, head, upload):
        if order.kind == "TRAIN":
            several = not upload.startswith(MAGIC)
            upload = (
                pack_message({**unpack_message(upload, 10**6), "delta": whole(size)})
                if several
                else whole(size)
            )
        return head, upload

    return rewrite


@pytest.mark.parametrize("factor", [100.0, 0.0])
@pytest.mark.parametrize(
    "algorithm",
    ["fednova()", "fedadavr(lr=0.1, memory='fp16')", "with_codecs(fedavg(), down=fp16())", "fedavg()"],
)
def test_an_upload_that_no_step_can_be_taken_with_is_refused(algorithm, factor, tmp_path):
    ran = driven(
        tmp_path, rewrite=huge(1e18), algorithm=algorithm, schedule="rounds(3, clients=3)", norm_factor=factor
    )
    assert [r["step"] for r in ran.history] == [1, 2, 3]
    assert not any(1 in r["clients"] for r in ran.history)
    troubles = [t for r in ran.history for t in r.get("trouble", [])]
    assert {(t["client"], t["node"]) for t in troubles} == {(1, "node-1")}
    assert all(("beyond" if factor else "no step can be taken") in t["why"] for t in troubles), troubles


def lies(kind, **values):
    def rewrite(order, head, upload):
        return (head | values if order.kind == kind else head), upload

    return rewrite


def zero(loss):
    """A zero update with a claimed loss."""

    def rewrite(order, head, upload):
        return (head | {"loss": loss}, whole(0.0)) if order.kind == "TRAIN" else (head, upload)

    return rewrite


@pytest.mark.parametrize("loss", [9e29, 1e39, -1e29, -1e308, float("inf"), float("nan"), -0.5, 10**400])
def test_a_claimed_loss_ends_no_run_and_enters_no_record(loss, tmp_path):
    """The attack that ended a run: a zero update with a loss of 9e29, round after round."""
    schedule = "rounds(6, clients=3, select=oort())"
    ran = driven(tmp_path, rewrite=zero(loss), schedule=schedule, minimum=3, max_refusals=0)
    assert [r["step"] for r in ran.history] == [1, 2, 3, 4, 5, 6]
    for record in ran.history:
        assert 0 < record["train_loss"] < 10
        assert record["losses"][record["clients"].index(1)] is None
        assert any("left out" in t["why"] for t in record["trouble"])
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text


def test_claimed_samples_are_bounded_by_the_others_and_the_operators_file(tmp_path):
    """1e9 samples and a zero update froze a run that weighs by samples."""

    def rewrite(order, head, upload):
        return lies("HELLO", samples=10**9)(order, *zero(0.5)(order, head, upload))

    said = {"algorithm": "fedavg(weights='samples')", "schedule": "rounds(3, clients=2)", "minimum": 2}
    ran = driven(tmp_path, rewrite=rewrite, **said)
    assert all(1 not in r["clients"] for r in ran.history)
    assert "claims 1000000000 samples" in ran.history[0]["trouble"][0]["why"]
    assert ran.history[-1]["loss"] < ran.history[0]["loss"]


def test_the_operators_file_says_how_many_samples_a_node_has():
    table = NodeTable(b"k", "run", samples_factor=100.0, vouched={"a-0": 5, "a-1": 10**6})
    table.connect({f"a-{i}": NodeIdentity(f"a-{i}", "k") for i in range(5)}, 1.0)
    with pytest.raises(WireError, match="claims 6 samples, not 5"):
        table.register(table.nodes["a-0"], 6, -1)
    for name, samples in (("a-0", 5), ("a-1", 10**6), ("a-2", 7), ("a-3", 6), ("a-4", 10**5)):
        table.register(table.nodes[name], samples, -1)
        table.nodes[name].on("registered")
    assert [n.name for n in table.idle()] == ["a-0", "a-1", "a-2", "a-3"]
    assert table.sizes.tolist() == [5, 10**6, 7, 6, 0]


@pytest.mark.parametrize("held", [10**15, 1, -7])
def test_a_newcomer_that_claims_to_hold_what_it_does_not_gets_everything(held, tmp_path):
    algorithm = "hidden_state(with_codecs(fedavg(), up=qsgd(4), down=qsgd(8)))"
    ran = driven(
        tmp_path, rewrite=lies("HELLO", version=held), algorithm=algorithm, schedule="rounds(2, clients=3)"
    )
    assert [r["step"] for r in ran.history] == [1, 2]


ESCAPE = "\x1b[2J\nfedbraid: all is well"  # clears a terminal, and forges a line of the log


@pytest.mark.parametrize(
    ("rewrite", "why"),
    [
        (lambda o, h, u: b"", "cut off"),
        (lambda o, h, u: b"\xff" * 50, "cut off"),
        (lambda o, h, u: b"\0\0\0\2[]", "not an object"),
        (lambda o, h, u: b"\0\0\0\3{,}", "cannot be read"),
        (lambda o, h, u: b"\0\0\x80\0" + b"[" * 32768, "cannot be read"),
        (lambda o, h, u: ({k: v for k, v in h.items() if k != "loss"}, u), "no loss"),
        (lambda o, h, u: (h | {"loss": "low"}, u), "no loss"),
        (lambda o, h, u: (h | {"lost": 0}, u), "no lost"),
        (lambda o, h, u: (h, u[:-1]), ""),
        (lambda o, h, u: (h, u + b"x"), ""),
        (lambda o, h, u: (h, b"garbage" * 20), ""),
        (lambda o, h, u: (h, whole(np.nan)), ""),
        (lambda o, h, u: (h, whole(np.inf)), ""),
        (lambda o, h, u: (h, frame(0, 0, bytes(6), bytes(4 * LAYOUT.size))), "layout"),
        (lambda o, h, u: ({"error": ESCAPE}, b""), "it failed: \\x1b[2J\\nfedbraid: all is well"),
        (lambda o, h, u: ({"error": ["x"] * 1000}, b""), "it failed"),
    ],
)
def test_broken_answers_are_refused_by_name_and_the_rounds_go_on(rewrite, why, tmp_path, caplog):
    ran = driven(
        tmp_path,
        rewrite=lambda o, h, u: rewrite(o, h, u) if o.kind == "TRAIN" else (h, u),
        schedule="rounds(2, clients=3)",
    )
    assert [1 in r["clients"] for r in ran.history] == [False, False]
    troubles = [t for r in ran.history for t in r.get("trouble", [])]
    assert troubles
    assert all(t["node"] == "node-1" and why in t["why"] for t in troubles), troubles
    assert all(line.isprintable() for line in caplog.messages)
    same(ran, simulated(fb.fedavg(), Replay.of(ran.history)))


def test_a_large_answer_to_a_small_question_is_not_even_read(tmp_path):
    def rewrite(order, head, upload):
        return (head, bytes(10**6)) if order.kind == "HELLO" else (head, upload)

    class UntilRefused:  # the first rounds may be over before its answer is here
        def step(self, record, run):
            time.sleep(0.02)
            return any("far too large" in t["why"] for t in record.get("trouble", []))

    said = {"schedule": "rounds(3000, clients=2)", "nodes": 2, "minimum": 2, "callbacks": (UntilRefused(),)}
    ran = driven(tmp_path, rewrite=rewrite, **said)
    assert len(ran.history) < 3000
    assert not any(1 in r["clients"] for r in ran.history)


def test_a_second_answer_a_foreign_job_and_a_replay_count_for_nothing(tmp_path):
    fleet = LocalFleet(tmp_path)

    class Order:  # whatever job this node makes up
        def __init__(self, job):
            self.job = job

    jobs = []

    def rewrite(order, head, upload):
        if order.kind == "TRAIN":
            end = fleet.nodes["node-1"]
            for job in (order.job, "0123456789abcdef" * 2, *jobs):
                end.answer(Order(job), pack_answer(head | {"again": len(fleet.orders)}, upload))
            jobs.append(order.job)
        return head, upload

    fleet.rewrite["node-1"] = rewrite
    fleet.broker.quota = 100
    fleet.start("node-0", "node-1", "node-2")
    ran = fleet.serve(algorithm="scaffold()", schedule=ROUNDS, minimum=3)
    fleet.stop()
    assert torch.equal(ran.x, simulated(fb.scaffold(), TWO).x)
    told = [t for r in ran.history for t in r.get("trouble", [])] + fleet.status["trouble"]
    assert told
    assert all(t["node"] == "node-1" and "which it was not given" in t["why"] for t in told), told


def test_failing_nodes_are_asked_ever_more_rarely_and_what_is_told_stays_small(tmp_path):
    fleet = LocalFleet(tmp_path)
    for i in range(3):
        fleet.rewrite[f"node-{i}"] = lambda o, h, u: (
            ({"error": f"attempt {len(fleet.orders)}"}, b"") if o.kind == "TRAIN" else (h, u)
        )
    fleet.start("node-0", "node-1", "node-2")
    with pytest.raises(RunError, match="restart with the same out="):
        fleet.serve(schedule="rounds(1, clients=3)", deadline=6.0, too_few="stop")
    fleet.stop()
    assert 3 <= len(fleet.trained()) <= 3 * 6  # 1/2 + 1 + 2 + 4 s at least between one node's first five
    assert (tmp_path / "run" / "status.json").stat().st_size < 50_000
    assert fleet.status["state"] == "failed"
    assert all(
        n["state"] != "barred" for n in fleet.status["fleet"]
    )  # who says that it failed uploaded nothing
    assert "restart with the same out=" in fleet.status["traceback"]


def test_an_asynchronous_order_past_its_deadline_makes_room_and_still_counts(tmp_path):
    fleet = LocalFleet(tmp_path)
    go = threading.Event()

    def slow(order, head, upload):
        if order.kind == "TRAIN" and order.job == fleet_jobs(fleet, "node-0")[0]:
            go.wait(LONG)
        return head, upload

    fleet.rewrite["node-0"] = slow
    fleet.start("node-0", "node-1")

    class Watch:
        def step(self, record, run):
            if any("no answer within" in t["why"] for t in record.get("trouble", [])):
                go.set()
            return 0 in record["clients"] and len(record["clients"]) == 1 and go.is_set()

    ran = fleet.serve(
        schedule="buffered(steps=10000, buffer=1, concurrency=1)", nodes=2, deadline=1.5, callbacks=(Watch(),)
    )
    fleet.stop()
    last = ran.history[-1]
    assert last["clients"] == [0]
    if len(ran.history) > 1:
        assert last["versions"][0] < last["step"]


def fleet_jobs(fleet, name):
    return [job for _, node, kind, job in fleet.orders if (node, kind) == (name, "TRAIN")]


class UntilBarred:
    """Rounds that a node which rests does not miss, and a few more once a node is barred."""

    def __init__(self, then):
        self.then, self.at = then, None

    def step(self, record, run):
        if any("deploy admit node-1" in t["why"] for t in record.get("trouble", [])):
            self.at = record["step"]
        if self.at is None:
            time.sleep(0.2)
        elif record["step"] == self.at + 3:
            return self.then()


def barred(fleet):
    return [n["name"] for n in fleet.status["fleet"] if n["state"] == "barred"]


def torn(order, head, upload):
    return (head, upload[:-1]) if order.kind == "TRAIN" else (head, upload)


@pytest.mark.parametrize(
    ("rewrite", "schedule"),
    [
        (torn, "rounds(1000, clients=3)"),
        (lies("TRAIN", lost=0), "rounds(1000, clients=1.0)"),
        (huge(1e18), "rounds(1000, clients=3, over_select=1.5)"),
        (zero(9e29), "rounds(1000, clients=3)"),
        (torn, f"rounds(1000, clients={[[0, 1, 2]] * 1000})"),
        (torn, "buffered(steps=1000, buffer=2, concurrency=3)"),
    ],
)
def test_a_node_whose_uploads_were_refused_three_times_is_not_asked_a_fourth(rewrite, schedule, tmp_path):
    fleet = LocalFleet(tmp_path, rewrite={"node-1": rewrite}).start("node-0", "node-1", "node-2")
    watch = UntilBarred(lambda: True)
    ran = fleet.serve(schedule=schedule, deadline=LONG, minimum=2, callbacks=(watch,))
    fleet.stop()
    assert fleet.trained().count("node-1") == 3
    assert barred(fleet) == ["node-1"]
    assert "3 uploads in a row were refused" in next(n["why"] for n in fleet.status["fleet"] if n["why"])
    for record in ran.history[watch.at :]:
        assert 1 not in record["clients"]
        assert "trouble" not in record
    if "rounds" in schedule:
        assert [sorted(r["clients"]) for r in ran.history[watch.at :]] == [[0, 2]] * 3
    if not any(1 in r["clients"] for r in ran.history):
        same(ran, simulated(fb.fedavg(), Replay.of(ran.history)))


def test_who_is_barred_stays_out_after_a_restart_until_the_operator_admits_it(tmp_path):
    fleet = LocalFleet(tmp_path)
    is_hostile = threading.Event()
    is_hostile.set()
    fleet.rewrite["node-1"] = lambda o, h, u: torn(o, h, u) if is_hostile.is_set() else (h, u)
    fleet.start("node-0", "node-1", "node-2")
    said = {"schedule": "rounds(1000, clients=3)", "deadline": LONG, "minimum": 2}

    def kill():
        raise Killed

    with pytest.raises(Killed):
        fleet.serve(callbacks=(UntilBarred(kill),), **said)
    is_hostile.clear()
    file = tmp_path / "run" / "metrics.jsonl"
    done = len(file.read_text().splitlines())
    with pytest.raises(Killed):
        fleet.serve(callbacks=(At(done + 4, lambda run: kill()),), **said)
    assert fleet.trained().count("node-1") == 3
    assert barred(fleet) == ["node-1"]
    assert "missing" not in file.read_text()
    folder = Folder(tmp_path / "run")
    admissions.name(folder, "node-1")

    class UntilBack:
        def __init__(self):
            self.steps = 0

        def step(self, record, run):
            self.steps += 1 in record["clients"]
            time.sleep(0.02)
            return self.steps == 5

    ran = fleet.serve(callbacks=(UntilBack(),), **said)
    fleet.stop()
    assert sorted(ran.history[-1]["clients"]) == [0, 1, 2]
    assert barred(fleet) == admissions.named(folder) == []
    assert fleet.trained().count("node-1") == 3 + 5


def test_refusals_count_in_a_row_only(tmp_path):
    """Every third upload is fine."""
    fleet, count = LocalFleet(tmp_path), []

    def now_and_then(order, head, upload):
        if order.kind == "TRAIN":
            count.append(1)
        return zero(9e29)(order, head, upload) if len(count) % 3 else (head, upload)

    fleet.rewrite["node-1"] = now_and_then
    fleet.start("node-0", "node-1", "node-2")
    ran = fleet.serve(schedule="rounds(8, clients=3)", minimum=3)
    fleet.stop()
    assert [sorted(r["clients"]) for r in ran.history] == [[0, 1, 2]] * 8
    assert barred(fleet) == []


def test_the_operators_commands_say_who_is_barred_and_admit_it(tmp_path):
    run = Folder(tmp_path / "run")
    run.create({"run": "r"})
    table = NodeTable(b"k", "run")
    node = table.nodes["node-1"] = Node("node-1", 1, state=NodeState.BARRED, barred="3 uploads were refused")
    told = status_file.describe(table, 1.0, "running", 2, 9, Troubles(), Wait())
    run.write_json(status_file.FILE, told)
    make_folder(tmp_path / "broker")
    (tmp_path / "broker" / "up.json").write_text(json.dumps({"host": "", "port": 1, "out": str(run.path)}))
    runner = CliRunner()
    shown = runner.invoke(app, ["deploy", "status", str(tmp_path)]).output
    assert "node-1: barred, NOT CONNECTED: 3 uploads were refused" in shown
    assert (
        "is asked again" in runner.invoke(app, ["deploy", "admit", "node-1", "--dir", str(tmp_path)]).output
    )
    assert admissions.named(run) == ["node-1"]
    node.admitted()
    table.connect({"node-1": NodeIdentity("node-1", "k")}, 2.0)
    assert (node.state, node.refusals) == (NodeState.NEW, 0)


@pytest.mark.parametrize(
    "schedule",
    [
        "rounds(2, clients=4)",
        "rounds(2, clients=0.5)",
        "rounds(2, clients=[[0, 1, 2, 3, 4], [0, 1]])",
        "buffered(steps=2, buffer=4, concurrency=5)",
    ],
)
def test_more_hostile_nodes_than_a_rule_bears_are_refused_before_a_node_is_asked(schedule, tmp_path):
    fleet = LocalFleet(tmp_path)
    with pytest.raises(ConfigError, match=r"more than 2f \+ 2 = 4 vectors, got [24] clients"):
        fleet.serve(algorithm="robust(fedavg(), 'krum', f=1)", schedule=schedule, nodes=4)
    assert not (tmp_path / "run").exists()


# Small parts ------------------------------------------------------------------------------------------


def test_every_state_of_a_node_has_its_events():
    reached = {state for moves in EVENTS.values() for state in moves.values()} | {NodeState.NEW}
    assert reached == set(NodeState)
    assert not any(NodeState.GONE in moves for moves in EVENTS.values())
    node = Node("a")
    with pytest.raises(KeyError):
        node.on("asked")  # who has not introduced itself is asked nothing


def test_numbers_follow_names_and_outlive_restarts():
    table = NodeTable(b"k", "run")
    names = ["node-2", "node-0", "clinic", "x-2", "node-99999999"]
    table.connect({name: NodeIdentity(name, "k", "s") for name in names}, 1.0)
    for name in names:
        table.register(table.nodes[name], 5, -1)
        table.nodes[name].on("registered")
    assert {n.name: n.client for n in table.members} == {
        "node-2": 2, "node-0": 0, "clinic": 1, "x-2": 3, "node-99999999": 4,
    }  # fmt: skip
    again = NodeTable(b"k", "run")
    assert again.restore(json.loads(json.dumps(table.note()))) == set(names)
    assert {n.name: n.client for n in again.members} == {n.name: n.client for n in table.members}
    with pytest.raises(WireError, match="1000000000 samples, 5 at first"):
        again.register(again.nodes["clinic"], 10**9, -1)
    with pytest.raises(WireError, match="claims 0 samples"):
        again.register(again.nodes["clinic"], 0, -1)


def test_jobs_are_known_again_and_by_nobody_else():
    node, versions = Node("a", committed_sequence=4), {7: None, 8: None}
    table = NodeTable(b"secret", "run")
    assert table.adopt(node, table.job(node, 5, 8), versions) == (5, 8)
    assert table.adopt(node, table.job(node, 4, 8), versions) is None  # was counted
    assert table.adopt(node, table.job(node, 5, 6), versions) is None  # of a model that is gone
    assert table.adopt(node, NodeTable(b"other", "run").job(node, 5, 8), versions) is None
    assert table.adopt(node, table.job(Node("b"), 5, 8), versions) is None


def test_honest_uploads_of_any_size_are_accepted_and_learned_from():
    """Early and late, of one step and of a thousand; only what is out of all proportion is refused."""
    x, limit = torch.ones(100), NormLimit(100.0)
    for norm, steps in ((50.0, 1), (3.0, 10), (0.5, 1), (900.0, 1000), (2.0, 1), (0.01, 1), (150.0, 200)):
        limit.accepted(limit.check({"delta": torch.full((1, 100), norm / 10)}, steps, x))
    with pytest.raises(WireError, match="norm_factor=100 times the median"):
        limit.check({"delta": torch.full((1, 100), 1e4)}, 1, x)
    again = NormLimit.restore(100.0, json.loads(json.dumps(limit.note())))
    assert again == limit
    assert NormLimit(0.0).check({"delta": torch.full((1, 100), 1e30)}, 1, x)
    with pytest.raises(WireError, match="a million times"):
        NormLimit(100.0).check({"delta": torch.full((1, 100), 1e9)}, 1, x)


def test_honest_losses_are_believed_from_the_first_to_the_last():
    limit = LossLimit(100.0)
    for loss in (2.3, 2.2, 1.0, 0.3, 0.01, 1e-5, 1e-7, 1e-8, 1e-9, 3.0):
        assert limit.doubt(loss) is None
        limit.believed([loss])
    assert "beyond" in limit.doubt(1e6)
    assert "cannot be" in limit.doubt(-1.0)
    assert LossLimit(100.0, is_signed=True).doubt(-1.0) is None
    again = LossLimit.restore(100.0, False, json.loads(json.dumps(limit.note())))
    assert (again.first, list(again.newest)) == (limit.first, list(limit.newest))


def test_what_is_told_of_trouble_is_bounded():
    troubles = Troubles()
    for i in range(10_000):
        troubles.add(f"node-{i % 200}", i % 200, "x" * 1000)
    taken = troubles.take()
    assert len(taken["trouble"]) == 100
    assert taken["more_trouble"] == 5_000
    assert len(json.dumps(taken)) < 100_000
    assert troubles.take() == {}


def test_a_dead_server_is_said_to_be_dead_and_a_silent_one_silent(tmp_path):
    told = {"state": "running", "at": time.time(), "pid": 2**22 - 1, "host": ""}
    (tmp_path / "status.json").write_text(json.dumps(told))
    assert status_file.read(tmp_path)["life"] == "running"  # of another machine, just now
    (tmp_path / "status.json").write_text(json.dumps(told | {"at": time.time() - 55}))
    assert status_file.read(tmp_path)["life"] == "silent"
    assert 54 < status_file.read(tmp_path)["age"] < 100
    import socket

    (tmp_path / "status.json").write_text(json.dumps(told | {"host": socket.gethostname()}))
    assert status_file.read(tmp_path)["life"] == "dead"
    (tmp_path / "status.json").write_text("{")
    assert status_file.read(tmp_path) == {}


def test_a_corrupt_state_says_what_to_do(tmp_path):
    memory = NodeMemory(3, {"x": torch.ones(4)}, {"job": {"c": torch.ones(1, 4)}}, 2)
    memory.write(tmp_path, keep_down=True)
    again = NodeMemory.read(tmp_path)
    assert (again.version, again.participations, list(again.after)) == (3, 2, ["job"])
    file = tmp_path / "memory.safetensors"
    data = bytearray(file.read_bytes())
    for at in (5, len(data) // 2, len(data) - 1):
        broken = data.copy()
        broken[at] ^= 1
        file.write_bytes(broken)
        with pytest.raises(RunError, match="remove it"):
            NodeMemory.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"deadlin": 1.0}, "did you mean 'deadline'"),
        ({"deadline": "soon"}, "type float"),
        ({"deadline": 0}, "no time"),
        ({"minimum": 0}, "too small"),
        ({"too-few": "panic"}, "'wait' or 'stop'"),
        ({"max-norm": -1.0}, "refuses everything"),
        ({"vouched": {}}, "vouched"),
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
    with pytest.raises(ConfigError, match="must be an algorithm"):
        Settings.read({}, {"algorithm": fb.scaffold}).what()


def test_a_project_is_complete_or_says_what_is_missing():
    with pytest.raises(ConfigError, match="give both"):
        fb.deploy.Project(model)
    with pytest.raises(ConfigError, match="option of a project"):
        fb.deploy.Project(model, "mse", load, options={"metric": {}})
