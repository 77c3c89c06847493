"""Did a redesign change a bit? Hashes of x after five steps of 40 runs, on the machine that recorded them.

`python tests/test_golden.py` records them anew; on another processor, torch or compiler the test is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbraid as fb

FILE = Path(__file__).parent / "golden.json"
c = fb.codecs
ROUNDS, LATE, BUFFERED = fb.rounds(5, clients=4), fb.rounds(5, clients=3, timeout=2.0), fb.buffered(5, 2, 4)
LOOP, VMAP, NATIVE = (f"in_process(backend={b!r})" for b in ("loop", "vmap", "native"))
POOL = "pool(workers=2)"
ALGORITHMS = {
    "fedavg": fb.fedavg(),
    "fedavgm": fb.fedavgm(),
    "fednova": fb.fednova(),
    "fedprox": fb.fedprox(0.1),
    "fedyogi": fb.fedyogi(),
    "scaffold": fb.scaffold(),
    "scaffold_m": fb.scaffold_m(),
    "feddyn": fb.feddyn(0.1),
    "adabest": fb.adabest(),
    "fedgbo": fb.fedgbo("adam"),
    "mimelite": fb.mimelite("rmsprop"),
    "mfl": fb.mfl("adam"),
    "fedvarp": fb.fedvarp(),
    "fedvarp_held": fb.fedvarp(held="client"),
    "mifa": fb.mifa(),
    "cluster": fb.cluster_fedvarp(2),
    "fedadavr": fb.fedadavr("lamb", memory="int4"),
    "fedadavr_held": fb.fedadavr("adam", held="client"),
    "fedshift": fb.fedshift(fb.fedpaq(c.mixed(c.kmeans(3), share=0.5))),
    "fedef": fb.fedef(c.topk(0.3)),
    "hidden": fb.hidden_state(fb.with_codecs(fb.feddyn(), up=c.mixed(c.fp16(), share=0.5), down=c.qsgd(6))),
    "braid": fb.hidden_state(
        fb.with_codecs(fb.fedadavr("adabelief", 0.01, memory="int4"), up=c.qsgd(4), down=c.qsgd(4))
    ),
    "feedback": fb.fedshift(fb.error_feedback(fb.with_codecs(fb.scaffold(), up=c.uniform(5)))),
    "ghbm": fb.ghbm(2, 0.9),
    "scallion": fb.scallion(),
    "private": fb.private(fb.fedadam(), clip=1.0, noise=0.5),
}
LATER = {
    "fedbuff": fb.fedbuff(momentum=0.3),
    "qafel": fb.qafel(),
    "ca2fl": fb.ca2fl(),
    "ace": fb.ace(),
    "fadas": fb.fadas(0.01, 3),
}
RUNS = {
    **{
        f"{name}/rounds/{e}": (a, ROUNDS, e)
        for (name, a), e in zip(ALGORITHMS.items(), [LOOP, VMAP, NATIVE, POOL] * 7)
    },
    **{f"{name}/buffered": (a, BUFFERED, LOOP) for name, a in LATER.items()},
    **{
        f"{name}/buffered": (ALGORITHMS[name], BUFFERED, NATIVE)
        for name in ("braid", "scaffold", "fedadavr", "adabest", "hidden")
    },
    **{
        f"{name}/late": (ALGORITHMS[name], LATE, VMAP)
        for name in ("scaffold", "fedvarp", "feedback", "fedgbo")
    },
}


def fingerprint() -> str:
    from fedbraid_native.build import compiler, cpu_model

    here = [
        torch.__version__,
        np.__version__,
        cpu_model()[0],
        torch.backends.cpu.get_cpu_capability(),
        str(compiler()),
    ]
    return hashlib.sha256(" ".join(here).encode()).hexdigest()[:16]


def blobs() -> fb.Task:
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(3, 5))

    def some(n):
        y = draw.integers(0, 3, n)
        return (centers[y] + draw.normal(size=(n, 5))).astype(np.float32), y

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return fb.Task.from_arrays(model, [some(n) for n in (7, 12, 20, 33, 8, 40)], some(50))


def digest(name: str) -> str:
    algorithm, schedule, engine = RUNS[name]
    work = fb.Work(lr=0.1, batch=8, epochs=2, momentum=0.0 if "gbo" in name else 0.5)
    x = fb.simulate(blobs(), algorithm, work, schedule, seed=4, engine=engine).x
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_as_recorded(name):
    known = json.loads(FILE.read_text())
    if (hashes := known.get(fingerprint())) is None:
        pytest.skip("recorded on another processor, torch or compiler")
    assert digest(name) == hashes[name]


if __name__ == "__main__":
    os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parent.parent / "build/cache"))
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known[fingerprint()] = {name: digest(name) for name in RUNS}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(len(RUNS), "runs")
