"""Is the local optimiser the one that was asked for, at the rate of its version, wherever clients run?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import fedbraid as fb
from fedbraid.core.work import WORK
from fedbraid.data.batches import DrawnBatches
from fedbraid.deploy.settings import Settings
from fedbraid.errors import ConfigError, RunError
from fedbraid.parse import evaluate
from fedbraid.study.compare import as_entries
from fedbraid.study.recipe import command, sections

VMAP = "in_process(backend='vmap')"
TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
OTHERS = [*TORCH, "lion"]
PLAIN_ONLY = [fb.scaffold, fb.scaffold_m, fb.fednova, fb.fedgbo, fb.ghbm, fb.scallion]


class Lion(torch.optim.Optimizer):
    """The paper's Algorithm 2, but for the decay, which is part of the gradient here."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad + group["weight_decay"] * p.data
                m = self.state[p].setdefault("m", torch.zeros_like(p.data))
                p.data -= group["lr"] * torch.sign(0.9 * m + 0.1 * g)
                self.state[p]["m"] = 0.99 * m + 0.01 * g


def alone(task, work, client, x, version, bend):
    """One client's visit with torch's own optimiser."""
    module = task.layout.load(task.module(), x)
    params = list(module.parameters())
    kind = TORCH.get(work.optimizer, Lion)
    optimizer = kind(params, lr=work.rate(version), weight_decay=work.weight_decay)
    start = [p.detach().clone() for p in params]
    plan = DrawnBatches(task, work, np.array([client]), version, 3)
    for k in range(int(plan.K[0])):
        rows = plan.batch(k).client(0).rows[0]
        optimizer.zero_grad()
        cross_entropy(module(task.inputs[rows]), task.targets[rows]).backward()
        for p, x0 in zip(params, start):
            p.grad += bend * (p.detach() - x0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def transcribed(task, work, cohorts, bend=0.0):
    """FedAvg, client by client."""
    x = task.initial(3)
    for version, cohort in enumerate(cohorts):
        n = torch.tensor([float(task.sizes[c]) for c in cohort])
        y = torch.stack([alone(task, work, c, x, version, bend) for c in cohort])
        x = (n[:, None] / n.sum() * y).sum(0)
    return x


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_it_steps_as_torch_does_on_uneven_clients(blobs, optimizer, decay):
    work = fb.Work(lr=0.01, batch=5, epochs=2, weight_decay=decay, optimizer=optimizer)
    result = fb.simulate(blobs, fb.fedavg(), work, fb.rounds(3, clients=4), seed=3, engine=VMAP)
    x = transcribed(blobs, work, [r["clients"] for r in result.history])
    torch.testing.assert_close(result.x, x, atol=2e-5, rtol=0)


def test_it_follows_what_the_rule_made_of_the_gradient(blobs):
    work = fb.Work(lr=0.02, batch=5, epochs=2, optimizer="adam")
    result = fb.simulate(blobs, fb.fedprox(mu=3.0), work, fb.rounds(2, clients=4), seed=3, engine=VMAP)
    cohorts = [r["clients"] for r in result.history]
    torch.testing.assert_close(result.x, transcribed(blobs, work, cohorts, 3.0), atol=2e-5, rtol=0)
    assert (result.x - transcribed(blobs, work, cohorts)).abs().max() > 1e-3


@pytest.mark.parametrize("optimizer", OTHERS)
def test_results_do_not_depend_on_the_block(blobs, optimizer):
    work = fb.Work(lr=0.01, batch=5, epochs=2, weight_decay=0.01, optimizer=optimizer)
    engines = ["in_process(block=1, backend='vmap')", "in_process(block=64, backend='vmap')"]
    one, many = (fb.simulate(blobs, fb.fedavg(), work, fb.rounds(3, clients=6), engine=e).x for e in engines)
    torch.testing.assert_close(one, many, atol=2e-5, rtol=0)


def test_sgd_is_what_it_was(blobs):
    plain, named = fb.Work(lr=0.1, momentum=0.5), fb.Work(lr=0.1, momentum=0.5, optimizer="sgd")
    x, y = (fb.simulate(blobs, fb.fedavg(), w, fb.rounds(2), engine=VMAP).x for w in (plain, named))
    assert torch.equal(x, y)


def test_a_full_gradient_has_no_part_of_a_decay_that_is_decoupled(blobs):
    def grad(**kw):
        work = fb.Work(lr=1e-12, batch=None, weight_decay=0.5, **kw)
        result = fb.simulate(blobs, fb.mimelite(beta=0.0), work, fb.rounds(1, clients=6), engine=VMAP)
        return result.state.server[0]["m"]

    torch.testing.assert_close(grad() - grad(optimizer="adamw"), 0.5 * blobs.initial(0), atol=1e-5, rtol=0)


# Rates ------------------------------------------------------------------------------------------------


def test_rates_by_name():
    cosine = fb.rates.cosine(0.2, 10, warmup=2, least=0.02)
    assert [cosine(0), cosine(1), cosine(2)] == [0.1, 0.2, 0.2]
    assert cosine(6) == pytest.approx(0.11)
    assert cosine(9) == cosine(500) == pytest.approx(0.02 + 0.09 * (1 + math.cos(math.pi * 7 / 8)))
    warm = fb.rates.warmup(0.4, 4)
    assert [warm(v) for v in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert fb.rates.cosine(0.1, 5)(99) > 0


@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        ([0.3, 0.2], [0.3, 0.2, 0.2]),
        (np.array([0.5, 0.25]), [0.5, 0.25, 0.25]),
        (lambda version: 0.1 / (1 + version), [0.1, 0.05, 0.1 / 3]),
        (fb.rates.warmup(0.2, 2), [0.1, 0.2, 0.2]),
    ],
    ids=["list", "array", "function", "warmup"],
)
def test_a_rate_follows_the_version(blobs, lr, expected):
    work = fb.Work(lr=lr, batch=10)
    result = fb.simulate(blobs, fb.fedavg(), work, fb.rounds(3, clients=3), engine=VMAP)
    assert [r["lr"] for r in result.history] == pytest.approx(expected)
    x = None
    for steps in range(1, 4):  # as three runs at a fixed list of rates
        again = fb.Work(lr=expected[:steps], batch=10)
        x = fb.simulate(blobs, fb.fedavg(), again, fb.rounds(steps, clients=3), engine=VMAP).x
    assert torch.allclose(result.x, x, atol=1e-7)


