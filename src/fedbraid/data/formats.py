"""Readers of the public formats that data sets come in; whatever is wrong with a file is a DataError."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import DataError, MissingExtra

Bytes = NDArray[np.uint8]


def broken(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read: {why}; get the file again")


def content(path: Path) -> bytes:
    """A file's bytes, unpacked if it is gzip."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise broken(path, error) from error


def idx(path: Path) -> Bytes:
    """An array of bytes in the idx format of MNIST."""
    raw = content(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise broken(path, f"it does not begin as an idx file of bytes but with {raw[:4]!r}")
    head = 4 + 4 * raw[3]
    if len(raw) < head:
        raise broken(path, "its header is cut off")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", raw[3], 4))
    expected = head + int(np.prod(shape, dtype=object))
    if len(raw) != expected:
        raise broken(path, f"it has {len(raw)} bytes where its header announces {expected}")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def cifar_binary(paths: Sequence[Path], labels: int) -> tuple[Bytes, Bytes]:
    """Images `[n, 32, 32, 3]` and labels `[n, labels]` of the binary version of CIFAR."""
    records = []
    for path in paths:
        raw = content(path)
        if not raw or len(raw) % (labels + 3072):
            raise broken(path, f"its {len(raw)} bytes are not a multiple of {labels + 3072}-byte records")
        records.append(np.frombuffer(raw, np.uint8).reshape(-1, labels + 3072))
    rows = np.concatenate(records)
    return rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, :labels]


def libsvm(path: Path, features: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Dense features and integer labels of a LIBSVM file."""
    lines = content(path).decode("ascii", "replace").splitlines()
    x, y = np.zeros((len(lines), features), np.float32), np.zeros(len(lines), np.int64)
    for i, line in enumerate(lines):
        try:
            label, *pairs = line.split()
            y[i] = int(float(label))
            for pair in pairs:
                at, value = pair.split(":")
                if not 1 <= int(at) <= features:
                    raise ValueError(f"feature {at} is not one of 1 to {features}")
                x[i, int(at) - 1] = float(value)
        except ValueError as error:
            raise broken(path, f"line {i + 1}: {error}") from error
    return x, y


def leaf(paths: Sequence[Path]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Each user's samples and targets, from the json files that LEAF writes."""
    users: dict[str, tuple[list[Any], list[Any]]] = {}
    for path in paths:
        try:
            for user, data in json.loads(content(path))["user_data"].items():
                x, y = list(data["x"]), list(data["y"])
                if len(x) != len(y):
                    raise ValueError(f"user {user!r} has {len(x)} samples but {len(y)} targets")
                had = users.setdefault(user, ([], []))
                had[0].extend(x)
                had[1].extend(y)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise broken(path, f"it is not LEAF's json ({type(error).__name__}: {error})") from error
    if not any(y for _, y in users.values()):
        raise broken(paths[0], "it has no samples")
    return users


def parquet(paths: Sequence[Path], columns: Sequence[str]) -> list[list[Any]]:
    """Columns of parquet files, one after the other, as lists."""
    pq = _extra("pyarrow.parquet", "reading parquet files")
    out: list[list[Any]] = [[] for _ in columns]
    for path in paths:
        try:
            table = pq.read_table(path, columns=list(columns))
            for values, column in zip(out, columns):
                if table[column].null_count:
                    raise ValueError(f"column {column!r} has empty cells")
                values += table[column].to_pylist()
        except (OSError, ValueError, KeyError) as error:  # ArrowInvalid is a ValueError
            raise broken(path, error) from error
    return out


def images(blobs: Sequence[Any], path: Path) -> Bytes:
    """Encoded images of one size (bytes, or Hugging Face's {"bytes": ...}) as one array."""
    opened = _opener("decoding images")
    try:
        return np.stack(
            [np.asarray(opened(io.BytesIO(b["bytes"] if isinstance(b, dict) else b))) for b in blobs]
        )
    except Exception as error:  # whatever a decoder may raise
        raise broken(path, f"it holds an image that cannot be decoded ({error})") from error


def thumbnail(path: Path, size: int) -> Bytes:
    """An image file as RGB, its shorter side brought to `size` and the middle cut out."""
    opened = _opener("decoding images")
    try:
        image = opened(path).convert("RGB")
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        return np.asarray(image.resize((width, height), 2).crop((left, top, left + size, top + size)))
    except Exception as error:  # whatever a decoder may raise
        raise broken(path, error) from error


def _opener(what: str) -> Callable[[Any], Any]:
    opener: Callable[[Any], Any] = _extra("PIL.Image", what).open
    return opener


def _extra(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, "data") from error
