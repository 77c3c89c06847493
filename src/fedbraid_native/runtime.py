"""Calls into a compiled library: jobs whose fields are filled by name, and mirrored by one struct of the source."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from fedbraid_native.build import FLAGS, library

_C_TYPES = {"float": ctypes.c_float, "int": ctypes.c_int, "int64_t": ctypes.c_int64}


def _fields(members: dict[str, str]) -> list[tuple[str, Any]]:
    """The fields of a job for ctypes, by name and C++ type: pointers are addresses, None where there is no array."""
    return [(name, _C_TYPES.get(kind, ctypes.c_void_p)) for name, kind in members.items()]


def _cpp(name: str, members: dict[str, str]) -> str:
    return f"struct {name} {{ {' '.join(f'{kind} {field};' for field, kind in members.items())} }};"


class GradientJob(ctypes.Structure):
    """Each client's gradient of its batch, at parameters of its own.

    Rows number samples of `inputs` and `targets`; without `input_rows` the inputs are [clients][batch] too. The last
    four are of a library that clips single samples' gradients.
    """

    members: ClassVar[dict[str, str]] = {
        "params": "const float*",  # [clients][parameters]
        "constants": "const float*",
        "dropout_keys": "const uint64_t*",  # [clients], or none
        "grads": "float*",  # [clients][parameters]
        "losses": "float*",  # [clients]
        "clients": "int64_t",
        "batch": "int64_t",
        "input_rows": "const int64_t*",  # [clients][batch], or none
        "target_rows": "const int64_t*",  # [clients][batch]
        "weight": "const float*",  # [clients][batch], or none
        "inputs": "const float*",
        "input_count": "int64_t",
        "targets": "const void*",
        "target_count": "int64_t",
        "threads": "int",
        "clip": "float",  # the largest norm of a sample's gradient
        "deviation": "float",  # of the noise
        "planned": "const float*",  # [clients]: samples that the sum is divided by
        "noise_keys": "const uint64_t*",  # [clients], or none
    }
    _fields_ = _fields(members)


class EvaluateJob(ctypes.Structure):
    """Every sample's loss, and the class with the largest output."""

    members: ClassVar[dict[str, str]] = {
        "params": "const float*",
        "constants": "const float*",
        "inputs": "const float*",
        "count": "int64_t",
        "targets": "const void*",
        "losses": "float*",  # [count]
        "classes": "int64_t*",  # [count], or none
        "threads": "int",
    }
    _fields_ = _fields(members)


STRUCTS = "\n".join(_cpp(job.__name__, job.members) for job in (GradientJob, EvaluateJob))  # the same in C++


class Library:
    """A source compiled and loaded. Each call returns a status, 0 where all went well."""

    def __init__(self, source: str, flags: tuple[str, ...] = FLAGS) -> None:
        loaded = library(source, flags)
        self._gradient, self._evaluate = loaded.fedbraid_gradient, loaded.fedbraid_evaluate
        self._clipped = getattr(loaded, "fedbraid_examples", None)

    def gradient(self, job: GradientJob) -> int:
        return int(self._gradient(ctypes.byref(job)))

    def clipped_gradient(self, job: GradientJob) -> int:
        """The same of single samples' gradients, clipped, and noised with keys."""
        assert self._clipped is not None
        return int(self._clipped(ctypes.byref(job)))

    def evaluate(self, job: EvaluateJob) -> int:
        return int(self._evaluate(ctypes.byref(job)))
