"""Does what people try in their first week work, or say in one sentence what to do?"""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import ConfigError, DataError, FedbraidError

WORK, ROUNDS = fb.Work(lr=0.1, batch=10), fb.rounds(3, clients=4)
MARKUP = '<script>alert("x")</script>'


def wards(n=200, names=("H00", "H01", "H02", "H03"), seed=0):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, n)
    x = (draw.normal(size=(n, 3)) + y[:, None]).astype(np.float32)
    return {
        "age": x[:, 0],
        "bmi": x[:, 1],
        "dose": x[:, 2],
        "sick": y,
        "hospital": [names[i % len(names)] for i in range(n)],
    }


def frame(**options):
    pandas = pytest.importorskip("pandas", reason="the extra frames is not installed")
    return pandas.DataFrame(wards(**options))


def model():
    return nn.Linear(3, 2)


def auc(outputs, targets):
    pos, neg = outputs[targets == 1, 1], outputs[targets == 0, 1]
    return (pos[:, None] > neg).float().mean() if len(pos) and len(neg) else float("nan")


# A table of hospitals -----------------------------------------------------------------------------


def test_a_frame_by_hospital_has_names_and_local_test_sets():
    task = fb.Task.from_table(model, frame(), "sick", by="hospital", test_fraction=0.2, metrics={"auc": auc})
    assert task.client_names == ("H00", "H01", "H02", "H03")
    assert task.sizes.tolist() == [40] * 4
    assert np.diff(task.test_offsets).tolist() == [10] * 4
    result = fb.simulate(task, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients")
    assert [row["name"] for row in result.per_client()] == ["H00", "H01", "H02", "H03"]
    assert result.last("auc_clients") > 0.6


def test_held_out_samples_are_stratified_and_counted():
    y = np.repeat([0, 1], [80, 20])
    x = np.arange(300, dtype=np.float32).reshape(100, 3)

    def make(seed):
        return fb.Task.from_table(model, x, y, by=np.zeros(100, int), test_fraction=0.25, seed=seed)

    one, again, other = make(1), make(1), make(2)
    assert torch.bincount(one.test[1]).tolist() == [20, 5]
    assert torch.equal(one.test[0], again.test[0])
    assert not torch.equal(one.test[0], other.test[0])
    seen = torch.cat([one.inputs[one.rows], one.test[0]])
    assert torch.equal(seen[seen[:, 0].argsort()], torch.from_numpy(x))  # every sample once, on one side


def test_a_clients_draw_does_not_depend_on_the_others():
    x, y = np.arange(90, dtype=np.float32).reshape(30, 3), np.arange(30) % 2
    pairs = [(x[:10], y[:10]), (x[10:], y[10:])]
    both = fb.Task.from_arrays(model, pairs, test_fraction=0.3)
    first = fb.Task.from_arrays(model, pairs[:1], test_fraction=0.3)
    assert torch.equal(both.test[0][: both.test_offsets[1]], first.test[0])


def test_a_loaded_task_holds_out_local_test_sets_too():
    from fedbraid.data import tasks

    task = fb.tasks.load("digits", clients=10, test_fraction=0.2)
    whole = fb.tasks.load("digits", clients=10)
    assert (task.sizes + np.diff(task.test_offsets)).tolist() == whole.sizes.tolist()
    assert np.diff(task.test_offsets).tolist() == [round(0.2 * n) for n in whole.sizes]
    again = tasks.reload(task.spec)
    assert torch.equal(again.test[0], task.test[0])
    assert torch.equal(again.rows, task.rows)
    with pytest.raises(ConfigError, match="both test_shares= and test_fraction="):
        fb.tasks.load("digits", clients=10, test_fraction=0.2, test_shares=True)


def test_a_client_of_one_sample_trains_on_it():
    x, y = np.ones((6, 3), np.float32), np.arange(6) % 2
    task = fb.Task.from_table(model, x, y, by=[0, 1, 1, 1, 1, 1], test_fraction=0.4)
    assert task.sizes.tolist() == [1, 3]
    assert task.test_offsets.tolist() == [0, 0, 2]


def test_clients_by_name_in_dicts():
    table = wards()
    x = np.stack([table[k] for k in ("age", "bmi", "dose")], 1)
    clients = {"north": (x[:60], table["sick"][:60]), "south": (x[60:], table["sick"][60:])}
    task = fb.Task.from_arrays(model, clients, client_tests={"south": (x[:9], table["sick"][:9])})
    assert task.client_names == ("north", "south")
    assert task.test_offsets.tolist() == [0, 0, 9]
    with pytest.raises(DataError, match="names 'west', which is not a client"):
        fb.Task.from_arrays(model, clients, client_tests={"west": clients["north"]})


@pytest.mark.parametrize("test_fraction", [0, 1, -0.1, math.nan, "a fifth"])
def test_a_fraction_that_leaves_one_side_empty_is_refused(test_fraction):
    with pytest.raises(ConfigError, match="test_fraction"):
        fb.Task.from_table(model, wards(), "sick", by="hospital", test_fraction=test_fraction)


@pytest.mark.parametrize(
    ("column", "value"), [("bmi", math.nan), ("sick", None), ("sick", math.nan), ("hospital", None)]
)
def test_missing_values_are_refused_with_the_columns_name(column, value):
    table = frame()
    table[column] = table[column].astype(object if value is None else float)
    table.loc[[7, 9], column] = value
    with pytest.raises(DataError, match=r"row 7|has 2 missing values \(first in row 7\)") as refusal:
        fb.Task.from_table(model, table, "sick", by="hospital")
    assert column in str(refusal.value) or "client id" in str(refusal.value)


def test_names_are_text_on_every_page(tmp_path):
    from fedbraid.report import collect, page

    table = wards(names=(MARKUP, "b", "c", "d"))
    x = np.stack([table[k] for k in ("age", "bmi", "dose")], 1)
    task = fb.Task.from_table(model, x, table["sick"], by=table["hospital"], test_fraction=0.2)
    fb.simulate(task, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients", out=tmp_path / "run")
    shown = page.render(page.describe(collect.collect([tmp_path / "run"])))
    assert MARKUP not in shown
    assert MARKUP not in task._repr_html_()
    assert json.dumps(MARKUP)[1:-1].replace("<", "\\u003c") in shown


# Metrics that some clients do not define ----------------------------------------------------------


@pytest.fixture
def one_class():
    """Four clients, of whom the first has a local test set of one class."""
    draw = np.random.default_rng(0)

    def some(n, kinds):
        y = draw.integers(0, kinds, n)
        return (draw.normal(size=(n, 3)) + y[:, None]).astype(np.float32), y

    clients, tests = [some(30, 2) for _ in range(4)], [some(10, 1), *(some(10, 2) for _ in range(3))]
    return fb.Task.from_arrays(model, clients, client_tests=tests, metrics={"auc": auc})


def test_an_undefined_metric_is_left_out_counted_and_said(one_class, tmp_path, caplog):
    result = fb.simulate(one_class, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients", out=tmp_path / "run")
    assert all(record["undefined"] == {"auc": 1} for record in result.history)
    assert sum("undefined on the local test sets of 1 of 4" in r.message for r in caplog.records) == 1
    rows = result.per_client()
    assert rows[0]["auc"] is None
    assert result.last("auc_clients") == pytest.approx(np.mean([row["auc"] for row in rows[1:]]), abs=1e-6)


def test_gains_leave_it_out_too(one_class, tmp_path):
    entries = {"FedAvg": fb.fedavg(), "FedProx": fb.fedprox(0.1)}
    found = fb.compare(
        one_class, entries, WORK, ROUNDS, seeds=2, out=tmp_path, local=True, metric="auc", jobs=1
    )
    assert all(math.isfinite(row["gain"]) and row["undefined"] == 1 for row in found.gains)
    assert "auc is undefined for 1 of the clients" in str(found)
    assert "gain over" in str(found)


# What a task says of itself -----------------------------------------------------------------------


def test_a_task_prints_five_lines_and_none_of_its_data():
    task = fb.tasks.load("digits", clients=10)
    assert len(str(task).splitlines()) == 5
    assert "tensor" not in str(task) + repr(task) + task._repr_html_()
    assert len(repr(task)) < 200
    assert "<svg" in task._repr_html_()


def test_settings_are_keywords_that_help_shows():
    import inspect

    for make in (fb.Task.from_arrays, fb.Task.from_datasets, fb.Task.from_table):
        taken = inspect.signature(make).parameters
        assert {"metrics", "personal", "forward", "buffers", "test_fraction", "public"} <= set(taken)
        assert not any(p.kind is p.VAR_KEYWORD for p in taken.values())


def test_no_public_callable_hides_its_settings():
    import inspect

    hidden = []
    for name in dir(fb):
        value = getattr(fb, name)
        if callable(value) and not inspect.ismodule(value):
            try:
                kinds = [p.kind for p in inspect.signature(value).parameters.values()]
            except (TypeError, ValueError):
                continue
            if inspect.Parameter.VAR_KEYWORD in kinds:
                hidden.append(name)
    assert hidden == []


# Folders of files ---------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    for client in range(6):
        (tmp_path / f"c{client}").mkdir()
        for i in range(4):
            np.save(tmp_path / f"c{client}" / f"{i}.npy", np.full(3, client + i, np.float32))
    return fb.folders(tmp_path, lambda path: (np.load(path), int(path.stem) % 2))


def test_folders_are_sliced_counted_and_walked(images):
    assert len(images[:4]) == 4
    assert images[1:3].names == ["c1", "c2"]
    assert images[-1].folder.name == "c5"
    assert [len(files) for files in images] == [4] * 6
    assert images[[0, 5]].names == ["c0", "c5"]


@pytest.mark.parametrize("lazy", [True, False])
def test_clients_are_held_out_by_folder(images, lazy):
    train, held_out = images.split(0.3, seed=1)
    assert sorted(train.names + held_out.names) == images.names
    assert len(held_out) == 2
    task = fb.Task.from_datasets(model, train, held_out.pooled(), lazy=lazy)
    assert task.client_names == tuple(train.names)
    assert fb.simulate(task, fb.fedavg(), WORK, ROUNDS).last("accuracy") is not None


# Language models ----------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x):
        return self.out(self.words(x))  # [B, T, V]


def texts(n=12):
    x = torch.randint(11, (n, 7), generator=torch.Generator().manual_seed(n))
    return x, (x + 1) % 11


def test_a_language_model_is_told_which_to_change_and_how():
    with pytest.raises(DataError, match="use forward=lambda model, x:") as refusal:
        fb.Task.from_arrays(Words, [texts()])
    forward = eval(re.search(r"forward=(lambda.*)$", str(refusal.value))[1])
    task = fb.Task.from_arrays(
        Words, [texts(), texts(9)], texts(20), forward=forward,
        metrics={"perplexity": fb.metrics.perplexity(), "top5": fb.metrics.top_k(5)},
    )  # fmt: skip
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=1.0, batch=4), fb.rounds(3))
    assert result.last("perplexity") == pytest.approx(math.exp(result.last("loss")), rel=1e-4)
    assert 0 < result.last("top5") <= 1


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "said"),
    [
        ("cross_entropy", (2, 3), (2, 3), "argmax"),
        ("cross_entropy", (2, 3), (2, 1), r"targets\[\.\.\., 0\]"),
        ("cross_entropy", (2, 7, 3), (2,), "one a sample"),
        ("cross_entropy", (2, 5, 5, 3), (2, 5, 5), "movedim"),
        ("mse", (2, 3), (2, 4), "to give 4 a sample"),
    ],
)
def test_shapes_that_do_not_fit_say_which_to_change(loss, outputs, targets, said):
    from fedbraid.data.task import shape_advice

    assert re.search(said, shape_advice(loss, torch.zeros(outputs), torch.zeros(targets)))


