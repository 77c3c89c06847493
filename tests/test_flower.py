"""Do the same server and nodes run over Flower's public interfaces, on a real SuperLink?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedbraid as fb

pytest.importorskip("flwr", reason="flwr is not installed: make test-engines brings it")
from brokers import free_port
from deployments import environment
from fleets import LONG, simulated, until
from safetensors.torch import load_file

from fedbraid.deploy import credentials, status_file

pytestmark = pytest.mark.engines

APP = """
import sys

sys.path.insert(0, {here!r})
from fleets import PROJECT

from fedbraid.deploy.transport_flower import apps

both = apps(PROJECT, {folder!r})
server = both.server
client = both.client
"""
CONFIG = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fleet"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "test"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
"""


def test_three_supernodes_give_the_simulators_numbers(tmp_path):

    folder, app, ports = tmp_path / "fleet", tmp_path / "app", [free_port() for _ in range(5)]
    folder.mkdir()
    app.mkdir()
    here = str(Path(__file__).parent)
    credentials.make(folder / "keys", ["127.0.0.1"], 0)
    (folder / "fleet.toml").write_text(
        'algorithm = "scaffold()"\nschedule = "rounds(2, clients=3)"\nwork = "Work(lr=0.1, steps=3, batch=4)"\n'
        f'nodes = 3\nminimum = 3\nout = "run"\ndeadline = {LONG}\n'
    )
    (app / "app.py").write_text(APP.format(here=here, folder=str(folder)))
    (app / "pyproject.toml").write_text(CONFIG)
    home = tmp_path / "home"
    home.mkdir()
    connection = ["[superlink]", 'default = "it"', "[superlink.it]", f'address = "127.0.0.1:{ports[0]}"']
    (home / "config.toml").write_text("\n".join([*connection, "insecure = true"]))
    about = {
        **environment(), "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    }  # fmt: skip
    link = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(ports[0])]
    link += ["--database", str(tmp_path / "link.db"), "--disable-runtime-dependency-installation"]
    children = []

    def start(name, words):
        with (tmp_path / f"{name}.log").open("wb") as log:
            children.append(
                subprocess.Popen(words, env=about, stdout=log, stderr=log, start_new_session=True)
            )

    def told():
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in tmp_path.glob("*.log"))

    try:
        start("link", link)
        for i in range(3):
            node = f'share={i} state="{tmp_path / f"state-{i}"}"'
            start(f"node-{i}", [
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{ports[0]}", "--host", "127.0.0.1",
                "--port", str(ports[1 + i]), "--node-config", node,
            ])  # fmt: skip

        said = []

        def submitted():
            words = ["flwr", "run", str(app), "it", "--format", "json"]
            done = subprocess.run(words, env=about, capture_output=True, text=True, timeout=5 * LONG)
            said.append(done.stdout + done.stderr)
            return done.returncode == 0 and json.loads(done.stdout[done.stdout.index("{") :]).get("success")

        until(submitted, lambda: f"submission: {said[-1][-1500:]} {told()}")
        end = time.monotonic() + 5 * LONG
        while status_file.read(folder / "run").get("state") not in ("done", "failed"):
            assert time.monotonic() < end, told()
            time.sleep(0.5)
    finally:
        for child in reversed(children):
            os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            child.wait(60)
    status = status_file.read(folder / "run")
    assert status["state"] == "done", (status, told())
    model = load_file(folder / "run" / "model.safetensors")
    result = simulated(fb.scaffold(), fb.rounds(2, clients=3))
    # Flower's nodes have no numbers in their names, so that the fold may be in another order
    for name, v in result.task.layout.views(result.x).items():
        assert model[name].shape == v.shape
        assert torch.isfinite(model[name]).all()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)["clients"]) for line in lines] == [[0, 1, 2]] * 2
