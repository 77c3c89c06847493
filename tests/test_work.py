"""Does a client do the work it was given: which samples, how many steps, at what rate, with which draws?"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.core.work import step_counts
from fedbraid.data.augment import CropJitter, Flip, FlipCrop
from fedbraid.data.batches import DrawnBatches
from fedbraid.errors import ConfigError

SIZES = (1, 3, 7, 12, 20)
LOOP = "in_process(backend='loop')"


@pytest.fixture(scope="module")
def task():
    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(n, 4)).astype(np.float32), draw.integers(0, 3, n)) for n in SIZES]
    torch.manual_seed(0)
    return fb.Task.from_arrays(nn.Linear(4, 3), data, data[-1])


def samples(task, work, client, version=0, seed=0):
    """The sample numbers of every step of a client, alone in its block."""
    plan = DrawnBatches(task, work, np.array([client]), version, seed)
    steps = []
    for k in range(int(plan.K[0])):
        batch = plan.batch(k).client(0)
        steps.append((batch.rows[0] - int(task.offsets[client])).tolist())
    return steps


@pytest.mark.parametrize(
    ("work", "counts"),
    [
        (fb.Work(batch=5), [1, 1, 2, 3, 4]),
        (fb.Work(batch=5, last="drop"), [1, 1, 1, 2, 4]),
        (fb.Work(batch=5, last="fill"), [1, 1, 2, 3, 4]),
        (fb.Work(batch=5, epochs=3), [3, 3, 6, 9, 12]),
        (fb.Work(batch=None, epochs=2), [2, 2, 2, 2, 2]),
        (fb.Work(batch=1000), [1, 1, 1, 1, 1]),
        (fb.Work(batch=5, steps=6), [6, 6, 6, 6, 6]),
        (fb.Work(batch=1), [1, 3, 7, 12, 20]),
    ],
    ids=str,
)
def test_steps_are_counted_right(task, work, counts):
    assert step_counts(np.array(SIZES), work).tolist() == counts
    assert [len(samples(task, work, c)) for c in range(5)] == counts


def test_batches_with_replacement_are_full_and_repeat_samples(task):
    work = fb.Work(batch=5, epochs=4, replace=True)
    steps = samples(task, work, 3)
    assert [len(s) for s in steps] == [5] * 12
    assert any(len(set(s)) < 5 for s in steps)
    assert set(chain(*steps)) == set(range(12))
    assert steps == samples(task, work, 3)
    assert samples(task, work, 1) != samples(task, work, 1, version=1)
    block = DrawnBatches(task, work, np.array([3, 0, 1]), 0, 0)
    assert (block.batch(2).client(0).rows[0] - int(task.offsets[3])).tolist() == steps[2]
    with pytest.raises(ConfigError, match="replace=True draws batches"):
        fb.Work(batch=None, replace=True)


def test_without_shuffling_every_epoch_goes_through_the_samples_as_they_lie(task):
    steps = samples(task, fb.Work(batch=5, epochs=2, shuffle=False), 3)
    assert steps == 2 * [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert steps != samples(task, fb.Work(batch=5, epochs=2), 3)
    with pytest.raises(ConfigError, match="shuffle=False takes them as they lie"):
        fb.Work(replace=True, shuffle=False)


def test_an_epoch_sees_every_sample_once_in_an_order_of_its_own(task):
    steps = samples(task, fb.Work(batch=5, epochs=2), 3)
    assert [len(s) for s in steps] == [5, 5, 2, 5, 5, 2]
    first, second = [*chain(*steps[:3])], [*chain(*steps[3:])]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12))
    assert samples(task, fb.Work(batch=5), 3, version=1) != steps[:3]
    assert samples(task, fb.Work(batch=5), 3, seed=1) != steps[:3]


def test_the_last_batch_is_kept_dropped_or_filled(task):
    assert [len(s) for s in samples(task, fb.Work(batch=5, last="keep"), 2)] == [5, 2]
    assert [len(s) for s in samples(task, fb.Work(batch=5, last="drop"), 2)] == [5]
    filled = samples(task, fb.Work(batch=5, last="fill"), 2)
    assert [len(s) for s in filled] == [5, 5]
    assert sorted(filled[0] + filled[1][:2]) == list(range(7))
    assert set(filled[1][2:]) <= set(range(7))


def test_a_client_smaller_than_a_batch_trains_on_all_it_has(task):
    for last in ("keep", "drop", "fill"):
        assert samples(task, fb.Work(batch=5, steps=2, last=last), 1) == [[0, 1, 2]] * 2


def test_steps_go_on_into_the_next_epoch(task):
    steps = samples(task, fb.Work(batch=5, steps=7), 3)
    assert [len(s) for s in steps] == [5, 5, 2, 5, 5, 2, 5]
    assert sorted(chain(*steps[3:6])) == list(range(12))
    dropped = samples(task, fb.Work(batch=5, steps=5, last="drop"), 3)
    assert [len(s) for s in dropped] == [5] * 5


@pytest.mark.parametrize("last", ["keep", "drop", "fill"])
@pytest.mark.parametrize("how", [{"epochs": 2}, {"steps": 7}])
def test_batches_do_not_depend_on_the_block(task, last, how):
    work = fb.Work(batch=5, last=last, **how)
    plan = DrawnBatches(task, work, np.arange(5), 2, 9)
    alone = [samples(task, work, c, 2, 9) for c in range(5)]
    for k in range(int(plan.K.max())):
        batch = plan.batch(k)
        for c in range(5):
            mine = (batch.client(c).rows[0] - int(task.offsets[c])).tolist()
            assert mine == (alone[c][k] if k < len(alone[c]) else [])


@pytest.mark.parametrize("last", ["keep", "drop", "fill"])
@pytest.mark.parametrize("batch", [None, 5])
def test_results_do_not_depend_on_block_or_backend(task, last, batch):
    work = fb.Work(lr=0.1, batch=batch, epochs=2, last=last, momentum=0.5)
    xs = [
        fb.simulate(task, fb.scaffold(), work, fb.rounds(3, clients=99), seed=1, engine=engine)
        for engine in (
            LOOP,
            "in_process(block=1, backend='vmap')",
            "in_process(block=2, backend='vmap')",
            "in_process",
        )
    ]
    for other in xs[1:]:
        assert torch.allclose(xs[0].x, other.x, atol=1e-6)
    assert all(sorted(r["clients"]) == [0, 1, 2, 3, 4] for r in xs[0].history)  # more were asked than exist


def by_hand(task, client, work, rounds=1):
    """A client alone, by torch's own SGD."""
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for t in range(rounds):
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=work.lr * work.lr_decay**t,
            momentum=work.momentum,
            weight_decay=work.weight_decay,
        )
        for picked in samples(task, work, client, t):
            rows = torch.tensor(picked) + int(task.offsets[client])
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(task.inputs[rows]), task.targets[rows]).backward()
            if work.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), work.clip)
            optimizer.step()
    return task.layout.flatten(module)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"clip": 0.2},
        {"lr_decay": 0.5},
        {"momentum": 0.5, "weight_decay": 0.01, "clip": 0.3, "lr_decay": 0.9},
    ],
    ids=str,
)
def test_local_training_is_torchs_sgd(task, settings):
    work = fb.Work(lr=0.2, batch=5, epochs=2, **settings)
    result = fb.simulate(task, fb.fedavg(), work, fb.rounds(3, clients=[[3]] * 3), engine=LOOP)
    assert torch.allclose(result.x, by_hand(task, 3, work, 3), atol=1e-6)
    assert result.history[2]["lr"] == pytest.approx(0.2 * work.lr_decay**2)
    plain = fb.Work(lr=0.2, batch=5, epochs=2)
    if settings:
        assert not torch.allclose(result.x, by_hand(task, 3, plain, 3), atol=1e-4)