@pytest.mark.parametrize(("metric", "outputs"), [("perplexity", (2, 3, 4)), ("top", (2, 3)), ("k", (4, 3))])
def test_ready_metrics_refuse_what_they_cannot_read(metric, outputs):
    used = fb.metrics.perplexity() if metric == "perplexity" else fb.metrics.top_k(9 if metric == "k" else 1)
    with pytest.raises(ConfigError):
        used(torch.zeros(outputs), torch.zeros(4, dtype=torch.int64))


def test_ready_metrics_leave_padding_out():
    outputs, targets = torch.randn(3, 5, 4), torch.tensor([[0, 1, -100, -100], [4, -100, 2, 3], [1, 1, 1, 1]])
    expected = nn.functional.cross_entropy(outputs, targets, ignore_index=-100).exp()
    assert fb.metrics.perplexity()(outputs, targets) == pytest.approx(float(expected), rel=1e-5)
    assert fb.metrics.top_k(5)(outputs, targets) == 1.0


# Raw errors that became sentences -----------------------------------------------------------------


def pairs(bad=None, at=2):
    x, y = np.ones((5, 3), np.float32), np.arange(5) % 2
    found = [(x, y.copy()) for _ in range(4)]
    if bad is not None:
        found[at][1][3] = bad
    return found


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("at", [0, 2])
def test_a_label_out_of_range_names_client_and_range(bad, at):
    with pytest.raises(DataError, match=rf"client {at} has the label {bad}, .*run from 0 to 1") as refusal:
        fb.Task.from_arrays(model, pairs(bad, at))
    assert "fit each other" not in str(refusal.value)


