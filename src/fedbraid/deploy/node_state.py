"""What a node stores between orders: the server's hidden state, and its own after each upload that may be counted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.errors import RunError
from fedbraid.run.atomic_files import checksum, make_folder, write_atomic
from fedbraid.run.checkpoint import model_checksum

FILE = "memory.safetensors"


@dataclass(frozen=True)
class Trained:
    """What a secure sum is to have of this node: the upload of a job, which leaves it masked alone."""

    version: int
    loss: float
    vectors: Vectors  # [1, ·] each


@dataclass
class NodeMemory:
    """A node's state in one run."""

    version: int = -1  # of `down`, where the server counts on it
    down: Vectors = field(default_factory=dict)
    after: dict[str, Vectors] = field(default_factory=dict)  # client state [1, ·] after a job
    participations: int = 0  # uploads so far, counted or not
    trained: dict[str, Trained] = field(default_factory=dict)  # the last job
    unmasked: int = -1  # the newest version of which shares for a sum were given away

    def keep(self, jobs: set[str]) -> None:
        """Forget the state after all other jobs."""
        self.after = {job: rows for job, rows in self.after.items() if job in jobs}
        self.trained = {}

    @classmethod
    def read(cls, place: Path) -> NodeMemory:
        try:
            with safe_open(place / FILE, "pt") as file:
                told = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if told["checksum"] != _checksum(told["fedbraid"], tensors):
                raise ValueError("its checksum does not fit")
            about = json.loads(told["fedbraid"])
        except FileNotFoundError:
            return cls()
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{place / FILE} is corrupt ({error}); remove it, and this node starts without its state"
            ) from error
        jobs: dict[str, Vectors] = {job: {} for job in about["jobs"]}
        down: Vectors = {}
        trained = {
            job: Trained(version, loss, {}) for job, (version, loss) in about.get("trained", {}).items()
        }
        for key, value in tensors.items():
            kind, job, name = key.split("/", 2)
            (down if kind == "down" else trained[job].vectors if kind == "trained" else jobs[job])[name] = (
                value
            )
        return cls(about["version"], down, jobs, about["participations"], trained, about.get("unmasked", -1))

    def write(self, place: Path, keep_down: bool) -> None:
        """To the disk itself, whole or not at all: what is uploaded next will be counted on."""
        make_folder(place)
        tensors: dict[str, Tensor] = {}
        if keep_down:
            tensors |= {f"down//{name}": v.contiguous().clone() for name, v in self.down.items()}
        for job, rows in self.after.items():
            tensors |= {f"after/{job}/{name}": v.contiguous().clone() for name, v in rows.items()}
        for job, what in self.trained.items():
            tensors |= {f"trained/{job}/{name}": v.contiguous().clone() for name, v in what.vectors.items()}
        about = json.dumps(
            {
                "version": self.version if keep_down else -1, "jobs": list(self.after),
                "participations": self.participations, "unmasked": self.unmasked,
                "trained": {job: (what.version, what.loss) for job, what in self.trained.items()},
            }
        )  # fmt: skip
        told = {"fedbraid": about, "checksum": _checksum(about, tensors)}
        write_atomic(place / FILE, save_tensors(tensors, told))


def _checksum(about: str, tensors: Vectors) -> str:
    return f"{checksum(about.encode(), int(model_checksum(tensors), 16)):08x}"
