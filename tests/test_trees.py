"""Do inputs and targets of several tensors train as one tensor does, in every engine and with every algorithm?"""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from test_resume import SCHEDULES, Stop, StopAt, algorithms
from torch import nn

import fedbraid as fb
from fedbraid.data import tree
from fedbraid.data.batches import Batch
from fedbraid.engines.flops import of_task as forward
from fedbraid.errors import DataError
from fedbraid_native.build import compiler

LOOP = "in_process(backend='loop')"
VMAP = "in_process(backend='vmap')"
WORK = fb.Work(lr=0.1, epochs=1, batch=8, momentum=0.5)


class Two(nn.Module):
    """One linear map over two parts of the same five features."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 3)

    def forward(self, left, right):
        return self.line(torch.cat([left, right], -1))


def halves(x):
    return {"left": x[:, :2], "right": x[:, 2:]}


def clients(task):
    at = [slice(a, b) for a, b in zip(task.offsets, task.offsets[1:])]
    return [(task.inputs[a], task.targets[a]) for a in at]


def model_of(task):
    two = Two()
    task.layout.load(two.line, task.start)
    return two


@pytest.fixture(scope="module")
def dicts(blobs):
    """The task of `blobs` with its features in two parts, by name."""
    test = (halves(blobs.test[0]), blobs.test[1])
    return fb.Task.from_arrays(model_of(blobs), [(halves(x), y) for x, y in clients(blobs)], test)


@pytest.mark.parametrize("algorithm", list(algorithms()), ids=lambda a: a.name)
def test_every_algorithm_in_blocks_a_pool_and_resumed(blobs, dicts, tmp_path, algorithm):
    options = {"seed": 3, "evaluate_every": None}
    schedule = SCHEDULES["rounds"]
    plain = fb.simulate(blobs, algorithm, WORK, schedule, engine=LOOP, **options)
    for engine in (LOOP, "pool(workers=2, backend='loop')"):
        assert torch.equal(fb.simulate(dicts, algorithm, WORK, schedule, engine=engine, **options).x, plain.x)
    for block in (1, 64):
        engine = fb.engines.in_process(block=block, backend="vmap")
        found = fb.simulate(dicts, algorithm, WORK, schedule, engine=engine, **options)
        same = fb.simulate(blobs, algorithm, WORK, schedule, engine=engine, **options)
        assert torch.equal(found.x, same.x)
    cut = {"out": tmp_path / "cut", "callbacks": [StopAt(6)], "engine": LOOP}
    with pytest.raises(Stop):
        fb.simulate(dicts, algorithm, WORK, schedule, **cut, **options)
    assert torch.equal(fb.resume(tmp_path / "cut", task=dicts, algorithm=algorithm).x, plain.x)


@pytest.mark.parametrize("backend", ["native", "vmap", "loop"])
def test_a_tree_of_one_tensor_is_that_tensor(blobs, backend, monkeypatch):
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(5, 3)

        def forward(self, x):
            return self.line(x)

    if backend == "native":
        if compiler() is None:
            pytest.skip("no C++ compiler was found")
        monkeypatch.setattr(Batch, "x", None)  # rows are read where they lie, not gathered first
    found = [
        fb.simulate(
            fb.Task.from_table(Line, inputs, blobs.targets, blobs.rows, blobs.offsets),
            fb.fedavg(), WORK, fb.rounds(2), engine=f"in_process(backend='{backend}')", evaluate_every=None,
        ).x
        for inputs in (blobs.inputs, {"x": blobs.inputs}, (blobs.inputs,))
    ]  # fmt: skip
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_ways_to_give_and_to_call(blobs, dicts):
    data, two = clients(blobs), model_of(blobs)
    pairs = [((x[:, :2], x[:, 2:]), y) for x, y in data]
    rows = [np.arange(a, b) for a, b in zip(blobs.offsets, blobs.offsets[1:])]

    def joined(module, inputs):
        return module.line(torch.cat([inputs["left"], inputs["right"]], -1))

    tasks = [
        fb.Task.from_arrays(two, pairs),
        fb.Task.from_arrays(two, [(halves(x), y) for x, y in data], forward=joined),
        fb.Task.from_table(two, halves(blobs.inputs), blobs.targets, rows),
        fb.Task.from_datasets(two, [_Items(halves(x), y) for x, y in data]),
        fb.Task.from_datasets(two, [_Named({**halves(x), "label": y}) for x, y in data]),
        fb.Task.from_datasets(two, [_Named({**halves(x), "kind": y}) for x, y in data], targets="kind"),
    ]
    want = fb.simulate(dicts, fb.fedavg(), WORK, fb.rounds(3), engine=LOOP, evaluate_every=None).x
    for task in tasks:
        for engine in (LOOP, VMAP):
            got = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3), engine=engine, evaluate_every=None).x
            assert torch.allclose(got, want, atol=1e-6)


class _Items(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.x.items()}, self.y[i]


class _Named(torch.utils.data.Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.columns.items()}


Out = namedtuple("Out", "logits hidden")


class Speaks(nn.Module):
    """Gives what a bigger library's models give."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.line, self.kind = nn.Linear(5, 3), kind

    def forward(self, x):
        logits = self.line(x)
        given = {"logits": logits, "hidden": x, "loss": logits.sum()}
        return given if self.kind == "dict" else Out(logits, x)


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_outputs_with_logits(blobs, kind):
    speaks = Speaks(kind)
    blobs.layout.load(speaks.line, blobs.start)
    task = fb.Task.from_arrays(speaks, clients(blobs), blobs.test)
    for engine in (LOOP, VMAP, "auto"):
        got = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3), engine=engine)
        want = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3), engine=engine)
        assert torch.allclose(got.x, want.x, atol=1e-6)
        assert got.last("accuracy") == want.last("accuracy")


