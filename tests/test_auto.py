"""Does "auto" take the fast way, the same one every time, and survive what it remembers?"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.engines import auto
from fedbraid.engines.native.build import compiler

WORK = fb.Work(lr=0.1, batch=5)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedbraid" / "fastest.json"


def convolutional(clients=4):
    def build():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 3)
        )

    draw = np.random.default_rng(0)
    each = [
        (draw.normal(size=(10, 1, 8, 8)).astype(np.float32), draw.integers(0, 3, 10)) for _ in range(clients)
    ]
    return fb.Task.from_arrays(build, each)


def test_a_small_job_is_guessed_and_leaves_nothing_behind(blobs, cache):
    linear = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3, clients=2), seed=1)
    assert "backend='vmap'" in linear.engine
    assert "backend='loop'" in fb.simulate(convolutional(), fb.fedavg(), WORK, fb.rounds(3, clients=2)).engine
    assert not cache.exists()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_large_job_is_measured_once(cache, monkeypatch):
    task, schedule = convolutional(), fb.rounds(400, clients=2)
    first = fb.simulate(task, fb.fedavg(), WORK, schedule, evaluate_every=None)
    assert "backend='native'" in first.engine
    assert list(json.loads(cache.read_text()).values()) == ["native"]
    monkeypatch.setattr(auto, "_candidates", lambda *_: pytest.fail("measured again"))
    again = fb.simulate(task, fb.fedavg(), WORK, schedule, evaluate_every=None)
    assert torch.equal(first.x, again.x)


@pytest.mark.parametrize("junk", ["", "[]", "not json", '{"x": 5}'])
def test_a_damaged_memory_is_only_forgotten(cache, junk):
    cache.parent.mkdir(mode=0o700)
    cache.write_text(junk)
    assert auto.best(convolutional(), WORK, 2) in ("native", "pool", "loop")
    assert json.loads(cache.read_text())


def test_without_a_compiler_everything_still_runs(monkeypatch, cache):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert auto.best(convolutional(), WORK, 2) in ("pool", "loop")
    with pytest.raises(fb.errors.EngineError, match="no C\\+\\+ compiler"):
        fb.simulate(
            convolutional(), fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="in_process(backend='native')"
        )


def test_multiply_adds_follow_the_places_a_weight_is_used_at():
    assert auto.multiply_adds(convolutional()) == (2 * 9 + 2) * 36 + 72 * 3 + 3


def test_the_backend_that_ran_is_in_run_json(blobs, tmp_path):
    fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2, clients=2), out=tmp_path / "run")
    assert "backend='vmap'" in json.loads((tmp_path / "run" / "run.json").read_text())["engine"]
