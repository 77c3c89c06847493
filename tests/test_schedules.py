"""Staleness, busy clients, dropped clients, simulated time: who trains when?"""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from oracles import VMAP, Trial

import fedbraid as fb

clock = fb.clock

SCHEDULES = {
    "rounds": fb.rounds(30, clients=4),
    "share": fb.rounds(30, clients=0.25),
    "over_select": fb.rounds(30, clients=4, over_select=1.5, durations=clock.halfnormal()),
    "timeout": fb.rounds(30, clients=4, timeout=1.0, durations=clock.exponential()),
    "constant": fb.buffered(60, buffer=3, concurrency=8),
    "poisson": fb.buffered(60, buffer=3, concurrency=8, arrivals="poisson"),
    "closed": fb.buffered(60, buffer=3, concurrency=8, arrivals="closed"),
    "crowded": fb.buffered(60, buffer=3, concurrency=40),
    "classes": fb.buffered(60, buffer=3, concurrency=8, durations=clock.classes(clock.lognormal(), (1.0, 9.0), (0.7, 0.3))),
    "slow links": fb.buffered(60, buffer=3, concurrency=8, bandwidth=clock.bandwidth(1e3, 1e4, spread=0.5)),
    "immediate": fb.immediate(60, concurrency=8),
    "a trace": fb.buffered(10, buffer=3, arrivals=np.linspace(0, 9, 60).tolist()),
}  # fmt: skip
BUFFERED = [name for name, s in SCHEDULES.items() if s.asynchronous]
everything = pytest.mark.parametrize("name", SCHEDULES)
buffered = pytest.mark.parametrize("name", BUFFERED)


def ticks(schedule, N=20, seed=1, message=(100.0, 100.0)):
    return list(schedule.ticks(N, seed, message))


# Every schedule -----------------------------------------------------------------------------------------


@everything
def test_there_is_a_tick_for_every_step_and_time_never_runs_backwards(name):
    seen = ticks(SCHEDULES[name])
    assert [t.step for t in seen] == list(range(SCHEDULES[name].steps))
    assert all(a.time <= b.time for a, b in pairwise(seen))
    assert all(0 <= c < 20 for t in seen for c in t.clients)
    assert all(len(t.clients) == len(t.versions) > 0 for t in seen)
    assert len({c for t in seen for c in t.clients.tolist()}) > 10


@everything
def test_ticks_are_a_function_of_the_seed_and_can_be_replayed(name):
    def told(seed):
        return [
            (
                t.time,
                t.clients.tolist(),
                t.versions.tolist(),
                t.started.tolist(),
                t.pending_versions,
                t.dropped,
            )
            for t in ticks(SCHEDULES[name], seed=seed)
        ]

    assert told(1) == told(1)
    assert [t[1] for t in told(1)] != [t[1] for t in told(2)]


@everything
def test_a_longer_schedule_begins_like_a_shorter_one(name):
    from dataclasses import replace

    short = ticks(replace(SCHEDULES[name], steps=5))
    for a, b in zip(short, ticks(SCHEDULES[name])):
        assert (a.time, a.clients.tolist(), a.versions.tolist()) == (
            b.time,
            b.clients.tolist(),
            b.versions.tolist(),
        )


# In flight ----------------------------------------------------------------------------------------------


@buffered
def test_a_client_has_at_most_one_job_in_flight_and_hands_in_every_job_once(name):
    flying: dict[int, list[int]] = {}
    started = Counter()
    for tick in ticks(SCHEDULES[name]):
        events = Counter((c, tick.step) for c in tick.started.tolist())
        started += events
        handed = Counter(zip(tick.clients.tolist(), tick.versions.tolist()))
        for _, v in handed:
            assert v <= tick.step
        assert not handed - started, "a job was handed in that never started"
        started -= handed
        flying = {c: [v for (i, v), k in started.items() if i == c for _ in range(k)] for c in range(20)}
        assert max(map(len, flying.values())) <= 1
        assert tick.pending_versions == {v for vs in flying.values() for v in vs}


@buffered
def test_staleness_is_counted_from_the_version_downloaded(name):
    """A job that starts while the server stands at version v, and ends after k more steps, is k versions old."""
    begun: dict[int, int] = {}
    for tick in ticks(SCHEDULES[name]):
        starts = tick.started.tolist()
        for c, v in zip(tick.clients.tolist(), tick.versions.tolist()):
            if v < tick.step:
                assert begun.pop(c) == v
            else:
                assert c in starts
                starts.remove(c)
        begun |= dict.fromkeys(starts, tick.step)


