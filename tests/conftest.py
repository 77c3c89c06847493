"""What the tests share: tiny tasks, and the real data where it is there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbraid as fb

# what other runs on this machine compiled and measured decides no test: a fresh checkout begins with nothing
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / "build/cache")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data; tests that need it are skipped where it is not."""
    root = os.environ.get("FEDBRAID_DATA")
    if not root:
        pytest.skip("FEDBRAID_DATA is not set: the real data is not here")
    return Path(root)


@pytest.fixture(scope="session")
def blobs() -> fb.Task:
    """Six clients of unequal size, three classes, a linear model."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(3, 5))

    def some(n):
        y = draw.integers(0, 3, n)
        return (centres[y] + draw.normal(size=(n, 5))).astype(np.float32), y

    torch.manual_seed(0)
    return fb.Task.from_arrays(torch.nn.Linear(5, 3), [some(n) for n in (7, 12, 20, 33, 8, 40)], some(50))


@pytest.fixture(params=["vmap", "native"])
def backend(request, monkeypatch):
    """Run what the oracles run on this gradient backend."""
    import oracles

    from fedbraid_native.build import compiler

    if request.param == "native" and compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(oracles, "ENGINE", fb.engines.in_process(backend=request.param))