@pytest.mark.parametrize(
    "work",
    [
        fb.Work(lr=[0.3, 0.2], optimizer="lion"),
        fb.Work(lr=fb.rates.cosine(0.1, 50, warmup=5), steps=3),
        fb.Work(lr=fb.rates.warmup(0.1, 5), lr_decay=0.9, optimizer="adamw", weight_decay=0.1),
        fb.Work(lr=lambda v: 0.1 / (v + 1)).tabled(7),
    ],
)
def test_work_prints_as_it_is_read_again(work):
    assert evaluate(repr(work), WORK, "work") == work
    assert hash(work) == hash(evaluate(repr(work), WORK, "work"))


# Where it runs ----------------------------------------------------------------------------------------


class StopAt:
    def __init__(self, step):
        self.at = step

    def step(self, record, run):
        if record["step"] == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lr", [[0.02, 0.01], lambda v: 0.02 / (v + 1), fb.rates.cosine(0.02, 6, warmup=2)])
def test_a_stopped_run_goes_on_to_the_same_bits_without_being_told_the_rate_again(blobs, tmp_path, lr):
    work, schedule = fb.Work(lr=lr, batch=5, optimizer="adam"), fb.rounds(6, clients=3)
    whole = fb.simulate(blobs, fb.fedavg(), work, schedule, engine=VMAP)
    with pytest.raises(KeyboardInterrupt):
        fb.simulate(
            blobs, fb.fedavg(), work, schedule, engine=VMAP, out=tmp_path / "run", callbacks=[StopAt(4)]
        )
    assert torch.equal(fb.resume(tmp_path / "run", task=blobs).x, whole.x)
    fb.simulate(blobs, fb.fedavg(), work, schedule, engine=VMAP, out=tmp_path / "run")
    other = fb.Work(lr=lambda v: 0.5, batch=5, optimizer="adam")
    with pytest.raises(RunError, match="already contains a run with work="):
        fb.simulate(blobs, fb.fedavg(), other, schedule, engine=VMAP, out=tmp_path / "run")


def test_a_pool_and_stale_clients_get_the_same(blobs):
    work = fb.Work(lr=lambda v: 0.02 / (v + 1), batch=5, optimizer="rmsprop")
    schedule = fb.buffered(4, buffer=3, concurrency=4)
    here, apart = (
        fb.simulate(blobs, fb.fedbuff(), work, schedule, engine=e).x
        for e in ("in_process(backend='loop')", "pool(workers=2, backend='loop')")
    )
    assert torch.equal(here, apart)