def test_history_counts_the_same_staleness_and_keeps_a_bounded_number_of_versions():
    trial, schedule = Trial(), fb.buffered(40, buffer=2, concurrency=6)
    result = trial.run(fb.fedbuff(lr=0.2), schedule)
    live = []
    for tick, record in zip(schedule.ticks(8, trial.seed), result.history, strict=True):
        tau = tick.step - tick.versions
        assert record["staleness"] == pytest.approx(tau.mean())
        assert record["staleness_max"] == tau.max()
        assert record["versions_kept"] <= 8 + 1  # one job a client, and the newest
        live.append(record["versions_kept"])
    assert max(live) > 2
    assert set(result.state.sent) == tick.pending_versions | {40}


def test_versions_kept_do_not_grow_with_the_run():
    schedule = fb.buffered(3000, buffer=5, concurrency=50)
    kept = [len(t.pending_versions) for t in ticks(schedule, N=500)]
    assert max(kept[1500:]) <= max(kept[:1500]) + 5
    assert max(kept) < 100


def test_closed_keeps_exactly_that_many_busy():
    inside = 0
    for tick in ticks(fb.buffered(50, buffer=3, concurrency=7, arrivals="closed")):
        inside += len(tick.started) - len(tick.clients)
        assert 7 - 3 <= inside < 7 + 1
    assert ticks(fb.buffered(5, buffer=2, concurrency=50, arrivals="closed"))[0].started.size <= 20 + 1


def test_when_everyone_is_busy_an_arrival_passes_by():
    seen = ticks(fb.buffered(200, buffer=5, concurrency=1000), N=20)
    for a, b in pairwise(seen):
        assert a.time <= b.time
    flying = np.cumsum([len(t.started) - len(t.clients) for t in seen])
    assert flying.max() <= 20
    assert flying[50:].mean() > 18


def test_a_closed_loop_lets_all_that_ends_at_once_hand_in_before_anyone_starts():
    seen = ticks(fb.buffered(9, buffer=2, concurrency=6, arrivals="closed", durations=clock.constant(1.0)))
    assert [t.time for t in seen] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [(t.step - t.versions).tolist() for t in seen] == [[0, 0], [1, 1], [2, 2]] * 3