def test_momentum_starts_anew_with_every_visit(task):
    work = fb.Work(lr=0.1, batch=None, steps=1, momentum=0.9)
    plain = fb.Work(lr=0.1, batch=None, steps=1)
    xs = [fb.simulate(task, fb.fedavg(), w, fb.rounds(3, clients=2), engine=LOOP).x for w in (work, plain)]
    assert torch.equal(*xs)


def images():
    draw = np.random.default_rng(1)
    return [(draw.normal(size=(n, 1, 6, 6)).astype(np.float32), draw.integers(0, 2, n)) for n in (5, 9, 4)]


def test_augmentation_is_drawn_from_counted_randomness():
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    work, plan = fb.Work(lr=0.1, batch=4, epochs=2), fb.rounds(3, clients=3)
    plain = fb.simulate(fb.Task.from_arrays(module, images()), fb.fedavg(), work, plan, engine=LOOP).x
    for augment in (Flip(), FlipCrop(2), FlipCrop(2, per="batch")):
        task = fb.Task.from_arrays(module, images(), augment=augment)
        torch.manual_seed(3)
        first = fb.simulate(task, fb.fedavg(), work, plan, engine=LOOP)
        torch.manual_seed(4)
        for engine in (
            LOOP,
            "in_process(block=3, backend='loop')",
            "in_process(backend='vmap')",
            "in_process",
        ):
            again = fb.simulate(task, fb.fedavg(), work, plan, engine=engine)
            assert torch.allclose(first.x, again.x, atol=1e-6)
        assert not torch.allclose(first.x, plain, atol=1e-4)
        other = fb.simulate(task, fb.fedavg(), work, plan, seed=1, engine=LOOP)
        assert not torch.equal(first.x, other.x)


