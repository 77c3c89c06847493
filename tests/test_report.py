"""Is the report one file that needs nothing, says what the runs say, and works in a real browser?"""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.cli import config as cfg
from fedbraid.cli import main
from fedbraid.report import page, watch
from fedbraid.report.collect import collect
from fedbraid.report.watch import serve
from fedbraid.run.checkpoint import Folder
from fedbraid.study import flops, recipe
from fedbraid.study.compare import compare

WORK = fb.Work(lr=0.05, batch=10)


@pytest.fixture(scope="module")
def task():
    return fb.tasks.load("digits", clients=40, partition=fb.partition.label_chunks(1))


@pytest.fixture(scope="module")
def grid(task, tmp_path_factory):
    """Two in rounds and one asynchronous, so that every part of the page has something to show."""
    out = tmp_path_factory.mktemp("report") / "grid"
    entries = {
        "avg": fb.fedavg(),
        "control <i>variates</i>": fb.scaffold(),
        "buffered": (fb.fedbuff(), WORK, fb.buffered(12, buffer=3, concurrency=9)),
    }
    compare(task, entries, WORK, fb.rounds(12, clients=5), seeds=2, out=out, target=0.2)
    return out


@pytest.fixture(scope="module")
def single(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "single"
    fb.simulate(task, fb.fedavg(), WORK, fb.rounds(5, clients=5), seed=3, out=out)
    return out


def call(capsys, *arguments):
    code = main([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(result, said):
    code, out, err = result
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


# What it says -------------------------------------------------------------------------------------


def test_one_file(grid, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert call(capsys, "report", grid, "-o", out)[0] == 0
    text = out.read_text()
    assert len(text) < 1_000_000
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text.replace("https://github.com/leeoniya/uPlot", "")  # its credit
    assert "Leon Sorokin" in text
    assert "<i>variates" not in text  # names are data, not markup


def test_it_says_what_the_runs_say(grid, single):
    data = page.describe(collect([grid]))
    assert [g["name"] for g in data["groups"]] == ["avg", "control <i>variates</i>", "buffered"]
    assert all(
        set(g["curves"]["accuracy"]["x"]) == {"step", "bytes", "time", "flops"} for g in data["groups"]
    )
    assert data["groups"][0]["curves"]["staleness"] is None
    assert data["groups"][2]["curves"]["staleness"] is not None
    assert set(data["groups"][1]["up"]) == {"delta", "dc"}
    assert data["target"] == 0.2
    history = list(Folder(single).records())
    alone = page.describe(collect([single]))
    assert alone["groups"][0]["curves"]["accuracy"]["half"] is None
    assert alone["verdict"] == ""
    assert alone["groups"][0]["curves"]["accuracy"]["mean"] == [r["accuracy"] for r in history]


def test_the_partition_is_drawn(single, task):
    counts = page.describe(collect([single]))["partition"]["counts"]
    assert [sum(c) for c in counts] == task.sizes.tolist()


def test_papers_and_other_programs(grid, tmp_path, capsys):
    names = {kind: tmp_path / f"out.{kind}" for kind in ("png", "pdf", "csv", "latex")}
    flags = {"png": "--figure", "pdf": "--figure", "csv": "--csv", "latex": "--latex"}
    options = [word for kind, path in names.items() for word in (flags[kind], path)]
    code, out, _ = call(
        capsys, "report", grid, "-o", tmp_path / "r.html", *options, "--axis", "bytes", "--json"
    )
    assert code == 0
    assert len(json.loads(out)["files"]) == 5
    assert names["png"].read_bytes().startswith(b"\x89PNG")
    assert names["pdf"].read_bytes().startswith(b"%PDF")
    with open(names["csv"]) as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 3 * 2 * 12
    assert int(rows[11]["bytes"]) == int(rows[11]["bytes_up"]) + int(rows[11]["bytes_down"])
    table = names["latex"].read_text()
    assert r"\begin{tabular}" in table
    assert r"\pm" in table


@pytest.mark.parametrize(
    ("algorithm", "work", "schedule"),
    [
        (fb.fedavg(), WORK, fb.rounds(3, clients=5)),
        (fb.fedadavr("lamb", lr=0.02, memory="int4"), fb.Work(lr=0.1, steps=4, batch=None, clip=1.0), fb.rounds(3, clients=0.1)),
        (fb.fedshift(fb.fedpaq(fb.codecs.uniform(4))), fb.Work(lr=0.1, epochs=2, weight_decay=0.01, last="drop"), fb.rounds(2, clients=1.0)),
        (fb.qafel(), WORK, fb.buffered(3, buffer=2, concurrency=5, durations=fb.clock.lognormal(0.0, 1.0))),
        (fb.fedavg(), WORK, fb.rounds(2, clients=4, over_select=1.5, timeout=5.0, durations=fb.clock.halfnormal(1.0), bandwidth=fb.clock.bandwidth(up=1e6, down=1e7))),
    ],
)  # fmt: skip
def test_the_command_runs_it_again(task, tmp_path, capsys, algorithm, work, schedule):
    fb.simulate(task, algorithm, work, schedule, seed=11, out=tmp_path / "first")
    command = page.describe(collect([tmp_path / "first"]))["groups"][0]["command"]
    words = shlex.split(command)
    assert words[0] == "fedbraid"
    assert call(capsys, *words[1:], "--out", tmp_path / "again", "--quiet")[0] == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "first/model.safetensors"
    ).read_bytes()
    said = recipe.sections(collect([tmp_path / "first"]).config)
    (tmp_path / "run.toml").write_text(recipe.toml(said))
    plan = cfg.prepare(cfg.merge(cfg.read(str(tmp_path / "run.toml")), {}))
    assert (plan.algorithm, plan.work) == (algorithm, work)


def test_runs_that_differ_are_told_apart(task, tmp_path):
    for lr in (0.1, 0.2):
        fb.simulate(task, fb.fedavg(), fb.Work(lr=lr), fb.rounds(2, clients=3), out=tmp_path / str(lr))
    found = collect([tmp_path / "0.1", tmp_path / "0.2"])
    assert [g.name for g in found.groups] == ["fedavg(), lr=0.1", "fedavg(), lr=0.2"]


def test_a_task_made_in_python(blobs, tmp_path):
    fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3, clients=3), out=tmp_path / "own")
    data = page.describe(collect([tmp_path / "own"]))
    assert data["groups"][0]["command"] is None
    assert np.array(data["partition"]["counts"]).sum(1).tolist() == blobs.sizes.tolist()
    spent = data["groups"][0]["curves"]["accuracy"]["x"]["flops"]
    visit = flops.of_clients(blobs, fb.fedavg(), WORK)
    records = list(Folder(tmp_path / "own").records())
    assert spent[-1] == pytest.approx(sum(visit[r["clients"]].sum() for r in records))


def test_a_task_made_in_python_and_not_described(blobs, tmp_path, capsys):
    fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(3, clients=3), out=tmp_path / "own")
    (tmp_path / "own/task.json").write_text("{}")
    refused(call(capsys, "report", tmp_path / "own"), "remove it to report without the partition")
    (tmp_path / "own/task.json").unlink()
    data = page.describe(collect([tmp_path / "own"]))
    assert "made in Python" in data["partition"]["note"]
    assert "flops" not in data["groups"][0]["curves"]["accuracy"]["x"]


