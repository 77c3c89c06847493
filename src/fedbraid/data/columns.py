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
    """The names of a table's columns; None if it has none."""
    if isinstance(table, Mapping):
        return [str(k) for k in table]
    columns = getattr(table, "column_names", None)  # Hugging Face
    columns = getattr(table, "columns", None) if columns is None else columns
    return None if columns is None or callable(columns) else [str(c) for c in columns]


def split(
    table: Any, targets: Any, by: Any, what: str, inputs: Sequence[str] | None = None
) -> tuple[Any, Any, Any]:
    """(inputs, targets, ids) of a table whose columns are selected by name; frames give their numbers as one matrix."""
    listed = names(table)
    if listed is None or not (isinstance(targets, str) or isinstance(by, str) or inputs):
        return table, targets, by
    named = _columns(table)
    called = {name: _column(named, name, what) for name in (targets, by) if isinstance(name, str)}
    if isinstance(targets, str):
        _complete(called[targets], targets, what)
    rest = [c for c in listed if c not in called] if inputs is None else list(inputs)
    columns = {c: _column(named, c, what) for c in rest}
    frame = not isinstance(table, Mapping) and not hasattr(table, "column_names")
    return (
        _matrix(columns, what) if frame else columns,
        called[targets] if isinstance(targets, str) else targets,
        called[by] if isinstance(by, str) else by,
    )


def _columns(table: Any) -> Any:
    """A mapping of columns by name; a Hugging Face dataset as NumPy arrays, unless it transforms its items."""
    if not hasattr(table, "with_format"):
        return table
    if getattr(table, "format", {}).get("type") != "custom":
        arrays: Any = table.with_format("numpy")[:]
        return arrays
    items = [table[i] for i in range(len(table))]
    return {key: [item[key] for item in items] for key in items[0]}


def _column(table: Any, name: str, what: str) -> Any:
    if name not in (listed := names(table) or []):
        raise DataError(f"{what} has no column {name!r}; it has {', '.join(map(repr, listed))}")
    column = table[name]
    return column.to_numpy() if hasattr(column, "to_numpy") else column


def _matrix(columns: Mapping[str, Any], what: str) -> NDArray[np.float32]:
    """The columns of a frame as one matrix."""
    for name, column in columns.items():
        _complete(column, name, what)
        if np.asarray(column).dtype.kind not in "biuf":
            raise DataError(
                f"{what}'s column {name!r} does not hold numbers ({np.asarray(column).dtype}); encode it, or leave it out"
            )
    return np.stack([np.asarray(c, np.float32) for c in columns.values()], 1)


def _complete(column: Any, name: str, what: str) -> None:
    """Refuse a column with missing values by its name, before they become one matrix, in which its name is lost."""
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
    """The column of a dataset's targets: the one passed, or one with a usual name."""
    return targets if targets is not None else next((n for n in LABELS if n in (names(table) or ())), None)


FRAMES = ("arrow", "pandas", "polars")  # formats in which an item is a table of one row


def by_item(dataset: Any) -> Any:
    """A dataset whose items are dicts: a Hugging Face dataset in a frame format gives arrays instead."""
    form = getattr(dataset, "format", None)
    return dataset.with_format("numpy") if isinstance(form, dict) and form.get("type") in FRAMES else dataset


class RowSubset:
    """Rows of a dataset whose items are dicts, read on access, without one of its columns."""

    def __init__(self, dataset: Any, rows: Ints, without: str, name: str = "") -> None:
        self.dataset, self.rows, self.without, self.name = by_item(dataset), rows, without, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = self.dataset[int(self.rows[i])]
        return {key: value for key, value in item.items() if key != self.without}


def by_client(dataset: Any, by: str) -> list[RowSubset]:
    """A Hugging Face dataset as one dataset per client; only the column of client ids is read."""
    if not hasattr(dataset, "select_columns"):
        raise DataError(
            f"lazy=True with by={by!r} takes a Hugging Face dataset, not a {type(dataset).__name__}; give one dataset"
            " per client instead, or leave lazy out"
        )
    if by not in (listed := names(dataset) or []):
        raise DataError(f"the dataset has no column {by!r}; it has {', '.join(map(repr, listed))}")
    ids = dataset.select_columns([by]).with_format("numpy")[:][by]
    rows_of, names_ = deal(None, ids, len(dataset), None, None, 0)
    return [RowSubset(dataset, rows, by, name) for rows, name in zip(rows_of, names_ or ())]


def without(dataset: Any, column: str) -> Any:
    """The same dataset, its items without a column."""
    return (
        RowSubset(dataset, np.arange(len(dataset)), column) if column in (names(dataset) or ()) else dataset
    )


def deal(
    targets: Any, ids: Any, count: int, partition: Partition | str | None, clients: int | None, seed: int
) -> tuple[list[Ints], list[str] | None]:
    """The rows of each client in a table of `count` rows, and the clients' names if they are ids of the data."""
    recipe = parse(partition) if isinstance(partition, str) else partition
    if recipe is None and ids is None:
        raise DataError(
            "from_table() needs a partition; give rows=, by= (a column of client ids), or partition= and clients="
        )
    recipe = natural() if recipe is None else recipe
    groups = None if ids is None else _ids(ids, count)
    if clients is None and not (isinstance(recipe, natural) and groups is not None):
        raise ConfigError(f"{recipe} needs the number of clients; give clients=, such as clients=20")
    number = len(np.unique(groups)) if clients is None and groups is not None else clients
    labels = np.asarray(targets) if targets is not None and not isinstance(targets, Mapping | tuple) else None
    if labels is None or labels.ndim != 1 or labels.dtype.kind == "f":
        labels = np.zeros(count, np.int64)
        if type(recipe).__name__ not in ("iid", "natural", "quantity_skew"):
            raise ConfigError(
                f"{recipe} partitions rows by class, and these targets are not classes; use iid() or by="
            )
    rows_of = recipe(Table(labels, groups), int(number or 0), seed)
    named = isinstance(recipe, natural) and groups is not None
    return rows_of, [str(groups[rows[0]]) for rows in rows_of] if named and groups is not None else None


def _ids(ids: Any, count: int) -> NDArray[Any]:
    values = np.asarray(ids)
    if values.ndim != 1 or len(values) != count:
        raise DataError(f"by= has shape {values.shape} for a table of {count} rows; give one id for each")
    missing = [i for i, v in enumerate(values.tolist()) if v is None or v != v]
    if missing:
        raise DataError(f"row {missing[0]} has no client id; fill it in or leave the row out")
    return values.astype(str) if values.dtype == object else values
