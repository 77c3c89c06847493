"""Energy of devices: joules of a client's computing, messages and idle time, by the profile of a device.

E = flops · joules_per_flop + up · joules_per_byte_up + down · joules_per_byte_down + seconds · idle_watts, where the
seconds are those of computing and of the transfer. A FLOP is `cost`'s: a multiply-add counts as one. docs/energy.md
names the sources of the profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.check import number
from fedbraid.errors import unknown
from fedbraid.parse import evaluate
from fedbraid.run.checkpoint import Record
from fedbraid.schedule.clock import Network


@dataclass(frozen=True)
class DeviceProfile:
    """The speed and power of a device.

    >>> phone = PROFILES["phone-wifi"]
    >>> round(phone.joules(flops=1e9, up=1e6, down=1e6), 2)  # a second of one core, and two megabytes
    3.83
    """

    flops_per_second: float
    joules_per_flop: float
    joules_per_byte_up: float
    joules_per_byte_down: float
    idle_watts: float

    def __post_init__(self) -> None:
        for f in fields(self):
            interval = "(0, inf)" if f.name == "flops_per_second" else "[0, inf)"
            number(f.name, getattr(self, f.name), interval)

    def seconds(self, flops: float) -> float:
        return flops / self.flops_per_second

    def joules(self, flops: float, up: float, down: float, transfer_seconds: float = 0.0) -> float:
        """The energy of participations with these sums."""
        return (
            flops * self.joules_per_flop
            + up * self.joules_per_byte_up
            + down * self.joules_per_byte_down
            + (self.seconds(flops) + transfer_seconds) * self.idle_watts
        )


_PER_BYTE = 8e-9  # mW per Mbit/s, as joules per byte
_CORE = {
    "flops_per_second": 2e9,
    "joules_per_flop": 4e-10,
}  # (α/2)·f² a cycle at 2 GHz, a multiply-add a cycle
PROFILES = {
    "phone-wifi": DeviceProfile(**_CORE, joules_per_byte_up=283.17 * _PER_BYTE, joules_per_byte_down=137.01 * _PER_BYTE, idle_watts=0.13286),
    "phone-lte": DeviceProfile(**_CORE, joules_per_byte_up=438.39 * _PER_BYTE, joules_per_byte_down=51.97 * _PER_BYTE, idle_watts=1.28804),
    "raspberry-pi-4": DeviceProfile(4e9, 9.25e-10, 283.17 * _PER_BYTE, 137.01 * _PER_BYTE, 2.7),
}  # fmt: skip


def profile_of(profile: str | DeviceProfile) -> DeviceProfile:
    """A profile from its name or its repr."""
    if isinstance(profile, DeviceProfile):
        return profile
    if profile in PROFILES:
        return PROFILES[profile]
    if not profile.startswith("DeviceProfile("):
        raise unknown("device profile", profile, PROFILES)
    parsed: DeviceProfile = evaluate(profile, {"DeviceProfile": DeviceProfile}, "device profile")
    return parsed


class EnergyMeter:
    """A callback that adds to each record the joules that its clients spent; `client_flops` has the FLOPs of each client."""

    def __init__(
        self, profile: DeviceProfile, client_flops: NDArray[np.float64], network: Network | None = None
    ) -> None:
        self.profile, self.client_flops, self.network = profile, client_flops, network

    def step(self, record: Record, run: Any) -> None:
        up, down = record["bytes_up"], record["bytes_down"]
        transfer = 0.0 if self.network is None else self.network.mean(down, up)
        flops = float(self.client_flops[record["clients"]].sum())
        record["energy"] = self.profile.joules(flops, up, down, transfer)
