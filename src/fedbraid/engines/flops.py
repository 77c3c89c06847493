"""The arithmetic of a model's forward pass, counted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedbraid.data import tree
from fedbraid.data.call import Forward, call
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree
from fedbraid.models.linear import BagOfWords

_FORWARD: weakref.WeakKeyDictionary[Task, float] = weakref.WeakKeyDictionary()


def of_task(task: Task) -> float:
    """FLOPs of a forward pass of the task's model, per sample."""
    if task not in _FORWARD:
        _FORWARD[task] = forward_flops(task.module(), tree.take(task.sample, slice(1)), task.run)
    return _FORWARD[task]


def forward_flops(module: nn.Module, sample: Tree, run: Forward = call) -> float:
    """Operations of a forward pass, per sample: torch's count of multiply-adds, added biases, and RNN gates."""
    extra: list[float] = []
    hooks = [m.register_forward_hook(lambda m, i, o: extra.append(_extra(m, i, o))) for m in module.modules()]
    was, counter = module.training, FlopCounterMode(display=False)
    module.eval()
    try:
        with torch.no_grad(), _plain_kernels(), counter:
            run(module, tree.numbers(sample))
    finally:
        module.train(was)
        for hook in hooks:
            hook.remove()
    return (counter.get_total_flops() / 2 + sum(extra)) / tree.length(sample)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without oneDNN, whose fused LSTM hides its products from the counter; its flags warn about GPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _extra(m: nn.Module, inputs: tuple[Any, ...], out: Any) -> float:
    """What torch's counter leaves out."""
    match m:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if m.bias is not None:
            return float(out.numel())
        case nn.GRU() | nn.LSTM():  # gate sums and biases, the reset product, the mix of old and new
            gates, rest = (3, 4) if isinstance(m, nn.GRU) else (4, 4)
            per_gate = 3 if m.bias else 1
            return float((gates * per_gate + rest) * out[0].numel() * m.num_layers)
        case BagOfWords():  # counted as the dense layer on a bag of words that it stands for
            vocab, classes = m.words.num_embeddings - 1, m.words.embedding_dim
            return float(len(out) * (vocab + 1) * classes)
    return 0.0