def test_flip_and_crop_do_what_they_say():
    x = torch.arange(32.0).view(2, 1, 4, 4)
    assert torch.equal(
        Flip()(x, torch.tensor([[0.2, 0, 0], [0.7, 0, 0]])), torch.stack([x[0].flip(-1), x[1]])
    )
    middle = torch.tensor([[0.7, 0.5, 0.5]] * 2)
    assert torch.equal(FlipCrop(1)(x, middle), x)
    corner = FlipCrop(1)(x, torch.tensor([[0.7, 0.0, 0.0]] * 2))
    assert torch.equal(corner[:, :, 1:, 1:], x[:, :, :3, :3])
    assert not corner[:, :, 0].any()


def test_a_batch_may_share_one_draw():
    task = fb.Task.from_arrays(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 2)),
        [(np.zeros((9, 1, 6, 6)), np.zeros(9, int))],
        augment=FlipCrop(2, per="batch"),
    )
    plan = DrawnBatches(task, fb.Work(batch=4), np.array([0]), 0, 0)
    first, second = (plan.batch(k).draws[0] for k in (0, 1))
    assert torch.equal(first, first[:1].expand_as(first))
    assert not torch.equal(first[0], second[0])


def test_jitter_crops_and_keeps_colours_in_range():
    x = torch.rand(5, 3, 8, 8)
    still = torch.tensor([[0.7, 0.0, 0.5, 0.5, 0.5, 0.5]] * 5)
    assert torch.allclose(CropJitter(6)(x, still), x[:, :, :6, 1:7], atol=1e-6)
    bright = CropJitter(6, strength=0.5)(x, still.index_fill(1, torch.tensor([3]), 0.75))
    assert torch.allclose(bright, (1.25 * x[:, :, :6, 1:7]).clamp(0, 1), atol=1e-2)
    dull = CropJitter(8, strength=0.9)(x, still.index_fill(1, torch.tensor([5]), 0.0))
    assert (dull.std(1) < 0.2 * x.std(1)).all()


class Twice:
    """Doubles every image, so that a gradient over them is known."""

    draws, per = 1, "sample"

    def __call__(self, x, draws):
        return 2 * x


