"""Secure sums in a fleet: the simulator's numbers, nodes that go at each stage, lies, restarts, and what the server is given."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")

from fleets import PROJECT, LocalFleet, Replay, simulated, until

import fedbraid as fb
from fedbraid.algorithms.registry import algorithm_from
from fedbraid.deploy.node_state import NodeMemory, Trained
from fedbraid.deploy.secure_round import FILE, SecureNode
from fedbraid.deploy.transport import unpack_answer
from fedbraid.deploy.transport_memory import MemoryTransport
from fedbraid.engines.engine import Setup
from fedbraid.errors import ConfigError, EngineError, RunError, WireError
from fedbraid.privacy.secure_sum import MASKED, STAGES, Session, stage_of

pytestmark = [pytest.mark.engines, pytest.mark.quick]

NODES = tuple(f"node-{i}" for i in range(6))
ORDERS = ("invitation", "shares", "masked", "unmask")  # what opens each stage
SECURE = "secure(fedavg(), range=4.0, threshold=3)"


class Recorded(MemoryTransport):
    """A transport that keeps all that its server is given."""

    def __init__(self, broker):
        super().__init__(broker)
        self.received = []

    def receive(self, limit, wait):
        answers = super().receive(limit, wait)
        self.received += [answer.read() for answer in answers]
        return answers


class Mortal(SecureNode):
    """A node that disconnects, or sends other bytes, when a stage begins; `times` it does so."""

    dies_at = lies_at = node = None
    times = 1

    def answer(self, job, body, *more):
        stage = stage_of(base64.b64decode(body["message"]))
        if stage == self.dies_at and self.times > 0:
            self.times -= 1
            self.node.close()
            raise EngineError("gone")
        message = super().answer(job, body, *more)
        return message[:-1] if stage == self.lies_at else message


def deployed(place, algorithm=SECURE, dies=None, lies=None, transport=Recorded, nodes=NODES, **config):
    """(the run, the transport, the fleet): `dies` and `lies` say at which stage a node does."""
    fleet = LocalFleet(place)
    fleet.start(*nodes)
    for name in nodes:
        mortal = fleet.runtimes[name].secure = Mortal()
        mortal.node = fleet.nodes[name]
        mortal.dies_at, mortal.lies_at = (dies or {}).get(name), (lies or {}).get(name)
    end = transport(fleet.broker)
    config = {"schedule": "rounds(2, clients=6)", "deadline": 4.0} | config
    try:
        return fleet.serve(algorithm=algorithm, transport=end, **config), end, fleet
    finally:
        fleet.stop()


# The simulator's numbers ------------------------------------------------------------------------------

EQUAL = [
    "secure(fedavg(), range=4.0)",
    "secure(fedavg(weights='uniform'), bits=12, range=4.0, neighbours=2)",
    "secure(fedadam(lr=0.1), range=4.0, rotate=True)",
    "secure(feddyn(mu=0.1), range=4.0)",
    "secure(fedadavr(held='client'), range=4.0)",
    "secure(scaffold(), range={'delta': 4.0, 'dc': 40.0})",
    "secure(error_feedback(fedavg()), range=4.0)",
    "secure(with_codecs(fedavg(), up=mixed(shared(5, 4.0), share=0.5)), range=4.0)",
    "private(secure(fedavg(), range=4.0), clip=0.05, noise=0.0)",
]


@pytest.mark.parametrize("name", EQUAL)
def test_a_fleet_that_sees_sums_has_the_simulators_bits_and_bytes(name, tmp_path):
    if "private" in name:
        pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    ran, _, _ = deployed(tmp_path, name)
    expected = simulated(algorithm_from(name), fb.rounds(2, clients=6), clients=6)
    assert torch.equal(ran.x, expected.x)
    for key in ("clients", "bytes_up", "up", "saturated", "secure_dropped"):
        assert [r[key] for r in ran.history] == [r[key] for r in expected.history]
    for ours, its in zip(ran.history, expected.history):
        assert ours["train_loss"] == pytest.approx(its["train_loss"], abs=1e-4)
        assert sum(ours["node_up"]) == ours["bytes_up"]
    assert not any("trouble" in r for r in ran.history)


@pytest.mark.parametrize("staleness", ["constant", "sqrt"])
def test_buffers_weigh_what_nodes_mask_by_its_age(staleness, tmp_path):
    a = f"secure(fedbuff(staleness='{staleness}'), range=4.0)"
    ran, _, _ = deployed(tmp_path, a, schedule="buffered(steps=4, buffer=3, concurrency=5)")
    assert any(r.get("staleness_max") for r in ran.history)
    expected = simulated(algorithm_from(a), Replay.of(ran.history), clients=6)
    assert float((ran.x - expected.x).abs().max()) < 1e-6


# Nodes that go, and lies ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ORDERS)
@pytest.mark.parametrize("lost", [1, 2])
def test_nodes_that_go_at_a_stage_leave_the_sum_of_the_others(stage, lost, tmp_path):
    ran, _, _ = deployed(
        tmp_path, dies=dict.fromkeys(NODES[:lost], stage), schedule="rounds(1, clients=6)", too_few="stop"
    )
    (record,) = ran.history
    stayed = [i for i in range(6) if i >= lost or stage == "unmask"]
    assert sorted(record["clients"]) == stayed
    assert record["secure_dropped"] == 6 - len(stayed)
    expected = simulated(algorithm_from(SECURE), fb.rounds(1, clients=[tuple(record["clients"])]), clients=6)
    assert torch.equal(ran.x, expected.x)
    assert {t["node"] for t in record["trouble"]} == set(NODES[:lost])


@pytest.mark.parametrize("stage", ORDERS)
def test_too_many_of_them_end_the_run_in_a_sentence(stage, tmp_path):
    with pytest.raises(RunError, match=r"step 1: the secure sum failed in stage .*threshold=3.* to resume"):
        deployed(tmp_path, dies=dict.fromkeys(NODES[:4], stage), too_few="stop")


@pytest.mark.parametrize("stage", ["invitation", "shares", "masked"])
def test_or_a_new_sum_begins_with_those_that_stay(stage, tmp_path):
    """Four of nine are too many for threshold=6; the five that stay are enough for another sum of five."""
    nodes = tuple(f"node-{i}" for i in range(9))
    a = "secure(fedavg(), range=4.0)"  # everybody is everybody's neighbor, and more than half must stay
    ran, _, _ = deployed(
        tmp_path, a, dict.fromkeys(nodes[:5], stage), nodes=nodes, schedule="rounds(1, clients=9)"
    )
    (record,) = ran.history
    assert sorted(record["clients"]) == [5, 6, 7, 8]
    assert any("the secure sum failed" in t["why"] for t in record["trouble"])
    expected = simulated(algorithm_from(a), fb.rounds(1, clients=[tuple(record["clients"])]), clients=9)
    assert torch.equal(ran.x, expected.x)
    assert record["bytes_up"] > expected.history[0]["bytes_up"]  # what did not help was sent all the same


def test_a_step_whose_shares_were_on_their_way_ends_without_uploads(tmp_path):
    """Its uploads are in no other sum: the next step asks for new ones."""
    fleet = LocalFleet(tmp_path)
    fleet.start(*NODES)

    class Reconnects(Mortal):
        def answer(self, job, body, *more):
            if stage_of(base64.b64decode(body["message"])) == self.dies_at and self.times > 0:
                self.times -= 1
                raise EngineError("no answer this time")
            return super().answer(job, body, *more)

    for name in NODES[:4]:
        fleet.runtimes[name].secure = Reconnects()
        fleet.runtimes[name].secure.dies_at = "unmask"
    ran = fleet.serve(algorithm=SECURE, schedule="rounds(2, clients=6)", deadline=2.0)
    fleet.stop()
    assert [len(r["clients"]) for r in ran.history] == [0, 6]
    assert json.loads((tmp_path / "run" / FILE).read_text()) == {"step": 1}
    assert not torch.equal(ran.x, torch.zeros_like(ran.x))


@pytest.mark.parametrize("stage", ORDERS)
def test_a_node_whose_messages_do_not_parse_is_gone_and_named(stage, tmp_path):
    ran, _, _ = deployed(tmp_path, lies={"node-2": stage}, schedule="rounds(1, clients=6)")
    (record,) = ran.history
    assert sorted(record["clients"]) == [i for i in range(6) if i != 2 or stage == "unmask"]
    assert [t["node"] for t in record["trouble"]] == ["node-2"]


def test_a_node_that_sends_its_upload_as_it_is_is_refused(tmp_path):
    fleet = LocalFleet(tmp_path, rewrite={"node-1": lambda order, head, upload: (head, upload or b"plain")})
    fleet.start(*NODES)
    ran = fleet.serve(algorithm=SECURE, schedule="rounds(1, clients=6)", deadline=4.0)
    fleet.stop()
    assert any("of which the server is to see a sum alone" in t["why"] for t in ran.history[0]["trouble"])
    assert 1 not in ran.history[0]["clients"]


def test_weights_that_do_not_fit_are_noticed(tmp_path, monkeypatch):
    """A node that counts itself twice as heavy, once."""
    import fedbraid.deploy.secure_round as module

    honest, told = module.numbers_of, []

    def heavier(sums, up, loss):
        row = honest(sums, up, loss)
        if up.clients[0] == 3 and not told:
            told.append(True)
            row = 2 * row
        return row

    monkeypatch.setattr(module, "numbers_of", heavier)
    ran, _, _ = deployed(tmp_path)
    assert [len(r["clients"]) for r in ran.history] == [0, 6]
    assert "masks other numbers than it should" in ran.history[0]["trouble"][0]["why"]


# What the server is given -----------------------------------------------------------------------------


def test_what_the_server_is_given_is_uniform_and_holds_no_upload(tmp_path):
    """Chi-square of the bytes of all masked uploads of ten steps; no answer has a loss, or codes that are not masked."""
    ran, end, fleet = deployed(tmp_path, schedule="rounds(10, clients=6)")
    answers = [unpack_answer(message) for message in end.received]
    trained = [(head, upload) for head, upload in answers if "loss" in head]
    assert len(trained) == 60
    assert all(head["loss"] == 0.0 and upload == b"" for head, upload in trained)
    masked = [upload[24:] for _, upload in answers if upload[:2] == b"fS" and upload[3] == MASKED]
    assert len(masked) == 60
    drawn = np.frombuffer(b"".join(m[: 2 * (len(m) // 4)] for m in masked), np.uint8)  # the lowest plane
    counts, even = np.bincount(drawn, minlength=256), len(drawn) / 256
    assert even > 5
    assert float(((counts - even) ** 2 / even).sum()) < 255 + 6 * math.sqrt(2 * 255)
    for name in NODES:  # what its own disk has is not in anything that it sent
        memory = NodeMemory.read(fleet.runtimes[name].place(str(fleet_run(fleet))))
        (about,) = memory.trained.values()
        delta = about.vectors["delta"].numpy()
        grid = algorithm_from(SECURE).up.codec
        session = Session(bytes(16), 6, 4, 3, 30, delta.size)
        codes = session.pack(session.modulo(grid.recover(delta)[0].astype(session.word)))
        for sent in (delta.tobytes(), codes[:64]):
            assert not any(sent in message for message in end.received)
    assert ran.history[-1]["train_loss"] < ran.history[0]["train_loss"]


def fleet_run(fleet):
    return json.loads((fleet.place / "run" / "run.json").read_text())["run"]


# Servers that are started again -----------------------------------------------------------------------


class Stopped(Exception):
    """The server's process ends here."""


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_server_that_is_killed_in_a_stage_sums_anew_or_not_at_all(stage, tmp_path):
    class Dying(Recorded):
        def receive(self, limit, wait):
            answers = super().receive(limit, wait)
            for message in self.received:
                _, upload = unpack_answer(message)
                if upload[:2] == b"fS" and upload[3] == stage:
                    raise Stopped
            return answers

    fleet = LocalFleet(tmp_path)
    fleet.start(*NODES)
    config = {"algorithm": SECURE, "schedule": "rounds(2, clients=6)", "deadline": 8.0}
    with pytest.raises(Stopped):
        fleet.serve(transport=Dying(fleet.broker), **config)
    ran = fleet.serve(**config)
    fleet.stop()
    if STAGES[stage] == "unmask":  # shares are out, so these uploads are in no other sum
        assert [len(r["clients"]) for r in ran.history] == [0, 6]
    else:
        expected = simulated(algorithm_from(SECURE), fb.rounds(2, clients=6), clients=6)
        assert torch.equal(ran.x, expected.x)
    assert fleet.trained().count("node-0") == 2  # nobody trained twice for one step