class Odd(torch.nn.Module):
    """A model that torch's counter cannot follow."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(8, 3)

    def forward(self, x):
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            assert len(x) > 1, "no statistics of one sample"
        return self.w(x)


def test_a_model_that_cannot_be_counted(tmp_path):
    x, y = torch.randn(30, 8), torch.arange(30) % 3
    task = fb.Task.from_arrays(Odd(), [(x[:10], y[:10]), (x[10:20], y[10:20])], (x[20:], y[20:]))
    fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2, clients=2), out=tmp_path / "own")
    data = page.describe(collect([tmp_path / "own"]))
    assert data["partition"]["clients"] == 2
    assert "flops" not in data["groups"][0]["curves"]["accuracy"]["x"]


# What it refuses ----------------------------------------------------------------------------------


def test_not_a_run(tmp_path, capsys):
    refused(call(capsys, "report", tmp_path), "is not a run folder")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_folder(single, tmp_path, capsys):
    for name, text, said in (
        ("run.json", "{", "cannot be read"),
        ("run.json", "{}", "of format 1"),
        ("metrics.jsonl", "{]\n", "is corrupt"),
        ("metrics.jsonl", '{"step": 1}\n', "not a step's"),
    ):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(single, broken)
        (broken / name).write_text(text)
        refused(call(capsys, "report", broken), said)
        assert not (broken / "report.html").exists()


def test_still_being_written(single, tmp_path, capsys):
    going = tmp_path / "going"
    shutil.copytree(single, going)
    (going / "model.safetensors").unlink()
    with open(going / "metrics.jsonl", "ab") as out:
        out.write(b'{"step": 6, "ti')  # a line half written is no error
    refused(call(capsys, "report", going), "not finished (step 5 of 5)")
    assert call(capsys, "report", going, "--unfinished", "-q")[0] == 0


def test_a_comparison_that_goes_on(grid, tmp_path, capsys):
    going = tmp_path / "going"
    shutil.copytree(grid, going)
    next(going.rglob("model.safetensors")).unlink()
    refused(call(capsys, "report", going), f"`fedbraid compare {going}`")
    shutil.rmtree(next(going.rglob("seed-1")))
    refused(call(capsys, "report", going), "is not finished")
    assert call(capsys, "report", going, "--unfinished", "-q")[0] == 0


def test_two_tasks(single, tmp_path, capsys):
    other = fb.tasks.load("synthetic")
    fb.simulate(other, fb.fedavg(), WORK, fb.rounds(1, clients=2), out=tmp_path / "other")
    result = call(capsys, "report", single, tmp_path / "other", "-o", tmp_path / "r.html")
    refused(result, "report one task at a time")
    assert not (tmp_path / "r.html").exists()


def test_no_evaluations(task, tmp_path, capsys):
    fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2, clients=2), out=tmp_path / "blind", evaluate_every=None)
    refused(call(capsys, "report", tmp_path / "blind"), "has no evaluations")


def test_the_same_run_twice(single, tmp_path, capsys):
    refused(call(capsys, "report", single, single, "-o", tmp_path / "r.html"), "is the same run as")


def test_nothing_is_overwritten_on_bad_input(single, tmp_path, capsys):
    (tmp_path / "r.html").write_text("mine")
    refused(
        call(capsys, "report", single, "-o", tmp_path / "r.html", "--axis", "byte"), "unknown axis 'byte'"
    )
    refused(call(capsys, "report", single, "-o", tmp_path / "r.html", "--csv", tmp_path), "is a folder")
    nowhere = tmp_path / "nowhere/steps.csv"
    refused(call(capsys, "report", single, "-o", tmp_path / "r.html", "--csv", nowhere), "cannot be written")
    assert (tmp_path / "r.html").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_run_is_no_comparison(single, capsys):
    refused(call(capsys, "compare", single, "fedavg"), "resume it with: fedbraid resume")


def test_a_missing_extra(single, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(
        call(capsys, "report", single, "-o", tmp_path / "r.html", "--figure", tmp_path / "x.png"),
        "needs the extra 'plot'; install it with: pip install 'matplotlib>=3.8'",
    )
    assert not (tmp_path / "r.html").exists()


# Watching -----------------------------------------------------------------------------------------


@pytest.fixture
def watched(single):
    with serve([single], port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def fetch(url, method="GET", **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_watch_reads_only(watched, single):
    before = {p: p.read_bytes() for p in single.iterdir()}
    assert watched.server_address[0] == "127.0.0.1"
    assert fetch(watched.address)[0] == 200
    assert json.loads(fetch(watched.address + "data.json")[1])["finished"]
    assert fetch(watched.address + "../run.json")[0] == 404
    assert fetch(watched.address, method="POST")[0] == 501
    assert fetch(watched.address, Host="evil.example")[0] == 403
    assert before == {p: p.read_bytes() for p in single.iterdir()}


def test_any_loopback_address_is_for_this_machine_alone(single):
    with serve([single], host="127.0.0.2", port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        assert fetch(server.address)[0] == fetch(server.address, Host="localhost")[0] == 200
        assert fetch(server.address, Host="[::1]:80")[0] == 200
        assert fetch(server.address, Host="evil.example")[0] == 403
        assert fetch(server.address, Host="127.0.0.1.evil.example:80")[0] == 403
        server.shutdown()


HOSTILE = "<img src=x onerror=document.title='taken'></script><b>"


def fleet_status(**changed):
    """A deployment's status, as its server writes it."""
    node = {"client": 0, "name": f"clinic {HOSTILE}", "here": True, "seen": 0.1, "asked": 45.0}
    away = {"client": 1, "name": "clinic-1", "here": False, "seen": None, "asked": None}
    wait = {"for": "uploads of round 6", "since": time.time() - 45, "until": time.time() + 555}
    return {
        "state": "running", "error": "", "traceback": "", "step": 5, "steps": 9, "busy": 1, "nodes": 1, "pid": os.getpid(), "host": socket.gethostname(),
        "at": time.time(), "wait": wait, "fleet": [node, away],
        "trouble": [{"node": "12", "client": 0, "why": f"it failed: {HOSTILE}", "times": 3}],
    } | changed  # fmt: skip