def reconstruction(outputs, inputs):
    return (outputs - inputs).square().mean(1)


@pytest.mark.parametrize(
    "loss", [reconstruction, lambda outputs, targets, inputs: reconstruction(outputs, inputs)]
)
@pytest.mark.parametrize("engine", [LOOP, VMAP, "pool(workers=2)"])
def test_without_targets_the_loss_sees_the_inputs(blobs, loss, engine):
    data = clients(blobs)
    torch.manual_seed(0)
    auto = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 5))
    task = fb.Task.from_arrays(auto, [(x, None) for x, _ in data], (blobs.test[0], None), loss)
    known = fb.Task.from_arrays(auto, [(x, x) for x, _ in data], (blobs.test[0], blobs.test[0]), "mse")
    found, want = (fb.simulate(t, fb.fedavg(), WORK, fb.rounds(4), engine=engine) for t in (task, known))
    assert torch.allclose(found.x, want.x, atol=1e-6)
    assert found.last("loss") == pytest.approx(want.last("loss"), rel=1e-5)
    assert task.targets is None
    assert not task.classifies


def test_a_loss_may_use_everything_the_model_gives(blobs):
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(5, 2), nn.Linear(2, 5)

        def forward(self, x):
            code = self.down(x)
            return {"code": code, "again": self.up(code)}

    def loss(outputs, targets, inputs):
        return (outputs["again"] - inputs).square().mean(1) + 0.1 * outputs["code"].abs().sum(1)

    task = fb.Task.from_arrays(Coder, [(x, None) for x, _ in clients(blobs)], (blobs.test[0], None), loss)
    result = fb.simulate(task, fb.scaffold(), WORK, fb.rounds(10))
    assert result.history[-1]["loss"] < result.history[0]["loss"]


# Samples of different lengths ----------------------------------------------------------------------