# A node alone -----------------------------------------------------------------------------------------


def prepared(text=SECURE):
    algorithm = algorithm_from(text)
    task = PROJECT.halves.own({"share": 0})
    return Setup(algorithm, task, fb.Work(lr=0.1, steps=3, batch=4), 0), algorithm.gather


def body(message, **more):
    return {"client": 0, "trained": "j", "step": 3, "message": base64.b64encode(message).decode()} | more


def test_a_node_sums_an_upload_once_and_as_the_algorithm_says(tmp_path):
    setup, sums = prepared()
    size = setup.task.layout.size
    fits = sums.planned_session(os.urandom(16), 6, 16, 12, size)
    memory = NodeMemory(trained={"j": Trained(3, 0.5, {"delta": torch.zeros(1, size)})})

    def ask(message, node=None, **more):
        return (node or SecureNode()).answer("job", body(message, **more), setup, sums, memory, tmp_path)

    with pytest.raises(WireError, match="not invited"):
        ask(b"fS\1\2" + bytes(20))
    with pytest.raises(WireError, match="no message of a secure sum"):
        ask(b"xx")
    with pytest.raises(WireError, match="has not trained"):
        ask(fits.invitation(1), trained="another")
    for weaker in (
        {"threshold": 2},
        {"neighbours": 4},
        {"length": fits.length + 1},
        {"bits": fits.bits - 1},
        {"parties": 8},  # of whom each would have only five neighbors
    ):
        session = Session(**{**{k: getattr(fits, k) for k in Session.__dataclass_fields__}, **weaker})
        with pytest.raises(WireError, match="another sum than the algorithm's"):
            ask(session.invitation(1))
    first = SecureNode()
    said = ask(fits.invitation(1), first)
    assert ask(fits.invitation(1), first) == said  # the same order once more
    memory.unmasked = 3
    memory.write(tmp_path, keep_down=False)
    memory = NodeMemory.read(tmp_path)
    assert memory.unmasked == 3
    assert memory.trained["j"].version == 3
    with pytest.raises(WireError, match="was summed before"):
        ask(fits.invitation(1))


