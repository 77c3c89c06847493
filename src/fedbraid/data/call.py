"""Calls of a model on a sample, and of a loss for one number per example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedbraid.data.tree import Tree

Forward = Callable[[nn.Module, Tree], Any]  # (module, inputs) -> outputs
Loss = Callable[..., Tensor]  # (outputs, targets[, inputs]) -> one loss per example


def call(module: nn.Module, inputs: Tree) -> Any:
    """A dict calls the model by keywords, a tuple by position."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def logits(out: Any) -> Any:
    """The outputs that losses get: the logits, if the model returns a dict or an object which has them."""
    if isinstance(out, Tensor):
        return out
    scores = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    return out if scores is None else scores


class ForwardModule(nn.Module):
    """A module and its forward function, as one module of one argument: the inputs."""

    def __init__(self, module: nn.Module, run: Forward) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, inputs: Tree) -> Any:
        return self.run(self.module, inputs)


NAMES = ("outputs", "targets", "inputs")
OTHERS = (
    "reference",
    "previous",
)  # outputs of the server's model, and of the client's last one, for the same inputs


@dataclass(frozen=True)
class SignatureCall:
    """A loss, the arguments it takes in this order, and whether it takes other models' outputs."""

    given: Callable[..., Any]
    order: tuple[str, ...] = NAMES[:2]

    @property
    def compares(self) -> bool:
        """Whether it takes other models' outputs."""
        return not set(OTHERS).isdisjoint(self.order)

    def __call__(
        self, outputs: Any, targets: Tree, inputs: Tree = None, reference: Any = None, previous: Any = None
    ) -> Any:
        if self.order == NAMES[:2]:
            return self.given(outputs, targets)
        have = {
            "outputs": outputs,
            "targets": targets,
            "inputs": inputs,
            "reference": reference,
            "previous": previous,
        }
        return self.given(*[have[name] for name in self.order])


def by_signature(given: Callable[..., Any]) -> SignatureCall:
    """`given` as a function of (outputs, targets, inputs), which gets the inputs if it has a parameter of that name.

    >>> by_signature(lambda outputs, inputs: outputs - inputs)(3, None, 1)
    2
    """
    try:
        kinds = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return SignatureCall(given)
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if more := [n for n in names[2:] if n in (*NAMES[2:], *OTHERS)]:
        return SignatureCall(given, (*NAMES[:2], *more))
    if names[:2] in (["outputs"], ["outputs", "inputs"]):
        return SignatureCall(given, tuple(n for n in names[:3] if n in NAMES))
    return SignatureCall(given)
