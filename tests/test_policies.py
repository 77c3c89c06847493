"""Do the policies decide alike for a simulated clock and for one that shows them every single event?"""

import heapq

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.schedule.policies import BufferPolicy, Close, Fail, RoundPolicy, Select, View, Wait


def view(step=0, available=(), **facts):
    return View(step, np.array(available, np.int64), **facts)


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        ({"uploads": 2, "pending": 1, "attempts": 1, "required": 3}, Wait(3, 10.0)),
        ({"uploads": 3, "pending": 1, "attempts": 1, "required": 3}, Close()),
        ({"uploads": 2, "pending": 1, "attempts": 1, "required": 3, "elapsed": 10.0}, Close()),
        ({"uploads": 1, "pending": 1, "attempts": 1, "required": 3, "elapsed": 10.0}, Wait(3, 10.0)),
        ({"uploads": 2, "pending": 0, "attempts": 1, "required": 3}, Close()),
        ({"uploads": 1, "pending": 0, "attempts": 1, "required": 3}, Wait(3, 10.0)),
        ({"available": [4], "pending": 0}, Wait(0, 10.0)),  # fewer than the minimum can be asked
    ],
)
def test_when_a_round_closes(facts, decision):
    assert RoundPolicy(3, 0, limit=10.0, minimum=2).next(view(**facts)) == decision


def test_a_round_fails_only_where_it_is_told_to():
    late = view(uploads=1, pending=1, attempts=1, required=3, elapsed=10.0)
    assert RoundPolicy(3, 0, limit=10.0, minimum=2, retries=False).next(late) == Fail()
    assert RoundPolicy(3, 0, limit=10.0, minimum=1, retries=False).next(late) == Close()


def test_who_failed_is_replaced_by_as_many_as_are_missing():
    policy = RoundPolicy(4, 7, over_select=1.5)
    first = policy.next(view(available=range(10)))
    assert isinstance(first, Select)
    assert (len(first.clients), first.required) == (6, 4)
    again = policy.next(view(available=[7, 8, 9], uploads=2, attempts=1, required=4))
    assert isinstance(again, Close)  # of the minimum, nobody is pending
    policy = RoundPolicy(4, 7, over_select=1.5, minimum=4)
    again = policy.next(view(available=[7, 8, 9], uploads=2, attempts=1, required=4))
    assert isinstance(again, Select)
    assert (sorted(again.clients.tolist()), again.required) == ([7, 8, 9], 4)


def test_given_cohorts_wait_for_all_of_them_until_the_time_is_over():
    policy = RoundPolicy((5, 2, 8), 0, limit=10.0)
    assert policy.next(view(available=[2, 5])) == Wait(0, 10.0)
    late = policy.next(view(available=[2, 5], elapsed=10.0))
    assert isinstance(late, Select)
    assert (late.clients.tolist(), late.required) == ([5, 2], 3)


@pytest.mark.parametrize("over_select", [1.0, 1.6])
@pytest.mark.parametrize("timeout", [None, 0.9])
def test_rounds_event_by_event_are_the_simulators(over_select, timeout):
    """The simulator jumps from one decision to the next; here the policy sees every upload."""
    schedule = fb.rounds(
        40, clients=5, over_select=over_select, timeout=timeout, durations=fb.clock.halfnormal()
    )
    policy = RoundPolicy(5, 3, over_select, timeout or np.inf)
    for tick in schedule.ticks(30, 3):
        attempts, last = 0, None
        while last is None:
            first = policy.next(View(tick.step, 30, attempts=attempts))
            draws = fb.core.rng.uniform(3, "duration", tick.step, attempts, np.arange(len(first.clients)))
            events = sorted(
                (float(t), i) for i, t in enumerate(schedule.durations.draw(draws)) if t <= policy.limit
            )
            done = []
            for time, i in events:
                done.append(i)
                pending = len(first.clients) - len(done)
                if isinstance(policy.next(_at(tick, time, done, pending, attempts, first.required)), Close):
                    break
            attempts += 1
            last = sorted(done) if done else None
        assert tick.clients.tolist() == first.clients[last].tolist()


def _at(tick, time, done, pending, attempts, wanted):
    return view(tick.step, elapsed=time, uploads=len(done), pending=pending, attempts=attempts + 1, required=wanted)  # fmt: skip


def test_buffers_keep_as_many_at_work_as_the_simulator_does():
    """The event queue applies the policy's two rules itself; here `next` is asked after every event."""
    schedule = fb.buffered(60, buffer=4, concurrency=7, arrivals="closed", durations=fb.clock.exponential())
    policy, ticks = BufferPolicy(4, 7), list(schedule.ticks(20, 5))
    jobs = iter(schedule.durations.draw(fb.core.rng.uniform(5, "duration", np.arange(4096))).tolist())
    running, idle, now = [], 20, 0.0
    for tick in ticks:
        uploads, started = 0, 0
        while True:
            decision = policy.next(View(tick.step, idle, uploads=uploads, pending=len(running)))
            if isinstance(decision, Close):
                break
            if isinstance(decision, Select):
                for _ in decision.clients:
                    heapq.heappush(running, now + next(jobs))
                    idle, started = idle - 1, started + 1
            else:
                now = heapq.heappop(running)
                idle, uploads = idle + 1, uploads + 1
        assert (tick.time, len(tick.clients)) == (now, uploads)
        assert len(tick.started) in (started, started - 1, started + 1)  # one may start at the step itself


def test_a_buffer_that_stays_empty_fails_only_where_it_is_told_to():
    empty = view(elapsed=9.0, pending=3)
    assert BufferPolicy(2, 3, limit=8.0).next(empty) == Wait(2, 8.0)
    assert BufferPolicy(2, 3, limit=8.0, retries=False).next(empty) == Fail()
