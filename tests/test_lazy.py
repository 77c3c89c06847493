"""Does data that stays on disk train to the same bits as data in memory, with new draws at each visit?"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import numpy as np
import pytest
import torch
from test_resume import Stop, StopAt
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import fedbraid as fb
from fedbraid.data import lazy
from fedbraid.errors import ConfigError, DataError, EngineError

LOOP, VMAP, POOL = (
    "in_process(backend='loop')",
    "in_process(block=3, backend='vmap')",
    "pool(workers=2, backend='loop')",
)
WORK = fb.Work(lr=0.1, batch=4, epochs=2)


class Held(Dataset):
    """Items of one client, perhaps with a transform."""

    def __init__(self, client, transform=None, n=None):
        draw = np.random.default_rng(client)
        n = n or 5 + client
        self.y = draw.integers(0, 3, n)
        self.x = (draw.normal(size=(n, 5)) + self.y[:, None]).astype(np.float32)
        self.transform = transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return (self.x[i] if self.transform is None else self.transform(self.x[i])), int(self.y[i])


def noisy(x):
    return x + np.float32(random.random()) + np.random.rand() + torch.rand(1).numpy()  # noqa: NPY002


def task(transform=None, clients=7, **options):
    torch.manual_seed(0)
    held = [Held(i, transform) for i in range(clients)]
    return fb.Task.from_datasets(nn.Linear(5, 3), held, Held(99, n=30), **options)


@pytest.mark.parametrize("algorithm", [fb.fedavg(), fb.scaffold(), fb.mimelite()], ids=lambda a: a.name)
@pytest.mark.parametrize("engine", [LOOP, VMAP, POOL])
def test_the_same_bits_as_in_memory(algorithm, engine):
    eager, late = (
        fb.simulate(t, algorithm, WORK, fb.rounds(4, clients=3), engine=engine)
        for t in (task(), task(lazy=True))
    )
    assert torch.equal(eager.x, late.x)
    assert eager.history == late.history


def test_draws_are_new_at_each_visit_and_counted(tmp_path):
    made = task(noisy, lazy=True)
    one, again, other = (made.inputs.store.table(np.array([2]), v, 0)[0] for v in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    options = {"seed": 5, "engine": LOOP}
    whole = fb.simulate(made, fb.scaffold(), WORK, fb.rounds(8, clients=3), **options)
    pooled = fb.simulate(made, fb.scaffold(), WORK, fb.rounds(8, clients=3), seed=5, engine=POOL)
    assert torch.equal(whole.x, pooled.x)
    kept = {"out": tmp_path / "cut", "callbacks": [StopAt(5)], **options}
    with pytest.raises(Stop):
        fb.simulate(made, fb.scaffold(), WORK, fb.rounds(8, clients=3), **kept)
    resumed = fb.resume(tmp_path / "cut", task=task(noisy, lazy=True))
    assert torch.equal(resumed.x, whole.x)


def test_the_users_random_state_is_untouched():
    made = task(noisy, lazy=True)
    states = random.getstate(), torch.get_rng_state()
    fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2, clients=3), engine=LOOP)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_reading_ahead_is_what_reading_is():
    store = task(noisy, lazy=True).inputs.store
    who = np.array([3, 1, 6, 0])
    plain = [store.table(np.array([c]), 4, 9) for c in who]
    store.prefetch(who, 4, 9)
    assert len(store._readers.pending) == 4
    for client, (x, y) in zip(who, plain):
        ahead = store.table(np.array([client]), 4, 9)
        assert torch.equal(ahead[0], x)
        assert torch.equal(ahead[1], y)
    assert not store._readers.pending
    store.stop()


def test_the_next_round_is_read_while_this_one_trains_and_who_left_is_let_go():
    store = task(noisy, lazy=True).inputs.store
    plain = store.table(np.array([5]), 5, 9)
    store.prefetch(np.array([3]), 4, 9, np.array([5, 6]))
    store.table(np.array([3]), 4, 9)
    assert set(store._readers.pending) == {(5, 5, 9), (6, 5, 9)}
    store.prefetch(np.array([5, 2]), 5, 9)  # 6 has left
    assert set(store._readers.pending) == {(5, 5, 9), (2, 5, 9)}
    assert torch.equal(store.table(np.array([5]), 5, 9)[0], plain[0])
    store.stop()


def load_number(path):
    return torch.full((3,), float(path.read_text())), int(path.stem) % 2


def test_changed_files_change_the_fingerprint(tmp_path):
    """Of 300 files one in the middle is written anew, in the same length and with the same time."""
    for client in range(3):
        (tmp_path / f"c{client}").mkdir()
        for i in range(100):
            (tmp_path / f"c{client}" / f"{i:03}.txt").write_text(f"{i:05}")

    module = torch.nn.Linear(3, 2)

    def made():
        clients = fb.folders(tmp_path, load_number)
        return fb.Task.from_datasets(module, clients, lazy=True).fingerprint

    before = made()
    assert made() == before
    changed = tmp_path / "c1" / "051.txt"
    found = changed.stat()
    changed.write_text("99999")
    os.utime(changed, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert made() != before


class InMemory(torch.utils.data.Dataset):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return torch.full((3,), self.values[i]), i % 2


def test_changed_contents_of_other_data_sets_change_the_fingerprint():
    module = torch.nn.Linear(3, 2)

    def made(values, indices=range(40)):
        clients = [torch.utils.data.Subset(InMemory(values), list(indices))]
        return fb.Task.from_datasets(module, clients, lazy=True).fingerprint

    values = [float(i) for i in range(40)]
    assert made(values) == made(list(values))
    assert made(values) != made([*values[:20], -1.0, *values[21:]])
    assert made(values) != made(values, [0, *range(2, 40), 1])


def test_a_client_who_leaves_is_not_waited_for():
    class Leaves:
        def step(self, record, run):
            if run.state.t == 2:
                run.leave(0)

    whole = [
        fb.simulate(
            task(noisy, lazy=True),
            fb.fedavg(),
            WORK,
            fb.rounds(6, clients=4),
            engine=LOOP,
            callbacks=[Leaves()],
        )
        for _ in range(2)
    ]
    assert all(0 not in record["clients"] for record in whole[0].history[2:])
    assert torch.equal(whole[0].x, whole[1].x)


def test_a_step_that_cannot_be_had_fails_in_its_turn(tmp_path):
    """Looking one step ahead must not end a run before the step that was possible."""
    when = fb.clock.availability({client: [[0, 3.5]] for client in range(7)})
    schedule = fb.rounds(9, clients=2, durations=fb.clock.constant(1), availability=when)
    for late in (False, True):
        made = task(noisy if late else None, lazy=late)
        with pytest.raises(fb.FedbraidError):
            fb.simulate(made, fb.fedavg(), WORK, schedule, engine=LOOP, out=tmp_path / str(late))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("False", "True")]
    assert lines[0] == lines[1] > 0


@pytest.mark.parametrize("draw", [lambda x: x + random.random(), lambda x: x + torch.rand(1).numpy(), noisy])
def test_random_transforms_are_never_frozen(draw):
    with pytest.raises(DataError, match=r"client 0 draws random numbers .* lazy=True"):
        task(draw)
    own = np.random.default_rng(0)
    with pytest.raises(DataError, match="client 0 draws random numbers"):
        task(lambda x: x + own.random())


# Folders ------------------------------------------------------------------------------------------


def write(root, clients=5, files=4):
    draw = np.random.default_rng(0)
    for c in range(clients):
        (root / f"c{c:06}").mkdir(parents=True)
        for i in range(files):
            np.save(root / f"c{c:06}/{i}-{(c + i) % 3}.npy", draw.normal(size=5).astype(np.float32))


def load(path):
    return np.load(path), int(path.stem.rpartition("-")[2])


def folder_task(root, **options):
    torch.manual_seed(0)
    return fb.Task.from_datasets(nn.Linear(5, 3), fb.folders(root, load), **options)


def test_folders_of_files(tmp_path):
    write(tmp_path / "data")
    late, eager = folder_task(tmp_path / "data", lazy=True), folder_task(tmp_path / "data")
    runs = [fb.simulate(t, fb.fedavg(), WORK, fb.rounds(3, clients=2), engine=LOOP) for t in (late, eager)]
    assert torch.equal(runs[0].x, runs[1].x)


class Removes:
    """Takes a file away after a step."""

    def __init__(self, path):
        self.path = path

    def step(self, record, run):
        self.path.unlink(missing_ok=True)


def test_a_file_that_vanishes(tmp_path):
    write(tmp_path / "data", clients=2)
    gone = tmp_path / "data/c000001/0-1.npy"
    kept = gone.read_bytes()
    made = folder_task(tmp_path / "data", lazy=True)
    options = {"engine": LOOP, "out": tmp_path / "run"}
    with pytest.raises(DataError, match="client 1 has 3 samples now and had 4 when the task was made"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(4), callbacks=[Removes(gone)], **options)
    gone.write_bytes(kept)
    resumed = fb.resume(tmp_path / "run", task=folder_task(tmp_path / "data", lazy=True))
    assert len(resumed.history) == 4


def test_what_cannot_be_read_is_named(tmp_path):
    write(tmp_path / "data", clients=2)
    made = folder_task(tmp_path / "data", lazy=True)
    (tmp_path / "data/c000001/1-2.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"client 1's item 1 cannot be read \(ValueError"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP)
    with pytest.raises(DataError, match="cannot be listed"):
        fb.folders(tmp_path / "none", load)


@pytest.mark.parametrize("engine", [LOOP, VMAP, POOL, "auto"])
def test_a_label_that_names_no_class(engine):
    held = [Held(i) for i in range(4)]
    made = fb.Task.from_datasets(nn.Linear(5, 3), held, lazy=True)
    held[2].y[1] = 7
    with pytest.raises(fb.FedbraidError, match="client 2 has the label 7, which is out of range; use 0 to 2"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(1, clients=4), engine=engine, evaluate_every=None)


def test_a_test_label_that_names_no_class():
    tested = Held(9, n=8)
    made = fb.Task.from_datasets(nn.Linear(5, 3), [Held(0), Held(1)], tested, lazy=True)
    tested.y[3] = -1
    with pytest.raises(DataError, match="the test set has the label -1"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(1, clients=2), engine=LOOP)


def test_a_test_share_per_client():
    shares = [Held(10, n=6), None, Held(12, n=9), Held(13, n=4)]
    metrics = {"hits": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    runs = [
        fb.simulate(
            fb.Task.from_datasets(
                model, [Held(i) for i in range(4)], client_tests=shares, lazy=late, metrics=metrics
            ),
            fb.fedavg(), WORK, fb.rounds(3, clients=2), engine=LOOP, evaluate_on="clients",
        )
        for late in (True, False)
    ]  # fmt: skip
    assert runs[0].history == runs[1].history
    assert runs[0].per_client() == runs[1].per_client()
    assert [row["client"] for row in runs[0].per_client()] == [0, 2, 3]
    held = [Held(0), Held(1)]
    for late in (True, False):
        with pytest.raises(DataError, match="1 local test sets for 2 clients; give one each"):
            fb.Task.from_datasets(model, held, client_tests=[Held(2)], lazy=late)
        with pytest.raises(DataError, match="both test= and client_tests= were given"):
            fb.Task.from_datasets(model, held, Held(3), client_tests=held, lazy=late)
        with pytest.raises(DataError, match="give test_fraction= or test= with by="):
            fb.Task.from_datasets(model, held, client_tests=held, by="who", lazy=late)


def test_clients_held_out_are_the_same_on_disk():
    eager, late = (fb.sweep.hold_out(task(lazy=on_disk), 0.3, 1) for on_disk in (False, True))
    assert isinstance(late.test[0], lazy.LazyColumn)
    assert late.sizes.tolist() == eager.sizes.tolist()
    runs = [fb.simulate(t, fb.fedavg(), WORK, fb.rounds(3, clients=3), engine=LOOP) for t in (eager, late)]
    assert runs[0].history == runs[1].history
    assert torch.equal(runs[0].x, runs[1].x)


@pytest.mark.parametrize("late", [True, False])
def test_what_has_no_length(late):
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(
        DataError, match="client 1 is a Stream, which has no length; give a dataset with __len__"
    ):
        fb.Task.from_datasets(nn.Linear(5, 3), [Held(0), Stream()], lazy=late)


def dies(x):
    if multiprocessing.parent_process() is not None:  # in a process that reads ahead
        os._exit(1)
    return x


def test_a_reader_that_dies():
    made = task(dies, lazy=True)
    with pytest.raises(EngineError, match=r"worker process \d+ died \(exit code 1\)"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP)


def test_what_is_larger_than_the_room_goes_through_the_pipe(monkeypatch):
    store = task(noisy, lazy=True).inputs.store
    who = np.arange(7)
    plain = [store.table(np.array([c]), 4, 9) for c in who]
    monkeypatch.setattr(lazy, "SHARED_BYTES", 90)
    store.prefetch(who, 4, 9)
    for client in (1, 0, 2, 6, 5, 4, 3):  # in any order
        for ahead, here in zip(store.table(np.array([client]), 4, 9), plain[client]):
            assert torch.equal(ahead, here)
    store.stop()


def test_readers_of_two_stores_end_when_they_are_told(monkeypatch):
    """No process keeps another's pipe open, so that none must be killed."""
    killed, kill = [], multiprocessing.process.BaseProcess.kill
    monkeypatch.setattr(
        multiprocessing.process.BaseProcess, "kill", lambda self: killed.append(self) or kill(self)
    )
    stores = [task(noisy, lazy=True).inputs.store for _ in range(2)]
    for store in stores:
        store.prefetch(np.arange(4), 0, 0)
    for store in stores:
        store.stop()
    assert not killed


