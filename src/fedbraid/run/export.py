"""The final model for other programs: safetensors, TorchScript or ONNX."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbraid.data import tree
from fedbraid.data.call import call
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree
from fedbraid.errors import ConfigError, DataError, MissingExtra, RunError, unknown
from fedbraid.run.checkpoint import Folder, load_model, save_model
from fedbraid.run.config import task_of
from fedbraid.run.result import Result

SUFFIXES = {".safetensors": "safetensors", ".pt": "torchscript", ".pts": "torchscript", ".onnx": "onnx"}
FORMATS = ("safetensors", "torchscript", "onnx")


def export(
    source: Result | str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: str | None = None,
    task: Task | None = None,
) -> Path:
    """Write the final model of a result or of a run folder; the format follows by default from the name.

    TorchScript and ONNX take inputs of any batch size. A folder whose task was made in Python needs `task` for them.
    """
    path = Path(path)
    kind = format or SUFFIXES.get(path.suffix)
    if kind is None:
        raise ConfigError(f"{path.name!r} names no format; end it in {', '.join(SUFFIXES)}, or give one")
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.touch()
        if kind == "safetensors":
            _safetensors(source, temporary)
        else:
            module, sample = _model(source, task)
            (_torchscript if kind == "torchscript" else _onnx)(module, sample, temporary)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _safetensors(source: Result | str | os.PathLike[str], target: Path) -> None:
    if isinstance(source, Result):
        save_model(target, source.task.layout.views(source.x))
    else:
        path = _file(Folder(source))
        load_model(path)
        shutil.copyfile(path, target)


def _file(folder: Folder) -> Path:
    folder.config()
    path = folder.path / "model.safetensors"
    if not path.exists():
        raise RunError(f"{folder.path} has no final model yet; end it with `fedbraid resume {folder.path}`")
    return path


def _model(source: Result | str | os.PathLike[str], task: Task | None) -> tuple[nn.Module, Tree]:
    """The module with its final weights, in evaluation mode, and three samples for it."""
    if isinstance(source, Result):
        module, task = source.model(), source.task
    else:
        folder = Folder(source)
        path = _file(folder)
        task = task or task_of(folder, folder.config())
        tensors = load_model(path)
        if set(tensors) != {s.name for s in task.layout}:
            raise DataError(f"{path} holds another model than the task's; pass the task it was trained on")
        x = torch.cat([tensors[s.name].flatten() for s in task.layout])
        module = task.layout.load(task.module(), x)
    module, sample = module.cpu().eval(), tree.numbers(tree.to(tree.take(task.inputs, task.rows[:3]), "cpu"))
    with torch.no_grad():
        out = call(module, sample)
    if task.forward is not None or not isinstance(out, Tensor):
        raise DataError(
            f"the model returns a {type(out).__name__} by a custom call; TorchScript and ONNX hold models"
            " that give a tensor: export safetensors"
        )
    return module, sample


def _torchscript(module: nn.Module, sample: Tree, target: Path) -> None:
    two = tree.take(sample, slice(2))
    given = {"example_kwarg_inputs": two} if isinstance(two, dict) else {"example_inputs": two}
    with _quiet(), torch.no_grad():
        traced = torch.jit.trace(module, **given, check_trace=False)  # type: ignore[no-untyped-call]
        if not torch.allclose(call(traced, sample), call(module, sample), atol=1e-5):
            raise DataError(
                "the model computes differently for other inputs, which a trace cannot hold; export safetensors"
            )
        traced.save(str(target))


def _onnx(module: nn.Module, sample: Tree, target: Path) -> None:
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra("writing ONNX", "onnx") from error
    two = tree.take(sample, slice(2))
    names = ["input" if key is None else str(key) for key, _ in tree.named(two)]
    axes = {name: {0: "batch"} for name in (*names, "output")}
    args, kwargs = ((), two) if isinstance(two, dict) else (two if isinstance(two, tuple) else (two,), None)
    with _quiet():
        torch.onnx.export(
            module, args, str(target), kwargs=kwargs, dynamo=False, input_names=names, output_names=["output"],
            dynamic_axes=axes,
        )  # fmt: skip
        onnx.checker.check_model(str(target))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's deprecation warnings of both formats, which programs still read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
