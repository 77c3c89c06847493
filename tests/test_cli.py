"""Does the command line do what it says, refuse what it cannot do in one sentence, and lose nothing?"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.numpy import load_file

import fedbraid as fb
from fedbraid.cli import app, main, show
from fedbraid_native.errors import Unsupported

sys.path.insert(0, str(Path(__file__).parent.parent / "docs/_site"))
import commands

Call = Callable[..., tuple[int, str, str]]
FAST = ["--rounds", "4", "--per-round", "5", "--clients", "20"]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A real one, as a shell would start it."""
    command = [sys.executable, "-m", "fedbraid", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but for SQLite's scratch files."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith("state.db-")}


def refused(result: tuple[int, str, str], said: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("fedbraid: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


# Help ---------------------------------------------------------------------------------------------


def test_help_does_not_import_torch() -> None:
    probe = "import sys; from fedbraid.cli import main; main(['--help']); main(['run', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "Commands:" in done.stdout
    assert "Examples:" in done.stdout


@pytest.mark.parametrize("command", ["demo", "run", "resume", "data", "cost", "list"])
def test_every_command_teaches(command: str, call: Call) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"  fedbraid {command}" in out


def test_no_command_and_version(call: Call) -> None:
    assert "Commands:" in call()[1]
    said = call("--version")[1].splitlines()
    assert said[0] == f"fedbraid {fb.__version__}"
    assert [line.split()[0] for line in said[1:]] == ["python", "torch", "compiler", "extras"]


@pytest.mark.parametrize("width", [60, 80, 110, 170])
def test_help_fits_and_is_whole(width: int, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    top = typer.main.get_command(app)
    taught = 0
    for name, command in [("", top), ("deploy", top.commands["deploy"]), *commands.commands(top)]:
        out = call(*name.split(), "--help")[1]
        assert [line for line in out.splitlines() if len(line) > width] == [], name
        assert not [line for line in out.partition("Commands:")[2].splitlines() if line.endswith("...")], name
        told = [line.strip() for line in (command.help or "").splitlines() if line.startswith("  fedbraid ")]
        shown = re.findall(r"^    (fedbraid .*(?:(?<=\\)\n.*)*)", out, re.MULTILINE)
        assert [shlex.split(line.replace("\\\n", "")) for line in shown] == [
            shlex.split(line) for line in told
        ], name
        taught += len(told)
        assert all(p.help for p in command.params if p.param_type_name == "argument"), name
    assert taught > 50


def test_a_command_is_folded_between_its_arguments() -> None:
    from fedbraid.cli.help import folded

    line = """    fedbraid run 'mnist(clients=500)' "fedshift(fedavg, by=0.1)" --partition 'iid_mix(0.5)' -a lr=1"""
    assert folded(line, len(line)) == line
    assert folded(line, 50).splitlines() == [
        "    fedbraid run 'mnist(clients=500)' \\",
        '      "fedshift(fedavg, by=0.1)" \\',
        "      --partition 'iid_mix(0.5)' -a lr=1",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_what_commands_say_fits(width: int, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    many = ["--partition", "label_chunks(1)", "--rounds", "2", "--per-round", "50", "--clients", "20"]
    for words in (
        ["run", "digits", "fedadavr(optimizer='lamb', lr=0.02, memory='int4')", *many],
        ["compare", "digits", "fedavg", "scaffold", "--seeds", "1", *many],
        ["sweep", "digits", "fedavg", "lr=log(0.01, 0.1)", "--method", "random", "--trials", "1", *many],
        ["data", "digits", "--partition", "label_chunks(1)"],
        ["demo"],
    ):
        code, out, _ = call(*words)
        assert code == 0
        assert [line for line in out.splitlines() if len(line) > width] == [], words[0]
        assert "load(" not in out


@pytest.mark.parametrize("width", [60, 110])
def test_lists_keep_a_column_of_names(width: int, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = call("list", "tasks")[1].splitlines()[1:]
    assert max(map(len, lines)) <= width
    names = [line.split()[0] for line in lines if line[2] != " "]
    assert names == fb.tasks.names()
    monkeypatch.delenv("COLUMNS")
    assert len(call("list", "tasks")[1].splitlines()) == len(names) + 1


def test_the_doctor_knows_every_extra() -> None:
    import tomllib

    from fedbraid.cli.doctor import EXTRAS

    told = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == told["optional-dependencies"].keys() - {"dev", "docs", "notebooks"}


# Commands -----------------------------------------------------------------------------------------


def test_demo(call: Call) -> None:
    code, out, err = call("demo", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    averaging, ours, kept, thin = said["runs"]
    assert ours["accuracy"] > averaging["accuracy"] > 0.9
    assert thin["accuracy"] > 0.95
    assert ours["accuracy_worst"] > averaging["accuracy_worst"]
    assert thin["bytes_up"] < 0.15 * ours["bytes_up"]
    assert kept["bytes_up"] == ours["bytes_up"]  # what is kept in 4 bits still travels in 32
    assert kept["bytes_kept"] == thin["bytes_kept"] < 0.15 * ours["bytes_kept"]
    assert averaging["bytes_kept"] == 0


def test_a_run_says_its_engine_and_why(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ("run", "digits", "fedavg", *FAST, "--out", str(tmp_path / "run"))
    said = json.loads(call(*asked, "--json")[1])
    assert said["plan"].startswith("plain autograd: the run takes about")
    _, out, _ = call("doctor", "--why", str(tmp_path / "run"))
    assert said["engine"] in " ".join(out.split())
    assert said["plan"] in " ".join(out.split())
    monkeypatch.setattr("fedbraid.engines.native_backend.trace", refuse)
    _, out, _ = call("run", "digits", "fedavg", "--rounds", "100000", "--target", "0.1", "--lr", "0.1")
    assert "vmap, and no compiled gradients: the layer Odd at 'body.3' is not supported" in " ".join(
        out.split()
    )


def refuse(*_: object) -> None:
    raise Unsupported("the layer Odd at 'body.3' is not supported")


def test_what_is_sent_and_what_is_kept(call: Call) -> None:
    _, out, _ = call("run", "digits", "fedadavr", "-a", "memory=int4", *FAST)
    assert "sent in 32 bits a number" in out
    assert re.search(r"stored in 4\.\d+ bits a number", out)
    assert "kept" not in call("run", "digits", "fedavg", *FAST)[1]


def test_more_clients_than_there_are_are_not_taken_in_silence(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    call("run", "digits", "fedavg", "--clients", "20", "--per-round", "21", "--rounds", "1", "-q")
    assert "21 clients per round were requested and there are 20" in caplog.text
    caplog.clear()
    call("run", "digits", "fedavg", "--clients", "20", "--per-round", "20", "--rounds", "1", "-q")
    assert not caplog.text


def test_training_alone_says_that_nothing_travelled(call: Call) -> None:
    assert "nothing travelled" in call("run", "digits", "local_only", *FAST)[2]


def test_a_run_that_learned_nothing_says_what_to_try(call: Call) -> None:
    said = call("run", "digits", "fedavg", *FAST, "--lr", "100", "--ignore-divergence")[2]
    assert "no better than guessing among 10 classes" in said
    assert call("run", "digits", "fedavg", *FAST)[2] == ""


def test_a_word_where_a_number_belongs(call: Call) -> None:
    refused(
        call("run", "digits", "fedavg", "-a", "lr=abc"), "lr=abc is not a number; write one, such as lr=0.01"
    )
    refused(call("run", "digits", "fedavg(lr=wxyz)"), "lr of fedavg is wxyz, which names nothing")
    refused(call("run", "digits", "fedpaq(int9)"), "did you mean 'int8'?")


# Tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_a_table_fits_and_keeps_a_line_a_row(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        ["a contestant of a very long name indeed", "97.12 ± 0.31 %", "1.0", "5.78 MB"],
        ["b", "–", "2.0", "1 B"],
    ]
    show.table("title", ["", "accuracy", "rank", "up"], rows, order=[0, 1, 3, 2])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert all(len(line) <= max(columns, 33) for line in lines[:4])  # two columns stay, whatever there is
    assert lines[2].startswith("a contestant of")
    assert "97.12 ± 0.31 %" in lines[2]
    assert ("left out at" in lines[4] if lines[4:] else False) == (columns < 60)
    assert ("rank" in lines[0]) == (columns >= 60)
    assert ("…" in lines[2]) == (columns < 80)


def test_run_makes_a_new_folder_each_time(call: Call) -> None:
    for number in (1, 2):
        code, out, err = call("run", "digits", "fedavg", *FAST, "--json")
        assert (code, err) == (0, "")
        said = json.loads(out)
        assert said["run"] == f"runs/digits-fedavg-{number}"
        assert said["steps"] == 4
        assert {p.name for p in Path(said["run"]).iterdir()} >= {
            "run.json",
            "metrics.jsonl",
            "state.db",
            "model.safetensors",
        }


def test_run_prints_a_table_and_no_colours(call: Call) -> None:
    _, out, err = call("run", "digits", "fedavg", *FAST)
    assert "accuracy" in out
    assert "runs/digits-fedavg-1" in out
    assert "\x1b" not in out + err
    assert call("run", "digits", "fedavg", *FAST, "--quiet") == (0, "", "")


def test_options_reach_the_run(call: Call) -> None:
    call(
        "run", "digits(clients=20, seed=3)", "fedadavr", "-a", "optimizer=lamb", "-a", "memory=int4", "-a", "lr=0.02",
        "--partition", "dirichlet(0.5)", "--model", "softmax_regression", "--lr", "0.1", "--steps", "3", "--batch", "full",
        "--momentum", "0.5", "--weight-decay", "0.001", "--clip", "5", "--lr-decay", "0.99", "--last", "drop",
        "--rounds", "3", "--per-round", "0.25", "--over-select", "1.5", "--timeout", "9", "--durations", "halfnormal(2)",
        "--bandwidth", "bandwidth(up=1e6, down=1e6)", "--seed", "5", "--engine", "in_process(block=2)", "--evaluate-every", "2",
        "--client-state", "disk", "--out", "here", "-q",
    )  # fmt: skip
    said = json.loads(Path("here/run.json").read_text())
    assert (
        said["task"]
        == "load('digits', clients=20, partition=dirichlet(0.5), seed=3, model='softmax_regression')"
    )
    assert said["algorithm"] == "fedadavr(optimizer='lamb', lr=0.02, memory='int4')"
    work = fb.Work(0.1, None, 3, None, momentum=0.5, weight_decay=0.001, clip=5.0, lr_decay=0.99, last="drop")
    assert said["work"] == repr(work)
    clock = fb.clock
    times = {"durations": clock.halfnormal(2), "bandwidth": clock.bandwidth(1e6, 1e6)}
    assert said["schedule"] == repr(fb.rounds(3, 0.25, over_select=1.5, timeout=9.0, **times))
    assert said["seed"] == 5
    assert "block=2" in said["engine"]
    assert said["options"]["client_state_storage"] == "disk"
    records = [json.loads(line) for line in Path("here/metrics.jsonl").read_text().splitlines()]
    assert ["accuracy" in r for r in records] == [False, True, True]


def test_asynchronous_run(call: Call) -> None:
    arguments = [
        "--rounds",
        "5",
        "--buffer",
        "3",
        "--concurrency",
        "6",
        "--arrivals",
        "poisson",
        "-o",
        "here",
        "-q",
    ]
    assert call("run", "digits", "fedbuff", *arguments)[0] == 0
    assert json.loads(Path("here/run.json").read_text())["schedule"].startswith(
        "Buffered(steps=5, buffer=3, concurrency=6"
    )


def test_composed_algorithms_and_codecs_by_text(call: Call) -> None:
    for text in (
        "fedshift(fedpaq(mixed(kmeans(4), share=0.5)))",
        "error_feedback(with_codecs(scaffold(), up=int8()))",
    ):
        assert call("run", "digits", text, *FAST, "-q") == (0, "", "")
    assert call("run", "digits", "fedpaq", "-a", "codec=int8", *FAST, "-q", "-o", "here") == (0, "", "")
    assert json.loads(Path("here/run.json").read_text())["algorithm"] == "fedpaq(int8())"


def test_target_ends_the_run_and_resume_keeps_to_it(call: Call) -> None:
    arguments = [
        "--clients",
        "20",
        "--rounds",
        "40",
        "--per-round",
        "10",
        "--target",
        "0.6",
        "-o",
        "here",
        "--json",
    ]
    said = json.loads(call("run", "digits", "fedavg", *arguments)[1])
    assert said["accuracy"] >= 0.6
    assert said["rounds_to_target"] == said["steps"] < 40
    again = json.loads(call("resume", "here", "--json")[1])
    assert (again["steps"], again["target"]) == (said["steps"], 0.6)


TOML = """
[task]
name = "digits"
clients = 20
partition = "label_chunks(2)"
[algorithm]
name = "fedadavr"
optimizer = "adagrad"
lr = 0.03
[work]
lr = 0.05
epochs = 2
batch = 5
[schedule]
rounds = 4
per_round = 5
[run]
seed = 7
out = "from-file"
evaluate_every = 2
"""


def test_toml(call: Call) -> None:
    Path("a.toml").write_text(TOML)
    assert call("run", "a.toml", "-q") == (0, "", "")
    said = json.loads(Path("from-file/run.json").read_text())
    assert said["algorithm"] == "fedadavr(optimizer='adagrad', lr=0.03)"
    assert (said["seed"], said["work"]) == (7, repr(fb.Work(0.05, 2, batch=5, momentum=0.9)))
    assert (
        call("run", "a.toml", "fedavg", "--steps", "3", "--seed", "8", "-o", "other", "-q")[0] == 2
    )  # optimizer is left
    assert call("run", "a.toml", "--steps", "3", "--seed", "8", "-o", "other", "-q") == (0, "", "")
    said = json.loads(Path("other/run.json").read_text())
    assert (said["seed"], said["work"]) == (8, repr(fb.Work(0.05, steps=3, batch=5, momentum=0.9)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[work]", "[wrok]", "did you mean 'work'"),
        ("epochs", "epoch", "unknown key of [work] in a.toml 'epoch'; did you mean 'epochs'"),
        ("per_round", "perround", "did you mean 'per_round'"),
        ("seed", "sede", "did you mean 'seed'"),
        ("optimizer", "optimiser", "did you mean 'optimizer'"),
        ("clients = 20", "cleints = 20", "unknown option of digits 'cleints'"),
        ('name = "digits"', "", "has no name in [task]"),
        ("lr = 0.05", 'lr = "fast"', "unknown lr 'fast'"),
        ("rounds = 4", "rounds = 4.5", "must be an integer"),
        ("epochs = 2", "epochs = 2\nsteps = 3", "both epochs=2 and steps=3"),
        ("[task]", "task = 3\n[rest]", "write a section [task]"),
        ("batch = 5", "batch = ", "is not TOML"),
        ('"label_chunks(2)"', '"label_chunk(2)"', "did you mean 'label_chunks'"),
        ("seed = 7", "seed = 7\nclient_state_storage = 'tape'", "got 'tape'"),
    ],
)
def test_toml_is_checked(old: str, new: str, said: str, call: Call) -> None:
    Path("a.toml").write_text(TOML.replace(old, new, 1))
    refused(call("run", "a.toml"), said)
    assert os.listdir() == ["a.toml"]


def test_list(call: Call) -> None:
    code, out, _ = call("list", "--json")
    said = json.loads(out)
    assert code == 0
    assert set(said["algorithms"]) >= {"fedavg", "fedadavr", "fedshift", "qafel"}
    assert set(said["tasks"]) == set(fb.tasks.names())
    assert all(text for kind in said.values() for text in kind.values())
    assert "label_chunks" in call("list", "partitions")[1]


@pytest.mark.parametrize("columns", [60, 80, 170])
def test_who_holds_what_is_drawn_to_the_width(
    columns: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = call("data", "digits", "--partition", "iid")[1].splitlines()
    assert [line[:5] for line in lines[:10]] == [f"{label:>3}  " for label in range(10)]
    shown = min(100, columns - 5)
    assert max(len(line) for line in lines[:10]) <= 5 + shown
    assert ("every client" if shown == 100 else f"{shown} of 100 clients") in lines[10]


def test_data(call: Call) -> None:
    code, out, err = call(
        "data", "digits", "--clients", "30", "--partition", "label_chunks(1)", "--figure", "a.png", "--json"
    )
    assert (code, err) == (0, "")
    said = json.loads(out)
    counts = said["counts"]
    assert (len(counts), len(counts[0])) == (30, 10)
    assert all(sum(c > 0 for c in row) == 1 for row in counts)
    assert sum(map(sum, counts)) == said["samples"] == 1438
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    same, other = (
        json.loads(
            call("data", "digits", "-n", "30", "--partition", "label_chunks(1)", "--seed", s, "--json")[1]
        )
        for s in "01"
    )
    assert said["partition_hash"] == same["partition_hash"] != other["partition_hash"]
    _, out, _ = call("data", "digits", "--partition", "dirichlet(0.5)")
    assert "█" in out
    assert "partition_hash" in out
    assert "\x1b" not in out


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rn"], "Did you mean 'run'"),
        (["run"], "Missing argument"),
        (["run", "digits"], "Name an algorithm too"),
        (["run", "digit", "fedavg"], "unknown task 'digit'; did you mean 'digits'?"),
        (["run", "iid", "fedavg"], "is not a task"),
        (["run", "digits(", "fedavg"], "cannot be read"),
        (["run", "digits", "fedadvr"], "unknown algorithm 'fedadvr'; did you mean 'fedadavr'?"),
        (["run", "digits", "int8"], "is not an algorithm"),
        (["run", "digits", "fedavg", "-a", "rate=2"], "unknown keyword of fedavg 'rate'"),
        (["run", "digits", "fedavg", "-a", "lr"], "not of the form key=value"),
        (["run", "digits", "fedadavr", "-a", "optimizer=lam"], "did you mean 'lamb'"),
        (["run", "digits", "fedadavr", "-a", "memory=int5"], "unknown memory 'int5'"),
        (["run", "digits", "fedavg", "--round", "3"], "--rounds"),
        (["run", "digits", "fedavg", "--rounds", "many"], "Invalid value for '--rounds'"),
        (["run", "digits", "fedavg", "--rounds", "0"], "must be an integer >= 1, got 0"),
        (["run", "digits", "fedavg", "--lr", "-1"], "lr must be > 0"),
        (["run", "digits", "fedavg", "--batch", "big"], "or 'full'"),
        (["run", "digits", "fedavg", "--last", "lose"], "'keep', 'drop' or 'fill'"),
        (["run", "digits", "fedavg", "--target", "95"], "target must be in (0, 1], got 95"),
        (["run", "digits", "fedavg", "--engine", "pol"], "did you mean 'pool'"),
        (["run", "digits", "fedavg", "--clients", "0"], "must be an integer >= 1, got 0"),
        (["run", "digits", "fedavg", "--clients", "5000"], "cannot share"),
        (["run", "digits", "fedavg", "--partition", "iidd"], "did you mean 'iid'"),
        (["run", "digits", "fedavg", "--model", "lenet"], "did you mean 'lenet5'"),
        (["run", "digits", "fedavg", "--buffer", "3", "--per-round", "3"], "belongs to synchronous rounds"),
        (["run", "digits", "fedavg", "--arrivals", "poisson"], "belongs to asynchronous steps"),
        (["run", "digits", "fedbuff", "--buffer", "3", "--arrivals", "poison"], "'poisson'"),
        (["run", "digits", "fedavg", "--durations", "halfnorm(1)"], "did you mean 'halfnormal'"),
        (["run", "absent.toml"], "absent.toml cannot be read"),
        (["resume", "absent"], "absent is not a run folder"),
        (["data", "digits", "--figure", "absent/a.png"], "cannot be written"),
        (["data", "digits", "--partition", "dirichlet(-1)"], "alpha must be > 0"),
        (["data", "digits", "--partition", "pachinko()"], "needs coarse labels"),
        (["list", "algos"], "did you mean 'algorithms'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: list[str], said: str, call: Call) -> None:
    refused(call(*arguments, *(["--json"] if arguments[0] in ("run", "data") else [])), said)
    assert list(Path("runs").glob("*")) == []


def test_missing_files_are_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBRAID_DATA", os.getcwd())
    refused(call("run", "femnist", "fedavg"), "no files of femnist were found")


# Run folders --------------------------------------------------------------------------------------


@pytest.fixture
def done(call: Call) -> Path:
    """A finished run."""
    assert call("run", "digits", "fedadavr", *FAST, "-o", "here", "-q")[0] == 0
    return Path("here")


def test_the_same_command_continues_and_another_is_refused(call: Call, done: Path) -> None:
    before = tree(done)
    assert call("run", "digits", "fedadavr", *FAST, "-o", "here", "-q") == (0, "", "")
    assert tree(done)["model.safetensors"] == before["model.safetensors"]
    before = tree(done)
    for change in (["--lr", "0.3"], ["--seed", "9"], ["--partition", "label_chunks(1)"]):
        refused(call("run", "digits", "fedadavr", *FAST, "-o", "here", *change), "already contains a run")
    refused(call("run", "digits", "fedavg", *FAST, "-o", "here"), "already contains a run")
    assert tree(done) == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", b"{", "run.json cannot be read"),
        ("run.json", b"[]", "does not hold a configuration"),
        ("run.json", b"{}", "of format 1, and this fedbraid reads format 3"),
        ("run.json", None, "is not a run folder"),
        ("state.db", b"no database, but long enough to look at" * 100, "cannot be read or written"),
        ("target.json", b"{}", "remove it to run to the last step"),
        ("watching.json", b"[]", "remove it to resume unwatched"),
    ],
)
def test_a_broken_folder_is_refused_and_left_alone(
    name: str, content: bytes | None, said: str, call: Call, done: Path
) -> None:
    (done / name).unlink(missing_ok=True)
    if content is not None:
        (done / name).write_bytes(content)
    before = tree(done)
    refused(call("resume", "here"), said)
    assert tree(done) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "digits", "fedavg", *FAST, "-o", "x" * 300], "cannot be written: File name too long"),
        (["run", "digits", "fedavg", *FAST, "-o", "a\0b"], "is not text"),
        (["run", "digits", "fedavg", *FAST, "-o", "a\udcffb"], "is not text"),
        (["resume", "x" * 300], "cannot be read"),
        (["resume", "/etc/passwd"], "is not a run folder"),
        (["deploy", "init", "/etc/passwd"], "/etc/passwd"),
        (["deploy", "keys", "secrets", "--nodes", "-1"], "'--nodes'"),
        (["watch", "x" * 300], "File name too long"),
        (["data", "digits(partition=dirichlet('a'))"], "alpha must be > 0, got 'a', which is not a number"),
    ],
)
def test_paths_and_numbers_that_cannot_be(words: list[str], said: str, call: Call) -> None:
    refused(call(*words), said)


def test_other_bits_are_asked_for(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbraid.run import fingerprint as bits

    class Stop(Exception):
        pass

    class StopAt:
        def step(self, record: Any, run: Any) -> None:
            if record["step"] == 3:
                raise Stop

    task = fb.tasks.load("digits", clients=4)
    with pytest.raises(Stop):
        fb.simulate(
            task, fb.fedavg(), fb.Work(lr=0.1, steps=1), fb.rounds(4), out="here", callbacks=[StopAt()]
        )
    real = bits.describe
    monkeypatch.setattr(bits, "describe", lambda engine: real(engine) | {"torch": "9.9"})
    refused(
        call("resume", "here"),
        "and is 9.9; resume it where it began, or accept the change with --allow-numeric-changes",
    )
    assert call("resume", "here", "--allow-numeric-changes", "--quiet")[0] == 0


def test_a_checkpoint_cut_short_is_refused(call: Call, done: Path) -> None:
    whole = (done / "state.db").read_bytes()
    (done / "state.db").write_bytes(whole[: len(whole) // 2])
    refused(call("resume", "here"), "here")


def test_places_that_cannot_be_written(call: Call) -> None:
    Path("file").write_text("mine")
    refused(call("run", "digits", "fedavg", *FAST, "-o", "file/run"), "cannot be written")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    refused(call("run", "digits", "fedavg", *FAST, "-o", "full"), "new or empty folder")
    assert Path("full/notes.txt").read_text() == Path("file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(call: Call) -> None:
    Path("closed").mkdir(mode=0o500)
    refused(call("run", "digits", "fedavg", *FAST, "-o", "closed/run"), "cannot be written")


@pytest.mark.parametrize("room", [600, 300_000])
def test_a_full_disk_leaves_what_was_there(room: int, call: Call, done: Path, tmp_path: Path) -> None:
    """No file may grow beyond `room` bytes; afterwards the run is continued to the bits of one with room."""
    before = tree(done)
    arguments = ["run", "digits", "fedadavr", *FAST, "-q", "-o", "tight"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    tight = process(*arguments, cwd=tmp_path, preexec_fn=limit)
    out, err = tight.communicate(timeout=600)
    refused((tight.returncode, out, err), "tight")
    assert tree(done) == before
    assert call(*arguments) == (0, "", "")
    assert tree(Path("tight"))["model.safetensors"] == before["model.safetensors"]


# Stopping -----------------------------------------------------------------------------------------

LONG = ["--rounds", "60", "--per-round", "5", "--clients", "50", "--evaluate-every", "30"]
STEPS = 10
HELD = f"""
import signal, sys, time
from fedbraid.cli import main
from fedbraid.run.checkpoint import Checkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
commit, done = Checkpoint.commit, []
def hold(self, *given):
    commit(self, *given)
    done.append(given)
    while len(done) >= {STEPS}:  # until a signal comes
        time.sleep(0.01)

Checkpoint.commit = hold
sys.exit(main(sys.argv[1:]))
"""


def held(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A real process that waits for its signal after some steps, however busy the machine is."""
    command = [sys.executable, "-c", HELD, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def stop(process: subprocess.Popen[str], folder: Path, how: signal.Signals) -> tuple[int, str, str]:
    """Signal a held run once it has committed its steps."""
    enough = steps(folder) + STEPS
    while steps(folder) < enough:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def test_ctrl_c_says_how_to_resume_and_resuming_gives_the_same_bits(call: Call, tmp_path: Path) -> None:
    code, out, err = stop(
        held("run", "digits", "fedadavr", *LONG, "-o", "a", cwd=tmp_path), tmp_path / "a", signal.SIGINT
    )
    assert (code, out) == (130, "")
    assert err.count("\n") == 1
    assert "fedbraid resume a" in err
    code, _, _ = stop(held("resume", "a", cwd=tmp_path), tmp_path / "a", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert steps(Path("a")) == 2 * STEPS
    code, out, _ = call("resume", "a", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 60)
    assert call("run", "digits", "fedadavr", *LONG, "-o", "b", "-q")[0] == 0
    assert tree(Path("a"))["metrics.jsonl"] == tree(Path("b"))["metrics.jsonl"]
    ours, theirs = (load_file(f"{run}/model.safetensors") for run in "ab")
    assert all((ours[k] == theirs[k]).all() for k in theirs)


def test_ctrl_c_with_worker_processes(tmp_path: Path) -> None:
    run = held(
        "run",
        "digits",
        "fedavg",
        *LONG,
        "--engine",
        "pool(workers=2)",
        "-o",
        "a",
        cwd=tmp_path,
        start_new_session=True,
    )
    code, out, err = stop(run, tmp_path / "a", signal.SIGINT)
    assert (code, out) == (130, "")
    assert "fedbraid resume a" in err
    assert "Traceback" not in err


def test_ctrl_c_at_a_terminal_reaches_every_process(tmp_path: Path) -> None:
    """A terminal signals the whole group, workers included."""
    run = held(
        "run",
        "digits",
        "fedavg",
        *LONG,
        "--engine",
        "pool(workers=2)",
        "-o",
        "a",
        cwd=tmp_path,
        start_new_session=True,
    )
    run.send_signal = lambda how: os.killpg(run.pid, how)  # type: ignore[method-assign]
    code, _, err = stop(run, tmp_path / "a", signal.SIGINT)
    assert code == 130
    assert "Traceback" not in err


def test_a_run_in_use_is_refused(call: Call, tmp_path: Path) -> None:
    run = process("run", "digits", "fedavg", *LONG, "--rounds", "100000", "-o", "a", cwd=tmp_path)
    try:
        while not (metrics := Path("a/metrics.jsonl")).exists() or not metrics.stat().st_size:
            assert run.poll() is None
            time.sleep(0.01)
        refused(call("resume", "a"), "in use by another process")
    finally:
        run.kill()
        run.communicate()


def test_progress_is_shown_at_a_terminal_only() -> None:
    import io

    from rich.console import Console

    from fedbraid.run.progress import Bar

    task = fb.tasks.load("digits", clients=20)
    shown = {}
    for terminal in (True, False):
        screen = io.StringIO()
        bar = Bar(console=Console(file=screen, force_terminal=terminal, width=120))
        fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(3, clients=5), callbacks=[bar])
        shown[terminal] = screen.getvalue()
    assert shown[False] == ""
    for part in ("fedavg", "3/3", "%", "↑", "↓", "took"):
        assert part in shown[True]


def test_installed_command_is_this_one() -> None:
    found = shutil.which("fedbraid", path=Path(sys.executable).parent)
    if found is None:
        pytest.skip("fedbraid is not installed here, only on the path")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    assert said.startswith("fedbraid ")
