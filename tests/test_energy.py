"""Do records, comparisons and costs add up the joules that a device's profile says, and is every builder's space buildable?"""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.algorithms import ALL, SPACES
from fedbraid.cli import config as cfg
from fedbraid.cli import main
from fedbraid.cli.sweep import build
from fedbraid.study.compare import compare, resume
from fedbraid.study.energy import PROFILES, DeviceProfile, profile_of

UNIT = DeviceProfile(flops_per_second=1e6, joules_per_flop=1.0, joules_per_byte_up=10.0, joules_per_byte_down=100.0, idle_watts=3.0)  # fmt: skip


def test_joules_are_the_sum_of_four_terms():
    assert UNIT.joules(flops=2e6, up=3, down=4, transfer_seconds=5) == 2e6 + 30 + 400 + (2 + 5) * 3
    with pytest.raises(fb.errors.ConfigError, match="flops_per_second"):
        DeviceProfile(0.0, 1, 1, 1, 1)


def test_profiles_are_known_by_name_and_as_they_print():
    for name, profile in PROFILES.items():
        assert profile_of(name) == profile == profile_of(repr(profile))
    with pytest.raises(fb.errors.ConfigError, match="did you mean 'phone-lte'"):
        profile_of("phone-lt")


def test_a_comparison_counts_what_each_step_took(tmp_path):
    task = fb.tasks.load("digits", clients=20)
    network = fb.clock.bandwidth(up=100.0, down=1000.0)
    schedule = fb.rounds(3, clients=4, bandwidth=network)
    found = compare(
        task, {"avg": fb.fedavg(), "thin": fb.fedpaq(fb.codecs.int8())}, fb.Work(lr=0.05, batch=5), schedule,
        seeds=1, out=tmp_path / "c", energy=UNIT,
    )  # fmt: skip
    for group, row in zip(found.groups, found.rows):
        (history,), (flops,) = group.histories, group.flops
        wanted = [
            f + 10 * r["bytes_up"] + 100 * r["bytes_down"]
            + 3 * (f / 1e6 + r["bytes_up"] / 100 + r["bytes_down"] / 1000)
            for f, r in zip(flops, history)
        ]  # fmt: skip
        assert [r["energy"] for r in history] == pytest.approx(wanted)
        assert row["energy"] == pytest.approx(np.sum(wanted))
        assert group.spent[0]["energy"] == pytest.approx(np.cumsum(wanted))
    assert found.rows[1]["energy"] < found.rows[0]["energy"]
    assert "energy" in found.cells()[0]
    assert resume(tmp_path / "c").rows == found.rows


def test_cost_says_the_energy_of_a_round(capsys):
    words = ["cost", "digits", "fedavg", "--clients", "20", "--per-round", "4", "--energy", "phone-lte"]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    phone = PROFILES["phone-lte"]
    assert said["energy"]["up"] == pytest.approx(said["bytes_up"] / 4 * phone.joules_per_byte_up)
    parts = (said["energy"][k] for k in ("compute", "up", "down", "idle"))
    assert said["energy"]["total"] == pytest.approx(sum(parts))
    assert main(words) == 0
    assert "client energy per round" in capsys.readouterr().out
    assert main([*words[:-1], "toaster"]) == 2
    assert "unknown device profile 'toaster'" in capsys.readouterr().err


# What builders declare as worth a search ---------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SPACES))
def test_a_declared_space_can_be_built_at_both_ends(name):
    algorithm = {"name": name} | ({"a": "fedavg()"} if name == "with_codecs" else {})
    config = cfg.merge({"task": {"name": "digits"}, "algorithm": algorithm}, {})
    for u in (0.0, 0.999999):
        entry = build(config, {key: what.draw(u) for key, what in SPACES[name].items()})
        assert entry.algorithm.name.startswith(name)
    assert name in ALL
    assert "lr" in SPACES[name]


def test_sweep_searches_what_the_builder_declares(tmp_path, capsys):
    words = ["sweep", "digits", "fedprox", "--method", "random", "--trials", "2", "--clients", "20"]
    words += ["--rounds", "2", "--out", str(tmp_path / "s"), "--json"]
    assert main(words) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert set(best) == {"lr", "algorithm.mu"}
    assert main(["sweep", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == best
    assert main([*words[:-2], str(tmp_path / "t"), "--json", "--lr", "0.1"]) == 0
    assert set(json.loads(capsys.readouterr().out)["best"]) == {"algorithm.mu"}
