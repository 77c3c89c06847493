"""Are data sets what their sources say, in every form they come in, and are bad files refused clearly?"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import pickle
import sys
import types

import numpy as np
import pytest
import torch

from fedbraid.core import rng
from fedbraid.data import formats, shakespeare, sources, synthetic, tasks
from fedbraid.data.augment import FlipCrop
from fedbraid.data.partition import label_chunks, natural, pachinko
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, DataError, MissingExtra

real = pytest.mark.skipif(not os.environ.get("FEDBRAID_DATA"), reason="the real files: set FEDBRAID_DATA")
load = functools.lru_cache(tasks.load)  # the real sets are read once


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDBRAID_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path


def same(a: Task, b: Task) -> bool:
    tensors = zip((a.inputs, a.targets, a.rows, *a.test), (b.inputs, b.targets, b.rows, *b.test))
    return all(torch.equal(x, y) for x, y in tensors) and np.array_equal(a.offsets, b.offsets)


# What needs no files -------------------------------------------------------------------------------


def test_digits_ship_inside_the_package(monkeypatch):
    monkeypatch.delenv("FEDBRAID_DATA", raising=False)
    task = tasks.load("digits")
    assert task.inputs.shape == (1438, 1, 8, 8)
    assert task.test[0].shape == (359, 1, 8, 8)
    assert abs(float(task.inputs.mean())) < 1e-4
    assert abs(float(task.inputs.std()) - 1) < 1e-4
    assert torch.bincount(torch.cat([task.targets, task.test[1]])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert int(torch.bincount(task.test[1]).min()) > 20


def test_digits_of_one_class_each_for_the_demo():
    task = tasks.load("digits", clients=100, partition=label_chunks(1))
    assert all(len(task.labels(i).unique()) == 1 for i in range(100))
    assert set(task.sizes.tolist()) <= {13, 14, 15, 16}


def test_spec_loads_the_same_task_again():
    task = tasks.load("digits", 20, "dirichlet(0.3)", model="softmax_regression", seed=5)
    assert (
        task.spec
        == "load('digits', clients=20, partition=dirichlet(0.3), seed=5, model='softmax_regression')"
    )
    assert same(tasks.reload(task.spec), task)
    made = tasks.load("synthetic", 7, alpha=0.5, seed=2)
    assert made.spec == "load('synthetic', clients=7, partition=natural(), seed=2, alpha=0.5)"
    assert same(tasks.reload(made.spec), made)


def test_seed_draws_the_partition_and_not_the_split():
    a, b = tasks.load("digits", seed=0), tasks.load("digits", seed=1)
    assert not torch.equal(a.rows, b.rows)
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.test[0], b.test[0])


def test_model_may_be_a_name_a_module_or_a_builder():
    assert tasks.load("digits", model="softmax_regression").layout.size == 650
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    given = tasks.load("digits", model=module)
    assert torch.equal(given.initial(3), given.layout.flatten(module))
    assert given.spec is None
    assert (
        tasks.load(
            "digits", model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        ).spec
        is None
    )
    build = tasks.load("digits").build
    assert pickle.loads(pickle.dumps(build))().state_dict().keys() == build().state_dict().keys()


def test_synthetic_clients_differ_as_alpha_and_beta_say():
    task = tasks.load("synthetic")
    assert task.clients == 30
    assert task.inputs.shape[1] == 60
    assert task.sizes.min() >= 45
    assert len(task.test_offsets) == 31
    assert not torch.equal(task.inputs[:40], tasks.load("synthetic", seed=1).inputs[:40])
    assert not torch.equal(task.targets[:40], tasks.load("synthetic", alpha=5.0).targets[:40])

    def spread(beta):
        made = tasks.load("synthetic", beta=beta)
        return torch.stack(
            [made.inputs[made.rows[a:b]].mean() for a, b in zip(made.offsets, made.offsets[1:])]
        ).std()

    assert spread(5.0) > 2 * spread(0.0)


def test_synthetic_is_what_one_draw_after_the_other_gives():
    """Numbers that were published for a seed hold: however it is drawn, client k's samples are these."""
    made = synthetic.read(clients=5, seed=3, alpha=0.5, beta=2.0)
    for k in range(5):
        gen = rng.generator(3, "synthetic", k)
        n = int(gen.lognormal(4, 2)) + 50
        u, v = gen.normal(0, 0.5, 10), gen.normal(0, 2.0)
        w, b = gen.normal(u, 1, (60, 10)), gen.normal(u, 1, 10)
        x = gen.normal(gen.normal(v, 1, 60), np.arange(1, 61) ** -0.6, (n, 60))
        test, train = made.test_groups == k, made.groups == k
        assert torch.equal(torch.cat([made.test[0][test], made.inputs[train]]), torch.from_numpy(x).float())
        labels = torch.cat([made.test[1][test], made.targets[train]])
        assert torch.equal(labels, torch.from_numpy(np.argmax(x @ w + b, 1)))
        assert test.sum() == n // 10