def test_who_leaves_a_fleet_of_sums_sends_no_contribution(tmp_path):
    from fedbraid.deploy import departures
    from fedbraid.run.checkpoint import Folder

    fleet = LocalFleet(tmp_path)
    fleet.start(*NODES)

    class Names:
        def step(self, record, run):
            if record["step"] == 1:
                departures.name(Folder(tmp_path / "run"), "node-5")

    a = "secure(scaffold(), range={'delta': 4.0, 'dc': 40.0})"
    ran = fleet.serve(algorithm=a, schedule="rounds(3, clients=4)", callbacks=[Names()], deadline=4.0)
    fleet.stop()
    assert len(ran.history) == 3
    assert all(kind != "LEAVE" for _, _, kind, _ in fleet.orders)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"max_norm": 3.0}, "max_norm"),
        ({"schedule": "rounds(2, clients=2)"}, "hides any of them"),
        (
            {"algorithm": "secure(fedbuff())", "schedule": "buffered(steps=2, buffer=8)"},
            "use a smaller buffer",
        ),
        (
            {"algorithm": "private(secure(fedavg()), clip=0.5, noise=0.5, where='distributed')"},
            "use where='server'",
        ),
        ({"schedule": "rounds(2, clients=4, select=power_of_choice(6))"}, "losses, which a secure sum hides"),
    ],
)
def test_what_a_fleet_cannot_sum_is_refused_before_it_begins(config, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        deployed(tmp_path, **config)


# Real processes ---------------------------------------------------------------------------------------

KILLED = """
import base64, os, signal, sys

sys.path.insert(0, {here!r})
from fleets import PROJECT as fleet
from fedbraid.deploy.secure_round import SecureNode
from fedbraid.privacy.secure_sum import stage_of

honest = SecureNode.answer


def answer(self, job, body, *more):
    if body["step"] == 1 and body["client"] == 1 and stage_of(base64.b64decode(body["message"])) == {stage!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(self, job, body, *more)


SecureNode.answer = answer
"""


@pytest.mark.skipif(
    shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None,
    reason="nats-server is not installed: make nats-server",
)
@pytest.mark.parametrize("stage", ["masked"])
def test_a_real_node_that_is_killed_at_a_stage(stage, tmp_path):
    killed_at(stage, tmp_path)


def killed_at(stage, place):
    pytest.importorskip("nats", reason="the extra `nats` is not installed: make test-engines brings it")
    from deployments import HERE, Deployment

    config = {"algorithm": SECURE, "schedule": "rounds(3, clients=5)", "minimum": 3, "deadline": 20.0}
    file = KILLED.format(here=str(HERE), stage=stage)
    with Deployment(place / "fleet", nodes=5, fleet=file, **config) as fleet:
        fleet.up()
        for i in range(5):
            fleet.node(i)
        fleet.until(lambda: fleet.processes["node-1"].poll() is not None, "the kill")
        assert fleet.processes["node-1"].returncode == -9
        fleet.until_done()
        records = fleet.records
        assert [1 in r["clients"] for r in records] == [True, stage == "unmask", False]
        assert [r["secure_dropped"] for r in records] == [0, int(stage != "unmask"), 0]
        schedule = fb.rounds(3, clients=[tuple(r["clients"]) for r in records])
        expected = simulated(algorithm_from(SECURE), schedule, clients=5)
        views = expected.task.layout.views(expected.x)
        assert all(torch.equal(fleet.model[name], v) for name, v in views.items())
    until(lambda: True)
