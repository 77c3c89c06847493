"""From a graph to C++: one call per layer and direction, every shape and offset a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedbraid.engines.native.trace import Graph, Op

_CHUNK = 64  # samples that go through the layers together,
_ROOM = 12 * 2**20  # or fewer, where the workspace of a thread would take more bytes than this

_LOSSES = {"cross_entropy": "CrossEntropy", "logistic": "Logistic", "mse": "SquaredError"}
_READS_OUTPUT = {"relu", "leaky_relu", "tanh", "sigmoid", "max_pool"}  # on the way back
_MAPS = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


def generate(graph: Graph, loss: str, lanes: int) -> str:
    """The whole source of a library for this graph and loss, `lanes` samples to a vector."""
    here = Path(__file__).parent
    kernels, runtime = ((here / f).read_text(encoding="utf-8") for f in ("kernels.hpp", "runtime.hpp"))
    writer = _Writer(graph, loss, lanes, blocks := _CHUNK // lanes)
    while blocks > 1 and writer.workspace * lanes * 4 > _ROOM:
        writer = _Writer(graph, loss, lanes, blocks := blocks // 2)
    return f"#define LANES {lanes}\n{kernels}\n{writer.model()}\n{runtime}"


@dataclass
class _Buffer:
    """Room in the workspace: how many vectors, and from when to when it is in use."""

    size: int
    first: int
    last: int
    offset: int = -1


class _Writer:
    """Time runs from 0 to n over the forward operations, n is the loss, 2n - t takes operation t back."""

    def __init__(self, graph: Graph, loss: str, lanes: int, blocks: int) -> None:
        self.graph, self.loss, self.lanes, self.blocks = graph, loss, lanes, blocks
        self.sizes = [math.prod(s) for s in graph.shapes]
        self.moving = self._moving()
        self.by_rows = self._by_rows()
        self.written: set[int] = set()  # values whose gradient has been written so far
        n = len(graph.ops)
        made = {0: 0} | {op.output: t for t, op in enumerate(graph.ops)}
        uses = {v: [t for t, op in enumerate(graph.ops) if v in op.inputs] or [n] for v in made}
        needed = {v: 2 * n - uses[v][0] for v in made}
        needed |= {op.output: 2 * n - t for t, op in enumerate(graph.ops) if op.kind in _READS_OUTPUT}
        self.values = {v: self._per_block(self.sizes[v], made[v], needed[v]) for v in made}
        self.gradients = {
            v: self._per_block(self.sizes[v], 2 * n - uses[v][-1], 2 * n - made[v]) for v in made if v
        }
        self.kept = {t: self._per_block(_kept(op), t, 2 * n - t) for t, op in enumerate(graph.ops)}
        self.scratch = {t: _Buffer(self._scratch(op), t, t) for t, op in enumerate(graph.ops)}
        self.scratch_back = {t: _Buffer(b.size, 2 * n - t, 2 * n - t) for t, b in self.scratch.items()}
        groups = (self.values, self.gradients, self.kept, self.scratch, self.scratch_back)
        self.workspace = _place([b for group in groups for b in group.values()])

    def _per_block(self, size: int, first: int, last: int) -> _Buffer:
        return _Buffer(size * self.blocks, first, last)

    def _moving(self) -> set[int]:
        """The values that depend on a parameter, and so need a gradient."""
        moving: set[int] = set()
        for op in self.graph.ops:
            if op.weight is not None or op.bias is not None or moving.intersection(op.inputs):
                moving.add(op.output)
        return moving

    def _by_rows(self) -> bool:
        """Whether the input goes to one linear layer, too narrow for turning the samples to pay."""
        users = [op for op in self.graph.ops if 0 in op.inputs]
        if len(users) != 1 or users[0].kind != "linear":
            return False
        i, o = (int(c) for c in users[0].constants)
        return i % self.lanes == 0 and 9 * o <= i

    def _gather(self) -> str:
        size = self.sizes[0]
        return (
            f"for (int n = 0; n < nb; n++) gather<{size}>(rows + n * LANES, {self._value(0)} + n * {size});"
        )

    def _constants(self) -> dict[str, int]:
        out = self.graph.output
        return {
            "parameters": self.graph.layout.size,
            "once": int(self.graph.once),
            "inputs": self.sizes[0],
            "outputs": self.sizes[out],
            "blocks": self.blocks,
            "workspace": self.workspace,
            "output": self.values[out].offset,
            "output_gradient": self.gradients[out].offset,
        }

    def model(self) -> str:
        ops, out = self.graph.ops, self.graph.output
        slopes = [
            f"struct Slope{t} {{ static constexpr float a = {float(op.constants[1])!r}f; }};"
            for t, op in enumerate(ops)
            if op.kind == "leaky_relu"
        ]
        types = [f"typedef {_type(t, op)} L{t};" for t, op in enumerate(ops)]
        back = [line for t in reversed(range(len(ops))) for line in self._backward(t, ops[t])]
        zero = "if (!add) std::memset(g, 0, sizeof(float) * parameters), add = true;"
        zeros = [] if self.graph.once else [zero]
        return "\n".join([
            *slopes,
            *types,
            *(line for t, op in enumerate(ops) for line in self._agreements(t, op)),
            "struct Model {",
            f"    typedef {_LOSSES[self.loss]}<{self.sizes[out]}> Loss;",
            *(f"    static constexpr int64_t {name} = {value};" for name, value in self._constants().items()),
            "",
            "    static void forward(const float* p, V* v, const float* const* rows, int nb) {",
            *([] if self.by_rows else [f"        {self._gather()}"]),
            *(f"        {self._forward(t, op)}" for t, op in enumerate(ops)),
            "    }",
            "",
            "    static void backward(const float* p, float* g, V* v, const float* const* rows, int nb,",
            "                         int samples, bool add) {",
            *(f"        {line}" for line in zeros + back),
            "    }",
            "};",
        ])  # fmt: skip

    # Places ---------------------------------------------------------------------------------------

    def _value(self, v: int) -> str:
        return f"v + {self.values[v].offset}"

    def _gradient(self, v: int) -> str:
        return f"v + {self.gradients[v].offset}"

    def _add(self, v: int) -> str:
        """Whether a gradient is added to what is there: all but the first writer on the way back do."""
        first = v not in self.written
        self.written.add(v)
        return "false" if first else "true"

    def _scratch(self, op: Op) -> int:
        if op.kind == "linear":
            i, o = (-(-int(c) // self.lanes) * self.lanes for c in op.constants)
            return (i + o) * self.blocks
        if op.kind == "conv":
            i, h, w, o, ky, kx = (int(c) for c in op.constants[:6])
            return o * i * ky * kx // self.lanes + 1 + o * (h + ky - 1) * (w + kx - 1)
        return 2 * int(op.constants[0]) if op.kind == "group_norm" else 0

    def _agreements(self, t: int, op: Op) -> Iterator[str]:
        """That the room made here is what the kernels take."""
        scratch = {
            "conv": "packed + L{t}::spread",
            "linear": f"turned * {self.blocks}",
            "group_norm": "sums",
        }
        if op.kind in scratch:
            taken = scratch[op.kind].format(t=t)
            yield f'static_assert(L{t}::{taken} == {self.scratch[t].size}, "scratch of layer {t}");'
        if op.kind in ("conv", "group_norm"):
            yield f'static_assert(L{t}::kept == {_kept(op)}, "what layer {t} keeps");'

    # Calls ----------------------------------------------------------------------------------------

    def _forward(self, t: int, op: Op) -> str:
        x = ", ".join(self._value(v) for v in op.inputs)
        y, w, b = self._value(op.output), _at("p", op.weight), _at("p", op.bias)
        kept, scratch = f"v + {self.kept[t].offset}", f"v + {self.scratch[t].offset}"
        match op.kind:
            case "linear":
                if self.by_rows and op.inputs[0] == 0:
                    return f"L{t}::forward_rows(rows, {w}, {b}, {y}, nb);"
                return f"L{t}::forward({x}, {w}, {b}, {y}, nb);"
            case "conv":
                return f"L{t}::forward({x}, {w}, {b}, {y}, {kept}, {scratch}, nb);"
            case "max_pool":
                return f"L{t}::max_forward<{_bool(op.constants[-1])}>({x}, {y}, nb);"
            case "avg_pool":
                return f"L{t}::mean_forward<{op.constants[-1]}>({x}, {y}, nb);"
            case "group_norm":
                return f"L{t}::forward({x}, {w}, {b}, {y}, {kept}, {float(op.constants[3])!r}f, nb);"
            case _:
                return f"L{t}::forward({x}, {y}, nb);"

    def _backward(self, t: int, op: Op) -> Iterator[str]:
        if op.output not in self.moving:
            return
        x, dy = self._value(op.inputs[0]), self._gradient(op.output)
        w, dw, db = _at("p", op.weight), _at("g", op.weight), _at("g", op.bias)
        kept, scratch = f"v + {self.kept[t].offset}", f"v + {self.scratch_back[t].offset}"
        wanted = op.inputs[0] in self.moving
        dx = self._gradient(op.inputs[0]) if wanted else "nullptr"
        match op.kind:
            case "linear":
                whole = int(op.constants[0]) % self.lanes == 0
                if op.inputs[0] == 0 and whole:  # the table's rows are what the turned inputs would be
                    yield f"L{t}::weight_rows(rows, {dy}, {dw}, {db}, (float*)({scratch}), nb, samples, add);"
                else:
                    yield f"L{t}::backward_weight({x}, {dy}, {dw}, {db}, {scratch}, nb, samples, add);"
                if wanted:
                    yield f"L{t}::backward_input<{self._add(op.inputs[0])}>({dy}, {w}, {dx}, nb);"
            case "conv":
                yield f"L{t}::backward_weight({x}, {dy}, {dw}, {db}, {kept}, nb, add);"
                if wanted:
                    yield f"L{t}::backward_input<{self._add(op.inputs[0])}>({dy}, {w}, {dx}, {scratch}, nb);"
            case "group_norm":
                flags = f"{self._add(op.inputs[0]) if wanted else 'false'}, {_bool(wanted)}"
                rest = f"{dy}, {dx}, {dw}, {db}, {scratch}, nb, add"
                yield f"L{t}::backward<{flags}>({x}, {w}, {kept}, {rest});"
            case "max_pool":
                flags = f"{_bool(op.constants[-1])}, {self._add(op.inputs[0])}"
                yield f"L{t}::max_backward<{flags}>({x}, {self._value(op.output)}, {dy}, {dx}, nb);"
            case "avg_pool":
                yield f"L{t}::mean_backward<{op.constants[-1]}, {self._add(op.inputs[0])}>({dy}, {dx}, nb);"
            case "add":
                for v in op.inputs:
                    if v in self.moving:
                        yield f"L{t}::backward<{self._add(v)}>({dy}, {self._gradient(v)}, nb);"
            case _:
                yield f"L{t}::backward<{self._add(op.inputs[0])}>({self._value(op.output)}, {dy}, {dx}, nb);"


def _at(base: str, offset: int | None) -> str:
    return "nullptr" if offset is None else f"{base} + {offset}"


def _bool(flag: object) -> str:
    return "true" if flag else "false"


def _kept(op: Op) -> int:
    """What a layer's forward pass leaves for its backward pass, in vectors per block."""
    if op.kind == "conv":
        i, h, w, *_, py, px = (int(c) for c in op.constants)
        return i * (h + 2 * py) * (w + 2 * px) if py or px else 0
    return 2 * int(op.constants[2]) if op.kind == "group_norm" else 0


def _type(t: int, op: Op) -> str:
    c = op.constants
    match op.kind:
        case "linear":
            return f"Linear<{c[0]}, {c[1]}>"
        case "conv":
            return f"Conv<{', '.join(map(str, c))}>"
        case "max_pool" | "avg_pool":
            return f"Pool<{', '.join(map(str, c[:-1]))}>"
        case "group_norm":
            return f"GroupNorm<{c[0]}, {c[1]}, {c[2]}>"
        case "leaky_relu":
            return f"Map<LeakyRelu<Slope{t}>, {c[0]}>"
        case "add":
            return f"Add<{c[0]}>"
        case _:
            return f"Map<{_MAPS[op.kind]}, {c[0]}>"


def _place(buffers: list[_Buffer]) -> int:
    """Give each buffer the first place that nothing alive at the same time overlaps; the total."""
    placed: list[_Buffer] = []
    for b in sorted(buffers, key=lambda b: -b.size):
        at = 0
        for other in sorted(placed, key=lambda o: o.offset):
            apart = other.last < b.first or b.last < other.first or other.offset + other.size <= at
            if not apart and at + b.size > other.offset:
                at = other.offset + other.size
        b.offset = at
        placed.append(b)
    return max((b.offset + b.size for b in buffers), default=0)