def rains(x):
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGINT)
    return x


def test_a_terminals_interrupt_is_not_the_readers_affair(capfd):
    made = task(rains, lazy=True)
    run = fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP)
    assert len(run.history) == 2
    assert capfd.readouterr().err == ""


class Made(Dataset):
    """Three samples of a client's number, made when they are read."""

    def __init__(self, client):
        self.client = client

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.full(5, self.client % 7, np.float32), self.client % 3


class PrivacySetup:
    """A hundred thousand clients, none of whom is there before they are asked for."""

    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        return Made(i)


def test_a_hundred_thousand_clients():
    made = fb.Task.from_datasets(lambda: nn.Linear(5, 3), PrivacySetup(), lazy=True)
    result = fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2, clients=10), engine=LOOP)
    assert made.clients == 100_000
    assert len(result.history) == 2


# Lengths of their own -----------------------------------------------------------------------------


class Texts(Dataset):
    """Sequences of different lengths, perhaps with a word left out at each visit."""

    def __init__(self, client, drops=False, n=None):
        draw = np.random.default_rng(client)
        self.said = [draw.integers(1, 20, draw.integers(2, 9)) for _ in range(n or 4 + client)]
        self.drops = drops

    def __len__(self):
        return len(self.said)

    def __getitem__(self, i):
        said = self.said[i]
        if self.drops:
            said = np.delete(said, np.random.randint(len(said)))  # noqa: NPY002
        return {"input_ids": said, "label": int(self.said[i][0] % 2)}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        seen = attention_mask.unsqueeze(-1).float()
        return self.out((self.words(input_ids) * seen).sum(1) / seen.sum(1))


