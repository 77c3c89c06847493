"""Do the ports of peers' tutorials run, and are they as long as their page says?"""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedbraid.data import tasks
from fedbraid.data.dataset import DataSet

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "examples/peers"
PORTS = sorted(p for p in PEERS.glob("*.py") if p.name != "beside.py")

beside = SimpleNamespace(**runpy.run_path(str(PEERS / "beside.py")))  # its name stays free for users' files


def test_there_is_a_port_of_each_peers_tutorial():
    assert {p.name for p in PORTS} == {peer.port for peer in beside.PEERS.values()}


def small(name):
    """Random images in the shapes of a public data set, with as many clients as its tutorial has."""
    draw = torch.Generator().manual_seed(0)
    shape, classes, n = ((3, 32, 32), 10, 2000) if name == "cifar10" else ((1, 28, 28), 62, 210)
    x, y = torch.randn(n, *shape, generator=draw), torch.randint(classes, (n,), generator=draw)
    groups = np.arange(n) % 105 if name == "femnist" else None
    some = slice(0, 105)
    return DataSet(
        x, y, (x[some], y[some]), classes, groups=groups, test_groups=None if groups is None else groups[some]
    )


@pytest.mark.parametrize("path", PORTS, ids=lambda p: p.stem)
def test_a_port_runs(path, tmp_path, monkeypatch, capsys):
    """As it stands, for one round; `make examples` runs it on the real data."""
    for name in ("cifar10", "femnist"):
        source = dataclasses.replace(
            tasks._SOURCES[name], read=lambda statistics="own", name=name: small(name)
        )
        monkeypatch.setitem(tasks._SOURCES, name, source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path.name, "1"])
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert 0 <= float(re.search(r"accuracy +([\d.]+)", printed)[1]) < 1


def test_lines_of_code_are_counted_without_comments_and_docstrings():
    text = (
        '"""Page."""\n\nx = 1  # one\n# none\n\n\ndef f():\n    """Says."""\n    return (\n        x\n    )\n'
    )
    assert beside.code_lines(text, "a.py") == 5
    assert beside.code_lines("# c\n[a]\n\nb = 1\n", "a.toml") == 2