def test_negative_strides_are_taken():
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3)[::-1], np.array([0, 1, 0, 1, 1])[::-1]
    task = fb.Task.from_arrays(model, [(x, y)])
    assert torch.equal(task.inputs, torch.from_numpy(x.copy()))


def test_a_model_on_meta_is_one_sentence():
    with torch.device("meta"):
        given = nn.Linear(3, 2)
    for form in (given, lambda: nn.Linear(3, 2, device="meta")):
        with pytest.raises(DataError, match="meta device, which holds no weights; build it on the CPU"):
            fb.Task.from_arrays(form, pairs())


def test_a_missing_schedule_is_one_sentence():
    with pytest.raises(FedbraidError, match=r"schedule.*fb\.rounds\("):
        fb.simulate(fb.Task.from_arrays(model, pairs()), fb.fedavg(), WORK)


# Terminals and notebooks --------------------------------------------------------------------------


def drawn(width, steps=20_000, done=123, title="fedavg", terminal=True):
    """What a bar looks like on a terminal of this width."""
    import io

    from rich.console import Console

    from fedbraid.run.progress import Bar

    sheet = io.StringIO()
    bar = Bar(title, console=Console(file=sheet, force_terminal=terminal, width=width, color_system=None))
    bar.bar = bar.screen.add(title, steps, 0)
    bar.up = bar.down = 48.1e6
    bar.accuracy = 0.983
    bar.screen.show(bar.bar, done, bar._facts())
    bar.close()
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", sheet.getvalue()).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_bar_is_one_line_with_its_count_and_accuracy(width):
    lines = [line.rstrip() for line in drawn(width, title="4 bits kept and sent") if line.strip()]
    assert max(map(len, lines)) <= width
    assert "123/20000" in lines[-1]
    assert "98.3 %" in lines[-1]
    assert ("↓ 48.1 MB" in lines[-1]) == (width >= 80)