def texts(drops=False, **options):
    held = [Texts(i, drops) for i in range(6)]
    return fb.Task.from_datasets(Words, held, Texts(99, n=700), collate=fb.pad(), **options)


@pytest.mark.parametrize("engine", [LOOP, "in_process(backend='loop', block=4)", POOL])
def test_collated_at_each_visit_to_the_bits_of_a_table(engine):
    eager, late = (
        fb.simulate(t, fb.scaffold(), WORK, fb.rounds(3, clients=3), engine=engine)
        for t in (texts(), texts(lazy=True))
    )
    assert torch.equal(eager.x, late.x)
    assert [r["accuracy"] for r in eager.history] == [r["accuracy"] for r in late.history]


def test_collated_draws_are_the_same_when_resumed(tmp_path):
    options = {"engine": "in_process(backend='loop', block=4)", "seed": 3}
    whole = fb.simulate(texts(True, lazy=True), fb.mimelite(), WORK, fb.rounds(6, clients=3), **options)
    alone = fb.simulate(
        texts(True, lazy=True), fb.mimelite(), WORK, fb.rounds(6, clients=3), engine=LOOP, seed=3
    )
    assert torch.allclose(whole.x, alone.x, atol=1e-6)
    cut = {"out": tmp_path / "cut", "callbacks": [StopAt(3)], **options}
    with pytest.raises(Stop):
        fb.simulate(texts(True, lazy=True), fb.mimelite(), WORK, fb.rounds(6, clients=3), **cut)
    assert torch.equal(fb.resume(tmp_path / "cut", task=texts(True, lazy=True)).x, whole.x)
    with pytest.raises(ConfigError, match="samples to be of one length"):
        fb.simulate(texts(lazy=True), fb.fedavg(), WORK, fb.rounds(1), engine=VMAP)


