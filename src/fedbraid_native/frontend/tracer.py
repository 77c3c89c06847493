"""From a module to a traced graph: followed with torch.fx through all layers that do not branch on their inputs, and run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend import (
    lower_attention,
    lower_loss,
    lower_nn,
    lower_products,
    lower_reductions,
    lower_shapes,
    lower_tensor,
)
from fedbraid_native.frontend.builder import BATCHES, Builder
from fedbraid_native.frontend.registry import LOWERINGS
from fedbraid_native.frontend.values import Inputs, map_leaves
from fedbraid_native.ir import Graph, ParamLayout

LOWERED_BY = (
    lower_attention,
    lower_loss,
    lower_nn,
    lower_products,
    lower_reductions,
    lower_shapes,
    lower_tensor,
)  # whose import fills the registry


def trace(make_root: Callable[[], nn.Sequential], layout: ParamLayout, given: tuple[Inputs, ...]) -> Graph:
    """The graph of a model on inputs shaped like the first sample of `given`.

    `make_root()` makes a module that holds the model as its only child and whose forward takes `given`: the inputs, and
    the targets where the model ends in a loss. Raises Unsupported.
    """
    model = make_root()[0]
    model.train()
    try:
        traced = _trace_deterministic(make_root, tuple(take(g, [0]) for g in given))
        traced.graph.eliminate_dead_code()
        runs = [_ShapeProbe(traced).record(*(take(g, [0] * n) for g in given), seed=n) for n in BATCHES]
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"the model cannot be traced ({first_line(error)})") from error
    try:
        return Builder(model, layout, runs).build(traced.graph)
    except Unsupported:
        raise
    except Exception as error:  # a call that no lowering expected
        raise Unsupported(f"the model cannot be translated ({first_line(error)})") from error


def _trace_deterministic(made: Callable[[], nn.Module], given: tuple[Inputs, ...]) -> fx.GraphModule:
    """A module as it was traced twice in a row: the first time may make what later ones find, but no more than that."""
    seen: list[tuple[str, list[Tensor]]] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        before = torch.get_rng_state()
        for _ in range(3):
            root = made()
            graph = _trace_unrolled(root, given)
            kept = [t.detach().clone() for n, t in vars(root).items() if n.startswith("_tensor_constant")]
            seen.append((str(graph), kept))
            if not torch.equal(before, torch.get_rng_state()):
                break
            if len(seen) > 1 and _same(*seen[-2:]):
                return _graph_module(root, graph)
    raise Unsupported("the model or its loss is another each time: it draws numbers, counts or remembers")


def _same(one: tuple[str, list[Tensor]], other: tuple[str, list[Tensor]]) -> bool:
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


_MADE = (
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
)  # of sizes that are followed; random ones are none of ours


def take(inputs: Inputs, rows: list[int]) -> Inputs:
    """These samples of every leaf."""
    return map_leaves(lambda leaf: leaf[rows], inputs)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


# Layers of PyTorch whose forward cannot be traced; lowered as layers, or not supported.
_BRANCHING = (
    nn.RNNBase, nn.RNNCellBase, nn.modules.batchnorm._NormBase, nn.modules.conv._ConvTransposeNd, nn.Softmax2d,
    nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip


class _Tracer(fx.Tracer):
    """Follows loops over the parts that a function gives, where it knows how many they are."""

    proxy_buffer_attributes = True

    def __init__(self, counts: list[int]) -> None:
        super().__init__(autowrap_functions=_MADE)
        self._autowrap_search.append(torch)
        self.counts = iter(counts)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers that branch on what they get, and tools that change what they are part of."""
        if m.__module__.startswith("torch.nn.utils"):
            followed = isinstance(m, (parametrize.ParametrizationList, parametrizations._WeightNorm))
            return not followed and not parametrize.is_parametrized(m)
        return type(m) in LOWERINGS or (m.__module__.startswith("torch.nn") and isinstance(m, _BRANCHING))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError as error:
            count = next(self.counts, None)
            if count is None:
                raise _NeedIterationCount(obj.node) from error
            return iter([operator.getitem(obj, k) for k in range(count)])

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Modules that are no part of the model, such as a loss, are what they do."""
        mine = any(m is each for each in self.root.modules())
        return super().call_module(m, forward, args, kwargs) if mine else forward(*args, **kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        made: fx.Proxy = super().create_proxy(*args, **kwargs)
        if not torch.is_grad_enabled():
            made.node.meta["still"] = True
        return made


class _NeedIterationCount(BaseException):
    """Asked about the parts of what a node gives; nobody on the way may take it for an error."""


def _trace_unrolled(module: nn.Module, given: tuple[Inputs, ...]) -> fx.Graph:
    """A module as a graph; where a loop asks how many parts there are, a sample tells, and it is followed again."""
    counts: list[int] = []
    while True:
        try:
            return _Tracer(counts).trace(module)
        except _NeedIterationCount as asked:
            counts.append(_iteration_count(module, asked.args[0], given))


def _graph_module(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph that can run."""
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # or its code would wrap the function for all who trace later
    return fx.GraphModule(module, graph)


def _iteration_count(module: nn.Module, node: fx.Node, given: tuple[Inputs, ...]) -> int:
    """Of how many parts the tuple is that a node gives for the sample, by the graph as far as it."""
    before, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for other in node.graph.nodes:
        copied[other] = before.node_copy(other, lambda n: copied[n])
        if other is node:
            break
    before.output(copied[node])
    parts = _ShapeProbe(_graph_module(module, before)).record(*given, seed=0)[copied[node]]
    if not isinstance(parts, (tuple, list)):
        raise Unsupported(f"the model goes through {node.name!r} number by number")
    return len(parts)


class _ShapeProbe(fx.Interpreter):
    """Runs the graph once and keeps what every node gave."""

    def record(self, *given: Inputs, seed: int) -> dict[fx.Node, Any]:
        self.results: dict[fx.Node, Any] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # the user's random state stays as it is
            torch.manual_seed(seed)
            self.run(*given)
        return self.results

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = result
        return result
