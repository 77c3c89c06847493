"""A gradient compiler for small PyTorch models: C++ with every shape a constant, compiled once and cached.

It knows nothing of federated learning and imports nothing of fedbraid. The pipeline:

`frontend.tracer.trace` follows a model into a graph of operations, or raises `Unsupported` with one sentence; `emit.generate` writes the
source of a library for the graph and a loss; `runtime.Library` compiles and loads it, or raises `CompileError`. `kernels/`
holds the C++ that generated code calls. docs/native.md tells how to add an operation.
"""

from fedbraid_native.build import library
from fedbraid_native.emit import generate
from fedbraid_native.errors import CompileError, Unsupported
from fedbraid_native.frontend.tracer import trace
from fedbraid_native.ir import Graph

__all__ = ["CompileError", "Graph", "Unsupported", "generate", "library", "trace"]
