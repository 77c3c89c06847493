"""Do Hugging Face's models, adapters and datasets train as they are?"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves
WORK = fb.Work(lr=0.1, batch=4)
LOOP = "in_process(backend='loop')"


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def bert(transformers):
    """A tiny classifier of random weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    small = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=2, **shape)
    return transformers.BertForSequenceClassification(small)


def rows(n=24, seed=0):
    draw = np.random.default_rng(seed)
    said = [draw.integers(5, 50, draw.integers(2, 9)).tolist() for _ in range(n)]
    return {
        "input_ids": said,
        "attention_mask": [[1] * len(s) for s in said],
        "label": [int(s[0] % 2) for s in said],
        "user": [f"u{i % 4}" for i in range(n)],
    }


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets", reason="the extra hf is not installed")


def test_a_dataset_by_column_with_a_model_as_it_is(bert, datasets):
    task = fb.Task.from_datasets(
        bert,
        datasets.Dataset.from_dict(rows()),
        datasets.Dataset.from_dict(rows(12, 1)),
        by="user",
        collate=fb.pad(),
    )
    assert (task.clients, set(task.inputs)) == (4, {"input_ids", "attention_mask"})
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3, clients=2), seed=1)
    assert result.last("accuracy") is not None
    again = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3, clients=2), seed=1, engine="pool(workers=2)")
    assert torch.equal(result.x, again.x)


def test_a_dataset_by_column_that_stays_on_disk(bert, datasets, tmp_path):
    for name, some in (("train", rows()), ("test", rows(12, 1))):
        datasets.Dataset.from_dict(some).save_to_disk(tmp_path / name)
    train, test = (datasets.load_from_disk(tmp_path / name) for name in ("train", "test"))
    tasks = [
        fb.Task.from_datasets(bert, train, test, by="user", collate=fb.pad(), lazy=lazy)
        for lazy in (True, False)
    ]
    assert type(tasks[0].inputs).__name__ == "LazyColumn"
    lazy, eager = (fb.simulate(t, fb.fedavg(), WORK, fb.rounds(3, clients=2), engine=LOOP) for t in tasks)
    assert torch.equal(lazy.x, eager.x)
    assert lazy.last("accuracy") == eager.last("accuracy")
    with pytest.raises(DataError, match=r"no column 'person'; it has 'input_ids'"):
        fb.Task.from_datasets(bert, train, by="person", collate=fb.pad(), lazy=True)
    with pytest.raises(DataError, match="takes a Hugging Face dataset, not a dict"):
        fb.Task.from_datasets(bert, rows(), by="user", collate=fb.pad(), lazy=True)


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas", "polars", "arrow"])
def test_a_dataset_in_any_format_is_read_alike(datasets, form):
    """A format of frames gives a table of one row for an item."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x)

    draw = np.random.default_rng(0)
    held = {"x": draw.normal(size=(24, 3)).tolist(), "user": [i % 4 for i in range(24)], "label": [0, 1] * 12}
    plain = datasets.Dataset.from_dict(held)
    one = plain.with_format(form)
    made = [fb.Task.from_datasets(Sum, d, d, by="user", lazy=z) for d in (plain, one) for z in (False, True)]
    for lazy in (False, True):
        apart = [one.select(range(i, 24, 4)).remove_columns("user") for i in range(4)]
        made.append(fb.Task.from_datasets(Sum, apart, one.remove_columns("user"), lazy=lazy))
    ends = [fb.simulate(t, fb.fedavg(), WORK, fb.rounds(2, clients=2), engine=LOOP) for t in made]
    for end in ends[1:]:
        assert torch.equal(end.x, ends[0].x)
        assert end.last("accuracy") == ends[0].last("accuracy")


def test_a_dataset_per_client_and_its_collator(bert, datasets, transformers):
    whole = datasets.Dataset.from_dict(rows())
    parts = [
        whole.filter(lambda r, u=u: r["user"] == u).remove_columns("user") for u in ("u0", "u1", "u2", "u3")
    ]

    def together(samples):
        long = max(len(s["input_ids"]) for s in samples)
        fill = {
            k: torch.tensor([[*s[k], *[0] * (long - len(s[k]))] for s in samples])
            for k in ("input_ids", "attention_mask")
        }
        return {**fill, "labels": torch.tensor([s["labels"] for s in samples])}

    tasks = [
        fb.Task.from_datasets(bert, parts, collate=together),
        fb.Task.from_datasets(bert, whole, by="user", collate=together),
        fb.Task.from_datasets(bert, whole, by="user", collate=fb.pad()),
    ]
    runs = [fb.simulate(t, fb.fedavg(), WORK, fb.rounds(2), evaluate_every=None).x for t in tasks]
    assert torch.allclose(runs[0], runs[1], atol=1e-6)
    assert torch.equal(runs[1], runs[2])


def test_columns_that_are_text_or_missing(bert, datasets):
    data = datasets.Dataset.from_dict({**rows(), "text": ["so it is"] * 24})
    with pytest.raises(DataError, match=r"'text'.* holds text such as 'so it is'"):
        fb.Task.from_datasets(bert, data, by="user", collate=None, inputs=["text"])
    with pytest.raises(DataError, match="no column 'person'"):
        fb.Task.from_datasets(bert, data, by="person")
    chosen = {"inputs": ["input_ids", "attention_mask"], "collate": fb.pad()}
    assert set(fb.Task.from_datasets(bert, data, by="user", **chosen).inputs) == set(chosen["inputs"])


def test_adapters_alone_travel(bert, datasets):
    peft = pytest.importorskip("peft", reason="the extra hf is not installed")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    adapted = peft.get_peft_model(copy.deepcopy(bert), config)
    task = fb.Task.from_datasets(adapted, datasets.Dataset.from_dict(rows()), by="user", collate=fb.pad())
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert task.layout.size == trained < sum(p.numel() for p in adapted.parameters()) / 10
    assert all("lora" in name or "classifier" in name for name in task.layout.names)
    result = fb.simulate(task, fb.scaffold(), WORK, fb.rounds(2), engine=LOOP)
    assert result.history[0]["up"]["delta"] < 4 * 4 * trained + 4 * 60
    before, after = adapted.state_dict(), result.model().state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved
    assert all("lora" in k or "classifier" in k for k in moved)
    one, two = task.module(), task.module()
    frozen = [p for p in one.parameters() if not p.requires_grad]
    shared = {p.data_ptr() for p in two.parameters()}
    assert all(p.data_ptr() in shared for p in frozen)  # held once, however many copies there are


def test_with_a_frozen_the_mean_of_products_is_the_product_of_means(bert, datasets):
    peft = pytest.importorskip("peft", reason="the extra hf is not installed")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], lora_dropout=0.0)
    adapted = fb.lora.freeze_a(peft.get_peft_model(copy.deepcopy(bert), config))
    task = fb.Task.from_datasets(adapted, datasets.Dataset.from_dict(rows()), by="user", collate=fb.pad())
    assert not any("lora_A" in name for name in task.layout.names)
    assert any("lora_B" in name for name in task.layout.names)
    with pytest.raises(DataError, match="no LoRA"):
        fb.lora.freeze_a(torch.nn.Linear(2, 2))