# Test sets ----------------------------------------------------------------------------------------


def share(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def asks(outputs, targets, inputs):
    return inputs.mean()


def test_a_test_set_is_read_chunk_by_chunk():
    judged = Counted(99, n=1300)
    metrics = {"share": share, "asks": asks}
    runs = []
    for lazily in (True, False):
        torch.manual_seed(0)
        held = [Held(i) for i in range(4)]
        made = fb.Task.from_datasets(nn.Linear(5, 3), held, judged, lazy=lazily, metrics=metrics)
        runs.append(fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2, clients=2), engine=LOOP))
    assert runs[0].history == runs[1].history
    plain = fb.Task.from_datasets(nn.Linear(5, 3), held, judged, lazy=True)
    for engine in (LOOP, VMAP, POOL):
        again = fb.simulate(plain, fb.fedavg(), WORK, fb.rounds(2, clients=2), engine=engine)
        assert again.last("accuracy") is not None
    store = plain.test[0].store
    assert store._readers is None  # what reads ahead ends with the run
    Counted.read = 0
    store._labels, store._last = {}, ((0, 0), (None, None))
    x = plain.initial(0)
    from fedbraid.engines.autograd import LoopGradient
    from fedbraid.run.evaluate import evaluate_model

    evaluate_model(LoopGradient(plain), plain, x)
    plain.close()
    assert Counted.read <= 2  # two samples tell the kind; processes read the rest, once each
    assert len(store._labels) == 3