@pytest.mark.parametrize(
    "make", [fb.fedadavr, fb.feddyn, fb.adabest, fb.mimelite, fb.mfl, fb.fedvarp, fb.qafel]
)
def test_other_algorithms_run_with_it(blobs, make):
    work = fb.Work(lr=0.01, batch=10, optimizer="adam")
    assert fb.simulate(blobs, make(), work, fb.rounds(3, clients=3), engine=VMAP).x.isfinite().all()


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", PLAIN_ONLY)
def test_what_reads_gradients_off_a_visit_takes_plain_steps_alone(blobs, make, tmp_path):
    adam, schedule = fb.Work(optimizer="adam"), fb.rounds(1)
    for a in (make(), fb.with_codecs(make(), up=fb.codecs.int8())):
        with pytest.raises(ConfigError, match="use optimizer='sgd' or another algorithm"):
            fb.simulate(blobs, a, adam, schedule, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="use optimizer='sgd'"):
        Settings(algorithm=make(), work="Work(optimizer='lion')").what()
    with pytest.raises(ConfigError, match="use optimizer='sgd'"):
        as_entries({"a": make()}, adam, schedule)
    fb.simulate(blobs, make(), fb.Work(momentum=0.5), schedule, engine=VMAP)


def test_a_rule_among_others_is_asked_too(blobs):
    from fedbraid.algorithms.averaging import EffectiveSteps, Proximal

    assert fb.chain(Proximal(0.1), EffectiveSteps()).traits().requires_sgd
    assert not fb.chain(Proximal(0.1), Proximal(0.2)).traits().requires_sgd


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"optimizer": torch.optim.Adam}, "unknown optimizer <class .*; valid: adagrad, adam"),
        ({"optimizer": "adam", "momentum": 0.9}, "leave it out"),
        ({"lr": []}, "has no rate"),
        ({"lr": [0.1, 0.0]}, r"lr\[1\] must be > 0, got 0.0"),
        ({"lr": "0.1"}, "is not a number"),
        ({"lr": [0.1, "x"]}, r"lr\[1\] must be > 0, got 'x', which is not a number"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(settings, said):
    with pytest.raises(ConfigError, match=said):
        fb.Work(**settings)


def test_bad_rates_are_refused_before_anything_runs(blobs, tmp_path):
    for lr, said in (
        (lambda v: 1 - v, r"lr\(1\) must be > 0, got 0"),
        (lambda v: None, r"lr\(0\) must be > 0, got None"),
    ):
        with pytest.raises(ConfigError, match=said):
            fb.simulate(blobs, fb.fedavg(), fb.Work(lr=lr), fb.rounds(2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"warmup must be in \[0, 5\)"):
        fb.rates.cosine(0.1, 5, warmup=5)
    with pytest.raises(ConfigError, match=r"least must be in \[0, 0\.1\]"):
        fb.rates.cosine(0.1, 5, least=0.2)
    with pytest.raises(ConfigError, match="does not train"):
        fb.rates.warmup(-0.1, 5)


# The shell ----------------------------------------------------------------------------------------------


def test_a_deployment_reads_rates_and_lists_those_of_a_function():
    text = "Work(lr=cosine(0.1, 20, warmup=2), optimizer='adamw')"
    assert Settings(work=text).what()[1] == fb.Work(lr=fb.rates.cosine(0.1, 20, 2), optimizer="adamw")
    own = Settings(work=fb.Work(lr=lambda v: 0.1 / (v + 1)), schedule="rounds(3, clients=2)").what()[1]
    assert own.lr == (0.1, 0.05, 0.1 / 3)


@pytest.mark.parametrize(
    ("options", "work"),
    [
        (["--optimizer", "adam"], "Work(lr=0.001, batch=5, optimizer='adam')"),
        (["--optimizer", "lion", "--lr", "0.0003"], "Work(lr=0.0003, batch=5, optimizer='lion')"),
        (["--lr", "cosine(0.1, 2)"], "Work(lr=cosine(0.1, 2), batch=5, momentum=0.9)"),
        (["--lr", "[0.1, 0.2]"], "Work(lr=(0.1, 0.2), batch=5, momentum=0.9)"),
    ],
)
def test_the_shell_says_the_same(tmp_path, options, work):
    import json

    from typer.testing import CliRunner

    from fedbraid.cli import app

    out = tmp_path / "run"
    words = ["run", "digits", "fedavg", "--rounds", "1", "--per-round", "2", "--out", str(out), "--quiet"]
    said = CliRunner().invoke(app, [*words, *options])
    assert said.exit_code == 0, said.output
    known = json.loads((out / "run.json").read_text())
    assert evaluate(known["work"], WORK, "work") == evaluate(work, WORK, "work")
    line = command(sections(known))
    assert options[0] in line
    assert ("--momentum" in line) == ("momentum" in work)