def test_a_gradient_over_the_whole_local_set_is_augmented_too():
    """Mimelite's first moment after one full step is (1 − β) times it."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 2, bias=False))
    work, doubled = fb.Work(lr=0.1, batch=None, steps=1), [(2 * x, y) for x, y in images()]
    first, second = (
        fb.simulate(task, fb.mimelite("sgdm", beta=0.5), work, fb.rounds(3, clients=3), engine=LOOP).x
        for task in (
            fb.Task.from_arrays(module, images(), augment=Twice()),
            fb.Task.from_arrays(module, doubled),
        )
    )
    assert torch.allclose(first, second, atol=1e-6)


def test_augmentation_touches_training_alone():
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    runs = [
        fb.simulate(
            fb.Task.from_arrays(module, images(), images()[0], augment=augment),
            fb.fedavg(),
            fb.Work(lr=1e-12, batch=4),
            fb.rounds(1),
        )
        for augment in (None, FlipCrop(2))
    ]
    assert runs[0].last("loss") == pytest.approx(runs[1].last("loss"), abs=1e-6)


def dropping():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


@pytest.mark.parametrize("algorithm", [fb.fedavg(), fb.mimelite()], ids=lambda a: a.name)
def test_dropout_is_counted(task, algorithm):
    data = [(task.inputs[task.offsets[c] : task.offsets[c + 1]], task.labels(c)) for c in range(5)]
    dropped = fb.Task.from_arrays(dropping, data, data[0])
    work, plan = fb.Work(lr=0.1, batch=5, epochs=2), fb.rounds(3, clients=4)
    torch.manual_seed(5)
    first = fb.simulate(dropped, algorithm, work, plan, engine=LOOP)
    torch.manual_seed(6)
    for engine in (LOOP, "in_process(block=4, backend='loop')", "auto", "pool(workers=2)"):
        again = fb.simulate(dropped, algorithm, work, plan, engine=engine)
        assert torch.allclose(first.x, again.x, atol=1e-6)
        assert first.last("loss") == pytest.approx(again.last("loss"), rel=1e-5)  # judged without dropout
    still = fb.Task.from_arrays(
        lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, 3)), data
    )
    assert torch.equal(still.initial(0), dropped.initial(0))
    assert not torch.allclose(fb.simulate(still, algorithm, work, plan, engine=LOOP).x, first.x, atol=1e-3)
    with pytest.raises(ConfigError, match="use backend='loop'"):
        fb.simulate(dropped, algorithm, work, plan, engine="in_process(backend='vmap')")


def test_histories_hold_what_the_contract_names(task):
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(4, clients=2), seed=2)
    assert [r["step"] for r in result.history] == [1, 2, 3, 4]
    for record in result.history:
        assert record.keys() >= {"step", "time", "clients", "bytes_up", "bytes_down", "loss", "accuracy"}
        assert len(record["clients"]) == 2
        assert all(type(c) is int for c in record["clients"])
        assert type(record["bytes_up"]) is type(record["bytes_down"]) is int
        assert type(record["time"]) is type(record["loss"]) is float
    assert [r["time"] for r in result.history] == sorted(r["time"] for r in result.history)
    assert result.bytes_up == sum(r["bytes_up"] for r in result.history)
    assert result.x.dtype == torch.float32
    assert result.x.shape == (task.layout.size,)


def test_numpy_numbers_are_numbers(task, tmp_path):
    work = fb.Work(lr=np.float64(0.1), steps=np.int64(2), momentum=np.float32(0.5))
    assert work == fb.Work(lr=0.1, steps=2, momentum=0.5)
    assert repr(work) == repr(fb.Work(lr=0.1, steps=2, momentum=0.5))
    plan = fb.rounds(np.int64(2), clients=np.int32(3))
    assert repr(plan) == repr(fb.rounds(2, clients=3))
    algorithm = fb.fedadam(lr=np.float64(0.01))
    assert algorithm.name == fb.fedadam().name
    out = tmp_path / "run"
    first = fb.simulate(task, algorithm, work, plan, seed=np.int64(3), out=out)
    assert torch.equal(fb.resume(out, task=task).x, first.x)


@pytest.mark.parametrize("rho", [0.5, 0.9, 0.99])
def test_effective_steps_are_exact_to_float32(rho):
    """In float32 all through, two steps at ρ = 0.99 would be off by 1 in 10⁴, and every estimate that is divided by them."""
    for K in (1, 2, 7, 40):
        moved = sum(
            (1 - rho ** (K - k)) / (1 - rho) for k in range(K)
        )  # each gradient's share, all its echoes
        a = fb.Work(momentum=rho).effective(torch.tensor([[float(K)]]))
        assert a.dtype == torch.float32
        assert abs(a.item() / moved - 1) < 1e-7
