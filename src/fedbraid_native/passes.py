"""Passes over a graph's operations: those that nothing needs go, those that are cheaper as one are fused."""

from __future__ import annotations

from dataclasses import replace

from fedbraid_native.ops import Conv2d, ConvMaxPool2d, MaxPool2d, Op, Unary


def eliminate_dead_ops(ops: list[Op], output: int) -> list[Op]:
    """The operations that the output depends on."""
    needed, kept = {output}, []
    for op in reversed(ops):
        if op.output in needed:
            needed.update(op.operands)
            kept.append(op)
    return kept[::-1]


def fuse_ops(ops: list[Op], output: int, inputs: int) -> list[Op]:
    """Operations that are cheaper as one.

    ReLU before or after a max-pooling is part of it, the larger of the window and 0; a convolution of an input and the
    pooling of it are one.
    """
    users = [sum(v in op.inputs for op in ops) for v in range(1 + max(op.output for op in ops))]
    users[output] += 1
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        if last is not None and last.output in op.inputs and users[last.output] == 1:
            if _is_relu(last) and isinstance(op, MaxPool2d):
                fused[-1] = replace(op, inputs=last.inputs, rectify=True)
                continue
            if isinstance(last, MaxPool2d) and _is_relu(op):
                fused[-1] = replace(last, output=op.output, rectify=True)
                continue
        fused.append(op)
    return _fuse_conv_pool(fused, users, inputs)


def _fuse_conv_pool(ops: list[Op], users: list[int], inputs: int) -> list[Op]:
    joined: list[Op] = []
    for op in ops:
        match (joined[-1] if joined else None), op:
            case Conv2d() as conv, MaxPool2d() as pool if (
                pool.inputs == (conv.output,)
                and users[conv.output] == 1
                and conv.inputs[0] < inputs
                and ConvMaxPool2d.suits(conv, pool)
            ):
                joined[-1] = ConvMaxPool2d.of(conv, pool)
            case _:
                joined.append(op)
    return joined


def _is_relu(op: Op) -> bool:
    return isinstance(op, Unary) and op.function == "Relu"
