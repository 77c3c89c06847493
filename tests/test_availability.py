"""Who can be reached when, and what becomes of the jobs of those who go away?"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.parse import evaluate
from fedbraid.run.config import SCHEDULES

clock, availability = fb.clock, fb.clock.availability
TABLE = {0: [[0, 10]], 1: [[5, 20], [30, 40]], 2: [[0, None]]}


def ticks(schedule, N, seed=1):
    return list(schedule.ticks(N, seed))


def naive(table, period, client, t):
    """Whether a client is there, by looking at every repetition."""
    laps = [0] if period is None else range(-60, 60)
    return any(
        s + k * (period or 0) <= t < (math.inf if e is None else e + k * (period or 0))
        for s, e in table.get(client, [])
        for k in laps
    )


# The table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [None, 7.0, 25.0, 1000.0])
def test_here_is_who_the_table_says(period):
    table = {0: [[0, 10]], 1: [[5, 20], [30, 40]], 3: [[22, 24.5]]}
    when = availability(table, period=period)
    for t in [*np.arange(0, 45, 0.5), *np.arange(45, 120, 7.5)]:
        assert when.available(5, t).tolist() == [c for c in range(5) if naive(table, period, c, t)], t
        coming = when.next_start(5, t)
        later = np.arange(t + 0.5, t + (1001 if period else 50), 0.5)
        comes = (u for u in later if set(when.available(5, u)) - set(when.available(5, u - 0.5)))
        assert coming <= next(comes, math.inf)
        if t > 40 and period is None:
            assert coming == math.inf


@pytest.mark.parametrize("period", [None, 7.0, 25.0])
def test_idle_clients_are_those_who_are_there_and_have_no_job(period):
    from fedbraid.schedule.availability import Reachable

    table = {0: [[0, 10]], 1: [[5, 20], [30, 40]], 3: [[22, 24.5]]}
    when = availability(table, period=period)
    pool, busy, draw = Reachable(5, when), set(), np.random.default_rng(0)
    for t in np.arange(0, 150, 0.25):
        pool.move(t)
        assert sorted(pool.free) == [c for c in when.available(5, t) if c not in busy], t
        if pool.free and draw.random() < 0.3:
            busy.add(pool.take(draw.random()))
        elif busy and draw.random() < 0.3:
            pool.give(client := busy.pop())
            assert (client in pool.free) == naive(table, period, client, t)


def test_jobs_end_are_lost_or_rest():
    lost, delayed = availability(TABLE), availability(TABLE, away="delayed")
    assert lost.ends(1, 6, 14) == delayed.ends(1, 6, 14) == (20, True)
    assert lost.ends(1, 6, 15) == (20, False)
    assert delayed.ends(1, 6, 15) == (31, True)
    assert delayed.ends(1, 6, 25) == (40, False)  # it never comes back
    assert lost.ends(2, 6, 1e9) == (6 + 1e9, True)
    again = availability(TABLE, period=50)
    assert again.ends(1, 106, 15) == (120, False)
    assert replace(again, away="delayed").ends(1, 106, 25 + 15 + 1) == (180 + 1 + 1, True)


def test_a_span_goes_on_where_the_period_begins_again():
    night = availability({0: [[20, 28]]}, period=24)
    assert (
        night.available(1, 2).tolist()
        == night.available(1, 23).tolist()
        == night.available(1, 240 + 22).tolist()
        == [0]
    )
    assert night.available(1, 5).tolist() == []
    assert night.ends(0, 22, 5) == (27, True)
    assert night.ends(0, 240 + 1, 5) == (244, False)
    always = availability({0: [[3, 40]]}, period=24)
    assert always.ends(0, 7, 1e6) == (7 + 1e6, True)
    assert next(iter(always.changes(1))) == (0.0, True, 0)


def test_rows_are_dealt_and_begin_again():
    when = availability({5: [[0, 1]], 9: [[1, 2]]}, deal=True)
    assert when.available(5, 0).tolist() == [0, 2, 4]
    assert when.available(5, 1).tolist() == [1, 3]
    assert when.available(1, 1).tolist() == []
    assert {c for t, comes, c in when.changes(5) if comes and t == 1} == {1, 3}
    assert fb.rounds(1, clients=2, availability=when).caution(5) is None


def test_who_is_never_there_is_said_once():
    assert "2 of 5 clients are never available" in fb.rounds(
        1, availability=availability(TABLE), clients=2
    ).caution(5)
    assert "2 of 5" in fb.buffered(1, availability=availability(TABLE)).caution(5)


# Rounds -----------------------------------------------------------------------------------------------------


def test_rounds_ask_who_is_there_and_wait_for_somebody():
    table = {0: [[0, 2]], 1: [[1, 3]], 2: [[10, 99]]}
    seen = ticks(fb.rounds(5, clients=2, availability=availability(table)), 3)
    assert [sorted(t.clients.tolist()) for t in seen] == [[0], [0, 1], [1], [2], [2]]
    assert [t.time for t in seen] == [1, 2, 3, 11, 12]
    assert seen[3].intervals.tolist() == [[10.0, 11.0]]


def test_who_goes_away_in_a_round_is_not_waited_for():
    table = {0: [[0, 100]], 1: [[0, 4]], 2: [[0, 3], [20, 100]]}
    work = {"clients": 3, "durations": clock.constant(5.0)}
    [lost] = ticks(fb.rounds(1, **work, availability=availability(table)), 3)
    assert (lost.clients.tolist(), lost.dropped, lost.time) == ([0], 2, 5)
    [late] = ticks(fb.rounds(1, **work, availability=availability(table, away="delayed")), 3)
    assert (sorted(late.clients.tolist()), late.dropped, late.time) == ([0, 2], 1, 22)
    [hurried] = ticks(fb.rounds(1, **work, timeout=6.0, availability=availability(table, away="delayed")), 3)
    assert (hurried.clients.tolist(), hurried.dropped, hurried.time) == ([0], 2, 6)


def test_a_round_that_everybody_left_is_asked_anew():
    table = {0: [[0, 4], [7, 20]], 1: [[0, 3]]}
    [tick] = ticks(
        fb.rounds(1, clients=2, durations=clock.constant(5.0), availability=availability(table)), 2
    )
    assert (tick.clients.tolist(), tick.time) == ([0], 12)


def test_poisson_rounds_lose_those_who_are_away():
    always = fb.rounds(300, clients=2, sampling="poisson")
    half = {c: [[0, 1e9]] if c % 2 else [[0, 1e-9]] for c in range(10)}
    here = replace(always, availability=availability(half), durations=clock.constant(1.0))
    for a, b in zip(ticks(always, 10), ticks(here, 10)):
        assert [c for c in a.clients.tolist() if c % 2] == b.clients.tolist()
        assert b.dropped == len(a.clients) - len(b.clients)
    assert 0.8 < sum(len(t.clients) for t in ticks(here, 10)) / 300 < 1.2


def test_everybody_always_there_is_as_without():
    there = availability({c: [[0, None]] for c in range(20)})
    for schedule in (
        fb.rounds(30, clients=4, over_select=1.5, timeout=2.0, durations=clock.halfnormal()),
        fb.rounds(30, clients=4, sampling="poisson", durations=clock.halfnormal()),
        fb.buffered(60, buffer=3, concurrency=8),
        fb.buffered(60, buffer=3, concurrency=8, arrivals="closed"),
    ):
        plain, same = ticks(schedule, 20), ticks(replace(schedule, availability=there), 20)
        if not schedule.asynchronous:
            assert [t.clients.tolist() for t in plain] == [t.clients.tolist() for t in same]
        assert [len(t.clients) for t in plain] == [len(t.clients) for t in same]
        assert [t.time for t in plain] == pytest.approx([t.time for t in same])


# Asynchronous -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", ["constant", "poisson", "closed"])
@pytest.mark.parametrize("away", ["lost", "delayed"])
def test_asynchronous_jobs_are_of_those_who_were_there(arrivals, away):
    draw = np.random.default_rng(3)
    table = {c: [[s, s + d]] for c, s, d in zip(range(20), draw.uniform(0, 50, 20), draw.uniform(5, 30, 20))}
    when = availability(table, away=away, period=60)
    schedule = fb.buffered(80, buffer=3, concurrency=6, arrivals=arrivals, durations=clock.exponential(4.0), availability=when)  # fmt: skip
    seen, flying, dropped = ticks(schedule, 20), {}, 0
    for tick in seen:
        for c in tick.started.tolist():
            flying.setdefault(c, []).append(tick.step)
        for c, v, (start, end) in zip(tick.clients.tolist(), tick.versions.tolist(), tick.intervals.tolist()):
            assert flying[c].pop(0) == v
            assert naive(table, 60, c, start + 1e-9)
            assert naive(table, 60, c, end - 1e-6)
            assert away == "delayed" or all(naive(table, 60, c, u) for u in np.linspace(start, end, 9)[1:-1])
        assert tick.pending_versions == {v for vs in flying.values() for v in vs}
        assert all(len(vs) <= 1 for vs in flying.values())
        dropped += tick.dropped
    assert (dropped > 5) == (away == "lost")
    assert [t.time for t in seen] == [t.time for t in ticks(schedule, 20)]


@pytest.mark.parametrize("arrivals", ["constant", "poisson", "closed", [0.0, 5e8, 1e9 + 1, 1e9 + 2]])
def test_a_long_night_takes_no_time_to_simulate(arrivals):
    when = availability({0: [[1e9, 2e9]]})
    [tick] = ticks(fb.buffered(1, buffer=1, concurrency=4, arrivals=arrivals, durations=clock.constant(1.0), availability=when), 1)  # fmt: skip
    assert 1e9 + 1 <= tick.time < 1e9 + 12


@pytest.mark.parametrize("schedule", [fb.rounds(9, clients=1), fb.buffered(9, 1, 1), fb.buffered(9, 1, 1, arrivals="closed")])  # fmt: skip
def test_nobody_left_and_jobs_nobody_can_finish_are_told(schedule):
    gone = replace(schedule, availability=availability({0: [[0, 3]]}), durations=clock.constant(1.0))
    with pytest.raises(fb.FedbraidError, match="no client is available after time"):
        ticks(gone, 1)
    short = replace(
        schedule, availability=availability({0: [[0, 3]]}, period=5), durations=clock.constant(4.0)
    )
    with pytest.raises(fb.FedbraidError, match=r"attempts|in a row were lost"):
        ticks(short, 1)


# Whole runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [fb.rounds(8, clients=2, durations=clock.halfnormal()), fb.buffered(8, buffer=2, concurrency=4)],
)
def test_a_run_with_availability_is_resumed_to_the_same_bits(schedule, blobs, tmp_path):
    table = {str(c): [[3.0 * (c % 3), 3.0 * (c % 3) + 4]] for c in range(blobs.clients)}
    file = tmp_path / "when.json"
    file.write_text(json.dumps(table))
    schedule = replace(schedule, availability=availability(file, period=9))
    work = fb.Work(lr=0.05, epochs=1, batch=8)
    straight = fb.simulate(blobs, fb.scaffold(), work, schedule, seed=3)

    class Kill(Exception): ...

    class Killer:
        def step(self, record, run):
            if record["step"] == 5:
                raise Kill

    with pytest.raises(Kill):
        fb.simulate(blobs, fb.scaffold(), work, schedule, seed=3, out=tmp_path / "run", callbacks=[Killer()])
    assert fb.resume(tmp_path / "run", task=blobs).x.tolist() == straight.x.tolist()
    file.write_text(json.dumps(table | {"0": [[0, 1]]}))
    with pytest.raises(fb.FedbraidError, match="is not what it was when the run began"):
        fb.resume(tmp_path / "run", task=blobs)


def test_an_availability_prints_as_it_can_be_read_again(tmp_path):
    file = tmp_path / "when.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"0": [[0, None]]}).encode()))
    for when in (availability(TABLE, "delayed", 50.0), availability(file, deal=True), availability("phones")):
        again = evaluate(repr(when), SCHEDULES, "availability")
        assert again == when
        assert hash(again) == hash(when)
        assert again.available(9, 3.0).tolist() == when.available(9, 3.0).tolist()
    links = clock.devices("phones")
    assert evaluate(repr(links), SCHEDULES, "bandwidth") == links
    took = clock.measured({3: [1.0, 2.0], 1: [4.0]})
    assert evaluate(repr(took), SCHEDULES, "durations") == took


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ({0: [[5, 5]]}, {}, "from 5 to 5"),
        ({0: [[5, 3]]}, {}, "from 5 to 3"),
        ({0: [[-1, 3]]}, {}, "from -1 to 3"),
        ({0: [["1", 3]]}, {}, "from '1' to 3"),
        ({0: [[1, 3, 5]]}, {}, "is not a table"),
        ({0: [1, 3]}, {}, "is not a table"),
        ({-1: [[1, 3]]}, {}, "-1 is not a client's number"),
        ({"x": [[1, 3]]}, {}, "is not a table"),
        ({0: [[1, 3], [2, 4]]}, {}, "overlapping spans of client 0 at time 2"),
        ({0: []}, {}, "makes no client available"),
        ({}, {}, "makes no client available"),
        (7, {}, "is not a table"),
        ("no/such.json", {}, "cannot be read"),
        ({0: [[0, 1]]}, {"away": "gone"}, "away must be"),
        ({0: [[0, 1]]}, {"period": 0}, "period must be"),
    ],
)
def test_bad_tables_are_refused_with_the_value(source, options, says):
    with pytest.raises(fb.FedbraidError) as caught:
        availability(source, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("data", [b"{", b"\x1f\x8b\x00garbage", b"[1]", b"\xff\xfe", b'{"0": [[0, NaN]]}'])
def test_files_that_are_no_tables_are_refused(data, tmp_path):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(fb.FedbraidError, match=r"x\.json"):
        availability(tmp_path / "x.json")


def test_what_cannot_go_with_an_availability_is_refused(blobs):
    when = availability(TABLE)
    with pytest.raises(fb.FedbraidError, match="given cohorts"):
        fb.rounds(1, clients=[[0]], availability=when)
    with pytest.raises(fb.FedbraidError, match="requires durations="):
        fb.buffered(1, durations=clock.constant(0), availability=when)
    with pytest.raises(fb.FedbraidError, match="is not an availability"):
        fb.rounds(1, availability={0: [[0, 1]]})
    private = fb.private(fb.fedavg(), clip=1.0, noise=1.0)
    with pytest.raises(fb.FedbraidError, match="sampling='poisson'"):
        fb.simulate(blobs, private, fb.Work(lr=0.1), fb.rounds(1, clients=1, availability=when))


# The phones ---------------------------------------------------------------------------------------------------


def test_the_phones_ship_with_their_licence_in_a_hundred_kilobytes():
    place = resources.files("fedbraid.schedule").joinpath("files")
    sizes = {f.name: len(f.read_bytes()) for f in place.iterdir()}
    assert {"phones.json.gz", "speeds.json", "PHONES.txt"} == set(sizes)
    assert sum(sizes.values()) <= 100_000
    assert "BSD 2-Clause" in place.joinpath("PHONES.txt").read_text()
    assert "Redistribution" in place.joinpath("PHONES.txt").read_text()


def test_phones_are_there_at_night():
    phones = availability("phones")
    hours = [len(phones.available(1500, h * 3600)) for h in range(24)]
    assert max(hours) in hours[:7]
    assert 100 < min(hours) < 0.7 * max(hours) < 600
    assert [len(phones.available(3000, h * 3600)) for h in (3, 15)] == [2 * hours[3], 2 * hours[15]]


def test_links_of_phones_are_slow_for_some():
    links = clock.devices("phones")
    took = [links.seconds(c, 1e6, 1e6) for c in range(500)]
    assert len(set(took)) == 19
    assert np.mean(took) == pytest.approx(links.mean(1e6, 1e6), rel=0.2)
    with pytest.raises(fb.FedbraidError, match="phones"):
        clock.devices("phonse")


# From a run that was ------------------------------------------------------------------------------------------


def test_a_run_makes_a_clock_that_foretells_the_next(blobs, tmp_path):
    true = fb.rounds(60, clients=3, durations=clock.classes(clock.lognormal(0, 0.3), (1.0, 5.0), (0.7, 0.3)))
    work = fb.Work(lr=0.05, steps=1, batch=8)
    fb.simulate(blobs, fb.fedavg(), work, true, seed=1, out=tmp_path / "run")
    made = clock.from_run(tmp_path / "run")
    assert set(made) == {"durations"}
    foretold = ticks(fb.rounds(300, clients=3, **made), blobs.clients, seed=2)[-1].time
    assert foretold == pytest.approx(ticks(replace(true, steps=300), blobs.clients, seed=3)[-1].time, rel=0.1)


def test_a_deployments_records_say_who_was_away(tmp_path):
    lines = [
        {"clients": [0, 1], "start_times": [10, 10], "end_times": [12, 14], "came": [[0, 3], [1, 5]]},
        {"clients": [0], "start_times": [14], "end_times": [15], "went": [[1, 14.5]], "came": [[2, 14.8]]},
        {"clients": [1], "start_times": [15], "end_times": [19], "came": [[1, 15]]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = clock.from_run(tmp_path)
    assert made["durations"] == clock.measured({0: [2, 1], 1: [4, 4]})
    assert made["availability"].source == (
        (0, ((0, None),)),
        (1, ((2, 11.5), (12, None))),
        (2, ((11.8, None),)),
    )
    assert made["durations"].of(7, 0.3) in (1, 2, 4)
    with pytest.raises(fb.FedbraidError, match=r"metrics\.jsonl cannot be read"):
        clock.from_run(tmp_path / "none")
    (tmp_path / "metrics.jsonl").write_text('{"clients": [1]}\n')
    with pytest.raises(fb.FedbraidError, match="records no durations"):
        clock.from_run(tmp_path)


# On the command line ------------------------------------------------------------------------------------------


def test_the_command_line_takes_phones_files_and_runs(tmp_path, capsys):
    def run(*words):
        settings = ["--rounds", "2", "--steps", "1", "--per-round", "3", "--quiet"]
        return main(["run", "digits", "fedavg", *settings, *words]), capsys.readouterr().err

    def scheduled(name):
        return json.loads((tmp_path / name / "run.json").read_text())["schedule"]

    out, file = str(tmp_path / "a"), tmp_path / "when.json"
    phones = [
        "--availability",
        "phones",
        "--durations",
        "lognormal(3, 1)",
        "--bandwidth",
        "devices('phones')",
    ]
    assert run(*phones, "--out", out) == (0, "")
    assert "availability(source='phones'" in scheduled("a")
    assert run("--replay-timing", out, "--out", str(tmp_path / "b")) == (0, "")
    assert "measured(" in scheduled("b")
    file.write_text('{"0": [[0, 9]], "1": [[0, 9]]}')
    dealt = f"availability({str(file)!r}, period=9, deal=True)"
    assert run("--availability", dealt, "--out", str(tmp_path / "c")) == (0, "")
    for words, says in (
        (["--availability", "phonse"], "cannot be read"),
        (["--replay-timing", str(tmp_path)], "metrics.jsonl"),
        (["--replay-timing", out, "--durations", "constant(1)"], "leave out one"),
    ):
        code, error = run(*words)
        assert code == 2
        assert says in error