# Arrival rates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("concurrency", "rate"), [(100, 125), (500, 627), (1000, 1253)])
@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_the_arrival_rate_keeps_that_many_busy_under_half_normal_work(concurrency, rate, arrivals):
    schedule = fb.buffered(rate // 5, buffer=50, concurrency=concurrency, arrivals=arrivals)
    seen = ticks(schedule, N=5000)
    arrived = sum(len(t.started) for t in seen)
    assert arrived / seen[-1].time == pytest.approx(rate, rel=0.01 if arrivals == "constant" else 0.05)
    flying = np.cumsum([len(t.started) - len(t.clients) for t in seen])
    assert flying[len(flying) // 2 :].mean() == pytest.approx(concurrency, rel=0.1)


def test_the_rate_follows_the_mean_of_whatever_durations():
    for durations in (clock.constant(2.0), clock.exponential(3.0), clock.lognormal(0.5, 0.5), clock.trace([1.0, 5.0]), clock.classes(clock.constant(1.0), (1.0, 5.0), (0.5, 0.5))):  # fmt: skip
        draws = durations.draw((np.arange(40000) + 0.5) / 40000)
        factor = np.mean([durations.factor(c) for c in range(4000)])
        assert draws.mean() * factor == pytest.approx(durations.mean, rel=0.03)
        seen = ticks(fb.buffered(100, buffer=10, concurrency=40, durations=durations), N=2000)
        assert sum(len(t.started) for t in seen) / seen[-1].time == pytest.approx(
            40 / durations.mean, rel=0.03
        )


def test_half_normal_draws_are_absolute_normals():
    draws = clock.halfnormal(2.0).draw((np.arange(10000) + 0.5) / 10000)
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(2 * math.sqrt(2 / math.pi), rel=1e-3)
    assert np.mean(draws < 2.0) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=1e-3)


def test_a_trace_of_arrivals_is_followed_and_says_when_it_ends():
    schedule = fb.buffered(3, buffer=1, arrivals=[0.0, 4.0, 10.0], durations=clock.constant(1.0))
    assert [t.time for t in ticks(schedule)] == [1.0, 5.0, 11.0]
    with pytest.raises(fb.errors.ConfigError, match="ends before step 4 of 4"):
        ticks(fb.buffered(4, buffer=1, arrivals=[0.0, 4.0, 10.0], durations=clock.constant(1.0)))


def test_transfer_takes_time():
    slow, instant = clock.bandwidth(up=10.0, down=50.0), clock.constant(0.5)
    [tick] = ticks(fb.rounds(1, clients=3, durations=instant, bandwidth=slow), message=(100.0, 20.0))
    assert tick.time == pytest.approx(0.5 + 100 / 50 + 20 / 10)
    [tick] = ticks(
        fb.buffered(1, buffer=1, concurrency=1, durations=instant, bandwidth=slow), message=(100.0, 20.0)
    )
    assert tick.time == pytest.approx(4.5)


def test_a_smaller_message_is_sooner_there():
    trial, link = Trial(), clock.bandwidth(up=50.0, down=50.0)
    plain = trial.run(fb.fedavg(), fb.rounds(2, clients=2, bandwidth=link)).history[-1]["time"]
    small = trial.run(fb.fedpaq(fb.codecs.topk(0.1)), fb.rounds(2, clients=2, bandwidth=link)).history[-1][
        "time"
    ]
    assert small < plain


# Rounds ---------------------------------------------------------------------------------------------------


def test_cohorts_are_uniform_and_without_replacement():
    counts = Counter(c for t in ticks(fb.rounds(2000, clients=5)) for c in t.clients.tolist())
    assert all(len(set(t.clients.tolist())) == 5 for t in ticks(fb.rounds(50, clients=5)))
    assert len(counts) == 20
    assert all(abs(n - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75) for n in counts.values())


def test_a_share_of_clients_and_more_than_there_are():
    assert {len(t.clients) for t in ticks(fb.rounds(5, clients=0.25))} == {5}
    assert {len(t.clients) for t in ticks(fb.rounds(5, clients=0.01))} == {1}
    for t in ticks(fb.rounds(5, clients=99)):
        assert sorted(t.clients.tolist()) == list(range(20))
    for t in ticks(fb.rounds(5, clients=15, over_select=9.0, durations=clock.halfnormal())):
        assert (len(t.clients), t.dropped) == (15, 5)


def test_explicit_cohorts_are_taken_as_they_are():
    cohorts = [[3, 1], [7], [0, 1, 2]]
    assert [t.clients.tolist() for t in ticks(fb.rounds(3, clients=cohorts))] == cohorts
    assert [t.clients.tolist() for t in ticks(fb.rounds(2, clients=cohorts))] == cohorts[:2]


def test_over_asks_more_and_takes_the_first():
    asked_and_kept = [(len(t.clients) + t.dropped, len(t.clients)) for t in ticks(SCHEDULES["over_select"])]
    assert set(asked_and_kept) == {(6, 4)}
    plain = ticks(fb.rounds(300, clients=4, durations=clock.halfnormal()))
    hurried = ticks(fb.rounds(300, clients=4, over_select=2.0, durations=clock.halfnormal()))
    assert hurried[-1].time < 0.7 * plain[-1].time
    # the mean of the largest of four half-normals, and of the fourth of eight
    order = np.sort(np.abs(np.random.default_rng(0).normal(size=(20000, 8))), axis=1)
    assert hurried[-1].time / 300 == pytest.approx(order[:, 3].mean(), rel=0.1)


def test_a_timeout_drops_those_who_are_late_and_the_round_waits_no_longer():
    late, before = 0, 0.0
    for t in ticks(fb.rounds(300, clients=4, timeout=1.0, durations=clock.exponential())):
        assert len(t.clients) + t.dropped == 4
        late += t.dropped
        took = t.time - before
        if t.dropped:  # it waited to the end, and whole rounds more where nobody came
            assert took == pytest.approx(round(took), abs=1e-9)
            assert took > 0.5
        else:
            assert took % 1.0 > 0
        before = t.time
    assert late / 1200 == pytest.approx(math.exp(-1), abs=0.06)


def test_dropped_clients_never_ran():
    """Whoever is dropped uploads nothing and remembers nothing."""
    trial = Trial()
    schedule = fb.rounds(6, clients=2, over_select=2.0, durations=clock.halfnormal())
    result = trial.run(fb.scaffold(), schedule)
    assert all(r["dropped"] == 2 for r in result.history)
    took_part = {c for r in result.history for c in r["clients"]}
    assert set(result.state.clients.ids()) == took_part
    given = fb.simulate(
        trial.p.task,
        fb.scaffold(),
        trial.work,
        fb.rounds(6, clients=trial.cohorts),
        seed=trial.seed,
        engine=VMAP,
    )
    assert given.x.tolist() == result.x.tolist()


def test_a_round_that_nobody_can_finish_says_so():
    with pytest.raises(fb.errors.ConfigError, match="raise the timeout"):
        ticks(fb.rounds(1, clients=3, timeout=0.5, durations=clock.constant(1.0)))


def test_simulated_time_of_plain_rounds_is_their_number():
    assert [t.time for t in ticks(fb.rounds(3, clients=2))] == [1.0, 2.0, 3.0]
    times = [t.time for t in ticks(fb.rounds(2000, clients=1, durations=clock.halfnormal()))]
    assert times[-1] / 2000 == pytest.approx(math.sqrt(2 / math.pi), rel=0.05)


def test_slow_classes_are_slow_for_good():
    two = clock.classes(clock.constant(1.0), (1.0, 4.0), (0.5, 0.5))
    assert {two.factor(c) for c in range(50)} == {1.0, 4.0}
    assert [two.factor(c) for c in range(50)] == [two.factor(c) for c in range(50)]
    times = {t.clients[0]: t.time for t in ticks(fb.buffered(20, buffer=1, concurrency=20, arrivals="closed", durations=two)) if t.versions[0] == 0}  # fmt: skip
    assert all(times[c] == two.factor(int(c)) for c in times)


# Bad arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fb.rounds(0), "steps must be"),
        (lambda: fb.rounds(2.5), "steps must be"),
        (lambda: fb.rounds(True), "steps must be"),
        (lambda: fb.rounds(5, clients=0), "clients must be"),
        (lambda: fb.rounds(5, clients=-3), "clients must be"),
        (lambda: fb.rounds(5, clients="ten"), "clients='ten'"),
        (lambda: fb.rounds(5, clients=None), "clients=None"),
        (lambda: fb.rounds(2, clients=[3, 4]), "[3, 4]"),
        (lambda: fb.rounds(5, clients=1.5), "clients=1.5"),
        (lambda: fb.rounds(5, clients=float("nan")), "clients=nan"),
        (lambda: fb.rounds(5, clients=[[0, 1]]), "1 cohorts for 5 rounds"),
        (lambda: fb.rounds(2, clients=[[0, 1], []]), "non-empty"),
        (lambda: fb.rounds(5, over_select=0.5), "over_select must be"),
        (lambda: fb.rounds(5, timeout=0), "timeout must be"),
        (lambda: fb.buffered(0), "steps must be"),
        (lambda: fb.buffered(5, buffer=0), "buffer must be"),
        (lambda: fb.buffered(5, concurrency=0), "concurrency must be"),
        (lambda: fb.buffered(5, concurrency=2.0), "concurrency must be"),
        (lambda: fb.buffered(5, arrivals="sometimes"), "arrivals must be"),
        (lambda: fb.buffered(5, arrivals=[]), "at least one"),
        (lambda: fb.buffered(5, arrivals=[2.0, 1.0]), "in order"),
        (lambda: fb.buffered(5, buffer=4, concurrency=2, arrivals="closed", durations=clock.constant(0)), "concurrency"),
        (lambda: clock.constant(-1.0), "value must be"),
        (lambda: clock.halfnormal(0.0), "scale must be"),
        (lambda: clock.exponential(math.inf), "scale must be"),
        (lambda: clock.lognormal(0.0, -1.0), "sigma must be"),
        (lambda: clock.trace([]), "at least one"),
        (lambda: clock.trace([1.0, -1.0]), "-1.0"),
        (lambda: clock.classes(clock.constant(), (1.0, 2.0), (0.5, 0.6)), "adding up to 1"),
        (lambda: clock.bandwidth(0.0, 1.0), "up must be"),
        (lambda: ticks(fb.rounds(1, clients=[[20]])), "0 to 19"),
        (lambda: ticks(fb.rounds(1, clients=[[-1]])), "0 to 19"),
        (lambda: ticks(fb.rounds(1, clients=[[2, 2]])), "not a set"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_with_the_value_and_what_to_do(make, says):
    with pytest.raises(fb.errors.ConfigError) as caught:
        make()
    assert says in str(caught.value)
    assert len(str(caught.value)) > 20


def test_numpy_numbers_are_numbers_too():
    assert fb.rounds(np.int64(2), clients=np.int64(3)) == fb.rounds(2, clients=3)
    assert repr(fb.buffered(np.int64(2), buffer=np.int32(3))) == repr(fb.buffered(2, buffer=3))


# Work -------------------------------------------------------------------------------------------------------


def test_the_event_queue_does_no_more_for_a_large_population():
    def calls(population):
        """(uploads, calls of functions) of 200 steps."""
        made = 0

        def count(frame, event, argument):
            nonlocal made
            made += event in ("call", "c_call")

        schedule = fb.buffered(200, buffer=10, concurrency=100).ticks(population, 0)
        sys.setprofile(count)
        try:
            uploads = sum(len(t.clients) for t in schedule)
        finally:
            sys.setprofile(None)
        return uploads, made

    few, many = calls(1_000), calls(100_000)
    assert few[0] == many[0] == 2_000
    assert many[1] < 1.2 * few[1]


# Poisson rounds --------------------------------------------------------------------------------------------


def test_poisson_rounds_take_each_client_by_its_own_draw():
    drawn = ticks(fb.rounds(4000, clients=2, sampling="poisson"))
    sizes = np.array([len(t.clients) for t in drawn])
    assert sizes.mean() == pytest.approx(2, abs=5 * math.sqrt(1.8 / 4000))
    assert sizes.var() == pytest.approx(20 * 0.1 * 0.9, rel=0.1)  # binomial; a fixed cohort's would be 0
    assert (sizes == 0).mean() == pytest.approx(0.9**20, abs=0.03)
    visits = Counter(c for t in drawn for c in t.clients.tolist())
    assert all(abs(visits[c] - 400) < 5 * math.sqrt(4000 * 0.1 * 0.9) for c in range(20))
    assert all(t.versions.tolist() == [t.step] * len(t.clients) for t in drawn)


def test_poisson_rounds_on_a_clock():
    drawn = ticks(fb.rounds(50, clients=1, sampling="poisson", durations=clock.halfnormal()))
    assert any(not len(t.clients) for t in drawn)
    assert all(later.time > sooner.time for sooner, later in pairwise(drawn))
    assert all(t.intervals.shape == (len(t.clients), 2) for t in drawn)


def test_a_round_that_nobody_came_to_moves_nothing(blobs, tmp_path):
    schedule = fb.rounds(30, clients=1, sampling="poisson")
    work = fb.Work(lr=0.05, epochs=1, batch=8)
    straight = fb.simulate(blobs, fb.fedadam(), work, schedule, seed=3)
    empty = [r for r in straight.history if not r["clients"]]
    assert 3 < len(empty) < 20
    assert len(straight.history) == 30
    assert all(r["bytes_up"] == r["bytes_down"] == 0 and "train_loss" not in r for r in empty)
    norms = {r["step"]: r["norm"] for r in straight.history}
    assert all(norms[r["step"]] == norms[r["step"] - 1] for r in empty if r["step"] > 1)

    class Stopped(Exception):
        pass

    class Stop:
        def step(self, record, run):
            if record["step"] == 17:
                raise Stopped

    with pytest.raises(Stopped):
        fb.simulate(blobs, fb.fedadam(), work, schedule, seed=3, out=tmp_path / "run", callbacks=[Stop()])
    resumed = fb.resume(tmp_path / "run")
    assert resumed.x.equal(straight.x)
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in straight.history]


def test_bad_poisson_rounds_are_refused(blobs):
    with pytest.raises(
        fb.FedbraidError, match=r"7 of 6 clients is a Poisson rate of 1\.17, above 1; use at most 6"
    ):
        fb.simulate(blobs, fb.fedavg(), fb.Work(), fb.rounds(1, clients=7, sampling="poisson"))
    with pytest.raises(fb.FedbraidError, match="unknown sampling 'poison'; did you mean 'poisson'"):
        fb.rounds(1, sampling="poison")
    for more in ({"clients": [[0]]}, {"over_select": 1.5}, {"timeout": 1.0}):
        with pytest.raises(fb.FedbraidError, match="Poisson rounds take every client that is drawn"):
            fb.rounds(1, sampling="poisson", **more)
