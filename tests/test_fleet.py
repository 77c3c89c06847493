"""Can a fleet be trusted: who may do what, who comes back, and what one bad node can do to the others?

Real Flower processes on loopback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedbraid[flower]'")
import httpx
from fleets import LONG, Fleet, make_app
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedbraid.deploy import check, keys
from fedbraid.deploy.operator import Operator, build
from fedbraid.deploy.sign import is_signed, read_trusted, sign
from fedbraid.deploy.trial import Flower, free_port
from fedbraid.errors import ConfigError, EngineError

pytestmark = pytest.mark.engines

app = pytest.fixture(scope="module")(make_app)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets") / "keys"
    keys.make(folder, ["127.0.0.1"], 3)
    return folder


@pytest.fixture(scope="module")
def flower(secrets, tmp_path_factory):
    """The documented fleet: a SuperLink behind the gate, and two registered nodes that trust the operator alone."""
    with Flower(tmp_path_factory.mktemp("flower"), secrets) as made:
        made.link()
        with made.operator as operator:
            for i in range(2):
                operator.register(secrets / f"node-{i}.pub")
                start(made, i, secrets)
        yield made


def start(flower, i, secrets, **about):
    state = str(flower.scratch / "nodes")
    about = {"name": f"node-{i}", "client": i, "share": i, "state": state} | about
    flower.node(f"node-{i}", about, secrets / f"node-{i}.key")


@pytest.fixture
def fleet(flower, app, tmp_path):
    return Fleet(flower, app, tmp_path)


# Who may do what --------------------------------------------------------------------------------------

POST = {"content-type": "application/protobuf"}


def asked(client, port, path, message, **headers):
    """The status that a request is answered with."""
    url = f"https://127.0.0.1:{port}{path}"
    return client.post(url, content=message.SerializeToString(), headers=POST | headers).status_code


def test_a_stranger_with_the_ca_certificate_gets_nowhere(flower, fleet, app, secrets, tmp_path):
    """Next to the documented fleet, which works; the stranger is on the same machine, even."""
    with flower.operator as operator:
        registered = operator.nodes()
        runs = operator.runs()
    stranger = tmp_path / "stranger"
    keys.make(stranger, ["127.0.0.1"], 1)
    shutil.copy(secrets / "ca.crt", stranger / "ca.crt")  # all that the stranger has of ours

    # with Flower's own command line, at the nodes' port and at the operator's
    for port in (flower.port, flower.control):
        home = tmp_path / f"home-{port}"
        home.mkdir()
        lines = [
            "[superlink.it]",
            f'address = "127.0.0.1:{port}"',
            f'root-certificates = "{stranger}/ca.crt"',
        ]
        (home / "config.toml").write_text("\n".join(lines))
        for words in (
            ["ls", "it"],
            ["run", str(app), "it"],
            ["supernode", "register", f"{stranger}/node-0.pub", "it"],
        ):
            done = flwr(home, *words)
            assert done.returncode != 0, (port, words, done.stdout)

    # by hand, with and without a token of its own
    node = Node(node_id=registered[0].id)
    whole = [
        ("/v1/control/list-runs", ListRunsRequest()),
        ("/v1/control/register-node", RegisterNodeRequest(public_key=b"mine")),
        ("/v1/control/start-run", StartRunRequest(fab=Fab(hash_str="a", content=build(app)))),
        ("/v1/runtime/acquire-task", AcquireTaskRequest(supported_task_types=["serverapp"])),
        ("/v1/fleet/pull-messages", PullMessagesRequest(node=node)),
        ("/v1/fleet/register-node", RegisterNodeRequest(public_key=b"mine")),
        ("/openapi.json", ListRunsRequest()),
    ]
    forged, _ = keys.signed(None)
    with httpx.Client(verify=check._context(stranger)) as client:
        for port in (flower.port, flower.control):
            for path, message in whole:
                for headers in (
                    {},
                    {"authorization": "Bearer guessed"},
                    forged,
                    {"host": "x/v1/control/list-runs?"},
                ):
                    assert asked(client, port, path, message, **headers) in (401, 403, 404), (
                        port,
                        path,
                        headers,
                    )
    with (
        pytest.raises(EngineError, match="401"),
        Operator(stranger, f"127.0.0.1:{flower.control}") as operator,
    ):
        operator.nodes()

    # as a node with a key of its own
    flower.node("stranger", {"name": "node-0", "share": 2}, stranger / "node-0.key")
    fleet.run(schedule="rounds(2, clients=2)", nodes=2, minimum=2)
    assert [r["nodes"] for r in fleet.records] == [2, 2]
    assert not any("trouble" in r for r in fleet.records)
    assert "SuperNode ID" not in flower.log("stranger").read_text(errors="replace")
    with flower.operator as operator:
        assert [n.id for n in operator.nodes()] == [n.id for n in registered]
        assert len(operator.runs()) == len(runs) + 1


def flwr(home, *words):
    tool = os.path.join(os.path.dirname(sys.executable), "flwr")
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return subprocess.run([tool, *words], env=env, capture_output=True, text=True, timeout=LONG)


def test_check_finds_the_gate_shut_and_a_bare_superlink_open(flower, secrets, tmp_path):
    shut = check.look(secrets, f"127.0.0.1:{flower.port}", f"127.0.0.1:{flower.control}")
    assert all(trial.good for trial in shut), shut
    bare = Flower(tmp_path / "bare", secrets)
    with bare:
        bare.port = bare.control = free_port()
        words = ["--host", "127.0.0.1", "--port", str(bare.port), "--disable-runtime-dependency-installation"]
        words += ["--ssl-ca-certfile", str(secrets / "ca.crt"), "--ssl-certfile", str(secrets / "server.crt")]
        words += ["--ssl-keyfile", str(secrets / "server.key"), "--enable-supernode-auth"]
        bare.start("superlink", "flower-superlink", words)
        bare.wait_for_port()
        found = check.look(secrets, f"127.0.0.1:{bare.port}", f"127.0.0.1:{bare.port}")
    bad = {(trial.api, trial.tried) for trial in found if not trial.good}
    assert ("control", "as anybody with ca.crt") in bad
    assert ("runtime", "take a task") in bad
    assert not any(trial.api == "node" for trial in found if not trial.good)


def test_only_what_the_operator_signed_runs(flower, fleet, app, secrets, tmp_path):
    """Not even the operator's token runs code without the signing key."""
    thief = tmp_path / "thief"
    keys.make(thief, ["127.0.0.1"], 0)
    for name in ("ca.crt", "operator.token"):
        shutil.copy(secrets / name, thief / name)
    with Operator(thief, f"127.0.0.1:{flower.control}") as operator:
        before = operator.runs()  # may look
        with pytest.raises(EngineError, match="signed this app"):
            operator.start(app, {})
        with pytest.raises(EngineError, match="only signed apps"), operator._calling("start") as client:
            client.StartRun(StartRunRequest(fab=Fab(hash_str="a", content=build(app))))
        assert operator.runs() == before


