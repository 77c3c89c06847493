"""From a graph to C++: one call per operation and direction, every shape and offset a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedbraid_native.errors import Unsupported
from fedbraid_native.ir import Graph
from fedbraid_native.memory_plan import Buffer, plan_memory
from fedbraid_native.ops import SEQ_TILE, Linear, Op
from fedbraid_native.runtime import STRUCTS

_CHUNK = 64  # samples that go through the layers together,
_ROOM = 3 * 2**20  # or fewer, where the workspace of a thread would take more bytes than this,
_MODELS = 2  # or than so many models

_LOSSES = {"cross_entropy": "CrossEntropy", "logistic": "Logistic", "mse": "SquaredError", "own": "Own"}
_KERNELS = (
    "kernels.hpp",
    "images.hpp",
    "curves.hpp",
    "rows.hpp",
    "recurrent.hpp",
    "sequence.hpp",
    "computed.hpp",
)


def generate(graph: Graph, loss: str, lanes: int, batch: int, examples: bool = False) -> str:
    """The whole source of a library for this graph and loss, `lanes` samples to a vector.

    Where an operation mixes the samples of a batch, `batch` of them must fit into a chunk. With `examples` it also
    clips single samples' gradients.
    """
    here = Path(__file__).parent / "kernels"
    first, last = (*_KERNELS, *["squares.hpp"] * examples), ("runtime.hpp", *["examples.hpp"] * examples)
    kernels, runtime = ([(here / f).read_text(encoding="utf-8") for f in some] for some in (first, last))
    room = max(_ROOM, 4 * _MODELS * graph.layout.size)
    blocks = -(-batch // lanes) if graph.is_batch_dependent else _CHUNK // lanes
    writer = CppEmitter(graph, loss, lanes, blocks, examples)
    while blocks > 1 and not graph.is_batch_dependent and writer.workspace * lanes * 4 > room:
        writer = CppEmitter(graph, loss, lanes, blocks := blocks // 2, examples)
    model, parts = writer.model()
    head = f"#define LANES {lanes}\n#define PARTS {parts}\n#define SEQ_TILE {SEQ_TILE}"
    return "\n".join([head, _ONE_PIECE, *kernels, model, STRUCTS, *runtime, "#endif"])


# Pieces are compiled at the same time: -DPART=k is the k-th of them, and the first has what the library exports.
_ONE_PIECE = """#ifndef PART
#define PART -1
#endif
#define HIDDEN __attribute__((visibility("hidden")))"""
_WORTH_A_PIECE, _PIECES = 10, 4  # work that makes a compiler worth starting once more, and at most so often
_RUNTIME = 8  # the work that the exports are


