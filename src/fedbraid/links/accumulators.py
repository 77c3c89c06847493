"""What a worker or an edge has folded, as a message: sums by name and level, and their counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.core.exact_sum import ExactSum
from fedbraid.core.gather import Sums
from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, WireError
from fedbraid.links.wire import FRAME_BYTES, finite, frame, open_frame, pack_message, unpack_message

EXACT = 0x21  # the frame kind of one level of an exact sum, and of the counts beside it
_COUNTS = "sums"
_LEVELS = range(-16, 17)  # that products of float32 can reach


def message_of(acc: Sums, layout: Layout) -> bytes:
    """What a worker or an edge folded, as one message that loses nothing.

    A container of frames of float64: `sums` holds Σ p and the number of uploads, `NAME.J` level J of the sum of NAME, whose
    numbers are multiples of 2^(44 J − 26).
    """
    if not all(isinstance(total, ExactSum) for total in acc.vectors.values()):
        raise ConfigError("only sums of vectors travel as a message; secure sums have messages of their own")
    frames = {_COUNTS: _exact_frame(np.array([acc.weight, float(acc.count)]), 0, layout)}
    for name, total in acc.vectors.items():
        if not total.is_finite:
            raise WireError(f"the sum of {name!r} is not finite and is not sent; the model diverged")
        for j, level in sorted(total.settle().levels.items(), reverse=True):
            frames[f"{name}.{j}"] = _exact_frame(level.cpu().numpy(), j, layout)
    return pack_message(frames)


def from_message(message: bytes, declared: Mapping[str, Upload], layout: Layout) -> Sums:
    """The sums in such a message, which may be of these names only; whether the senders may be counted is the caller's affair.

    >>> import fedbraid as fb
    >>> layout, one = fb.Layout.from_shapes([("w", (2,))]), torch.ones(1)
    >>> folded = Sums({"delta": ExactSum(2).add(one, torch.tensor([[0.5, 3.0]]))}, 1.0, 1)
    >>> got = from_message(message_of(folded, layout), fb.fedavg().gathered, layout)
    >>> got.vectors["delta"].value(), got.count
    (tensor([0.5000, 3.0000], dtype=torch.float64), 1)
    """
    limit = (len(declared) * len(_LEVELS) + 1) * (FRAME_BYTES + 8 * max(layout.size, 2) + 128)
    frames = unpack_message(message, limit)
    if _COUNTS not in frames:
        raise WireError(f"message carries {list(frames)} and no counts; it is no accumulator")
    weight, count = _exact_numbers(frames.pop(_COUNTS), 0, 2, layout).tolist()
    if weight < 0 or count < 0 or count != int(count):
        raise WireError(
            f"message counts {count} uploads of weight {weight}; it is corrupt or from a hostile sender"
        )
    vectors: dict[str, ExactSum] = {}
    for key, data in frames.items():
        name, _, level = key.rpartition(".")
        if name not in declared or level not in map(str, _LEVELS):
            raise WireError(
                f"message sums {key!r}, not {list(declared)}; run the same algorithm on both sides"
            )
        width = declared[name].size(layout)
        total = vectors.setdefault(name, ExactSum(width))
        try:
            total.set_level(int(level), torch.from_numpy(_exact_numbers(data, int(level), width, layout)))
        except ValueError as error:
            raise WireError(f"message sums {key!r} in numbers that no sum has: {error}") from error
    uniform = frozenset(name for name in vectors if declared[name].uniform)
    return Sums(vectors, weight, int(count), uniform)


def _exact_frame(numbers: NDArray[np.float64], j: int, layout: Layout) -> bytes:
    fingerprint = layout.fingerprint[:6]
    return frame(EXACT, j - _LEVELS.start, fingerprint, numbers.astype("<f8").tobytes())


def _exact_numbers(data: bytes, j: int, count: int, layout: Layout) -> NDArray[np.float64]:
    fingerprint = layout.fingerprint[:6]
    body = open_frame(data, EXACT, j - _LEVELS.start, fingerprint, 8 * count)
    numbers = np.frombuffer(body, "<f8").astype(np.float64)
    finite(numbers, "sum")
    return numbers