def test_a_node_runs_only_what_a_key_signed_that_it_trusts(flower, fleet, secrets, tmp_path):
    """Whoever has the SuperLink does not have the nodes."""
    other = tmp_path / "other"
    keys.make(other, ["127.0.0.1"], 0)
    with flower.operator as operator:
        operator.register(secrets / "node-2.pub")
    words = [
        "--root-certificates",
        str(secrets / "ca.crt"),
        "--trusted-entities",
        str(other / "trusted.yaml"),
    ]
    about = {"name": "node-2", "client": 2, "share": 2, "state": str(tmp_path)}
    flower.node("node-2", about, secrets / "node-2.key", words)
    try:
        fleet.submit(schedule="rounds(1, clients=3)", nodes=3)
        status = fleet.wait(lambda status: status["trouble"] and status["nodes"] == 2)
        assert "verif" in status["trouble"][0]["why"].lower(), status
    finally:
        flower.end("node-2")
        with flower.operator as operator:
            operator.stop(operator.runs()[0]["run"])
            operator.unregister(secrets / "node-2.pub")
            assert len(operator.nodes()) == 2


def test_a_signature_is_of_one_bundle_by_one_key(tmp_path):
    keys.make(tmp_path / "a", ["h"], 0)
    keys.make(tmp_path / "b", ["h"], 0)
    trusted = read_trusted(tmp_path / "a" / "trusted.yaml")
    signed = sign(b"bundle", tmp_path / "a" / "signing.key")
    assert is_signed(b"bundle", signed, trusted)
    assert not is_signed(b"bundlf", signed, trusted)
    assert not is_signed(b"bundle", sign(b"bundle", tmp_path / "b" / "signing.key"), trusted)
    assert not is_signed(b"bundle", dict.fromkeys(trusted, "{}"), trusted)
    assert not is_signed(b"bundle", dict.fromkeys(trusted, "["), trusted)
    late = {name: about.replace('"signed_at": ', '"signed_at": 1') for name, about in signed.items()}
    assert not is_signed(b"bundle", late, trusted)


@pytest.mark.parametrize(
    ("nodes", "operator", "word"),
    [
        ("0.0.0.0:8000", "0.0.0.0:8001", "reached from elsewhere"),
        ("127.0.0.1:8000", "127.0.0.1:8000", "cannot share port"),
        ("0.0.0.0:8000", "127.0.0.2:8001", "not valid for 127.0.0.2"),
    ],
)
def test_a_link_that_would_be_unsafe_does_not_start(nodes, operator, word, secrets, tmp_path):
    from fedbraid.deploy.link import parse_address, serve

    with pytest.raises(ConfigError, match=word):
        serve(secrets, parse_address(nodes), parse_address(operator), tmp_path / "db")
