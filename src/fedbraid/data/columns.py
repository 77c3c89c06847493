"""Tables with named columns: pandas and polars frames, Hugging Face datasets, dicts of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.data.arrays import LABELS
from fedbraid.data.partition import Partition, Table, natural, parse
from fedbraid.errors import ConfigError, DataError

Ints = NDArray[np.int64]


def names(table: Any) -> list[str] | None:
    """The columns that a table names, None where it is something else."""
    if isinstance(table, Mapping):
        return [str(k) for k in table]
    found = getattr(table, "column_names", None)  # Hugging Face
    found = getattr(table, "columns", None) if found is None else found
    return None if found is None or callable(found) else [str(c) for c in found]


def split(
    table: Any, targets: Any, by: Any, what: str, inputs: Sequence[str] | None = None
) -> tuple[Any, Any, Any]:
    """(inputs, targets, ids) of a table whose columns are called by name; frames give their numbers as one matrix."""
    known = names(table)
    if known is None or not (isinstance(targets, str) or isinstance(by, str) or inputs):
        return table, targets, by
    held = _columns(table)
    taken = {name: _column(held, name, what) for name in (targets, by) if isinstance(name, str)}
    if isinstance(targets, str):
        _complete(taken[targets], targets, what)
    rest = [c for c in known if c not in taken] if inputs is None else list(inputs)
    columns = {c: _column(held, c, what) for c in rest}
    frame = not isinstance(table, Mapping) and not hasattr(table, "column_names")
    return (
        _matrix(columns, what) if frame else columns,
        taken[targets] if isinstance(targets, str) else targets,
        taken[by] if isinstance(by, str) else by,
    )


def _columns(table: Any) -> Any:
    """Something that has columns by name; a Hugging Face dataset as NumPy arrays, unless it transforms its items."""
    if not hasattr(table, "with_format"):
        return table
    if getattr(table, "format", {}).get("type") != "custom":
        found: Any = table.with_format("numpy")[:]
        return found
    items = [table[i] for i in range(len(table))]
    return {key: [item[key] for item in items] for key in items[0]}


def _column(table: Any, name: str, what: str) -> Any:
    if name not in (known := names(table) or []):
        raise DataError(f"{what} has no column {name!r}; it has {', '.join(map(repr, known))}")
    column = table[name]
    return column.to_numpy() if hasattr(column, "to_numpy") else column


def _matrix(columns: Mapping[str, Any], what: str) -> NDArray[np.float32]:
    """Numbers of a frame side by side."""
    for name, column in columns.items():
        _complete(column, name, what)
        if np.asarray(column).dtype.kind not in "biuf":
            raise DataError(
                f"{what}'s column {name!r} holds no numbers ({np.asarray(column).dtype}); encode it, or leave it out"
            )
    return np.stack([np.asarray(c, np.float32) for c in columns.values()], 1)


def _complete(column: Any, name: str, what: str) -> None:
    """Refuse a column with missing values by its name, before a matrix of numbers hides which it was."""
    values = np.asarray(column)
    if values.dtype.kind == "f":
        missing = np.isnan(values)
    elif values.dtype == object:
        missing = np.array([_is_missing(v) for v in values.reshape(-1).tolist()], np.bool_).reshape(
            values.shape
        )
    else:
        return
    gone = np.flatnonzero(missing.reshape(len(values), -1).any(1))
    if len(gone):
        raise DataError(
            f"{what}'s column {name!r} has {len(gone)} missing value{'s' * (len(gone) > 1)} (first in row {gone[0]});"
            " fill them in, or leave those rows or the column out"
        )


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA, which equal nothing."""
    if value is None:
        return True
    try:
        same = value == value
        return np.ndim(same) == 0 and not bool(same)
    except (TypeError, ValueError):
        return True


def named_targets(table: Any, targets: str | None) -> str | None:
    """Where a dataset has its targets: as told, or under a usual name."""
    return targets if targets is not None else next((n for n in LABELS if n in (names(table) or ())), None)


FRAMES = ("arrow", "pandas", "polars")  # formats in which an item is a table of one row


def by_item(dataset: Any) -> Any:
    """A dataset whose items are dicts: a Hugging Face one that is set to give frames gives arrays instead."""
    form = getattr(dataset, "format", None)
    return dataset.with_format("numpy") if isinstance(form, dict) and form.get("type") in FRAMES else dataset


class Share:
    """Rows of a dataset whose items are dicts, read when they are asked for, without one of its columns."""

    def __init__(self, dataset: Any, rows: Ints, without: str, name: str = "") -> None:
        self.dataset, self.rows, self.without, self.name = by_item(dataset), rows, without, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = self.dataset[int(self.rows[i])]
        return {key: value for key, value in item.items() if key != self.without}


def shares(dataset: Any, by: str) -> list[Share]:
    """A Hugging Face dataset as one dataset per client; of all its columns, the one of client ids alone is read."""
    if not hasattr(dataset, "select_columns"):
        raise DataError(
            f"lazy=True with by={by!r} takes a Hugging Face dataset, not a {type(dataset).__name__}; give one dataset"
            " per client instead, or leave lazy out"
        )
    if by not in (known := names(dataset) or []):
        raise DataError(f"the dataset has no column {by!r}; it has {', '.join(map(repr, known))}")
    ids = dataset.select_columns([by]).with_format("numpy")[:][by]
    parts, names_ = deal(None, ids, len(dataset), None, None, 0)
    return [Share(dataset, rows, by, name) for rows, name in zip(parts, names_ or ())]


def without(dataset: Any, column: str) -> Any:
    """The same dataset, its items without a column."""
    return Share(dataset, np.arange(len(dataset)), column) if column in (names(dataset) or ()) else dataset


def deal(
    targets: Any, ids: Any, count: int, partition: Partition | str | None, clients: int | None, seed: int
) -> tuple[list[Ints], list[str] | None]:
    """The rows of each client in a table of so many, and the clients' names where they are ids of the data."""
    share = parse(partition) if isinstance(partition, str) else partition
    if share is None and ids is None:
        raise DataError(
            "from_table() needs a partition; give rows=, by= (a column of client ids), or partition= and clients="
        )
    share = natural() if share is None else share
    groups = None if ids is None else _ids(ids, count)
    if clients is None and not (isinstance(share, natural) and groups is not None):
        raise ConfigError(f"{share} among how many? Give clients=, such as clients=20")
    number = len(np.unique(groups)) if clients is None and groups is not None else clients
    labels = np.asarray(targets) if targets is not None and not isinstance(targets, Mapping | tuple) else None
    if labels is None or labels.ndim != 1 or labels.dtype.kind == "f":
        labels = np.zeros(count, np.int64)
        if type(share).__name__ not in ("iid", "natural", "quantity_skew"):
            raise ConfigError(
                f"{share} shares rows out by class, and these targets are none; use iid() or by="
            )
    parts = share(Table(labels, groups), int(number or 0), seed)
    named = isinstance(share, natural) and groups is not None
    return parts, [str(groups[part[0]]) for part in parts] if named and groups is not None else None


def _ids(ids: Any, count: int) -> NDArray[Any]:
    found = np.asarray(ids)
    if found.ndim != 1 or len(found) != count:
        raise DataError(f"by= has shape {found.shape} for a table of {count} rows; give one id for each")
    missing = [i for i, v in enumerate(found.tolist()) if v is None or v != v]
    if missing:
        raise DataError(f"row {missing[0]} has no client id; fill it in or leave the row out")
    return found.astype(str) if found.dtype == object else found