class Counted(Held):
    read = 0

    def __getitem__(self, i):
        Counted.read += 1
        return super().__getitem__(i)


def test_a_test_set_that_changes_is_named(tmp_path):
    judged = Held(99, n=30)
    made = fb.Task.from_datasets(nn.Linear(5, 3), [Held(i) for i in range(3)], judged, lazy=True)
    judged.y, judged.x = judged.y[:20], judged.x[:20]
    with pytest.raises(DataError, match="the test set has 20 samples now and had 30 when the task was made"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine=LOOP, out=tmp_path / "run")


# Maps of files ------------------------------------------------------------------------------------


def test_maps_of_files_stay_so(tmp_path):
    draw = np.random.default_rng(0)
    pairs, maps = [], []
    for i in range(4):
        y = draw.integers(0, 3, 6 + i)
        x = (draw.normal(size=(6 + i, 5)) + y[:, None]).astype(np.float32)
        np.save(tmp_path / f"{i}.npy", x)
        pairs.append((x, y))
        maps.append((np.load(tmp_path / f"{i}.npy", mmap_mode="r"), y))
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain, mapped = (fb.Task.from_arrays(model, some, pairs[0]) for some in (pairs, maps))
    starts = {m[0].ctypes.data for m in maps}
    assert {p.data_ptr() for p in mapped.inputs.pieces} == starts  # the very maps, not copies
    whole = np.concatenate([x for x, _ in pairs])
    np.save(tmp_path / "all.npy", whole)
    one = np.load(tmp_path / "all.npy", mmap_mode="r")
    table = fb.Task.from_table(
        model, one, np.concatenate([y for _, y in pairs]), by=np.repeat(range(4), [6, 7, 8, 9])
    )
    assert table.inputs.data_ptr() == one.ctypes.data
    for engine in (LOOP, VMAP, POOL):
        runs = [
            fb.simulate(t, fb.scaffold(), WORK, fb.rounds(3, clients=3), engine=engine).x
            for t in (plain, mapped, table)
        ]
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])
    assert mapped.labels(1).tolist() == pairs[1][1].tolist()


def test_native_code_reads_what_was_read_for_it():
    pytest.importorskip("fedbraid.engines.native_backend")
    from fedbraid_native.build import compiler

    if compiler() is None:
        pytest.skip("there is no compiler")
    runs = [
        fb.simulate(t, fb.fedavg(), WORK, fb.rounds(3, clients=3), engine="in_process(backend='native')")
        for t in (task(lazy=True), task())
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].history == runs[1].history


def test_a_plan_is_made_without_reading_the_data():
    from fedbraid.engines import planning
    from fedbraid.engines.autograd import why_not_vmap
    from fedbraid.engines.engine import Setup

    plans = [planning.facts_of(Setup(fb.fedavg(), t, WORK, 0, 3, 300)) for t in (task(lazy=True), task())]
    assert plans[0] == plans[1]
    assert why_not_vmap(task(lazy=True)) is None
