"""Do callbacks see what happened, can the trackers' own readers read it, and is an exported model the same?"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.run import callbacks
from fedbraid.run.export import export

WORK = fb.Work(lr=0.1, batch=10)


def run(task, *watching, steps=6, **options):
    return fb.simulate(task, fb.fedavg(), WORK, fb.rounds(steps, clients=3), callbacks=watching, **options)


class Kill:
    """Stops a run the hard way."""

    def __init__(self, at):
        self.at = at

    def step(self, record, run):
        if record["step"] == self.at:
            raise KeyboardInterrupt


# Stopping and keeping -----------------------------------------------------------------------------


def test_early_stopping_counts_evaluations_without_a_rise():
    stop = callbacks.EarlyStopping(patience=2, by=0.01)
    stop.best, stop.waited = None, 0
    said = [
        stop._see(r)
        for r in (
            {"accuracy": 0.5},
            {},
            {"accuracy": 0.505},
            {"accuracy": 0.6},
            {"accuracy": 0.6},
            {"accuracy": 0.5},
        )
    ]
    assert said == [False, False, False, False, False, True]


def test_early_stopping_ends_a_run_and_a_resume_ends_it_there_too(blobs, tmp_path):
    whole = run(blobs, callbacks.EarlyStopping(3), steps=200)
    assert whole.state.t < 200
    with pytest.raises(KeyboardInterrupt):
        run(blobs, callbacks.EarlyStopping(3), Kill(whole.state.t - 1), steps=200, out=tmp_path / "r")
    again = run(blobs, callbacks.EarlyStopping(3), steps=200, out=tmp_path / "r")
    assert again.state.t == whole.state.t
    falling = callbacks.EarlyStopping(1, metric="loss")
    assert run(blobs, falling, steps=3).state.t == 3  # the loss falls at first


@pytest.mark.parametrize("idle", [print, object(), callbacks.EarlyStopping])
def test_what_is_no_callback_is_not_passed_over(blobs, idle):
    with pytest.raises(fb.FedbraidError, match=r"callbacks\[0\] .* start, step or end"):
        run(blobs, idle)


def test_the_best_model_is_kept(blobs, tmp_path):
    best = callbacks.KeepBest()
    result = run(blobs, best, steps=30, out=tmp_path / "r")
    top = max(r["accuracy"] for r in result.history)
    assert best.value == top
    assert best.at == next(r["step"] for r in result.history if r["accuracy"] == top)
    shorter = run(blobs, steps=best.at)
    assert torch.equal(shorter.x, best.x)
    kept = load_file(tmp_path / "r/best.safetensors")
    assert torch.equal(torch.cat([kept[s.name].flatten() for s in blobs.layout]), best.x)


def test_the_best_model_survives_a_resume(blobs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(blobs, callbacks.KeepBest(), Kill(10), steps=30, out=tmp_path / "r")
    run(blobs, callbacks.KeepBest(), steps=30, out=tmp_path / "r")
    run(blobs, callbacks.KeepBest(), steps=30, out=tmp_path / "whole")
    assert (tmp_path / "r/best.safetensors").read_bytes() == (
        tmp_path / "whole/best.safetensors"
    ).read_bytes()


def test_a_callback_of_ones_own_needs_no_more_than_it_uses(blobs):
    class Ends:
        def end(self, result):
            self.steps = result.state.t

    mine = Ends()
    run(blobs, mine)
    assert mine.steps == 6


@pytest.mark.parametrize("make", [lambda: callbacks.EarlyStopping(0), lambda: callbacks.EarlyStopping(by=-1)])
def test_bad_settings(make):
    with pytest.raises(fb.errors.ConfigError):
        make()


# Trackers -----------------------------------------------------------------------------------------


def test_scalars():
    record = {"step": 3, "loss": 0.5, "clients": [1, 2], "up": {"delta": 7}, "name": "x", "flag": True}
    assert callbacks.scalars(record) == {"loss": 0.5, "up/delta": 7.0}


def test_tensorboard(blobs, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(KeyboardInterrupt):
        run(blobs, callbacks.TensorBoard(), Kill(4), out=tmp_path / "r")
    result = run(blobs, callbacks.TensorBoard(), out=tmp_path / "r")
    read = EventAccumulator(str(tmp_path / "r/tensorboard"))
    read.Reload()
    found = {e.step: e.value for e in read.Scalars("accuracy")}
    assert found == pytest.approx({r["step"]: r["accuracy"] for r in result.history})
    assert "up/delta" in read.Tags()["scalars"]
    assert "algorithm/text_summary" in read.Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy and Alembic, which are not ours to mend
def test_mlflow(blobs, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with pytest.raises(KeyboardInterrupt):
        run(blobs, callbacks.MLflow("tests", uri), Kill(4), out=tmp_path / "r")
    result = run(blobs, callbacks.MLflow("tests", uri), out=tmp_path / "r")
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "r"
    assert found.data.params["algorithm"] == "fedavg()"
    logged = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "accuracy")}
    assert logged == {r["step"]: r["accuracy"] for r in result.history}


def test_wandb(blobs, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    result = run(blobs, callbacks.WandB(folder=tmp_path))
    (path,) = tmp_path.rglob("*.wandb")
    logged, deadline = {}, time.monotonic() + 600
    while len(logged) < len(result.history) and time.monotonic() < deadline:  # another process writes it
        for raw in frames(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            if "accuracy" in items:
                logged[items["_step"]] = items["accuracy"]
        time.sleep(0.1)
    assert logged == {r["step"]: r["accuracy"] for r in result.history}


def frames(data):
    """The messages of an offline run, whose file is LevelDB's log: wandb 0.31 reads it in Go only."""
    block, at, whole = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only or the last piece of a message
            yield whole
            whole = b""


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (callbacks.TensorBoard, "torch.utils.tensorboard", "tensorboard"),
        (callbacks.MLflow, "mlflow.tracking", "mlflow"),
        (callbacks.WandB, "wandb", "wandb"),
    ],
)
def test_missing_extras(make, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(fb.errors.MissingExtra, match=f"the extra '{extra}'"):
        make()


def test_command(tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    words = [
        "run",
        "digits",
        "fedavg",
        "--rounds",
        "300",
        "--per-round",
        "3",
        "--out",
        str(tmp_path / "r"),
        "-q",
    ]
    assert main([*words, "--track", "tensorboard", "--patience", "4", "--keep-best"]) == 0
    assert (tmp_path / "r/best.safetensors").exists()
    assert list((tmp_path / "r/tensorboard").iterdir())
    assert len((tmp_path / "r/metrics.jsonl").read_text().splitlines()) < 300
    assert main(["run", "digits", "fedavg", "--track", "paper"]) == 2
    assert "unknown tracker 'paper'" in capsys.readouterr().err


def test_resume_remembers_how_the_run_was_watched(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    place = tmp_path / "r"
    run_ = ["run", "digits", "fedavg", "--rounds", "60", "--per-round", "3", "--out", str(place), "--json"]
    monkeypatch.setattr(callbacks.EarlyStopping, "step", lambda self, *now: Kill(3).step(*now))
    assert main([*run_, "--track", "tensorboard", "--patience", "2", "--keep-best"]) == 130
    monkeypatch.undo()
    (place / "best.safetensors").unlink()
    logs = len(list((place / "tensorboard").iterdir()))

    def resumed(*words):
        capsys.readouterr()
        assert main(["resume", str(place), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    ended = resumed()["steps"]
    assert ended < 60
    assert (place / "best.safetensors").exists()
    assert len(list((place / "tensorboard").iterdir())) == logs + 1
    assert resumed()["steps"] == ended
    assert len(list((place / "tensorboard").iterdir())) == logs + 1  # nothing happened, so nothing is logged
    later = resumed("--patience", "4", "--track", "none", "--no-keep-best")["steps"]
    assert ended < later < 60
    assert json.loads((place / "watching.json").read_text()) == {
        "track": None,
        "patience": 4,
        "keep_best": False,
        "metric": "accuracy",
    }
    assert resumed("--patience", "0")["steps"] == 60
    assert not (place / "watching.json").exists()
    for words, said in (
        (["--track", "paper"], "unknown tracker"),
        (["--patience", "-1"], "patience"),
        (["--target", "95"], "such as 0.95"),
    ):
        assert main(["resume", str(place), *words]) == 2
        assert said in capsys.readouterr().err


# Export -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    task = fb.tasks.load("digits", clients=20)
    out = tmp_path_factory.mktemp("export") / "run"
    return fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3, clients=3), out=out)


def outputs(result, n):
    with torch.no_grad():
        return result.model().eval()(result.task.test[0][:n]).numpy()


@pytest.mark.parametrize("from_folder", [True, False])
def test_safetensors(trained, tmp_path, from_folder):
    path = export(trained.out if from_folder else trained, tmp_path / "m.safetensors")
    assert path.read_bytes() == (trained.out / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("from_folder", [True, False])
def test_torchscript(trained, tmp_path, from_folder):
    export(trained.out if from_folder else trained, tmp_path / "m.pt")
    loaded = torch.jit.load(tmp_path / "m.pt")
    for n in (1, 7):
        assert np.allclose(loaded(trained.task.test[0][:n]).detach().numpy(), outputs(trained, n), atol=1e-6)


def test_onnx(trained, tmp_path):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    from onnx.reference import ReferenceEvaluator

    trained.export(tmp_path / "m.onnx")
    read = ReferenceEvaluator(onnx.load(tmp_path / "m.onnx"))
    for n in (1, 7):
        (found,) = read.run(None, {"input": trained.task.test[0][:n].numpy()})
        assert np.allclose(found, outputs(trained, n), atol=1e-5)


def test_a_model_that_a_trace_cannot_hold(tmp_path):
    class Fickle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) * (1.0 if len(x) != 3 else 2.0)

    task = fb.Task.from_arrays(Fickle(), [(np.eye(2, dtype=np.float32)[[0, 1, 0]], np.array([0, 1, 0]))])
    result = fb.simulate(
        task, fb.fedavg(), WORK, fb.rounds(1, clients=1), engine="in_process(backend='loop')"
    )
    with pytest.raises(fb.errors.DataError, match="a trace cannot hold"):
        result.export(tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


def test_export_command(trained, tmp_path, capsys):
    assert main(["export", str(trained.out), str(tmp_path / "m.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 0
    for words, said in (
        ([str(trained.out), str(tmp_path / "m.h5")], "names no format"),
        ([str(trained.out), str(tmp_path / "m.h5"), "--format", "keras"], "unknown format 'keras'"),
        ([str(tmp_path), str(tmp_path / "n.pt")], "is not a run folder"),
        ([str(trained.out), str(tmp_path / "no/where/m.pt")], "cannot be written"),
    ):
        assert main(["export", *words]) == 2
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]


def test_onnx_missing(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(fb.errors.MissingExtra, match="the extra 'onnx'"):
        trained.export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


# Notebooks ----------------------------------------------------------------------------------------


def test_frames(trained):
    pandas, polars = (pytest.importorskip(m, reason=f"{m} is not installed") for m in ("pandas", "polars"))
    frame = trained.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["accuracy"].tolist() == [r["accuracy"] for r in trained.history]
    assert frame["up.delta"].sum() == trained.bytes_up
    assert isinstance(trained.to_polars(), polars.DataFrame)
    assert trained.to_polars()["clients"].to_list() == [r["clients"] for r in trained.history]


def test_a_result_shows_itself(trained, blobs):
    assert "<table>" in trained._repr_html_()
    assert "fedavg()" in trained._repr_html_()
    for axis in ("step", "bytes", "time", "flops"):
        figure = trained.plot(axis=axis)
        (line,) = figure.axes[0].lines
        assert line.get_ydata().tolist() == [r["accuracy"] for r in trained.history]
    with pytest.raises(fb.errors.RunError, match="no staleness"):
        trained.plot("staleness")


# Doctor -------------------------------------------------------------------------------------------


def test_doctor(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDBRAID_DATA", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["training"]["state"] == "ok"
    assert found["data"]["state"] == "missing"
    monkeypatch.setenv("FEDBRAID_DATA", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "no C++ compiler" in said
    assert "no files of mnist were found" in said