class CppEmitter:
    """Time runs from 0 to n over the forward operations, n is the loss, 2n - t takes operation t back.

    Where single `examples` are clipped, everything stays: gradients of weights come once all samples' norms are known.
    """

    def __init__(self, graph: Graph, loss: str, lanes: int, blocks: int, examples: bool) -> None:
        self.graph, self.loss, self.lanes, self.blocks, self.examples = graph, loss, lanes, blocks, examples
        self.sizes = [math.prod(s) for s in graph.shapes]
        self.moving = graph.needs_grad
        self.by_rows = self._reads_rows_directly()
        self.written: set[int] = set()  # values whose gradient has been written so far
        n = len(graph.ops)
        made = dict.fromkeys(range(graph.num_sample_inputs), 0) | {
            op.output: t for t, op in enumerate(graph.ops)
        }
        uses = {v: [t for t, op in enumerate(graph.ops) if v in op.operands] or [n] for v in made}
        needed = {v: max([uses[v][-1], *self._read_in_backward(v)]) for v in made}
        needed |= {op.output: 2 * n - t for t, op in enumerate(graph.ops) if op.backward_needs_output}
        self.values = {v: self._room(v, made[v], needed[v]) for v in made}
        self.gradients = {
            v: self._room(v, 2 * n - uses[v][-1], 2 * n - made[v])
            for v in made
            if v in self.moving or v == graph.output
        }
        self.kept = {t: self._per_block(sum(op.saved), t, 2 * n - t) for t, op in enumerate(graph.ops)}
        self.scratch = {t: Buffer(sum(op.workspace(lanes, blocks)), t, t) for t, op in enumerate(graph.ops)}
        self.scratch_back = {t: Buffer(b.size, 2 * n - t, 2 * n - t) for t, b in self.scratch.items()}
        if examples:  # one room, beside all gradients
            shared = Buffer(max((b.size for b in self.scratch.values()), default=0), n, 2 * n)
            self.scratch_back = dict.fromkeys(self.scratch, shared)
        groups = (self.values, self.gradients, self.kept, self.scratch, self.scratch_back)
        self.workspace = plan_memory(list({id(b): b for group in groups for b in group.values()}.values()))

    def _per_block(self, size: int, first: int, last: int) -> Buffer:
        return Buffer(size * self.blocks, first, 2 * len(self.graph.ops) if self.examples else last)

    def _room(self, v: int, first: int, last: int) -> Buffer:
        """A value's, or its gradient's: of all blocks, or of what they share."""
        if v in self.graph.unbatched:
            return Buffer(-(-self.sizes[v] // self.lanes), first, last)
        return self._per_block(self.sizes[v], first, last)

    def _read_in_backward(self, v: int) -> list[int]:
        """When the operations that read a value take it back, those that then read it again."""
        ops = enumerate(self.graph.ops)
        return [
            2 * len(self.graph.ops) - t
            for t, op in ops
            if ((v in op.inputs and op.backward_needs_input) or v in op.weight_values)
            and op.output in self.moving
        ]

    def _reads_rows_directly(self) -> bool:
        """Whether the input goes to one linear layer, too narrow for turning the samples to pay."""
        if self.graph.num_inputs > 1:
            return False
        users = [op for op in self.graph.ops if 0 in op.inputs]
        if len(users) != 1 or not isinstance(op := users[0], Linear) or op.rows > 1:
            return False
        return op.i % self.lanes == 0 and 9 * op.o <= op.i

    def _constants(self) -> dict[str, int]:
        out, tail = self.graph.output, self.graph.layout.buffers
        return {
            "parameters": self.graph.layout.size,
            "statistics": self.graph.layout.size if tail is None else tail.start,
            "once": int(self.graph.writes_every_grad_once),
            "inputs": sum(self.sizes[: self.graph.num_inputs]),
            "tokens": min((count for count in self.graph.vocab_sizes if count), default=1),
            "outputs": self.sizes[out],
            "blocks": self.blocks,
            "workspace": self.workspace,
            "output": self.values[out].offset,
            "output_gradient": self.gradients[out].offset,
        }

    def _loss(self) -> str:
        classes, places = (
            self.graph.output_shape[0] if self.graph.output_shape else 1,
            math.prod(self.graph.output_shape[1:]),
        )
        sizes = f"{classes}, {places}" if self.loss == "cross_entropy" else f"{classes * places}"
        if self.loss == "own":
            sizes = str(self.sizes[self.graph.num_inputs])
        return f"{_LOSSES[self.loss]}<{sizes}>"

    def model(self) -> tuple[str, int]:
        """The model's source, and in how many pieces it is."""
        ops = self.graph.ops
        types = [f"typedef {op.cpp_type(self.lanes)} L{t};" for t, op in enumerate(ops)]
        there = {
            t: self._shared(op, [op.forward(f"L{t}", _CallContext(self, t))]) for t, op in enumerate(ops)
        }
        back = {t: list(self._backward(t, ops[t])) for t in reversed(range(len(ops)))}
        part, parts = self.partition_units(there, back)
        zero = "if (!add) std::memset(g, 0, sizeof(float) * parameters), add = true;"
        zeros = [] if self.graph.writes_every_grad_once else [zero]
        return "\n".join([
            *types,
            *(_function("forward", _FORWARD_ARGS, t, there[t], part["forward", t]) for t in there),
            *(_function("backward", _BACKWARD_ARGS, t, back[t], part["backward", t]) for t in back if back[t]),
            "#if PART <= 0",
            "struct Model {",
            f"    typedef {self._loss()} Loss;",
            *(f"    static constexpr int64_t {name} = {value};" for name, value in self._constants().items()),
            "",
            "    // p: what is trained, q: what is not; key: of each sample's random numbers, none to evaluate.",
            f"    static void forward({_FORWARD_ARGS}) {{",
            *([] if self.by_rows else map(self._gather, range(self.graph.num_inputs))),
            *(f"        forward_{t}({_names(_FORWARD_ARGS)});" for t in there),
            "    }",
            "",
            "    static void targets(const Loss::Target* const* t, V* v, int nb) {",
            self._targets() if self.loss == "own" else "        (void)t, (void)v, (void)nb;",
            "    }",
            "",
            f"    static void backward({_BACKWARD_ARGS}) {{",
            *(f"        {line}" for line in zeros),
            *(f"        backward_{t}({_names(_BACKWARD_ARGS)});" for t in back if back[t]),
            "    }",
            *(self._examples(zeros) if self.examples else []),
            "};",
        ]), parts  # fmt: skip

    def partition_units(
        self, there: dict[int, list[str]], back: dict[int, list[str]]
    ) -> tuple[dict[tuple[str, int], int], int]:
        """Which piece has each function, those of one type together, and how many there are."""
        alike: dict[tuple[str, str], list[int]] = {}
        for way, calls in (("forward", there), ("backward", back)):
            for t in calls:
                alike.setdefault((way, self.graph.ops[t].cpp_type(self.lanes)), []).append(t)
        work = {
            (way, kind): (4 if self.graph.ops[some[0]].weights else 1) * (1 if way == "forward" else 2)
            for (way, kind), some in alike.items()
        }
        load = [0] * max(1, min(_PIECES, sum(work.values()) // _WORTH_A_PIECE))
        load[0] += _RUNTIME
        part = {}
        for key in sorted(work, key=lambda k: -work[k]):
            least = load.index(min(load))
            load[least] += work[key]
            part.update({(key[0], t): least for t in alike[key]})
        return part, len(load)

    def _examples(self, zeros: list[str]) -> Iterator[str]:
        """The backward pass in two: to the inputs, with the norms of all samples' gradients, then to the weights, scaled."""
        ops = [(t, op) for t, op in reversed([*enumerate(self.graph.ops)]) if op.output in self.moving]
        self.written.clear()
        places = [w for _, op in ops for w in op.weights if w is not None and w.trained]
        if self.graph.unbatched:
            raise Unsupported(
                "weights are computed from parameters, so that norms of gradients do not add up"
            )
        if len(places) > len(set(places)) or self.graph.is_batch_dependent:
            raise Unsupported(
                "a layer is used twice, or mixes samples, so that norms of their gradients do not add up"
            )
        yield f"    static void squares(const float* p, const float* q, V* v, {_BATCH_ARGS}, V* squares) {{"
        yield "        float* g = nullptr; bool add = false; (void)g, (void)add;"
        for t, op in ops:
            at = _CallContext(self, t, back=True, only="inputs")
            calls = op.emit_grad_norms(f"L{t}", at)
            if calls is None:
                raise Unsupported(f"single samples' gradients of {op.cpp_type(self.lanes)} are not compiled")
            if any(at.grad_input(i) != "nullptr" for i in range(len(op.inputs))):
                yield from (f"        {line}" for line in op.backward(f"L{t}", at))
                self.written.update(op.inputs)
            yield from (f"        {line}" for line in calls)
        yield "    }"
        yield (
            f"    static void scaled(const float* p, const float* q, float* g, V* v, {_BATCH_ARGS}, const V* by, bool add) {{"
        )
        yield from (f"        {line}" for line in zeros)
        for t, op in ops:
            if any(w is not None and w.trained for w in op.weights):
                at = _CallContext(self, t, back=True, only="weights")
                yield f"        scale_blocks({at.grad_out}, {self.sizes[op.output]}, by, nb);"
                yield from (f"        {line}" for line in op.backward(f"L{t}", at))
        yield "    }"

    def _gather(self, v: int) -> str:
        size, before = self.sizes[v], sum(self.sizes[:v])
        to = f"v + {self.values[v].offset} + n * {size}"
        return f"        for (int n = 0; n < nb; n++) gather<{size}>(rows + n * LANES, {to}, {before});"

    def _targets(self) -> str:
        """Targets have a table of their own, so that inputs are read where they lie."""
        size, at = self.sizes[self.graph.num_inputs], self.values[self.graph.num_inputs].offset
        return f"        for (int n = 0; n < nb; n++) gather<{size}>(t + n * LANES, v + {at} + n * {size});"

    def _backward(self, t: int, op: Op) -> Iterator[str]:
        if op.output not in self.moving:
            return
        for v in dict.fromkeys(op.weight_values):
            if v in self.gradients and v not in self.written:
                room = self.gradients[v]
                yield f"std::memset((void*)(v + {room.offset}), 0, sizeof(V) * {room.size});"
        yield from self._shared(op, list(op.backward(f"L{t}", _CallContext(self, t, back=True))))
        self.written.update(op.operands)

    def _shared(self, op: Op, lines: list[str]) -> list[str]:
        """Calls for what all samples share: its vectors of neighbours are the blocks."""
        if op.output not in self.graph.unbatched:
            return lines
        return [f"{{ const int nb = {self.values[op.output].size}; (void)nb; {line} }}" for line in lines]


_BATCH_ARGS = "const float* const* rows, const uint64_t* key, int nb, int samples"
_FORWARD_ARGS = f"const float* p, const float* q, V* v, {_BATCH_ARGS}"
_BACKWARD_ARGS = f"const float* p, const float* q, float* g, V* v, {_BATCH_ARGS}, bool add"


def _names(parameters: str) -> str:
    return ", ".join(each.split()[-1] for each in parameters.split(","))


def _function(name: str, parameters: str, t: int, lines: list[str], part: int) -> str:
    """One operation's calls, there or back, in one of the pieces."""
    head = f"HIDDEN void {name}_{t}({parameters})"
    body = "\n".join(f"    {line}" for line in lines)
    return f"#if PART < 0 || PART == {part}\n{head} {{\n{body}\n}}\n#else\n{head};\n#endif"


class _CallContext:
    """What operation t's surroundings are called in the source."""

    def __init__(self, writer: CppEmitter, t: int, back: bool = False, only: str | None = None) -> None:
        self.writer, self.t, self.op, self.only = writer, t, writer.graph.ops[t], only
        self.packs, self.simd_width = writer.blocks, writer.lanes
        self.rooms = writer.scratch_back if back else writer.scratch

    @property
    def out(self) -> str:
        return f"v + {self.writer.values[self.op.output].offset}"

    @property
    def grad_out(self) -> str:
        return f"v + {self.writer.gradients[self.op.output].offset}"

    def saved(self, k: int = 0) -> str:
        return f"v + {self.writer.kept[self.t].offset + self.packs * sum(self.op.saved[:k])}"

    def workspace(self, k: int | None = None) -> str:
        sizes = self.op.workspace(self.simd_width, self.packs)
        some = range(len(sizes)) if k is None else (k,)
        return ", ".join(f"v + {self.rooms[self.t].offset + sum(sizes[:j])}" for j in some)

    def input(self, i: int = 0) -> str:
        return f"v + {self.writer.values[self.op.inputs[i]].offset}"

    def grad_input(self, i: int = 0) -> str:
        place = None if self.only == "weights" else self.writer.gradients.get(self.op.inputs[i])
        return "nullptr" if place is None else f"v + {place.offset}"

    def accumulate(self, i: int = 0) -> str:
        """All but the first writer in the backward pass add; an operation that reads a value twice is two writers."""
        v = self.op.inputs[i]
        first = v not in self.writer.written and v not in self.op.inputs[:i]
        return "false" if first else "true"

    def weight(self, i: int) -> str:
        place = self.op.weights[i]
        if place is not None and place.value is not None:
            return f"(float*)(v + {self.writer.values[place.value].offset}) + {place.offset}"
        return "nullptr" if place is None else f"{'p' if place.trained else 'q'} + {place.offset}"

    def grad_weight(self, i: int) -> str:
        place = self.op.weights[i]
        if place is not None and place.value is not None:
            room = self.writer.gradients.get(place.value)
            return "nullptr" if room is None else f"(float*)(v + {room.offset}) + {place.offset}"
        lost = place is None or not place.trained or self.only == "inputs"
        return "nullptr" if lost or place is None else f"g + {place.offset}"

    def reads_model_input(self) -> bool:
        return self.op.inputs[0] == 0 and self.writer.graph.num_inputs == 1

    def reads_input_rows(self) -> bool:
        return self.reads_model_input() and self.writer.by_rows
