"""Is the contract's every name where it says, with the keywords it says?"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import fedbraid as fb

ADAPTIVE = "lr beta1 beta2 eps"
SHARED = "optimizer beta beta1 beta2 eps"
ASYNC = "lr momentum staleness"
BUILDERS = {
    "fedavg": "lr", "fedavgm": "lr momentum", "fednova": "lr", "fedvarp": "lr", "mifa": "lr",
    "fedprox": "mu",
    "fedadagrad": ADAPTIVE, "fedadam": ADAPTIVE, "fedyogi": ADAPTIVE, "fedadabelief": ADAPTIVE, "fedlamb": ADAPTIVE,
    "scaffold": "lr", "scaffold_m": "lr",
    "feddyn": "mu", "adabest": "mu beta",
    "fedgbo": SHARED, "mimelite": SHARED, "mfl": SHARED,
    "cluster_fedvarp": "clusters lr",
    "fedadavr": "optimizer lr memory normalise beta1 beta2 eps weight_decay",
    "fedpaq": "codec", "fedef": "codec",
    "fedbuff": ASYNC, "fedasync": ASYNC, "qafel": f"{ASYNC} up down",
}  # fmt: skip
DEFAULTS = {
    "lr": (
        "fedavg",
        "fedavgm",
        "fednova",
        "fedvarp",
        "mifa",
        "scaffold",
        "scaffold_m",
        "cluster_fedvarp",
        "fedbuff",
    ),
}
WRAPPERS = {
    "fedshift": "a",
    "with_codecs": "a up down only",
    "error_feedback": "a",
    "hidden_state": "a",
}
CODECS = {
    "identity": {}, "fp16": {}, "int8": {}, "int4": {}, "uniform": {"bits": 4}, "kmeans": {"bits": 4}, "qsgd": {"bits": 4},
    "topk": {"fraction": 0.5}, "shared": {"bits": 16, "range": 1.0},
}  # fmt: skip
NAMES = "Task Work Layout simulate resume rounds buffered tasks partition codecs"


def keywords(function):
    return inspect.signature(function).parameters


def test_all_is_complete_and_everything_in_it_is_there():
    assert fb.__all__ == sorted(set(fb.__all__))
    for name in fb.__all__:
        assert getattr(fb, name) is not None
    wanted = {*BUILDERS, *WRAPPERS, *NAMES.split(), "__version__"}
    assert wanted <= set(fb.__all__) == set(dir(fb))
    with pytest.raises(AttributeError, match="'fedadvr'"):
        _ = fb.fedadvr


def test_every_builder_is_exported():
    from fedbraid.algorithms import BUILDERS as made
    from fedbraid.algorithms import WRAPPERS as wrapping

    assert set(BUILDERS) <= set(made) <= set(fb.__all__)
    assert set(WRAPPERS) <= set(wrapping) <= set(fb.__all__)


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_keep_their_keywords(name):
    has = keywords(getattr(fb, name))
    assert set(BUILDERS[name].split()) <= set(has)
    assert has["weights"].default in ("samples", "uniform")
    assert getattr(fb, name).__doc__


def test_defaults_of_the_contract():
    for name in DEFAULTS["lr"]:
        assert keywords(getattr(fb, name))["lr"].default == 1.0
    assert keywords(fb.adabest)["mu"].default == 0.02
    assert keywords(fb.adabest)["beta"].default == 0.9
    for build in (fb.fedgbo, fb.mimelite, fb.mfl):
        assert keywords(build)["optimizer"].default == "sgdm"
        assert keywords(build)["eps"].default == 1e-3
    for build in (fb.fedbuff, fb.fedasync, fb.qafel):
        assert keywords(build)["momentum"].default == 0.0
        assert keywords(build)["staleness"].default == "sqrt"
    assert keywords(fb.fedadavr)["memory"].default is None
    assert keywords(fb.fedadavr)["normalise"].default == "cohort"


def test_the_values_that_the_contract_lists():
    for optimizer in ("adagrad", "adam", "adabelief", "yogi", "lamb", "sgd"):
        for memory in (None, "fp16", "int8", "int4"):
            fb.fedadavr(optimizer=optimizer, lr=0.1, memory=memory)
    fb.fedadavr(normalise="population", beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01)
    for build in (fb.fedgbo, fb.mimelite, fb.mfl):
        build(optimizer="sgdm", beta=0.9)
        build(optimizer="rmsprop", beta=0.9, eps=1e-3)
        build(optimizer="adam", beta1=0.9, beta2=0.99, eps=1e-3)
    for build in (fb.fedbuff, fb.fedasync, fb.qafel):
        build(lr=1.0, momentum=0.0, staleness="constant")
    for name in BUILDERS:
        needs = {"cluster_fedvarp": {"clusters": 2}}.get(name, {})
        needs |= {"codec": fb.codecs.int8()} if name in ("fedpaq", "fedef") else {}
        for weights in ("samples", "uniform"):
            getattr(fb, name)(**needs, weights=weights)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_take_any_algorithm(name):
    assert list(keywords(getattr(fb, name))) == WRAPPERS[name].split()
    for algorithm in (fb.fedavg(), fb.scaffold(), fb.qafel(), fb.fedadavr("lamb", memory="int4")):
        assert isinstance(getattr(fb, name)(algorithm), fb.Algorithm)


def test_secure_keeps_its_keywords():
    assert list(keywords(fb.secure))[:5] == ["a", "bits", "range", "neighbours", "threshold"]


def test_codecs_and_their_two_calls():
    layout = fb.Layout.from_shapes([("w", (3, 4)), ("b", (4,))])
    v = torch.linspace(-1, 1, 16)
    made = [getattr(fb.codecs, name)(**given) for name, given in CODECS.items()]
    made += [
        fb.codecs.of_weights(made[4]),
        fb.codecs.mixed(made[4], share=0.5),
        fb.codecs.mixed(made[2], clients=[0, 2]),
    ]
    for codec in made:
        data = codec.encode(v, layout, 7)
        assert isinstance(data, bytes)
        assert codec.decode(data, layout).shape == v.shape


def test_simulate_takes_what_the_contract_shows():
    has = keywords(fb.simulate)
    assert list(has)[:4] == ["task", "algorithm", "work", "schedule"]
    assert {"seed", "engine", "out"} <= set(has)
    assert has["engine"].default == "auto"
    assert {"lr", "epochs", "steps", "batch", "momentum", "weight_decay", "clip", "lr_decay"} <= set(
        keywords(fb.Work)
    )
    assert list(keywords(fb.Task.from_arrays))[:4] == ["model", "clients", "test", "loss"]
    assert {"steps", "clients"} <= set(keywords(fb.rounds))
    assert {"steps", "buffer", "concurrency"} <= set(keywords(fb.buffered))
    assert {"clients", "partition"} <= set(keywords(fb.tasks.load))
    for name in ("iid", "iid_mix", "dirichlet", "label_chunks", "pachinko"):
        assert callable(getattr(fb.partition, name))


def test_importing_fedbraid_does_not_import_torch():
    code = "import sys, fedbraid; assert 'torch' not in sys.modules; fedbraid.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
