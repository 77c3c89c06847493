"""Is a deployed run as private as a simulated one, and its noise nobody's to repeat?"""

from __future__ import annotations

import json
import math

import pytest

import fedbraid as fb

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
import torch  # noqa: E402
from fleets import LAYOUT, PROJECT, driven, simulated  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.quick]

ROUNDS = "rounds(3, clients=3)"


def deployed(tmp_path, algorithm, name="run", **config):
    said = {"schedule": ROUNDS, "minimum": 3, "deadline": 30.0, "too_few": "stop"} | config
    return driven(tmp_path / name, algorithm=algorithm, **said)


@pytest.mark.parametrize(
    "text",
    [
        "private(fedavg(), clip=0.05, noise=0.0)",
        "private(fedavg(), clip='adaptive', noise=0.0)",
        "private(feddyn(), clip=0.05, noise=0.0)",
        "private(fedvarp(held='client'), clip=0.05, noise=0.0)",
        "private(fedgbo(), clip=0.05, noise=0.0)",
        "private(scaffold(), clip=0.05, noise=0.0, scales={'dc': 10.0})",
        "private(fedpaq(int8()), clip=0.05, noise=0.0)",
        "private(fedavg(), clip=0.05, noise=0.0, where='client')",
        "private(fedadavr(optimizer='sgd', lr=1.0), clip=0.05, noise=0.0, where='client')",
    ],
)
def test_a_fleet_ends_where_the_simulator_ends_when_noise_is_zero(tmp_path, text):
    from fedbraid.algorithms.registry import algorithm_from

    result = deployed(tmp_path, text)
    expected = simulated(algorithm_from(text), fb.rounds(3, clients=3))
    plain = simulated(fb.fedavg(weights="uniform"), fb.rounds(3, clients=3))
    if "adaptive" not in text:  # whose count of norms has a noise of its own
        torch.testing.assert_close(result.x, expected.x, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(result.x, plain.x, atol=1e-4)  # the clip was felt
    assert "epsilon" not in result.history[-1]


def test_a_servers_noise_is_not_its_seeds(tmp_path):
    text = "private(fedavg(), clip=0.05, noise=2.0)"
    first, second = (deployed(tmp_path, text, name) for name in ("first", "second"))
    assert not torch.allclose(first.x, second.x, atol=1e-3)
    for run in (first, second):  # nobody draws who is there, so nothing is amplified
        assert [r["epsilon"] for r in run.history] == [
            dp.get_epsilon_gaussian(2 / math.sqrt(t), 1e-5) for t in (1, 2, 3)
        ]


def test_nodes_noise_for_themselves_and_count_their_own_visits(tmp_path):
    text = "private(fedavg(), clip=0.05, noise=6.0, where='client')"
    first, second = (deployed(tmp_path, text, name) for name in ("first", "second"))
    assert not torch.allclose(first.x, second.x, atol=1e-3)
    assert [r["epsilon"] for r in first.history] == [
        dp.get_epsilon_gaussian(3 / math.sqrt(t), 1e-5) for t in (1, 2, 3)
    ]
    assert {r["train_loss"] for r in first.history} == {0.0}  # a loss would tell of a node's data


def test_nodes_hide_their_examples_and_count_their_own_steps(tmp_path):
    """Of 12, 21 and 30 samples all are in every step, so that only noise tells a fleet from the simulator."""
    sure = "Work(lr=0.1, steps=2, batch=None)"
    still = deployed(tmp_path, "private(fedavg(), clip=0.5, noise=0.0, unit='example')", "still", work=sure)
    a = fb.private(fb.fedavg(), clip=0.5, noise=0.0, unit="example")
    expected = simulated(a, fb.rounds(3, clients=3), work=sure)
    torch.testing.assert_close(still.x, expected.x, rtol=1e-4, atol=1e-5)
    text = "private(fedavg(), clip=0.5, noise=6.0, unit='example')"
    first, second = (deployed(tmp_path, text, name, work=sure) for name in ("first", "second"))
    assert not torch.allclose(first.x, second.x, atol=1e-3)
    assert [r["epsilon"] for r in first.history] == [
        dp.get_epsilon_gaussian(6 / math.sqrt(2 * t), 1e-5) for t in (1, 2, 3)
    ]
    assert {r["train_loss"] for r in first.history} == {0.0}
    solved = deployed(
        tmp_path, "private(fedavg(), clip=0.5, epsilon=3.0, unit='example')", "solved", work=sure
    )
    assert 2.99 < solved.history[-1]["epsilon"] <= 3.0


def test_a_fleet_ends_when_its_budget_is_spent(tmp_path):
    two = dp.get_epsilon_gaussian(2 / math.sqrt(2), 1e-5) + 0.01
    result = deployed(tmp_path, f"private(fedavg(), clip=0.05, noise=2.0, epsilon={two})")
    assert len(result.history) == 2
    own = deployed(tmp_path, f"private(fedavg(), noise=4.0, epsilon={two}, where='client')", "own")
    assert len(own.history) == 2


def test_a_node_uploads_no_more_than_its_budget_allows(tmp_path):
    from fedbraid.deploy.node import NodeRuntime
    from fedbraid.deploy.node_state import NodeMemory
    from fedbraid.deploy.project import task_digest
    from fedbraid.deploy.transport import SignedOrder, unpack_answer

    five = dp.get_epsilon_gaussian(3 / math.sqrt(5), 1e-5) + 0.01
    settings = PROJECT.settings(
        {
            "algorithm": f"private(fedavg(), noise=6.0, epsilon={five}, where='client')",
            "schedule": "rounds(9, clients=3)", "work": "Work(lr=0.1, steps=3, batch=4)",
        }
    )  # fmt: skip
    body = {"task": task_digest(settings, LAYOUT), "settings": settings.to_nodes(), "client": 0, "version": 0}
    body |= {"base": -1, "start": "none", "committed": "none"}
    answers = []

    class Transport:
        name = "node-0"

        def answer(self, order, message):
            answers.append(unpack_answer(message)[0])

    node = NodeRuntime(PROJECT, Transport(), tmp_path, {"share": 0})
    NodeMemory(participations=5).write(node.place("run"), keep_down=False)
    node.obey(SignedOrder("run", "job", "node-0", "TRAIN", json.dumps(body).encode(), 0.0))
    assert "uploaded 5 times, which is all" in answers[0]["error"]