class Words(nn.Module):
    """The mean of the words' vectors, as far as the mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)
        self.seen: list[int] = []

    def forward(self, input_ids, attention_mask):
        self.seen.append(input_ids.shape[-1])
        w = attention_mask.unsqueeze(-1).float()
        return self.out((self.words(input_ids) * w).sum(-2) / w.sum(-2))


def texts(seed=0):
    draw = np.random.default_rng(seed)
    out = []
    for n in (6, 9, 5):
        said = [draw.integers(1, 20, draw.integers(2, 12)).tolist() for _ in range(n)]
        out.append(({"input_ids": said}, [int(sum(s) % 2) for s in said]))
    return out


def by_hand(data, longest=11):
    """The same, padded by the caller."""

    def row(s, fill):
        return [*fill(s), *[0] * (longest - len(s))]

    return [
        (
            {
                "input_ids": np.array([row(s, lambda s: s) for s in x["input_ids"]]),
                "attention_mask": np.array([row(s, lambda s: [1] * len(s)) for s in x["input_ids"]]),
            },
            y,
        )
        for x, y in data
    ]


def test_padding_once_and_batches_cut_to_their_longest():
    data, test = texts(), texts(1)[0]
    torch.manual_seed(0)
    words = Words()
    task = fb.Task.from_arrays(words, data, test, collate=fb.pad())
    plain = fb.Task.from_arrays(words, by_hand(data), by_hand([test])[0])
    runs = [
        fb.simulate(t, fb.fedavg(), fb.Work(lr=0.5, batch=2), fb.rounds(5), engine=LOOP)
        for t in (task, plain)
    ]
    assert torch.allclose(runs[0].x, runs[1].x, atol=1e-6)
    assert runs[0].last("loss") == pytest.approx(runs[1].last("loss"), rel=1e-5)
    batch = fb.data.batches.Batch(task.inputs, task.targets, torch.tensor([[0, 1]]))
    lengths = [len(s) for s in data[0][0]["input_ids"][:2]]
    assert (
        batch.first_client()[0]["input_ids"].shape
        == (2, max(lengths))
        == batch.first_client()[0]["attention_mask"].shape
    )
    assert batch.x()["input_ids"].shape[-1] == max(len(s) for x, _ in data for s in x["input_ids"])
    vmap = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.5, batch=2), fb.rounds(5), engine=VMAP)
    assert torch.allclose(runs[0].x, vmap.x, atol=1e-6)


def test_a_collate_function_as_in_a_data_loader():
    def together(samples):
        x = nn.utils.rnn.pad_sequence([torch.tensor(s["input_ids"]) for s in samples], batch_first=True)
        return {
            "input_ids": x,
            "attention_mask": (x > 0).long(),
            "labels": torch.tensor([s["kind"] for s in samples]),
        }

    data = texts()
    listed = [[{"input_ids": s, "kind": y} for s, y in zip(x["input_ids"], ys)] for x, ys in data]
    torch.manual_seed(0)
    words = Words()
    made = fb.Task.from_datasets(words, listed, collate=together)
    padded = fb.Task.from_arrays(words, data, collate=fb.pad())
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(made.inputs[key].values, padded.inputs[key].values)
        assert torch.equal(made.inputs[key].lengths, padded.inputs[key].lengths)
    assert made.fingerprint == padded.fingerprint


def test_lone_sequences_get_a_mask_and_targets_may_be_sequences():
    def each(outputs, targets):
        return nn.functional.cross_entropy(
            outputs.movedim(-1, 1), targets, reduction="none", ignore_index=-100
        ).sum(1)

    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)

        def forward(self, ids, mask):
            return self.out(self.words(ids) * mask.unsqueeze(-1))

    data = [(x["input_ids"], [[s % 2 for s in said] for said in x["input_ids"]]) for x, _ in texts()]
    task = fb.Task.from_arrays(Tags, data, data[0], each, collate=fb.pad())
    result = fb.simulate(task, fb.fedadam(), fb.Work(lr=0.5, batch=2), fb.rounds(15))
    assert result.history[-1]["loss"] < result.history[0]["loss"]


# The rest of the library ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript, by torch
def test_devices_fingerprints_flops_reports_and_hold_outs(dicts, blobs, tmp_path):
    assert {v.device.type for v in tree.leaves(dicts.to("meta").inputs)} == {"meta"}
    assert dicts.fingerprint != blobs.fingerprint
    swapped = {"right": dicts.inputs["right"], "left": dicts.inputs["left"].flip(0)}
    assert dataclasses.replace(dicts, inputs=swapped).fingerprint != dicts.fingerprint
    assert forward(dicts) == forward(blobs)
    result = fb.simulate(dicts, fb.fedavg(), WORK, fb.rounds(2), out=tmp_path / "run")
    assert result.export(tmp_path / "m.pt").exists()
    loaded = torch.jit.load(tmp_path / "m.pt")
    assert torch.allclose(loaded(**dicts.test[0]), result.model()(**dicts.test[0]), atol=1e-6)
    held = fb.sweep.hold_out(dicts, 0.3, 0)
    assert tree.length(held.test[0]) == len(held.test[1]) > 0


def test_segments_and_several_labels():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 1, 8, 8, generator=draw)
    masks = (x[:, :, 0] > 0).long()
    net = nn.Conv2d(1, 2, 3, padding=1)
    task = fb.Task.from_arrays(net, [(x[i], masks[i]) for i in range(3)], (x[0], masks[0]))
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.5, batch=2), fb.rounds(10))
    assert result.last("loss") < 0.7 * result.history[0]["loss"]
    assert result.last("accuracy") is None
    flat, labels = x.flatten(2), (x.flatten(2)[:, :, :4] > 0).long()
    task = fb.Task.from_arrays(
        nn.Linear(64, 4), [(flat[i], labels[i]) for i in range(3)], (flat[0], labels[0]), "logistic"
    )
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.5, batch=2), fb.rounds(10))
    assert result.last("loss") < result.history[0]["loss"]


def both(n=4, **others):
    return {"left": np.zeros((n, 2), np.float32), "right": np.zeros((n, 3), np.float32), **others}


Y = np.array([0, 1, 2, 0])
BAD = {
    "one client lacks a key": (
        lambda: fb.Task.from_arrays(Two, [(both(), Y), ({"left": both()["left"]}, Y)]),
        "client 1 lacks the input 'right', unlike client 0",
    ),
    "one client has a tuple": (
        lambda: fb.Task.from_arrays(Two, [(both(), Y), (tuple(both().values()), Y)]),
        "client 1 .* unlike client 0",
    ),
    "one key is longer": (
        lambda: fb.Task.from_arrays(Two, [(both(left=np.zeros((5, 2))), Y)]),
        "client 0 has 5 of input 'left' but 4 of 'right'; give one of each",
    ),
    "a key of another shape": (
        lambda: fb.Task.from_arrays(Two, [(both(), Y), (both(right=np.zeros((4, 2), np.float32)), Y)]),
        r"client 1 holds samples of shape \(2,\).* as 'right'",
    ),
    "text": (
        lambda: fb.Task.from_arrays(Two, [(both(left=["a", "b", "c", "d"]), Y)]),
        "client 0's input 'left' .* holds text such as 'a'; turn it into numbers",
    ),
    "lengths": (
        lambda: fb.Task.from_arrays(Two, [(both(left=[[1], [1, 2], [3], [4]]), Y)]),
        "client 0's input 'left' .* differ in length; give collate=fb.pad",
    ),
    "not finite": (
        lambda: fb.Task.from_arrays(Two, [(both(left=np.full((4, 2), np.nan)), Y)]),
        "client 0 has NaN or infinity in its input 'left'",
    ),
    "a keyword the model does not take": (
        lambda: fb.Task.from_arrays(Two, [(both(middle=np.zeros(4)), Y)]),
        "forward pass fails .*'middle'",
    ),
    "no targets for a named loss": (
        lambda: fb.Task.from_arrays(Two, [(both(), None)]),
        "client 0 has no targets, which 'cross_entropy' cannot use",
    ),
    "items of different keys": (
        lambda: fb.Task.from_datasets(Two, [[({"left": [0.0]}, 1), ({"right": [0.0]}, 1)]]),
        "client 0 has 'left' in some items, but not in all",
    ),
    "no such target": (
        lambda: fb.Task.from_datasets(Two, [_Named({"left": torch.zeros(2, 2)})], targets="kind"),
        "client 0 has no 'kind', only 'left'; name the targets",
    ),
    "a collate that fails": (
        lambda: fb.Task.from_arrays(Two, [(both(), Y)], collate=lambda samples: samples[9]),
        "collate fails on the samples",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_named(case):
    make, said = BAD[case]
    with pytest.raises(DataError, match=f"(?s){said}") as refusal:
        make()
    assert "\n" not in str(refusal.value).rstrip()
