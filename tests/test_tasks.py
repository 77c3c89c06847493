"""Do people's own models and data become tasks, and are they left as they were?"""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedbraid as fb
from fedbraid.errors import DataError

LOOP = "in_process(backend='loop')"
WORK = fb.Work(lr=0.1, batch=4)


def pairs(sizes=(7, 12, 20), seed=0, targets="classes"):
    draw = np.random.default_rng(seed)
    out = []
    for n in sizes:
        x = draw.normal(size=(n, 5)).astype(np.float32)
        y = draw.integers(0, 3, n) if targets == "classes" else (x @ np.arange(5.0)).astype(np.float32)
        out.append((x, y))
    return out


class Drops(nn.Module):
    """Dropout as a function, which no list of layers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 3)

    def forward(self, x):
        return self.line(nn.functional.dropout(x, 0.5, self.training))


MODELS = {
    "linear": lambda: nn.Linear(5, 3),
    "dropout layer": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "dropout function": Drops,
}


def test_arrays_lists_tensors_and_datasets_are_the_same():
    data = pairs()
    test = pairs((9,), seed=1)[0]
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    tasks = [
        fb.Task.from_arrays(nn.Linear(5, 3), data, test),
        fb.Task.from_arrays(nn.Linear(5, 3), tensors, test),
        fb.Task.from_arrays(nn.Linear(5, 3), [(x.tolist(), y.tolist()) for x, y in data], test),
        fb.Task.from_datasets(
            nn.Linear(5, 3),
            [TensorDataset(x, y) for x, y in tensors],
            TensorDataset(*(torch.from_numpy(t) for t in test)),
        ),
        fb.Task.from_table(
            nn.Linear(5, 3),
            np.concatenate([x for x, _ in data]),
            np.concatenate([y for _, y in data]),
            [np.arange(7), np.arange(7, 19), np.arange(19, 39)],
            test=test,
        ),
    ]
    for task in tasks:
        assert (task.clients, task.sizes.tolist(), task.classes) == (3, [7, 12, 20], 3)
        assert torch.equal(task.inputs, tasks[0].inputs)
        assert torch.equal(task.labels(1), torch.from_numpy(data[1][1]))
        assert torch.equal(task.test[0], tasks[0].test[0])


def test_a_table_may_be_shared():
    x, y = pairs((30,))[0]
    task = fb.Task.from_table(nn.Linear(5, 3), x, y, [np.array([3, 3, 1]), np.array([1, 29])])
    assert task.sizes.tolist() == [3, 2]
    assert task.labels(0).tolist() == [y[3], y[3], y[1]]
    assert len(fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2)).history) == 2


def test_a_given_module_is_the_start_and_is_never_changed():
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    before = copy.deepcopy(module.state_dict())
    task = fb.Task.from_arrays(module, pairs())
    layout = fb.Layout.of(module)
    for seed in (0, 1):
        assert torch.equal(task.initial(seed), layout.flatten(module))
    for engine in (LOOP, "in_process", "pool(workers=2)"):
        fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2), engine=engine)
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert not module.training
    start = task.initial(0)
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(task.initial(0), start)


def test_a_function_starts_from_weights_of_the_seed():
    task = fb.Task.from_arrays(lambda: nn.Linear(5, 3), pairs())
    torch.manual_seed(7)
    first = task.initial(0)
    torch.manual_seed(8)
    assert torch.equal(task.initial(0), first)
    assert not torch.equal(task.initial(1), first)


def test_a_function_that_always_gives_one_module_gives_its_weights():
    module = nn.Linear(5, 3)
    before = fb.Layout.of(module).flatten(module)
    task = fb.Task.from_arrays(lambda: module, pairs(), pairs((9,))[0])
    assert torch.equal(task.initial(3), before)
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3), engine=LOOP)
    assert torch.equal(fb.Layout.of(module).flatten(module), before)
    again = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3), engine="in_process(backend='vmap')")
    assert torch.allclose(result.x, again.x, atol=1e-6)
    assert result.last("loss") == pytest.approx(again.last("loss"), abs=1e-6)


@pytest.mark.parametrize("engine", [LOOP, "in_process", "pool(workers=2)"])
def test_lambdas_and_closures_run_in_every_local_engine(engine):
    width, weight = 3, torch.tensor([1.0, 2.0, 0.5])
    task = fb.Task.from_arrays(
        lambda: nn.Linear(5, width),
        pairs(),
        pairs((9,))[0],
        loss=lambda out, y: nn.functional.cross_entropy(out, y, weight, reduction="none"),
    )
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3), engine=engine)
    assert result.history[-1]["loss"] < result.history[0]["loss"] * 1.5
    assert 0 <= result.last("accuracy") <= 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["in_process", "pool(workers=2)"])
def test_the_users_random_state_and_threads_are_untouched(model, engine):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate(), torch.get_num_threads()  # noqa: NPY002
    task = fb.Task.from_arrays(MODELS[model], pairs(), pairs((9,))[0])
    fb.simulate(task, fb.mimelite(), WORK, fb.rounds(2), engine=engine)
    fb.simulate(task, fb.fedpaq(fb.codecs.qsgd(3)), WORK, fb.buffered(3, 2, 2), engine=engine).model()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1]))  # noqa: NPY002
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == before[3]


def test_threads_are_restored_when_a_run_fails():
    torch.set_num_threads(2)
    try:
        task = fb.Task.from_arrays(nn.Linear(5, 3), pairs())
        with pytest.raises(fb.errors.Diverged):
            fb.simulate(task, fb.fedprox(1e20), fb.Work(lr=1e30, steps=4), fb.rounds(2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_without_a_test_set_nothing_is_judged():
    task = fb.Task.from_arrays(nn.Linear(5, 3), pairs())
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2))
    for record in result.history:
        assert "accuracy" not in record
        assert "loss" not in record
        assert record["train_loss"] > 0
    assert result.last("accuracy") is None
    assert "accuracy" not in str(result)


def test_regression_learns_and_has_no_accuracy():
    data = pairs(targets="numbers")
    for shape in ((), (1,)):
        shaped = [(x, y.reshape(-1, *shape)) for x, y in data]
        task = fb.Task.from_arrays(nn.Linear(5, 1), shaped, shaped[0], loss="mse")
        result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.05, epochs=2), fb.rounds(10), evaluate_on="test")
        assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
        assert "accuracy" not in result.history[0]


def test_a_loss_of_ones_own_is_the_named_one():
    def own(out, y):
        return (out.squeeze(1) - y) ** 2

    data = pairs(targets="numbers")
    module = nn.Linear(5, 1)
    results = [
        fb.simulate(
            fb.Task.from_arrays(module, data, data[0], loss), fb.fedavg(), WORK, fb.rounds(3), engine=LOOP
        )
        for loss in ("mse", own)
    ]
    assert torch.allclose(results[0].x, results[1].x, atol=1e-6)
    assert results[0].last("loss") == pytest.approx(results[1].last("loss"), rel=1e-5)


def test_many_labels_per_sample_have_a_loss_and_no_accuracy():
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(n, 5)), draw.integers(0, 2, (n, 3))) for n in (5, 6)]

    def each(out, y):
        return nn.functional.binary_cross_entropy_with_logits(out, y.float(), reduction="none").mean(1)

    task = fb.Task.from_arrays(nn.Linear(5, 3), data, data[0], each)
    record = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(1)).history[0]
    assert "loss" in record
    assert "accuracy" not in record


def test_evaluation_every_n_steps_and_at_the_end(blobs):
    history = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(7), evaluate_every=3).history
    assert [r["step"] for r in history if "accuracy" in r] == [3, 6, 7]
    history = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3), evaluate_every=None).history
    assert not any("loss" in r for r in history)


def test_evaluation_on_the_clients_shares():
    data = pairs()
    tests = pairs((4, 6, 1), seed=2)
    module = nn.Linear(5, 3)
    task = fb.Task.from_arrays(module, data, client_tests=[tests[0], None, tests[2]])
    assert len(task.test[0]) == 5
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2), evaluate_on="clients")
    model, record = result.model(), result.history[-1]
    right = [
        float((model(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)).float().mean())
        for x, y in (tests[0], tests[2])
    ]
    assert record["accuracy"] == pytest.approx((4 * right[0] + right[1]) / 5)
    assert record["accuracy_clients"] == pytest.approx(np.mean(right))
    assert record["accuracy_worst_tenth"] == pytest.approx(min(right))
    numbers = fb.Task.from_arrays(
        nn.Linear(5, 1), pairs(targets="numbers"), loss="mse", client_tests=pairs(targets="numbers")
    )
    record = fb.simulate(numbers, fb.fedavg(), WORK, fb.rounds(1), evaluate_on="clients").history[0]
    assert record["loss_clients"] > 0
    assert "accuracy_clients" not in record


def test_fingerprints_tell_tasks_apart():
    module, data = nn.Linear(5, 1), pairs(targets="numbers")
    first = fb.Task.from_arrays(module, data, loss="mse")
    same = fb.Task.from_arrays(copy.deepcopy(module), data, loss="mse")
    assert first.fingerprint == same.fingerprint
    frozen = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 1))
    other = copy.deepcopy(frozen)
    with torch.no_grad():
        other[0].weight += 1
    others = [
        fb.Task.from_arrays(nn.Linear(5, 1), data, loss="mse"),
        fb.Task.from_arrays(module, data[::-1], loss="mse"),
        fb.Task.from_arrays(module, data, data[0], loss="mse"),
        fb.Task.from_arrays(module, data, loss=lambda out, y: (out.squeeze(1) - y).abs()),
        fb.Task.from_arrays(frozen, data, loss="mse"),
        fb.Task.from_arrays(other, data, loss="mse"),
    ]
    assert len({t.fingerprint for t in [first, *others]}) == 7


def test_device_is_taken_by_name_or_object(blobs):
    first = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), device="cpu")
    second = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), device=torch.device("cpu"))
    assert torch.equal(first.x, second.x)


def test_two_tasks_of_one_module_do_not_mix():
    module = nn.Linear(5, 3)
    one, two = fb.Task.from_arrays(module, pairs()), fb.Task.from_arrays(module, pairs(seed=5))
    alone = fb.simulate(one, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP).x
    fb.simulate(two, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP)
    assert torch.equal(fb.simulate(one, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP).x, alone)


def test_refusals_say_what_to_do():
    data = pairs()
    with pytest.raises(DataError, match="both test= and client_tests="):
        fb.Task.from_arrays(nn.Linear(5, 3), data, data[0], client_tests=data)
    with pytest.raises(DataError, match="2 local test sets for 3 clients"):
        fb.Task.from_arrays(nn.Linear(5, 3), data, client_tests=data[:2])


@pytest.mark.parametrize("partition", ["label_chunks(1)", "dirichlet(0.3)", "iid()"])
def test_test_shares_have_the_labels_of_their_clients(partition):
    task = fb.tasks.load("digits", clients=20, partition=partition, test_shares=True)
    plain = fb.tasks.load("digits", clients=20, partition=partition)
    assert torch.equal(task.rows, plain.rows)
    assert task.test_offsets[-1] == len(task.test[1]) == len(plain.test[1])
    assert torch.equal(task.test[1].bincount(), plain.test[1].bincount())
    for client in range(20):
        lo, hi = task.test_offsets[client : client + 2]
        assert set(task.test[1][lo:hi].tolist()) <= set(task.labels(client).tolist())
    again = fb.tasks.reload(task.spec)
    assert again.fingerprint == task.fingerprint
    work, plan = fb.Work(lr=0.05), fb.rounds(2, clients=3)
    record = fb.simulate(task, fb.fedavg(), work, plan, evaluate_on="clients").history[-1]
    assert record["accuracy_worst_tenth"] <= record["accuracy_clients"]