def test_an_interrupted_bar_has_no_time_left():
    lines = [line for line in drawn(80, done=5000) if line.strip()]
    assert "left" not in lines[-1]


def test_progress_is_drawn_where_somebody_watches(monkeypatch):
    """By default in terminals and notebooks, in neither pipes nor worker processes, and never where it is off."""
    from fedbraid.run import progress

    task, shown = fb.Task.from_arrays(model, pairs()), []

    class Screen:
        every, disabled = 0.0, False

        def add(self, title, total, done):
            return 0

        def show(self, bar, done, facts, finished=False):
            shown.append(done)

        def stop(self):
            pass

    monkeypatch.setattr(progress, "display", lambda console=None: Screen())
    runs = {}
    for watched in (True, False):
        monkeypatch.setattr(progress.sys.stderr, "isatty", lambda watched=watched: watched)
        for asked in (None, True, False):
            shown.clear()
            fb.simulate(task, fb.fedavg(), WORK, ROUNDS, progress=asked)
            runs[watched, asked] = bool(shown)
    assert runs == {(w, a): bool(a) or (a is None and w) for w in (True, False) for a in (None, True, False)}
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "_PROCESS", -1)  # as in a forked worker
    assert not progress.is_watched()


def test_a_notebooks_cell_shows_bars_and_leaves_none():
    pytest.importorskip("ipykernel", reason="the extra notebooks is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra notebooks is not installed")
    import nbformat

    code = (
        "import fedbraid as fb, fedbraid.run.progress as p\n"
        "p.Cell.stop = lambda self: None\n"
        "task = fb.tasks.load('digits', clients=10)\n"
        "fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(3, clients=4)).bytes_up > 0"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120).execute()
    outputs = book.cells[0].outputs
    pages = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert len(pages) == 1
    assert "<progress value='3' max='3'>" in pages[0]
    assert outputs[-1].data["text/plain"] == "True"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_terminals_that_are_not_utf8_show_ascii(encoding):
    import io

    from fedbraid.cli.show import spell_out

    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    spell_out(stream)
    stream.write("── ✓ 97.1 ± 0.2 % ε 日 …")
    stream.flush()
    assert (
        raw.getvalue().decode(encoding)
        == {
            "ascii": "-- yes 97.1 +/- 0.2 % epsilon ? ...",
            "latin-1": "-- yes 97.1 ± 0.2 % epsilon ? ...",
            "cp1252": "-- yes 97.1 ± 0.2 % epsilon ? …",
            "utf-8": "── ✓ 97.1 ± 0.2 % ε 日 …",
        }[encoding]
    )


