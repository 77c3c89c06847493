"""What a run costs, estimated from facts: the constants of engine selection, each with its unit.

`python benchmarks/cost_model.py` prints, for 35 networks, what these formulas say beside what was measured; the constants were
set by it on a core with AVX-512. They need only be right to a factor of two: ratios decide, and each formula errs on the side
that costs a run little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A network, as counted in one forward pass: numbers are of one sample."""

    layers: int
    multiply_adds: float
    activations: float  # numbers that its layers put out
    cells: int  # time steps of GRUs and plain RNNs, which PyTorch trains one by one
    parameters: int


@dataclass(frozen=True)
class CostModel:
    """Constants, in seconds of one core unless they name another unit."""

    # Plain autograd, for one local step of one client.
    layer: float = 5e-5  # of each layer, forward and backward, however small
    cell: float = 5e-5  # of each time step of a GRU's or RNN's layer
    activation: float = 8e-10  # of each number that a layer puts out
    parameter: float = 8e-10  # of each weight: read, its gradient written, updated
    flops: float = 200e9  # floating-point operations a second, with AVX-512
    avx2: float = 0.6  # of that rate, with AVX2
    default: float = 0.2  # of that rate, on other processors

    # Processes and threads.
    thread: float = 0.8  # cores' worth of arithmetic that each core adds to one process
    threads: int = 4  # threads, beyond which one process gains nothing
    message: float = 4e-4  # of a client update in another process
    number: float = 1.5e-9  # of each number that it sends
    processes: float = 0.4  # of a run, from which worker processes pay
    long_step: float = 0.3  # of a local step, from which processes take each other's caches
    thread_gain: float = 1.25  # times as fast, at least, that threads must make a step to be preferred

    # Compiled gradients.
    compile_base: float = 1.4  # of a compiler, whatever the model
    compile_layer: float = 0.1  # of a compiler, for each layer
    compile_wall: float = 0.6  # of a compiler's processor seconds, by the clock on two cores or more
    load_base: float = 0.05  # of tracing the model, loading the library and comparing it with autograd
    load_layer: float = 0.003  # of the same, for each layer
    saves_calls: float = 0.8  # of what PyTorch spends on layers and cells, at least
    saves_arithmetic: float = 0.4  # of its arithmetic, at least, where a batch fills its vectors
    margin: float = 1.25  # times its costs that compiled code must save
    filled: float = 0.3  # of a vector's lanes, below which heavy steps are as fast in PyTorch
    heavy: float = 5e8  # floating-point operations of a heavy step
    cut: float = 0.4  # of the longest sample that cut batches must keep for code of one length to pay

    # vmap.
    vmap: float = 4.0  # of a run by the clock, from which it pays: its first call loads torch._dynamo
    per_example: float = 3.0  # times as long a step takes with per-example gradients

    def arithmetic(self, model: Model, batch: int, capability: str) -> float:
        """Seconds of a local step's arithmetic by plain autograd."""
        rate = self.flops * (
            1.0 if "AVX512" in capability else self.avx2 if "AVX2" in capability else self.default
        )
        moved = self.activation * model.activations * batch + self.parameter * model.parameters
        return 6 * model.multiply_adds * batch / rate + moved

    def calls(self, model: Model) -> float:
        """Seconds that a local step takes whatever the sizes."""
        return self.layer * (1 + model.layers) + self.cell * model.cells

    def compiling(self, model: Model, cores: int) -> float:
        """Seconds by the clock until compiled code is there."""
        return (self.compile_base + self.compile_layer * model.layers) * (
            self.compile_wall if cores > 1 else 1.0
        )

    def loading(self, model: Model) -> float:
        """Seconds until compiled code that is there has been loaded and compared with autograd."""
        return self.load_base + self.load_layer * model.layers
