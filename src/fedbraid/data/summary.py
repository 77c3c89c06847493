"""A task in a few lines for people: sizes, shapes and names, never the data itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedbraid.data import tree

if TYPE_CHECKING:
    from fedbraid.data.task import Task

NAMES = 3  # clients' names that are printed


def facts(task: Task) -> dict[str, str]:
    """The lines of `print(task)`, by name."""
    return {
        "task": f"{task.spec or task.name}, loss {task.loss if isinstance(task.loss, str) else _named(task.loss)}",
        "clients": _clients(task),
        "inputs": _inputs(task),
        "test": _test(task),
        "model": _model(task),
    }


def _named(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _clients(task: Task) -> str:
    sizes = task.sizes
    low, high = int(sizes.min()), int(sizes.max())
    each = f"{low:,} samples each" if low == high else f"{low:,} to {high:,} samples each"
    called = ""
    if task.client_names is not None:
        more = ", …" if task.clients > NAMES else ""
        called = f" ({', '.join(task.client_names[:NAMES])}{more})"
    return f"{task.clients:,}{called} with {each}, {int(sizes.sum()):,} in all"


def _inputs(task: Task) -> str:
    shapes = tree.shapes(tree.first(task.inputs).store.like[0] if task.lazy else task.inputs)
    return shapes + (f", {task.classes} classes" if task.classifies else "")


def _test(task: Task) -> str:
    if task.test is None:
        return "none"
    count = f"{tree.length(task.test[0]):,} samples"
    if task.test_offsets is None:
        return f"{count}, common to all clients"
    return f"{count} in the local test sets of {int((np.diff(task.test_offsets) > 0).sum()):,} clients"


def _model(task: Task) -> str:
    given = getattr(task.build, "given", None)
    kind = type(given if given is not None else task.module()).__name__
    text = f"{kind}, {task.layout.size:,} parameters"
    if (personal := task.full_layout.size - task.layout.size) > 0:
        text += f", {personal:,} more are personal ({', '.join(task.personal) or 'buffers'})"
    return text