def test_watch_tells_of_a_fleet(watched, single, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(single, place)
    watched.watch.paths = [place]

    def fleets(status):
        (place / "status.json").write_text(status if isinstance(status, str) else json.dumps(status))
        code, text = fetch(watched.address + "data.json")
        assert code == 200
        return json.loads(text)["fleets"]

    (told,) = fleets(fleet_status())
    assert told["wait"] == "uploads of round 6"
    assert told["silent"] is None
    assert [one["here"] for one in told["fleet"]] == [True, False]
    assert 45 <= told["fleet"][0]["asked"] < 100
    assert told["fleet"][1]["asked"] is None
    (told,) = fleets(fleet_status(at=time.time() - 100))  # the server was killed: its orders grow old
    assert told["silent"] >= 100
    assert told["fleet"][0]["asked"] >= 145
    assert (told["state"].partition(":")[0], told["wait"]) == ("SILENT", "")
    assert not any(one["here"] for one in told["fleet"])
    (told,) = fleets(fleet_status(pid=2**22 - 1))  # at once, where its process can be looked for
    assert told["state"].startswith("DEAD")
    assert told["silent"] is not None
    (told,) = fleets(fleet_status(state="failed", error="no", traceback="Traceback: no"))
    assert (told["error"], told["wait"]) == ("Traceback: no", "")
    for damaged in ("", "[]", "{}", json.dumps(fleet_status(fleet=3)), json.dumps(fleet_status(wait=None))):
        assert fleets(damaged) == []
    assert page.describe(collect([place]))["fleets"] == []  # a report is of what was, not of what is


def test_connections_have_a_limit(watched):
    with ExitStack() as stack:
        for _ in range(watch.MOST):
            idle = stack.enter_context(socket.create_connection(watched.server_address))
            idle.sendall(b"GET / HTTP/1.1\r\n")  # and no more
        more = stack.enter_context(socket.create_connection(watched.server_address))
        assert more.recv(1) == b""


def test_a_reader_who_leaves_is_no_error(watched, single, capfd):
    """Such as a tab that is closed while its answer is on the way."""
    asked, left, look = threading.Event(), threading.Event(), watched.watch.refresh

    def slow():
        asked.set()
        left.wait(60)
        return look() | {"title": "long " * 2_000_000}

    watched.watch.refresh = slow
    with socket.create_connection(watched.server_address) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.sendall(b"GET /data.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(60)
    left.set()
    for _ in range(watch.MOST):  # its place is free again once it is done
        assert watched.slots.acquire(timeout=60)
    assert capfd.readouterr().err == ""


def test_a_run_that_makes_no_steps_is_not_called_running(grid, single, tmp_path):
    def told(place, ago):
        for path in place.rglob("metrics.jsonl"):
            os.utime(path, (time.time() - ago,) * 2)
        found = watch.Watch([place]).refresh()
        return found["silent"], found["again"]

    run, several = tmp_path / "a run", tmp_path / "grid"
    shutil.copytree(single, run)
    shutil.copytree(grid, several)
    assert told(run, 1000) == (None, "")  # finished
    (run / "model.safetensors").unlink()
    assert told(run, 1) == (None, "")
    silent, again = told(run, 1000)
    assert 1000 <= silent < 1100
    assert shlex.split(again) == ["fedbraid", "resume", str(run)]
    next(several.rglob("model.safetensors")).unlink()
    assert shlex.split(told(several, 1000)[1]) == ["fedbraid", "compare", str(several)]


def test_marks_in_a_name_are_only_a_name(single):
    data = page.describe(collect([single]))
    text = page.render({**data, "title": "/*script*//*data*//*style*/"})
    assert "<title>/*script*//*data*//*style*/" in text
    assert page.render(data).count("<script>") == text.count("<script>")
    assert len(text) == len(page.render({**data, "title": "x" * len("/*script*//*data*//*style*/")}))


def test_a_port_in_use(single, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused(call(capsys, "watch", single, "--port", taken.getsockname()[1]), "cannot be used")


def test_nothing_to_watch(tmp_path, capsys):
    refused(call(capsys, "watch", tmp_path / "nowhere"), "is not a run folder")


# In a browser -------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class ClientHistory:
    """A page and everything that went wrong in it."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(600_000)  # a busy machine is slow, not wrong
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on(
            "console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(url)
        self.page.wait_for_selector("#main-plot canvas")


@pytest.fixture(scope="module")
def report(grid, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(grid), "-o", str(out), "--quiet"]) == 0
    return out.as_uri()


@pytest.mark.browser
def test_every_switch(browser, report):
    seen = ClientHistory(browser, report)
    looked = seen.page
    drawings = set()
    for metric in ("accuracy", "loss", "train_loss"):
        looked.click(f"#metric button[data-value={metric}]")
        for axis in ("step", "bytes", "time", "flops"):
            looked.click(f"#axis button[data-value={axis}]")
            assert looked.get_attribute(f"#axis button[data-value={axis}]", "aria-pressed") == "true"
            assert lines(looked) == ["avg", "control <i>variates</i>", "buffered"]
            drawings.add(pixels(looked, "#main-plot"))
    assert len(drawings) == 12
    looked.click("#scale button[data-value=log]")
    assert looked.evaluate("document.getElementById('main-plot').chart.scales.y.distr") == 3
    for theme in ("dark", "light"):
        looked.click(f"#theme button[data-value={theme}]")
        assert looked.evaluate("document.documentElement.dataset.theme") == theme
    looked.click("#legend button >> nth=0")
    assert lines(looked) == ["control <i>variates</i>", "buffered"]
    looked.click("#legend button >> nth=0")
    assert len(lines(looked)) == 3
    looked.click("#commands button >> nth=0")
    looked.hover("#main-plot .u-over", position={"x": 300, "y": 100})
    assert looked.locator("#tip div").count() == 4
    assert seen.errors == []
    assert seen.requests == [report]


def lines(looked, plot="main-plot"):
    """The names of what a chart draws."""
    return looked.evaluate(
        f"document.getElementById('{plot}').chart.series.slice(1).map((s) => s.label).filter((n) => n !== 'band')"
    )


def pixels(looked, place):
    return looked.evaluate(f"document.querySelector('{place} canvas').toDataURL()")


def scale(looked, plot, axis):
    found = looked.evaluate(
        f"(({{min, max}}) => [min, max])(document.getElementById('{plot}').chart.scales.{axis})"
    )
    return tuple(found)


@pytest.mark.browser
def test_bands(browser, report):
    looked = ClientHistory(browser, report).page
    count = "document.getElementById('main-plot').chart.bands.length"
    pressed = "#band button[aria-pressed=true]"
    assert looked.get_attribute(pressed, "data-value") == "range"  # two seeds make intervals too wide to read
    drawn = set()
    for band, bands, said in (("interval", 3, "Student"), ("range", 3, "least to the most"), ("none", 0, "")):
        looked.click(f"#band button[data-value={band}]")
        assert looked.get_attribute(pressed, "data-value") == band
        assert looked.evaluate(count) == bands
        assert said in looked.inner_text("#curve-note")
        drawn.add(pixels(looked, "#main-plot"))
    assert len(drawn) == 3


@pytest.mark.browser
def test_a_curve_is_zoomed(browser, report):
    looked = ClientHistory(browser, report).page
    whole = scale(looked, "main-plot", "x")
    drag(looked, "#main-plot .u-over", (150, 40), (420, 90))
    near = scale(looked, "main-plot", "x")
    assert whole[0] < near[0] < near[1] < whole[1]
    looked.click("#band button[data-value=none]")
    assert scale(looked, "main-plot", "x") == near  # drawn anew, and still there
    looked.dblclick("#main-plot .u-over")
    assert scale(looked, "main-plot", "x") == whole
    drag(looked, "#main-plot .u-over", (150, 40), (420, 90))
    looked.click("#axis button[data-value=bytes]")
    assert looked.evaluate("document.getElementById('main-plot').dataset.zoomed") == "false"


def drag(looked, place, start, end):
    looked.locator(place).scroll_into_view_if_needed()
    box = looked.locator(place).bounding_box()
    looked.mouse.move(box["x"] + start[0], box["y"] + start[1])
    looked.mouse.down()
    looked.mouse.move(box["x"] + end[0], box["y"] + end[1], steps=4)
    looked.mouse.up()


@pytest.mark.browser
def test_the_timeline(browser, report):
    seen = ClientHistory(browser, report)
    looked = seen.page
    assert looked.locator("#timeline-run button").count() == 0  # one run is on a clock
    assert "12" in looked.evaluate(
        "String(document.getElementById('timeline-plot').drawn / 3)"
    )  # 12 steps of 3
    whole = scale(looked, "timeline-plot", "x")
    drag(looked, "#timeline-plot .u-over", (100, 60), (400, 160))
    near = [scale(looked, "timeline-plot", axis) for axis in "xy"]
    assert whole[0] < near[0][0] < near[0][1] < whole[1]
    assert near[1][1] - near[1][0] < 40
    assert looked.evaluate("document.getElementById('timeline-plot').drawn") < 36
    looked.mouse.wheel(0, -120)
    looked.wait_for_function(
        "w => { const s = document.getElementById('timeline-plot').chart.scales.x; return s.max - s.min < w }",
        arg=0.8 * (near[0][1] - near[0][0]),
    )
    looked.click("#timeline-zoom button[data-value=all]")
    assert scale(looked, "timeline-plot", "x") == whole
    looked.click("#timeline-zoom button[data-value=in]")
    assert scale(looked, "timeline-plot", "x")[1] < whole[1]
    looked.click("#timeline-zoom button[data-value=all]")
    at = looked.evaluate(
        """() => { const place = document.getElementById('timeline-plot'), u = place.chart;
        const job = JSON.parse(document.getElementById('data').textContent).groups[2].timeline.jobs;
        const middle = (job.start_times[5] + job.end_times[5]) / 2;
        return [u.valToPos(middle, 'x'), u.valToPos(job.client[5], 'y'), job.client[5], job.version[5]]; }"""
    )
    looked.hover("#timeline-plot .u-over", position={"x": at[0], "y": at[1]})
    said = looked.inner_text("#tip")
    assert f"client {at[2]}" in said
    assert f"from version {at[3]}" in " ".join(said.split())
    assert seen.errors == []


def reached(folder):
    """A run on a clock whose clients come and go."""
    table = {c: [[0.0, 3.0], [5.0, 40.0]] if c % 2 else [[0.0, 60.0]] for c in range(10)}
    task = fb.tasks.load("digits", clients=10)
    when = fb.clock.availability(table, away="delayed", period=60.0)
    schedule = fb.buffered(6, buffer=2, concurrency=4, availability=when)
    fb.simulate(task, fb.fedbuff(), fb.Work(lr=0.1, steps=1), schedule, out=folder)
    return folder


def test_the_timeline_tells_who_could_be_reached(tmp_path):
    line = page.describe(collect([reached(tmp_path / "run")]))["groups"][0]["timeline"]
    end = max(line["jobs"]["end_times"])
    spans = list(zip(*line["online"].values(), strict=True))
    assert [s for s in spans if s[0] == 0] == [(0, 0.0, end)]
    assert [s for s in spans if s[0] == 1] == [
        (1, a, min(b, end)) for a, b in ((0.0, 3.0), (5.0, 40.0)) if a < end
    ]
    for client, began in zip(line["jobs"]["client"], line["jobs"]["start_times"], strict=True):
        assert any(c == client and a <= began <= b for c, a, b in spans)


@pytest.mark.browser
def test_who_could_be_reached_is_drawn(browser, tmp_path):
    out = tmp_path / "page.html"
    assert main(["report", str(reached(tmp_path / "run")), "-o", str(out), "--quiet"]) == 0
    seen = ClientHistory(browser, out.as_uri())
    assert seen.page.evaluate("document.getElementById('timeline-plot').online") >= 10
    assert "can be reached" in seen.page.inner_text("#timeline-key")
    assert seen.errors == []


@pytest.mark.browser
@pytest.mark.parametrize(
    ("stalest", "spans"),
    [
        (14, ["0", "1", "2–3", "4–7", "8–15", "16 or more"]),
        (400, ["0–31", "32–63", "64–127", "128–255", "256–511", "512 or more"]),
    ],
)
def test_a_timeline_of_many_clients(browser, single, tmp_path, stalest, spans):
    data = page.describe(collect([single]))
    draw = np.random.default_rng(0)
    count, clients = page.JOBS, 10_000
    began = np.sort(draw.uniform(0, 100, count))
    step = np.searchsorted(np.arange(0, 100, 0.5), began)
    jobs = {
        "client": draw.integers(0, clients, count),
        "version": step - draw.integers(0, stalest + 1, count),
        "step": step,
    }
    jobs |= {"start_times": began, "end_times": began + draw.exponential(0.3, count)}
    line = {
        "name": "many",
        "seed": 0,
        "clients": clients,
        "steps": np.arange(0, 100, 0.5).tolist(),
        "note": "",
    }
    data["groups"][0]["timeline"] = line | {"jobs": {k: v.tolist() for k, v in jobs.items()}}
    out = tmp_path / "many.html"
    out.write_text(page.render(data))
    seen = ClientHistory(browser, out.as_uri())
    looked = seen.page
    assert looked.evaluate("document.getElementById('timeline-plot').drawn") == count
    assert looked.locator("#timeline-key > span").all_inner_texts() == spans
    for _ in range(5):
        looked.click("#timeline-zoom button[data-value=in]")
    near = looked.evaluate("document.getElementById('timeline-plot').drawn")
    assert 0 < near < count / 100
    looked.hover("#timeline-plot .u-over", position={"x": 300, "y": 100})
    assert "client" in looked.inner_text("#tip")
    assert seen.errors == []


def test_a_long_timeline_is_thinned(task, tmp_path, monkeypatch):
    fb.simulate(
        task,
        fb.fedbuff(),
        WORK,
        fb.buffered(6, buffer=5, concurrency=9),
        out=tmp_path / "r",
        evaluate_every=6,
    )
    whole = page.describe(collect([tmp_path / "r"]))["groups"][0]["timeline"]
    assert {len(v) for v in whole["jobs"].values()} == {30}
    assert whole["note"] == ""
    assert all(b < e for b, e in zip(whole["jobs"]["start_times"], whole["jobs"]["end_times"]))
    assert all(v <= s for v, s in zip(whole["jobs"]["version"], whole["jobs"]["step"]))
    monkeypatch.setattr(page, "JOBS", 10)
    some = page.describe(collect([tmp_path / "r"]))["groups"][0]["timeline"]
    assert {len(v) for v in some["jobs"].values()} == {10}
    assert "One job in 3 of 30" in some["note"]


@pytest.mark.browser
def test_cut_tables_say_so(browser, report):
    looked = ClientHistory(browser, report, viewport={"width": 390, "height": 800}).page
    cut = looked.locator(".cut:has(#results)")
    assert cut.get_attribute("data-more") == "true"
    looked.evaluate("document.querySelector('.scroll:has(#results)').scrollLeft = 10000")
    looked.wait_for_selector(".cut[data-more='false']:has(#results)", state="attached")
    wide = ClientHistory(browser, report, viewport={"width": 1400, "height": 800}).page
    assert wide.locator(".cut:has(#results)").get_attribute("data-more") == "false"


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_names_and_commands_break_between_words(browser, single, tmp_path, width):
    data = page.describe(collect([single]))
    name = "fedadavr(optimizer='adam', lr=0.01)"
    data |= {"title": f"{name} on digits", "rows": [data["rows"][0] | {"name": name}]}
    data["groups"] = [data["groups"][0] | {"name": name}]
    out = tmp_path / "named.html"
    out.write_text(page.render(data))
    looked = ClientHistory(browser, out.as_uri(), viewport={"width": width, "height": 800}).page
    assert looked.inner_text("#results td").strip() == name
    assert looked.inner_text("#commands pre") == data["groups"][0]["command"]
    for place, word in (
        ("#title", "optimizer="), ("#results td", "optimizer="), ("#legend button", "optimizer="), ("#commands .head", "optimizer="),
        ("#settings", "algorithm"),
        *(("#commands pre", word) for word in ("--momentum", "--per-round", "--seed")),
    ):  # fmt: skip
        assert looked.evaluate(ROWS, [place, word]) == 1, (place, word)
    assert looked.locator(".cut:has(#settings)").get_attribute("data-more") == "false"  # one run fits


ROWS = """([place, word]) => {
  const walk = document.createTreeWalker(document.querySelector(place), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const at = walk.currentNode.data.indexOf(word);
    if (at < 0) continue;
    const range = document.createRange();
    range.setStart(walk.currentNode, at);
    range.setEnd(walk.currentNode, at + word.length);
    return new Set([...range.getClientRects()].map((r) => Math.round(r.top))).size;
  }
}"""


@pytest.mark.browser
def test_every_part_is_there(browser, report):
    looked = ClientHistory(browser, report).page
    for part, text in (
        ("#results", "control <i>variates</i>"),
        ("#goal", "20 %"),
        ("#bytes", "dc"),
        ("#extras", "Staleness"),
        ("#extras", "Norm of updates"),
        ("#commands", "fedbraid run"),
        ("#settings", "Work(lr=0.05"),
    ):
        assert text in looked.inner_text(part)
    assert looked.locator("#partition canvas").count() == 1


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_or_overflows(browser, report, width, scheme):
    seen = ClientHistory(browser, report, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert seen.page.evaluate("document.documentElement.dataset.theme") == scheme
    assert seen.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for axis in ("step", "bytes", "flops"):
        seen.page.click(f"#axis button[data-value={axis}]")
        assert seen.page.evaluate(OVERLAPS) == []
    assert seen.errors == []


OVERLAPS = """() => {
  const bad = [];
  for (const place of document.querySelectorAll('.plot')) {
    if (!place.chart) continue;
    const frame = place.closest('.card').getBoundingClientRect(), box = place.getBoundingClientRect();
    if (box.right > frame.right) bad.push(`${place.id} sticks out`);
    (place.labels || []).forEach((a, i) => {
      if (a.right > place.chart.width) bad.push(`${a.text} sticks out`);
      for (const b of place.labels.slice(i + 1)) if (Math.abs(a.y - b.y) < 14) bad.push(`${a.text} over ${b.text}`);
    });
  }
  return bad;
}"""


@pytest.mark.browser
def test_watch_shows_a_fleet_and_nothing_that_its_nodes_slip_in(browser, watched, single, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(single, place)
    watched.watch.paths = [place]
    (place / "status.json").write_text(json.dumps(fleet_status()))
    seen = ClientHistory(browser, watched.address)
    text = seen.page.inner_text("#fleets")
    for words in (
        HOSTILE,
        "s ago, no answer yet",
        "clinic-1",
        "idle",
        "Waiting for uploads of round 6",
        "3 times",
    ):
        assert words in text
    assert "1 of 2 nodes connected" in text
    stop = fleet_status(state="failed", error="no", traceback=f"Traceback (most recent call last): {HOSTILE}")
    (place / "status.json").write_text(json.dumps(stop))
    seen.page.wait_for_function("() => document.getElementById('fleets').textContent.includes('Traceback')")
    assert HOSTILE in seen.page.inner_text("#fleets pre")
    assert seen.page.evaluate("document.querySelectorAll('#fleets img, #fleets b').length") == 0
    assert "taken" not in seen.page.title()
    assert seen.errors == []
    seen.context.close()


@pytest.mark.browser
def test_watch_follows_a_real_run(browser, tmp_path):
    out = tmp_path / "live"
    command = [
        sys.executable,
        "-m",
        "fedbraid",
        "run",
        "digits",
        "fedavg",
        "--rounds",
        "100000",
        "--out",
        str(out),
        "-q",
    ]
    running = subprocess.Popen(command)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 2000)
        with serve([out], port=0) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            seen = ClientHistory(browser, server.address)
            first = seen.page.inner_text("#status")
            assert first.startswith("running: step ")
            seen.page.wait_for_function("t => document.getElementById('status').textContent !== t", arg=first)
            assert seen.page.inner_text("#status").startswith("running: step ")
            running.kill()
            running.wait()
            os.utime(out / "metrics.jsonl", (time.time() - 1000,) * 2)
            seen.page.wait_for_selector("#status[data-state=lost]")
            assert "no step for 16 min" in seen.page.inner_text("#status")
            assert f"fedbraid resume {out}" in seen.page.inner_text("#status")
            assert seen.errors == []
            assert all(url.startswith(server.address) for url in seen.requests)
            seen.context.close()
            server.shutdown()
    finally:
        running.terminate()
        running.wait()


def wait_for(ready, seconds=60):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_page_is_packaged():
    here = Path(page.__file__).parent
    assert (here / "uplot/LICENSE").exists()
    assert {"page.html", *page.FILES.values()} <= {str(p.relative_to(here)) for p in here.rglob("*")}