def test_natural_clients_have_test_shares():
    full = tasks.load("synthetic", partition=natural())
    task = tasks.load("synthetic", partition="iid", clients=12)
    assert full.test_offsets[-1] == len(full.test[0])
    assert task.test_offsets is None
    assert task.clients == 12


# Small files in the public formats -----------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + np.asarray(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def write(path, data: bytes | dict):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps(data).encode() if isinstance(data, dict) else data)
    return path


def mnist_files(folder, packed: bool = True, size: int = 28, prefix=("train", "t10k"), base: int = 0):
    gen = np.random.default_rng(0)
    for part, n in zip(prefix, (40, 20)):
        for what, array in (
            ("images-idx3", gen.integers(0, 256, (n, size, size))),
            ("labels-idx1", base + np.arange(n) % 10),
        ):
            raw = idx_bytes(array)
            write(folder / f"{part}-{what}-ubyte{'.gz' * packed}", gzip.compress(raw) if packed else raw)


@pytest.mark.parametrize(("folder", "packed"), [("mnist", True), ("MNIST/raw", False)])
def test_mnist_in_both_layouts(root, folder, packed):
    mnist_files(root / folder, packed)
    task = tasks.load("mnist", clients=4, root=root)
    assert task.inputs.shape == (40, 1, 28, 28)
    assert abs(float(task.inputs.mean())) < 1e-5
    assert task.targets.tolist() == [i % 10 for i in range(40)]
    assert same(tasks.reload(task.spec), task)


def test_official_emnist_is_turned_upright(root):
    mnist_files(root / "emnist", prefix=("emnist-letters-train", "emnist-letters-test"), base=1)
    mnist_files(root / "emnist-letters-subset", prefix=("train", "test"), base=1)
    lying = tasks.load("emnist", clients=4, root=root)
    for f in (root / "emnist").iterdir():
        f.unlink()
    upright = tasks.load("emnist", clients=4, root=root)
    assert torch.equal(lying.inputs, upright.inputs.swapaxes(2, 3))
    assert lying.layout.size == 63_066
    assert int(lying.targets.min()) == 0


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(array).save(out, "PNG")
    return out.getvalue()


def parquet(path, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_mnist_from_hugging_face_parquet(root):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28)).astype(np.uint8)
    for part in ("train", "test"):
        rows = [{"bytes": png(p), "path": "x.png"} for p in pixels]
        parquet(root / f"mnist/mnist/{part}-00000-of-00001.parquet", image=rows, label=[*range(10), 0, 1])
    task = tasks.load("mnist", clients=2, root=root)
    assert torch.equal(task.inputs.argmax(), torch.from_numpy(pixels).argmax())
    assert task.inputs.shape == (12, 1, 28, 28)