def test_a_command_runs_to_its_end_on_an_ascii_terminal(tmp_path):
    words = ["data", "digits", "--clients", "10", "--partition", "label_chunks(1)"]
    done = fedbraid(*words, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def fedbraid(*words, cwd, **environment):
    import os
    import subprocess
    import sys

    command = [sys.executable, "-m", "fedbraid", *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def test_help_has_no_backslashes_before_brackets(capsys):
    from fedbraid.cli import main

    for command in ([], ["run"], ["sweep"], ["resume"], ["deploy", "node"]):
        assert main([*command, "--help"]) == 0
        assert "\\[" not in capsys.readouterr().out


def test_an_interrupted_resume_says_where_the_run_stands(tmp_path, monkeypatch, capsys):
    from fedbraid.cli import main
    from fedbraid.data import tasks

    place = tmp_path / "my run"
    fb.simulate(
        fb.tasks.load("digits", clients=10), fb.fedavg(), WORK, fb.rounds(9, clients=4), out=place,
        callbacks=[type("Stop", (), {"step": lambda self, record, run: record["step"] == 5})()],
    )  # fmt: skip

    def interrupted(spec):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "reload", interrupted)
    assert main(["resume", str(place)]) == 130
    said = capsys.readouterr().err
    assert f"interrupted at step 5. Resume with: fedbraid resume '{place}'" in said


def test_the_first_seconds_of_a_command_are_not_silent(monkeypatch, capsys):
    import sys

    from fedbraid.cli.show import waiting

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with waiting("loading digits"):
        assert capsys.readouterr().err.startswith("loading digits …")
    assert capsys.readouterr().err == "\x1b[K"
    with waiting("loading digits", hidden=True):
        pass
    assert capsys.readouterr().err == ""


# Reports and figures ------------------------------------------------------------------------------


def report(*words, capsys):
    from fedbraid.cli import main

    code = main(["report", *map(str, words)])
    return code, capsys.readouterr().err


@pytest.fixture
def clocked(tmp_path):
    task = fb.tasks.load("digits", clients=10)
    return fb.simulate(
        task, fb.fedbuff(), WORK, fb.buffered(6, buffer=2, concurrency=4), out=tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("name", "starts"), [("five.pdf", b"%PDF"), ("five.svg", b"<?xml"), ("five.PNG", b"\x89PNG"), ("timeline.svg", b"<?xml")]
)  # fmt: skip
def test_a_figure_is_what_its_name_says(name, starts, clocked, tmp_path, capsys):
    where = tmp_path / name
    assert report(clocked.out, "--figure", where, capsys=capsys)[0] == 0
    first = where.read_bytes()
    assert first.startswith(starts)
    report(clocked.out, "--figure", where, capsys=capsys)
    assert where.read_bytes() == first  # no date in it
    assert (b"staleness" in first or b"<!-- staleness -->" in first) == (name == "timeline.svg")


def test_a_figure_of_another_kind_is_refused(clocked, tmp_path, capsys):
    code, said = report(clocked.out, "--figure", tmp_path / "five.jpg", capsys=capsys)
    assert code == 2
    assert "must end in .pdf, .svg or .png" in said


def test_a_timeline_has_a_bar_a_job_and_needs_a_clock(clocked):
    pane = clocked.timeline().axes[0]
    jobs = sum(len(r["clients"]) for r in clocked.history)
    legend = len(pane.get_legend().get_texts())
    assert len(pane.patches) == jobs + legend
    without = fb.simulate(clocked.task, fb.fedavg(), WORK, fb.rounds(2, clients=3))
    with pytest.raises(FedbraidError, match=r"no clock.*durations="):
        without.timeline()


def test_latex_is_bold_only_where_intervals_lie_apart():
    from fedbraid.report.tables import as_latex

    def table(*finals):
        rows = [
            {"name": f"a{i}", "metric": "accuracy", "final": {"mean": m, "half": h, "count": 3}, "failed": 0,
             "bytes_up": 1e6, "bytes_down": 1e6} for i, (m, h) in enumerate(finals)
        ]  # fmt: skip
        return as_latex({"metric": "accuracy", "target": None, "task": "t", "rows": rows})

    clear = table((0.9, 0.01), (0.8, 0.01))
    assert clear.count("mathbf") == 1
    assert "dagger" not in clear
    level = table((0.8982, 0.0251), (0.8982, 0.0191), (0.5, 0.01))
    assert "mathbf" not in level
    assert level.count(r"^\dagger$") == 2 + 1  # two rows and the note
    assert "intervals overlap" in level
    single = table((0.9, None), (0.8, None))
    assert "mathbf" not in single
    assert "dagger" not in single


@dataclasses.dataclass(frozen=True)
class Halved(fb.Rule):
    def step(self, g, y, s, ctx):
        return g / 2, s


@pytest.mark.parametrize("name", ["mine", "My FedAvg (ours)", "fedavg", "fedavg()", ""])
def test_any_name_works_and_commands_reproduce_the_run(name, tmp_path):
    from fedbraid.report import collect, page

    task = fb.tasks.load("digits", clients=10)
    custom = fb.Algorithm(rule=Halved(), name=name)
    for made, place in ((custom, "a"), (fb.fedprox(0.1), "b")):
        fb.simulate(task, made, WORK, ROUNDS, out=tmp_path / place)
    for path, known in ((tmp_path / "a", False), (tmp_path / "b", True)):
        found = collect.collect([path])
        (group,) = page.describe(found)["groups"]
        assert (group["command"] is not None) == known
        assert ("made in Python" in group["why"]) != known
        assert (found.statistics()[0].flops[0] is not None) == known
        assert page.render(page.describe(found))


def test_reports_say_delta_what_is_personal_and_who_diverged(tmp_path):
    pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    from fedbraid.report import collect, page

    task = fb.tasks.load("digits", clients=10, personal=("3.*",))
    entries = {"private": fb.private(fb.fedavg(), noise=1.0), "dead": (fb.fedavg(), fb.Work(lr=1e6))}
    fb.compare(task, entries, WORK, ROUNDS, seeds=2, out=tmp_path / "grid", jobs=1)
    data = page.describe(collect.collect([tmp_path / "grid"]))
    assert "personal: 3.*" in data["task"]
    assert [row["name"] for row in data["rows"]] == ["private", "dead"]
    assert data["rows"][0]["delta"] == 1e-5
    assert data["rows"][1]["final"] is None
    assert data["rows"][1]["failed"] == 2
    assert "private and dead" in data["title"]
    assert data["groups"][0]["settings"]["personal"] == "3.*"
    page.render(data)


# Errors, stops and custom algorithms --------------------------------------------------------------


def command(*words, capsys):
    from fedbraid.cli import main

    code = main(list(map(str, words)))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "digits", "fedprox mu=0.8", "fedavg"],
        ["sweep", "digits", "fedprox", "mu=[0.1, 1]"],
        ["run", "digits", "fedavg", "-a", "epochs=3"],
        ["run", "digits", "fedavg", "-a", "work.lr=3"],
        ["run", "digits", "fedavg", "-a", "lr"],
    ],
)
def test_one_rule_for_the_spellings_of_a_rate_is_in_each_error(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, said = command(*words, capsys=capsys)
    assert code == 2
    assert "lr= and --lr are the clients' rate; algorithm.lr= and -a lr= are the algorithm's" in said


def test_the_rule_of_rates_holds(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("lr=0.5", "algorithm.lr=0.5"):
        code, out, _ = command(
            "run", "digits", "fedavg", "-a", given, "--lr", "0.1", "--rounds", "1", "--json", capsys=capsys
        )
        assert code == 0
        assert json.loads(out)["algorithm"] == "fedavg(lr=0.5)"


def test_a_run_stops_at_a_number_of_uploaded_bytes(tmp_path, capsys):
    place = tmp_path / "run"
    words = [
        "run",
        "digits",
        "fedavg",
        "--clients",
        "10",
        "--per-round",
        "2",
        "--rounds",
        "9",
        "--json",
        "-o",
        place,
    ]
    code, out, _ = command(*words, "--max-bytes-up", "0.1MB", capsys=capsys)
    stopped = json.loads(out)
    assert code == 0
    each = stopped["bytes_up"] // stopped["steps"]
    assert stopped["steps"] == -(-100_000 // each) < 9
    code, out, _ = command("resume", place, "--json", capsys=capsys)
    assert json.loads(out)["steps"] == stopped["steps"]
    from fedbraid.report import collect, page

    (group,) = page.describe(collect.collect([place]))["groups"]
    assert "--max-bytes-up 100000" in group["command"]
    code, out, _ = command("resume", place, "--json", "--max-bytes-up", "none", capsys=capsys)
    assert json.loads(out)["steps"] == 9
    assert command(*words[:3], "--max-bytes-up", "much", capsys=capsys)[0] == 2


def test_uploads_are_a_mapping_of_vectors():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Looks(fb.Gather):
        def zero(self, x):
            return torch.zeros_like(x)

        def add(self, acc, up, s, x):
            seen.append(
                (list(up), len(up), "delta" in up, up.get("absent"), dict(up.items())["delta"] is up["delta"])
            )
            return acc + up["delta"].sum(0)

        def close(self, acc, s, ctx):
            return {"delta": acc / ctx.cohort}, s, {}

    task = fb.Task.from_arrays(model, pairs())
    result = fb.simulate(task, fb.Algorithm(gather=Looks()), WORK, ROUNDS)
    assert seen[0] == (["delta"], 1, True, None, True)
    assert "Looks" in str(result)
    assert fb.Algorithm(name="mine").label == "mine"
    assert fb.Algorithm().label == "fedavg()"


def test_divergence_advises_in_the_words_of_the_place(tmp_path, capsys):
    task = fb.tasks.load("digits", clients=10)
    with pytest.raises(fb.errors.Diverged, match="pass ignore_divergence=True") as failure:
        fb.simulate(task, fb.fedadam(lr=1e5), WORK, fb.rounds(30, clients=4))
    shown = failure.value._render_traceback_()
    assert shown[0].startswith("Diverged: training diverged at step")
    assert any("fb.simulate(task" in line for line in shown[1:])
    assert not any("src/fedbraid" in line for line in shown[1:])
    words = ["run", "digits", "fedadam(lr=1e5)", "--clients", "10", "-o", tmp_path / "run", "-q"]
    code, _, said = command(*words, capsys=capsys)
    assert code == 2
    assert "pass --ignore-divergence" in said


def test_a_comparison_needs_no_folder(monkeypatch):
    from fedbraid.run import progress

    shown = []

    class Screen:
        every, disabled = 0.0, False

        def add(self, title, total, done):
            shown.append((title, total, done))
            return 0

        def show(self, bar, done, facts, finished=False):
            shown.append((done, facts))

        def stop(self):
            shown.append("stopped")

    monkeypatch.setattr(progress, "display", lambda console=None: Screen())
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    task = fb.Task.from_arrays(model, pairs(), pairs()[0])
    found = fb.compare(task, {"a": fb.fedavg(), "b": fb.fedprox(0.1)}, WORK, ROUNDS, seeds=1, jobs=1)
    assert found.out.exists()
    assert shown[0] == ("compare", 6, 0)
    assert shown[-1] == "stopped"
    shown.clear()
    fb.compare(task, {"a": fb.fedavg()}, WORK, ROUNDS, seeds=1, jobs=1, on_event=lambda event: None)
    assert shown == []


def test_a_sweep_says_which_trials_tie_with_the_best(tmp_path):
    from fedbraid.study.sweep import Sweep, Trial

    values = {0: 0.90, 1: 0.88, 2: 0.80, 3: None}
    trials = [Trial(n, {"lr": n}, "diverged" if v is None else "done", v, 5) for n, v in values.items()]
    found = Sweep("accuracy", trials, tmp_path, samples=500)
    assert found.noise == pytest.approx(1.96 * math.sqrt(2 * 0.9 * 0.1 / 500))
    assert [t.number for t in found.tied] == [1]
    assert [t.number for t in Sweep("accuracy", trials, tmp_path, samples=500_000).tied] == []
    assert Sweep("loss", trials, tmp_path, samples=500).tied == []


def test_a_sweep_prints_ties(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "sweep",
        "digits",
        "fedavg",
        "lr=[0.1, 0.101]",
        "--method",
        "grid",
        "--rounds",
        "3",
        "--clients",
        "20",
    ]
    code, out, _ = command(*words, capsys=capsys)
    assert code == 0
    assert re.search(r"1 other trial is within \d+\.\d % of the best", " ".join(out.split()))


# What a person reads at the end -------------------------------------------------------------------


def test_a_result_prints_four_digits_and_says_when_nothing_was_learned():
    task = fb.tasks.load("digits", clients=20)
    good = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3, clients=5))
    bad = fb.simulate(
        task, fb.fedavg(), fb.Work(lr=5.0, batch=10), fb.rounds(3, clients=5), ignore_divergence=True
    )
    assert re.search(r"accuracy  0\.\d{1,4}\n +loss  \d+\.\d{1,4}\n", str(good))
    assert "no better" not in str(good)
    likeliest = torch.bincount(task.test[1]).max() / len(task.test[1])
    assert ("no better than naming the most frequent label" in str(bad)) == (
        bad.last("accuracy") <= likeliest
    )
    assert bad.last("accuracy") <= likeliest


def test_a_notebook_shows_an_algorithm_by_its_name():
    class Printer:
        def text(self, said):
            self.said = said

    printer = Printer()
    fb.fedadavr(lr=0.02)._repr_pretty_(printer, False)
    assert printer.said == "fedadavr(lr=0.02)"


def test_resume_says_which_command_goes_on_with_a_comparison_or_sweep(tmp_path, capsys):
    task = fb.Task.from_arrays(model, pairs(), pairs()[0])
    fb.compare(task, {"a": fb.fedavg()}, WORK, ROUNDS, seeds=1, jobs=1, out=tmp_path / "c 1")
    code, _, said = command("resume", tmp_path / "c 1", capsys=capsys)
    assert code == 2
    assert f"is a comparison; use fedbraid compare '{tmp_path / 'c 1'}'" in " ".join(said.split())
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text("{}")
    _, _, said = command("resume", tmp_path / "s", capsys=capsys)
    assert "is a sweep; use fedbraid sweep" in " ".join(said.split())


def test_a_process_is_found_without_proc(tmp_path):
    """As on macOS: the broker of a folder is known by its command line."""
    broker = pytest.importorskip("fedbraid.deploy.broker", reason="the extra nats is not installed")
    import os
    import shutil

    if shutil.which("ps") is None:
        pytest.skip("ps is not installed")
    for proc in (broker.Path("/proc"), tmp_path / "none"):
        assert "python" in broker._command_of(os.getpid(), proc)
        assert broker._command_of(2**22 + 1, proc) == ""