def cifar_binary(folder, coarse: bool = False):
    gen = np.random.default_rng(0)
    names = (
        ["train.bin", "test.bin"]
        if coarse
        else [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    )
    for name in names:
        fine = np.arange(20) % (100 if coarse else 10)
        labels = np.stack([fine // 5, fine], 1) if coarse else fine[:, None]
        rows = np.concatenate([labels, gen.integers(0, 256, (20, 3072))], 1)
        write(folder / name, rows.astype(np.uint8).tobytes())


def test_cifar_binary_version(root):
    cifar_binary(root / "cifar-10-batches-bin")
    task = tasks.load("cifar10", clients=5, root=root, augment=True)
    assert task.inputs.shape == (100, 3, 32, 32)
    assert task.augment == FlipCrop()
    raw = np.frombuffer((root / "cifar-10-batches-bin/data_batch_1.bin").read_bytes(), np.uint8).reshape(
        20, 3073
    )
    pixel = torch.from_numpy(raw[3, 1:].reshape(3, 32, 32).astype(np.float32))
    ours = task.inputs[3]
    for c in range(3):
        assert torch.corrcoef(torch.stack([pixel[c].ravel(), ours[c].ravel()]))[0, 1] > 0.9999
    assert torch.allclose(task.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(task.inputs.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_cifar100_binary_has_coarse_labels_for_pachinko(root):
    cifar_binary(root / "cifar-100-binary", coarse=True)
    task = tasks.load("cifar100", clients=2, root=root)
    assert task.augment is None
    assert task.sizes.tolist() == [10, 10]
    assert "pachinko(0.1, 10.0)" in task.spec


def test_cifar_pickles_are_not_opened(root):
    write(root / "cifar-10-batches-py/data_batch_1", pickle.dumps({"data": 1}))
    with pytest.raises(DataError, match="python version is a pickle and not read"):
        tasks.load("cifar10", root=root)


def leaf_json(users: dict) -> dict:
    return {"users": list(users), "num_samples": [len(y) for _, y in users.values()],
            "user_data": {u: {"x": x, "y": y} for u, (x, y) in users.items()}}  # fmt: skip


def test_leaf_shakespeare_json_becomes_one_text(root):
    line = "To be, or not to be: that is the question: Whether 'tis nobler in the mind to suffer The slings"
    windows = lambda text: ([text[i : i + 80] for i in range(len(text) - 80)], list(text[80:]))  # noqa: E731
    x, y = windows(line)
    write(
        root / "shakespeare/data/train/a.json",
        leaf_json({"HAMLET": windows(line), "GHOST": (x[:5] + x[9:], y[:5] + y[9:])}),
    )
    write(
        root / "shakespeare/data/test/a.json",
        leaf_json({"HAMLET": (x[3:4], y[3:4]), "GHOST": windows(line[::-1])}),
    )
    task = tasks.load("shakespeare", root=root)
    text = lambda codes: "".join(shakespeare.LEAF_ALPHABET[c] for c in codes)  # noqa: E731
    assert task.clients == 2
    assert [text(w) for w in task.inputs[task.rows[: len(x)]]] == x
    assert text(task.targets[task.rows]) == "".join(y + y[:5] + y[9:])
    assert [text(w) for w in task.test[0][1:]] == windows(line[::-1])[0]
    assert task.test_offsets.tolist() == [0, 1, 1 + len(x)]
    with pytest.raises(ConfigError, match=r"needs leaf-clients\.parquet"):
        tasks.load("shakespeare", root=root, test_clients=1)


def roles(root):
    gen = np.random.default_rng(0)
    texts = ["".join(gen.choice(list("abcdef ,."), n)) for n in (2000, 1500, 300, 90, 60)]
    parquet(root / "shakespeare/leaf-clients.parquet", client_id=list("ABCDE"), text=texts)
    return texts


def test_shakespeare_is_split_in_time_without_leaks(root):
    texts = roles(root)
    task = tasks.load("shakespeare", root=root)
    n = [len(t) - 80 for t in texts[:2]]  # the others have no test window left
    assert task.sizes.tolist() == [int(0.9 * k) for k in n]
    assert np.diff(task.test_offsets).tolist() == [k - int(0.9 * k) - 79 for k in n]
    assert task.inputs.dtype == torch.uint8
    assert task.inputs.stride() == (1, 1)
    assert task.inputs.untyped_storage().nbytes() == sum(map(len, texts))
    last = int(0.9 * n[0]) - 1 + 80  # the last letter that was trained on
    decoded = "".join(shakespeare.LEAF_ALPHABET[c] for c in task.test[0][0])
    assert decoded == texts[0][last : last + 80]


def test_shakespeare_options_matter(root):
    roles(root)
    capped = tasks.load("shakespeare", root=root, max_samples_per_client=50)
    assert capped.sizes.tolist() == [50, 50]
    assert np.diff(capped.test_offsets).tolist() == [50, 50]
    assert tasks.load("shakespeare", root=root, min_samples=1500).clients == 1
    assert tasks.load("shakespeare", root=root, fraction=0.5).clients == 3
    whole = tasks.load("shakespeare", root=root, test_clients=2)
    assert len(whole.test[0]) + len(whole.rows) == 1920 + 1420 + 220 + 10
    assert whole.test_offsets is None
    assert tasks.load("shakespeare", root=root, test_clients=2, min_samples=200).clients == whole.clients - 1
    short = tasks.load("shakespeare", root=root, context=20, max_test_samples=7)
    full = tasks.load("shakespeare", root=root)
    assert torch.equal(short.inputs[short.rows], full.inputs[full.rows][:, -20:])
    assert len(short.test[1]) == int(short.test_offsets[-1]) == 7
    for wrong, message in (
        ({"fraction": 1.5}, "fraction must be"),
        ({"context": 81}, "context=81"),
        ({"max_test_samples": 0}, "tests nothing"),
        ({"min_samples": 9999}, "leaves no client"),
        ({"test_clients": 5}, "test_clients=5"),
        ({"max_samples_per_client": 0}, "leaves nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            tasks.load("shakespeare", root=root, **wrong)


def test_strange_characters_are_named():
    with pytest.raises(DataError, match="character 'ä' is not one of the 80"):
        shakespeare.encode("Hämlet", shakespeare.LEAF_ALPHABET)
    assert len(set(shakespeare.LEAF_ALPHABET)) == 80
    assert len(set(shakespeare.TINY_ALPHABET)) == 65


def test_femnist_from_leaf_json_is_white_on_black(root):
    ink = np.ones((3, 784))
    ink[:, 100] = 0.0
    for part in ("train", "test"):
        write(
            root / f"femnist/data/{part}/all.json",
            leaf_json({"f1": (ink.tolist(), [0, 5, 61]), "f2": (ink[:2].tolist(), [1, 2])}),
        )
    task = tasks.load("femnist", root=root)
    assert task.clients == 2
    assert task.inputs.shape == (5, 1, 28, 28)
    assert int(task.inputs[0].argmax()) == 100
    assert task.test_offsets.tolist() == [0, 3, 5]
    assert task.layout.size == 870_334


def test_celeba_from_leaf_json_and_images(root):
    image = np.zeros((218, 178, 3), np.uint8)
    image[:, :, 0] = 255
    write(root / "celeba/data/raw/img_align_celeba/000001.jpg", png(image))
    for part in ("train", "test"):
        write(
            root / f"celeba/data/{part}/all.json",
            leaf_json({"12": (["000001.jpg"] * 2, [0, 1]), "7": (["000001.jpg"], [1])}),
        )
    task = tasks.load("celeba", root=root)
    assert task.inputs.shape == (3, 3, 32, 32)
    assert task.inputs[0, :, 5, 5].tolist() == [1.0, -1.0, -1.0]
    assert task.layout.size == 29_282
    assert task.clients == 2
    assert tasks.load("celeba", root=root, size=16).inputs.shape == (3, 3, 16, 16)
    write(root / "celeba/data/train/all.json", leaf_json({"12": (["../secret.jpg"], [0])}))
    with pytest.raises(DataError, match="points out of its folder"):
        tasks.load("celeba", root=root)
    write(root / "celeba/data/train/all.json", leaf_json({"12": (["000009.jpg"], [0])}))
    with pytest.raises(DataError, match=r"image 000009.jpg of celeba was not found"):
        tasks.load("celeba", root=root)


def tweet(text: str) -> list[str]:
    return ["1", "Mon Apr 06", "NO_QUERY", "someone", text, "training"]


def test_sent140_from_leaf_json(root):
    train = {"ann": ([tweet("good good day"), tweet("zzz")], [4, 0]), "bob": ([tweet("Bad day")], [0])}
    write(root / "sent140/train/all.json", leaf_json(train))
    write(
        root / "sent140/test/all.json",
        leaf_json({"ann": ([tweet("good!")], ["1"]), "eve": ([tweet("day")], [1])}),
    )
    task = tasks.load("sent140", root=root, vocab=3)
    assert task.inputs[:, :4].tolist() == [[2, 2, 1, 0], [3, 1, 0, 0]]  # day, good, bad
    assert task.targets.tolist() == [1, 0]
    assert task.test_offsets.tolist() == [0, 1, 1]
    assert task.layout.size == 4 * 2 + 2
    assert len(tasks.load("sent140", 1, "iid", root=root, vocab=3).test[0]) == 2


def test_mushrooms_labels_and_features(root):
    lines = [f"{1 + i % 2} {1 + i % 112}:1 112:1" for i in range(50)]
    write(root / "mushrooms/mushrooms", "\n".join(lines).encode())
    task = tasks.load("mushrooms", clients=5, root=root)
    assert task.inputs.shape == (40, 112)
    assert (task.inputs[:, 111] == 1).all()
    both = torch.cat([task.targets, task.test[1]])
    assert torch.bincount(both).tolist() == [25, 25]


# The hub, the cache, the extras ---------------------------------------------------------------------


def test_hub_is_asked_when_files_are_missing(root, monkeypatch):
    asked = []

    def load_dataset(name):
        asked.append(name)
        part = {"img": [np.full((32, 32, 3), i, np.uint8) for i in range(10)], "label": list(range(10))}
        return {"train": part, "test": part}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert tasks.load("cifar10", clients=2, root=root).inputs.shape == (10, 3, 32, 32)
    assert asked == ["uoft-cs/cifar10"]
    with pytest.raises(
        DataError, match="ylecun/mnist could not be fetched from the Hugging Face hub: 'image'"
    ):
        tasks.load("mnist", root=root)


def test_decoded_images_are_kept_until_the_file_changes(root, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    file, calls = write(root / "a.parquet", b"1"), []

    def make():
        calls.append(1)
        return np.arange(4, dtype=np.uint8)

    for _ in range(2):
        assert sources.cached([file], make).tolist() == [0, 1, 2, 3]
    assert len(calls) == 1
    (kept,) = (root / "cache/fedbraid").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.parent.stat().st_mode & 0o077 == 0
    kept.write_bytes(b"rubbish")
    sources.cached([file], make)
    assert len(calls) == 2
    file.write_bytes(b"22")
    sources.cached([file], make)
    sources.cached([file], make, how="otherwise")
    assert len(calls) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not a folder: nothing is kept, nothing fails
    assert len(sources.cached([file], make)) == 4


def test_missing_extra_says_what_to_install(root, monkeypatch):
    write(root / "shakespeare/leaf-clients.parquet", b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        MissingExtra, match="reading parquet files needs the extra 'data'; install it with: pip install"
    ):
        tasks.load("shakespeare", root=root)


# What is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in tasks.names() if n not in ("digits", "synthetic")])
def test_missing_files_are_named_with_place_and_origin(root, name):
    with pytest.raises(DataError, match=rf"no files of {name} were found; put .* into .* \(from https://"):
        tasks.load(name, root=root)
    with pytest.raises(DataError, match="set FEDBRAID_DATA"):
        tasks.load(name)


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="unknown task 'minst'; did you mean 'mnist'"):
        tasks.load("minst")
    with pytest.raises(ConfigError, match="unknown option of mnist 'rot'; did you mean 'root'"):
        tasks.load("mnist", rot="x")
    with pytest.raises(ConfigError, match="unknown model 'lenet'"):
        tasks.load("digits", model="lenet")
    with pytest.raises(ConfigError, match="clients must be an integer >= 1, got 0"):
        tasks.load("digits", clients=0)
    with pytest.raises(ConfigError, match="alpha and beta of 0 or more"):
        tasks.load("synthetic", alpha=-1.0)
    said = (
        "cannot be read",
        "unknown task 'open'",
        "unknown argument of load 'open'",
        "missing a required argument",
    )
    for spec, what in zip(("load(", "open('x')", "load(open('x'))", "load()"), said, strict=True):
        with pytest.raises(ConfigError, match=what):
            tasks.reload(spec)


def test_broken_files_are_sentences_not_tracebacks(root):
    mnist_files(root / "mnist")
    images = root / "mnist/train-images-idx3-ubyte.gz"
    good = images.read_bytes()
    for bad, message in (
        (good[: len(good) // 2], "cannot be read: Compressed file ended"),
        (good[:40] + b"\xff" * 40 + good[80:], "cannot be read"),
        (gzip.compress(gzip.decompress(good)[:-5]), r"has 31371 bytes where its header announces 31376"),
        (b"\0\0\x08", "does not begin as an idx file"),
        (b"\0\0\x08\x03\0\0", "its header is cut off"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "where its header announces"),
        (gzip.compress(idx_bytes(np.zeros((39, 28, 28)))), "not images and as many labels"),
    ):
        images.write_bytes(bad)
        with pytest.raises(DataError, match=message):
            tasks.load("mnist", root=root)


def test_broken_text_formats(root):
    for bad, message in (
        (b"1 200:1", "line 1: feature 200 is not one of 1 to 112"),
        (b"1 5:1\nx", "line 2: could not convert"),
        (b"1 5:1\n1 6:1", "it has 1 different labels"),
    ):
        write(root / "mushrooms/mushrooms", bad)
        with pytest.raises(DataError, match=message):
            tasks.load("mushrooms", root=root)
    for part in ("train", "test"):
        write(root / f"femnist/{part}/a.json", b"{")
    with pytest.raises(DataError, match="it is not LEAF's json"):
        tasks.load("femnist", root=root)
    for bad, message in (
        ({"user_data": {"u": {"x": [1], "y": []}}}, "1 samples but 0 targets"),
        ({"user_data": []}, "not LEAF's json"),
        ({"user_data": {}}, "it has no samples"),
        ({"user_data": {"u": {"x": [[1.0]], "y": [1]}}}, "1 pixels for 1 images"),
        ({"user_data": {"u": {"x": [["a"]], "y": [1]}}}, "not numbers of one size"),
    ):
        write(root / "femnist/train/a.json", bad)
        with pytest.raises(DataError, match=message):
            tasks.load("femnist", root=root)


def test_broken_parquet_and_images(root):
    for part in ("train", "test"):
        write(root / f"cifar10/{part}-0.parquet", b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read"):
        tasks.load("cifar10", root=root)
    for columns, message in (
        ({"other": [1]}, "img"),
        ({"img": [b"no image"], "label": [1]}, "an image that cannot be decoded"),
        ({"img": [None], "label": [1]}, "column 'img' has empty cells"),
        ({"img": [png(np.zeros((8, 8, 3), np.uint8))], "label": [1]}, "must be 32×32"),
        ({"img": [png(np.zeros((32, 32, 3), np.uint8))], "label": ["cat"]}, "labels are not integers"),
    ):
        for part in ("train", "test"):
            parquet(root / f"cifar10/{part}-0.parquet", **columns)
        with pytest.raises(DataError, match=message):
            tasks.load("cifar10", root=root)
    with pytest.raises(DataError, match="not a multiple of 3073-byte records"):
        formats.cifar_binary([write(root / "x.bin", b"123")], 1)


# The real files, against the facts of their READMEs -------------------------------------------------

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@real
@pytest.mark.data
def test_real_mnist():
    task = load("mnist", clients=500, partition=label_chunks(1))
    assert task.spec == "load('mnist', clients=500, partition=label_chunks(1), seed=0)"
    assert torch.bincount(task.targets).tolist() == MNIST_COUNTS
    assert torch.bincount(task.test[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(task.inputs.min()) == pytest.approx(-0.1307 / 0.3081, abs=1e-3)
    assert task.layout.size == 61_706
    assert all(len(task.labels(i).unique()) == 1 for i in range(500))


@real
@pytest.mark.data
def test_real_fashion_mnist():
    task = load("fmnist")
    assert torch.bincount(task.targets).tolist() == [6000] * 10
    assert torch.bincount(task.test[1]).tolist() == [1000] * 10
    low, high = float(task.inputs.min()), float(task.inputs.max())
    assert -low / (high - low) == pytest.approx(0.2860, abs=1e-4)


@real
@pytest.mark.data
def test_real_emnist_letters():
    task = load("emnist")
    both = torch.bincount(task.targets), torch.bincount(task.test[1])
    per_class = {len(task.targets) // 26, len(task.test[1]) // 26}
    assert {int(c.min()) for c in both} == {int(c.max()) for c in both} == per_class


@real
@pytest.mark.data
@pytest.mark.slow
def test_real_cifar10():
    task = load("cifar10")
    assert torch.bincount(task.targets).tolist() == [5000] * 10
    assert torch.bincount(task.targets[:10_000]).tolist() == [
        1005,
        974,
        1032,
        1016,
        999,
        937,
        1030,
        1001,
        1025,
        981,
    ]
    assert torch.bincount(task.test[1]).tolist() == [1000] * 10
    low, high = task.inputs.amin((0, 2, 3)), task.inputs.amax((0, 2, 3))
    assert (-low / (high - low)).tolist() == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
    assert (1 / (high - low)).tolist() == pytest.approx([0.24703, 0.24348, 0.26159], abs=1e-5)


@real
@pytest.mark.data
def test_real_cifar100():
    task = load("cifar100", clients=50, partition=pachinko(0.1, 10.0))
    assert len(torch.bincount(task.targets).unique()) == 1
    assert task.classes == 100
    assert len(set(task.sizes.tolist())) == 1


@real
@pytest.mark.data
def test_real_mushrooms():
    task = load("mushrooms")
    both = torch.cat([task.inputs, task.test[0]])
    assert both.shape == (8124, 112)
    assert int(both.sum()) == 170_604
    assert torch.bincount(torch.cat([task.targets, task.test[1]])).tolist() == [3916, 4208]


@real
@pytest.mark.data
@pytest.mark.parametrize(
    ("fraction", "clients", "train", "test"),
    [(0.9, 660, 3_678_451, 356_921), (0.8, 799, 3_335_126, 771_050)],
)
def test_real_shakespeare_is_leafs(fraction, clients, train, test):
    task = load("shakespeare", fraction=fraction)
    assert (task.clients, len(task.rows), len(task.test[0])) == (clients, train, test)
    assert task.test_offsets[-1] == test
    assert task.inputs.untyped_storage().nbytes() < 5e6
    assert task.layout.size == 163_024


@real
@pytest.mark.data
def test_real_shakespeare_by_fedadavr():
    task = load("shakespeare", test_clients=225)
    assert task.clients == 904
    assert len(task.rows) + len(task.test[0]) == 4_226_158


@real
@pytest.mark.data
def test_real_tinyshakespeare():
    task = load("tinyshakespeare")
    assert task.clients > 100
    assert int(task.targets.max()) == 64


@real
@pytest.mark.data
def test_real_femnist():
    task = load("femnist")
    assert len(task.test_offsets) == task.clients + 1
    assert task.classes == 62
    if task.clients == 105:  # LEAF's five-per-cent sample, in part
        assert (len(task.rows), len(task.test[0])) == (14_708, 1_685)
        assert (task.sizes.min(), task.sizes.max()) == (4, 165)
    some = load("femnist", clients=10, partition=natural())
    assert some.clients == 10
    assert len(some.test[0]) == some.test_offsets[-1] < len(task.test[0])
